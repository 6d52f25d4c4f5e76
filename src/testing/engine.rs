//! A worker that does as it is told and keeps every byte it is sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::message::{Message, Reader};
use super::{Gate, soon, until};

/// One thing that a worker does with a request.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends bytes as they are, in one write.
    Send(Bytes),
    /// Sends bytes one by one.
    Drip(Vec<u8>),
    /// Counts that the steps before it were taken.
    Mark(Arc<AtomicUsize>),
    /// Waits for the test.
    Await(Gate),
    /// Waits until the proxy has closed the connection.
    AwaitClose,
    /// Sends back whatever comes, until the other side ends.
    Echo,
    /// Closes the connection in good order.
    Close,
    /// Breaks the connection off.
    Reset,
}

impl Step {
    pub fn send(bytes: impl AsRef<[u8]>) -> Step {
        Step::Send(Bytes::copy_from_slice(bytes.as_ref()))
    }

    /// A whole metrics page.
    pub fn page(text: &str) -> Step {
        let length = text.len();
        Step::send(format!(
            "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\r\n{text}"
        ))
    }

    /// A whole response with a JSON body.
    pub fn json(status: &str, body: &str) -> Step {
        let length = body.len();
        Step::send(format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
    }

    /// The head of a stream of events in chunks.
    pub fn stream_head() -> Step {
        Step::send(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        )
    }

    /// One chunk.
    pub fn chunk(data: impl AsRef<[u8]>) -> Step {
        let data = data.as_ref();
        let mut bytes = format!("{:x}\r\n", data.len()).into_bytes();
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(b"\r\n");
        Step::Send(bytes.into())
    }

    /// The end of a body in chunks.
    pub fn last_chunk() -> Step {
        Step::send("0\r\n\r\n")
    }
}

type Script = Arc<dyn Fn(&Message) -> Vec<Step> + Send + Sync>;

struct Shared {
    script: Mutex<Script>,
    once: Mutex<VecDeque<Vec<Step>>>,
    health: Mutex<Option<&'static str>>,
    /// Opened to have no more connections taken.
    deaf: Mutex<Gate>,
    metrics: Mutex<Script>,
    models: Mutex<Script>,
    seen: watch::Sender<Vec<Message>>,
    accepted: watch::Sender<usize>,
    /// Connections that the other side ended while a step waited, or before their first request.
    abandoned: watch::Sender<usize>,
}

/// A scripted worker on a port of its own.
pub struct FakeEngine {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: Option<JoinHandle<()>>,
}

/// What a worker answers if it is told nothing else.
pub const PLAIN_ANSWER: &str = r#"{"object":"fake","usage":{"prompt_tokens":10,"completion_tokens":1}}"#;

impl FakeEngine {
    /// Answers every request with a small JSON object, and its health page with 200.
    pub async fn start() -> FakeEngine {
        FakeEngine::with(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]).await
    }

