//! The way back: a worker's answer streams through as it comes, piece by piece, and what passes is watched for the first
//! token and for the usage. Nothing is held back, joined or split; a slow client slows the worker.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{header, response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use tokio::time::Instant;

use super::Proxy;
use super::place::{Asked, Placed};
use super::sse::FirstToken;
use super::usage::UsageReader;
use crate::core::booking::Finished;
use crate::fleet::connection::Answer;
use crate::fleet::health::Event;
use crate::metrics::FailureKind;

/// The body of a response to a client.
pub enum ResponseBody {
    /// Made here.
    Whole(Full<Bytes>),
    /// Made by a worker.
    Relayed(Box<Relay>),
}

impl ResponseBody {
    pub fn whole(bytes: Bytes) -> ResponseBody {
        ResponseBody::Whole(Full::new(bytes))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            ResponseBody::Whole(full) => Pin::new(full)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(|never: Infallible| match never {}))),
            ResponseBody::Relayed(relay) => relay.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::Whole(full) => full.is_end_stream(),
            ResponseBody::Relayed(relay) => relay.answer.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(full) => full.size_hint(),
            ResponseBody::Relayed(relay) => relay.answer.size_hint(),
        }
    }
}

/// One answer on its way. Dropped before its end, it closes the connection to the worker and gives the place back.
pub struct Relay {
    answer: Answer,
    watch: Watch,
    /// What broke the answer off, held back until what came before it is on its way.
    broken: Option<hyper::Error>,
}

/// What is known of the request, and what is learned of its answer.
struct Watch {
    placed: Placed,
    asked: Asked,
    arrived: Instant,
    /// Only a good answer says anything of tokens.
    usage: Option<UsageReader>,
    first_token: Option<FirstToken>,
    proxy: Arc<Proxy>,
}

impl Relay {
    pub fn new(
        answer: Answer,
        placed: Placed,
        asked: Asked,
        head: &response::Parts,
        arrived: Instant,
        proxy: Arc<Proxy>,
    ) -> Relay {
        let kind = head.headers.get(header::CONTENT_TYPE).map_or(b"".as_slice(), |kind| kind.as_bytes());
        let is_stream = kind.starts_with(b"text/event-stream");
        let readable = head.status.is_success() && !head.headers.contains_key(header::CONTENT_ENCODING);
        let usage = readable && (is_stream || kind.starts_with(b"application/json"));
        let mut watch = Watch {
            placed,
            asked,
            arrived,
            usage: usage.then(UsageReader::default),
            first_token: (readable && is_stream).then(FirstToken::default),
            proxy,
        };
        if answer.is_over() {
            watch.finish();
        }
        Relay { answer, watch, broken: None }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let frame = match ready!(Pin::new(&mut self.answer).poll_frame(cx)) {
            Some(Err(error)) => {
                self.watch.broke(&error);
                self.broken = Some(error);
                // hyper drops what it has not yet written when a body fails: let it write first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            frame => frame,
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.watch.saw(data);
        }
        if self.answer.is_over() {
            self.watch.finish();
        }
        Poll::Ready(frame)
    }
}

impl Watch {
    fn saw(&mut self, data: &Bytes) {
        if let Some(first_token) = &mut self.first_token
            && first_token.feed(data)
        {
            self.first_token = None;
            self.proxy.metrics.ttft(self.placed.predicted()).observe(self.arrived.elapsed().as_secs_f64());
            if let Some(booking) = &mut self.placed.booking {
                booking.first_token(self.proxy.clock.now());
            }
        }
        if let Some(usage) = &mut self.usage {
            usage.feed(data);
        }
    }

    /// The answer is complete. Told once: the booking is gone afterwards.
    fn finish(&mut self) {
        let Some(booking) = self.placed.booking.take() else { return };
        let found = self.usage.take().and_then(|usage| usage.found());
        let finished = found.unwrap_or_default();
        booking.finish(finished, self.proxy.clock.now());
        if found.is_some() {
            self.learn(finished);
        }
    }

    fn learn(&self, Finished { prompt_tokens, cached_tokens, output_tokens }: Finished) {
        let Some(prompt_tokens) = prompt_tokens else { return };
        let metrics = self.proxy.metrics.models.of(&self.asked.model);
        metrics.prompt_tokens.inc_by(u64::from(prompt_tokens));
        metrics.predicted_cached.inc_by(self.placed.predicted_cached_tokens.max(0.0).round() as u64);
        metrics.output_tokens.inc_by(u64::from(output_tokens.unwrap_or(0)));
        if let Some(cached) = cached_tokens {
            metrics.confirmed_cached.inc_by(u64::from(cached));
            metrics.confirmed_prompt.inc_by(u64::from(prompt_tokens));
        }
        if self.asked.prompt_bytes > 0 {
            let bytes = self.asked.prompt_bytes;
            self.proxy.feedback.learn(&self.asked.model, bytes, prompt_tokens, output_tokens);
        }
    }

    fn broke(&mut self, error: &hyper::Error) {
        let worker = self.placed.worker.clone();
        tracing::warn!(worker = %worker.config.url, "a worker broke off in the middle of an answer: {error}");
        worker.metrics.failed(FailureKind::InBody);
        self.placed.report(Event::Broke);
    }
}
