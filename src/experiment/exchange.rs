//! One generation request, sent and timed.
//!
//! Time to first token runs from just before the request is sent (before the connection is opened, if it needs one) to
//! the arrival of the first event with generated output. vLLM sends the head of a stream before any work and a chunk with
//! the bare role just before the first token: neither counts.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

use crate::experiment::sse::{self, Events, Usage};
use crate::experiment::target::{Connection, Target};

/// How much of an error's body is quoted.
const QUOTED_BYTES: usize = 300;

/// What one answered request showed.
#[derive(Copy, Clone, Debug)]
pub struct Sample {
    /// Until the first generated output.
    pub ttft: Duration,
    /// Until the end of the answer.
    pub e2e: Duration,
    pub usage: Usage,
}

/// Why a request gave no sample.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    #[error("status {0}: {1}")]
    Status(StatusCode, String),
    #[error("the answer broke off: {0}")]
    Broken(String),
    #[error("error inside the stream: {0}")]
    InStream(String),
    #[error("event that is not of an OpenAI-compatible stream: {0}")]
    Unreadable(String),
    #[error("the stream ended without {0}")]
    Incomplete(&'static str),
    #[error("no complete answer within {} s", .0.as_secs())]
    TimedOut(Duration),
}

/// Sends requests one after another, over a new connection each or over one that is kept.
#[derive(Debug)]
pub struct Client {
    target: Target,
    keep_alive: bool,
    timeout: Duration,
    kept: Option<Connection>,
}

impl Client {
    pub fn new(target: Target, keep_alive: bool, timeout: Duration) -> Client {
        Client { target, keep_alive, timeout, kept: None }
    }

    /// Sends `body` to `path` and reads the streamed answer to its end.
    pub async fn send(&mut self, path: &str, body: Bytes) -> Result<Sample, Failure> {
        let timeout = self.timeout;
        match tokio::time::timeout(timeout, self.send_unbounded(path, body)).await {
            Ok(sample) => sample,
            Err(_) => Err(Failure::TimedOut(timeout)),
        }
    }

    async fn send_unbounded(&mut self, path: &str, body: Bytes) -> Result<Sample, Failure> {
        let started = Instant::now();
        let kept = self.kept.take();
        let reused = kept.is_some();
        let mut connection = match kept {
            Some(connection) => connection,
            None => self.target.connect().await.map_err(Failure::Connect)?,
        };
        let mut answer = connection.send_request(self.target.request(Method::POST, path, body.clone())).await;
        // A kept connection may have been closed by the server while it was idle: that is no failure of the request.
        if reused && answer.is_err() {
            connection = self.target.connect().await.map_err(Failure::Connect)?;
            answer = connection.send_request(self.target.request(Method::POST, path, body)).await;
        }
        let answer = answer.map_err(|error| Failure::Broken(error.to_string()))?;
        let (status, body) = (answer.status(), answer.into_body());
        if status != StatusCode::OK {
            return Err(Failure::Status(status, quote(body).await));
        }
        let sample = read_stream(body, started).await?;
        if self.keep_alive && connection.ready().await.is_ok() {
            self.kept = Some(connection);
        }
        Ok(sample)
    }
}

async fn read_stream(mut body: Incoming, started: Instant) -> Result<Sample, Failure> {
    let mut events = Events::default();
    let (mut ttft, mut usage, mut done) = (None, None, false);
    while let Some(frame) = body.frame().await {
        let arrived = started.elapsed();
        let frame = frame.map_err(|error| Failure::Broken(error.to_string()))?;
        let Some(piece) = frame.data_ref() else { continue };
        events.push(piece);
        while let Some(data) = events.next_event() {
            let told = sse::read(&data).ok_or_else(|| Failure::Unreadable(cut(&data)))?;
            if let Some(message) = told.error {
                return Err(Failure::InStream(cut(message.as_bytes())));
            }
            if told.output && ttft.is_none() {
                ttft = Some(arrived);
            }
            usage = told.usage.or(usage);
            done |= told.done;
        }
    }
    let e2e = started.elapsed();
    if !done {
        return Err(Failure::Incomplete("`data: [DONE]`"));
    }
    let ttft = ttft.ok_or(Failure::Incomplete("any output"))?;
    let usage = usage.ok_or(Failure::Incomplete("`usage`, which stream_options.include_usage asks for"))?;
    Ok(Sample { ttft, e2e, usage })
}

async fn quote(body: Incoming) -> String {
    match Limited::new(body, 64 << 10).collect().await {
        Ok(body) => cut(&body.to_bytes()),
        Err(_) => String::from("(body not readable)"),
    }
}

fn cut(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(QUOTED_BYTES)]).trim().to_owned()
}