    /// Does what `script` says for each request.
    pub async fn with(script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) -> FakeEngine {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let shared = Arc::new(Shared {
            script: Mutex::new(Arc::new(script)),
            once: Mutex::default(),
            health: Mutex::new(Some("200 OK")),
            deaf: Mutex::default(),
            metrics: Mutex::new(Arc::new(|_| vec![Step::json("404 Not Found", "{}")])),
            models: Mutex::new(Arc::new(|_| vec![Step::json("404 Not Found", "{}")])),
            seen: watch::Sender::new(Vec::new()),
            accepted: watch::Sender::new(0),
            abandoned: watch::Sender::new(0),
        });
        let mut engine = FakeEngine { address, shared, serving: None };
        engine.serving = Some(tokio::spawn(accept(listener, engine.shared.clone())));
        engine
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Has the next request answered so; several calls queue up.
    pub fn next(&self, steps: Vec<Step>) {
        self.shared.once.lock().push_back(steps);
    }

    /// From now on, does what `script` says.
    pub fn always(&self, script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) {
        *self.shared.script.lock() = Arc::new(script);
    }

    /// The status of the health page; `None`: it never answers.
    pub fn set_health(&self, status: Option<&'static str>) {
        *self.shared.health.lock() = status;
    }

    /// Has the proxy's readings of the metrics page answered so; 404 if nothing is said.
    pub fn set_metrics(&self, script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) {
        *self.shared.metrics.lock() = Arc::new(script);
    }

    /// Has the proxy's readings of the list of models answered so; 404 if nothing is said.
    pub fn set_listing(&self, script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) {
        *self.shared.models.lock() = Arc::new(script);
    }

    /// Has the proxy told that these models are served.
    pub fn set_models(&self, names: &[&str]) {
        let entries: Vec<String> = names.iter().map(|name| format!(r#"{{"id":"{name}"}}"#)).collect();
        let list = format!(r#"{{"object":"list","data":[{}]}}"#, entries.join(","));
        self.set_listing(move |_| vec![Step::json("200 OK", &list)]);
    }

    /// Has them answered with this page.
    pub fn set_page(&self, text: impl Into<String>) {
        let text = text.into();
        self.set_metrics(move |_| vec![Step::page(&text)]);
    }

    /// The requests so far, health probes and scrapes left out, in the order in which they came.
    pub fn seen(&self) -> Vec<Message> {
        self.shared.seen.borrow().clone()
    }

    /// Forgets them, in a run that is too long to keep them.
    pub fn forget_seen(&self) {
        self.shared.seen.send_modify(Vec::clear);
    }

    /// Waits until `count` requests have come.
    pub async fn saw(&self, count: usize) -> Vec<Message> {
        let mut seen = self.shared.seen.subscribe();
        let what = format!("{count} requests at {}", self.address);
        soon(&what, seen.wait_for(|seen| seen.len() >= count)).await.expect("the engine lives").clone()
    }

    /// Connections accepted so far, those of probes left out.
    pub fn connections(&self) -> usize {
        *self.shared.accepted.borrow()
    }

    /// Waits until the proxy has left `count` requests unanswered.
    pub async fn abandoned(&self, count: usize) {
        let mut abandoned = self.shared.abandoned.subscribe();
        soon("the proxy to close its connection", abandoned.wait_for(|abandoned| *abandoned >= count))
            .await
            .expect("the engine lives");
    }

    /// Refuses connections from now on and goes on with those that are open, as vLLM does on SIGTERM.
    pub async fn stop_listening(&self) {
        self.shared.deaf.lock().open();
        let refused = async || TcpStream::connect(self.address).await.is_err();
        until("connections to be refused", refused).await;
    }

    /// Refuses connections from now on and breaks all that are open.
    pub async fn kill(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            let _ = serving.await;
        }
    }

    /// Takes connections again on the same port.
    pub async fn revive(&mut self) {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("an option of the socket");
        socket.bind(self.address).expect("the port that was ours");
        let listener = socket.listen(1024).expect("a bound socket listens");
        *self.shared.deaf.lock() = Gate::default();
        self.serving = Some(tokio::spawn(accept(listener, self.shared.clone())));
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Ended with this task: a dead engine has no connections.
    let mut connections = tokio::task::JoinSet::new();
    let deaf = shared.deaf.lock().clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { return };
                connections.spawn(serve(stream, shared.clone()));
            }
            () = deaf.passed() => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    stream.set_nodelay(true).expect("an option of the socket");
    let (read, mut write) = stream.into_split();
    let mut reader = Reader::new(read);
    let mut counted = false;
    while let Ok(Some(message)) = reader.request().await {
        if message.head.start.starts_with("GET /health ") {
            let status = *shared.health.lock();
            match status {
                None => return reader.ended().await,
                Some(status) => {
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    if write.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                    continue;
                }
            }
        }
        if message.head.get("user-agent") == Some("warmroute-scrape") {
            let page = if message.head.second() == "/v1/models" { &shared.models } else { &shared.metrics };
            let script = page.lock().clone();
            for step in script(&message) {
                if !take(step, &mut reader, &mut write, &shared).await {
                    return;
                }
            }
            continue;
        }
        if !counted {
            counted = true;
            shared.accepted.send_modify(|accepted| *accepted += 1);
        }
        let once = shared.once.lock().pop_front();
        let script = shared.script.lock().clone();
        let steps = once.unwrap_or_else(|| script(&message));
        shared.seen.send_modify(|seen| seen.push(message));
        for step in steps {
            if !take(step, &mut reader, &mut write, &shared).await {
                return;
            }
        }
    }
}

/// Takes one step; false if the connection is over.
async fn take(
    step: Step,
    reader: &mut Reader<OwnedReadHalf>,
    write: &mut OwnedWriteHalf,
    shared: &Shared,
) -> bool {
    let abandon = || {
        shared.abandoned.send_modify(|abandoned| *abandoned += 1);
        false
    };
    match step {
        Step::Send(bytes) => write.write_all(&bytes).await.is_ok() || abandon(),
        Step::Drip(bytes) => {
            for byte in bytes {
                if write.write_all(&[byte]).await.is_err() {
                    return abandon();
                }
                tokio::task::yield_now().await;
            }
            true
        }
        Step::Mark(marks) => {
            marks.fetch_add(1, Ordering::Relaxed);
            true
        }
        Step::Await(gate) => tokio::select! {
            () = gate.passed() => true,
            () = reader.ended() => abandon(),
        },
        Step::AwaitClose => {
            reader.ended().await;
            abandon()
        }
        Step::Echo => {
            while let Ok(piece) = reader.piece().await {
                if piece.is_empty() || write.write_all(&piece).await.is_err() {
                    break;
                }
            }
            abandon()
        }
        Step::Close => false,
        Step::Reset => {
            let socket = socket2::SockRef::from(write.as_ref());
            socket.set_linger(Some(std::time::Duration::ZERO)).expect("an option of the socket");
            false
        }
    }
}
