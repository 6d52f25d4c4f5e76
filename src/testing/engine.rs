//! A worker that does as it is told and keeps every byte it is sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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
    /// Works for so long.
    Work(Duration),
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

    /// A stream of two events, of which the second waits for the gate.
    pub fn stream_held_by(gate: &Gate) -> Vec<Step> {
        vec![
            Step::stream_head(),
            Step::chunk("data: 1\n\n"),
            Step::Await(gate.clone()),
            Step::chunk("data: [DONE]\n\n"),
            Step::last_chunk(),
        ]
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
    /// `None`: no answer.
    health: Mutex<Option<Script>>,
    /// Opened to have no more connections taken.
    deaf: Mutex<Gate>,
    /// Opened to have all that runs stand still.
    hung: Mutex<Gate>,
    metrics: Mutex<Script>,
    models: Mutex<Script>,
    seen: watch::Sender<Vec<Message>>,
    accepted: watch::Sender<usize>,
    /// Connections that the other side ended while a step waited, or before their first request.
    abandoned: watch::Sender<usize>,
    /// Probes that were answered with 2xx.
    probes_passed: Arc<AtomicUsize>,
}

/// What takes connections.
struct Serving {
    task: JoinHandle<()>,
    /// Opened to have all of it end.
    kill: Gate,
}

impl Serving {
    fn begin(listener: TcpListener, shared: Arc<Shared>) -> Serving {
        let kill = Gate::default();
        Serving { task: tokio::spawn(accept(listener, shared, kill.clone())), kill }
    }
}

/// A scripted worker on a port of its own.
pub struct FakeEngine {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: Option<Serving>,
}

/// What a worker answers if it is told nothing else.
pub const PLAIN_ANSWER: &str = r#"{"object":"fake","usage":{"prompt_tokens":10,"completion_tokens":1}}"#;

impl FakeEngine {
    /// Answers every request with a small JSON object, and its health page with 200.
    pub async fn start() -> FakeEngine {
        FakeEngine::with(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]).await
    }

    /// The same, at an address of one's own choice.
    pub async fn start_at(address: SocketAddr) -> FakeEngine {
        FakeEngine::with_at(address, |_| vec![Step::json("200 OK", PLAIN_ANSWER)]).await
    }

    /// Does what `script` says for each request.
    pub async fn with(script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) -> FakeEngine {
        FakeEngine::with_at(SocketAddr::from(([127, 0, 0, 1], 0)), script).await
    }

    async fn with_at(
        address: SocketAddr,
        script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static,
    ) -> FakeEngine {
        let listener = TcpListener::bind(address).await.expect("a free address");
        let address = listener.local_addr().expect("a bound listener has an address");
        let shared = Arc::new(Shared {
            script: Mutex::new(Arc::new(script)),
            once: Mutex::default(),
            health: Mutex::new(Some(Arc::new(|_| vec![Step::json("200 OK", "")]))),
            deaf: Mutex::default(),
            hung: Mutex::default(),
            metrics: Mutex::new(Arc::new(|_| vec![Step::json("404 Not Found", "{}")])),
            models: Mutex::new(Arc::new(|_| vec![Step::json("404 Not Found", "{}")])),
            seen: watch::Sender::new(Vec::new()),
            accepted: watch::Sender::new(0),
            abandoned: watch::Sender::new(0),
            probes_passed: Arc::default(),
        });
        let mut engine = FakeEngine { address, shared, serving: None };
        engine.serving = Some(Serving::begin(listener, engine.shared.clone()));
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
        let script = |status| Arc::new(move |_: &Message| vec![Step::json(status, "")]) as Script;
        *self.shared.health.lock() = status.map(script);
    }

    /// Has the proxy's probes answered so.
    pub fn set_probed(&self, script: impl Fn(&Message) -> Vec<Step> + Send + Sync + 'static) {
        *self.shared.health.lock() = Some(Arc::new(script));
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

    /// As vLLM on SIGTERM: new connections are refused, idle ones are closed, and what runs hangs, without a byte or a FIN.
    pub async fn terminate(&self) {
        self.shared.hung.lock().open();
        self.stop_listening().await;
    }

    /// Waits until it has ended as vLLM does after [`terminate`](FakeEngine::terminate): when the last of those who wait for its
    /// answers has gone.
    pub async fn ended(&mut self) {
        if let Some(serving) = self.serving.take() {
            let _ = soon("the proxy to give up what hangs", serving.task).await;
        }
    }

    /// Where it counts the probes of its health page that it has answered with 2xx.
    pub fn probes_passed(&self) -> Arc<AtomicUsize> {
        self.shared.probes_passed.clone()
    }

    /// Refuses connections from now on and breaks all that are open: none of them does anything any more when this returns.
    pub async fn kill(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.kill.open();
            let _ = serving.task.await;
        }
    }

    /// Takes connections again on the same port.
    pub async fn revive(&mut self) {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("an option of the socket");
        socket.bind(self.address).expect("the port that was ours");
        let listener = socket.listen(1024).expect("a bound socket listens");
        *self.shared.deaf.lock() = Gate::default();
        *self.shared.hung.lock() = Gate::default();
        self.serving = Some(Serving::begin(listener, self.shared.clone()));
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.task.abort();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, kill: Gate) {
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
            () = kill.passed() => break,
        }
    }
    drop(listener);
    tokio::select! {
        () = kill.passed() => connections.shutdown().await,
        () = async { while connections.join_next().await.is_some() {} } => {}
    }
}

/// The other side has ended the connection. Asks the system, which knows before the runtime has heard of it.
fn has_ended(stream: &TcpStream) -> bool {
    let seen = socket2::SockRef::from(stream).peek(&mut [std::mem::MaybeUninit::uninit()]);
    !matches!(seen, Ok(1..)) && !seen.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    stream.set_nodelay(true).expect("an option of the socket");
    let (read, mut write) = stream.into_split();
    let mut reader = Reader::new(read);
    let mut counted = false;
    let hung = shared.hung.lock().clone();
    loop {
        let read = tokio::select! {
            read = reader.request() => read,
            () = hung.passed() => return,
        };
        let Ok(Some(mut message)) = read else { return };
        if message.head.start.starts_with("GET /health ") {
            let script = shared.health.lock().clone();
            let Some(script) = script else { return reader.ended().await };
            let steps = script(&message);
            let passes = matches!(&steps[..], [Step::Send(answer), ..] if answer.starts_with(b"HTTP/1.1 2"));
            for step in steps {
                if !take(step, &mut reader, &mut write, &shared).await {
                    return;
                }
            }
            shared.probes_passed.fetch_add(usize::from(passes), Ordering::SeqCst);
            continue;
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
        message.left = has_ended(write.as_ref());
        let once = shared.once.lock().pop_front();
        let script = shared.script.lock().clone();
        let steps = once.unwrap_or_else(|| script(&message));
        shared.seen.send_modify(|seen| seen.push(message));
        for step in steps {
            let goes_on = tokio::select! {
                biased;
                () = hung.passed() => None,
                goes_on = take(step, &mut reader, &mut write, &shared) => Some(goes_on),
            };
            match goes_on {
                Some(true) => {}
                Some(false) => return,
                None => {
                    take(Step::AwaitClose, &mut reader, &mut write, &shared).await;
                    return;
                }
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
        Step::Work(time) => tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = reader.ended() => abandon(),
        },
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
            socket.set_linger(Some(Duration::ZERO)).expect("an option of the socket");
            false
        }
    }
}
