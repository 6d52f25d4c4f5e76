//! Connections to one worker: opening, keeping, and one exchange on one of them.
//!
//! A connection has no task of its own. Whoever waits for the answer drives it, so that an answer costs no hand-over between
//! tasks, and dropping the answer closes the socket there and then: a client that leaves takes its work off the worker at
//! once. An idle connection is driven by nobody; whether it still lives is looked up when it is taken out again.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::buf::Chain;
use bytes::{Buf, Bytes, BytesMut};
use http::{Method, Response, StatusCode};
use parking_lot::Mutex;
use prometheus::IntGauge;
use rustix::io::Errno;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::TcpSocket;
use tokio::time::{Instant, timeout};

use super::answer::Answer;
use super::framing::{self, Head, Malformed, Outgoing};
use super::stream::{self, Secure, Stream};
use crate::config::Origin;
use crate::threads::place;

/// Idle connections kept for one worker; above it they are closed after use.
const IDLE_CONNECTIONS: usize = 512;

/// A kept connection that ends so soon after a request was put on it had been closed already; later, the worker has ended
/// it with the request in hand.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// How long an answer is waited for on a connection that cannot be written to any more.
const HEARD_OUT: Duration = Duration::from_millis(500);
/// Room for a read from a worker: the least, and the most while reads fill it. No more is read ahead of what a client takes.
const ROOM: [usize; 2] = [8 << 10, 64 << 10];

/// What the system says when it has no socket, port or memory left for a connection.
const OUT_OF_SOCKETS: [Errno; 5] =
    [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS, Errno::NOMEM];

fn is_out_of_sockets(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| OUT_OF_SOCKETS.contains(&errno))
}

/// What ended an answer before its end.
#[derive(Debug, Error)]
pub enum Fault {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the connection was closed before the answer was complete")]
    Closed,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Why an exchange did not bring a response head.
#[derive(Debug, Error)]
pub enum ExchangeError {
    /// No connection could be opened: the worker has seen nothing of the request.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// This side has no socket left to connect with, which says nothing of the worker; it has seen nothing of the request.
    #[error("no connection can be opened from here: {0}")]
    Local(#[source] io::Error),
    /// No secure connection came about: the worker's certificate is not accepted, or it does not speak TLS. It has seen
    /// nothing of the request.
    #[error("no TLS connection: {0}")]
    Insecure(#[source] io::Error),
    /// A kept connection was closed by the worker before a byte of answer: it was idle for too long, and the request met
    /// its end.
    #[error("the kept connection was already closed: {0}")]
    Stale(#[source] Fault),
    /// The worker ended the connection before it had sent a whole head: whatever it did for the request is lost.
    #[error("broke off before the response head: {0}")]
    Broken(#[source] Fault),
    /// What the worker sent is not an HTTP response.
    #[error("did not answer in HTTP: {0}")]
    Nonsense(#[source] Fault),
    /// The worker switched protocols though nobody had asked it to.
    #[error("switched protocols unasked")]
    Unasked,
    /// The worker answered that its engine is gone or that it is shutting down: it has done nothing, and will do nothing more.
    #[error("answered that it is going down")]
    Dying,
}

impl ExchangeError {
    /// Why no connection was made.
    fn of_connecting(error: io::Error) -> ExchangeError {
        // A look-up of a name that finds no socket to ask with does not say why it failed.
        let own = is_out_of_sockets(&error)
            || (error.raw_os_error().is_none()
                && TcpSocket::new_v4().is_err_and(|error| is_out_of_sockets(&error)));
        if own { ExchangeError::Local(error) } else { ExchangeError::Connect(error) }
    }

    /// Nobody listens at the worker's address.
    pub fn is_refused(&self) -> bool {
        matches!(self, ExchangeError::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }
}

async fn within<T>(limit: Duration, connecting: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
    timeout(limit, connecting).await.map_err(late)?
}

/// Counts an open connection for as long as it lives.
struct Counted(IntGauge);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// One open connection to a worker. Dropping it closes the socket.
pub struct Connection {
    stream: Stream,
    /// What was read and not yet taken.
    pub(super) read: BytesMut,
    /// For the next read.
    room: usize,
    /// What is still to be written. Nothing is kept of it afterwards: the answer may take long, and the connection lives longer.
    unsent: Option<Chain<Bytes, Bytes>>,
    /// Writing has failed: what was answered before that can still be read.
    deaf: bool,
    /// Something was read since the last request.
    heard: bool,
    reused: bool,
    /// When it was last taken out of the pool or put there.
    since: Instant,
    _counted: Counted,
}

/// A connection to a worker that no longer speaks HTTP.
pub struct Tunnel {
    pub stream: Stream,
    /// What the worker sent at once in the new protocol.
    pub early: Bytes,
    _counted: Counted,
}

impl Connection {
    /// Boxed, as it moves often: to and from the pool, into an answer.
    async fn open(shared: &Shared, limit: Duration) -> Result<Box<Connection>, ExchangeError> {
        let Shared { origin, secure, open, .. } = shared;
        let stream = within(limit, stream::connect(origin)).await.map_err(ExchangeError::of_connecting)?;
        let stream = if origin.is_https() {
            within(limit, secure.wrap(stream, origin)).await.map_err(ExchangeError::Insecure)?
        } else {
            Stream::Plain(stream)
        };
        open.inc();
        Ok(Box::new(Connection {
            stream,
            read: BytesMut::new(),
            room: ROOM[0],
            unsent: None,
            deaf: false,
            heard: false,
            reused: false,
            since: Instant::now(),
            _counted: Counted(open.clone()),
        }))
    }

    /// Opened for this exchange.
    pub fn is_new(&self) -> bool {
        !self.reused
    }

    /// Takes the socket out of HTTP, with what was read of it already.
    pub(super) fn into_tunnel(self) -> Tunnel {
        Tunnel { stream: self.stream, early: self.read.freeze(), _counted: self._counted }
    }

    /// Writes what is to be written, as far as it goes. Fails once: after that nothing is written any more.
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = if self.deaf { Ok(()) } else { ready!(self.poll_write(cx)) };
        if sent.is_err() {
            self.deaf = true;
            self.unsent = None;
        }
        Poll::Ready(sent)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(unsent) = self.unsent.as_mut().filter(|unsent| unsent.has_remaining()) {
            let mut slices = [IoSlice::new(&[]); 2];
            let stream = Pin::new(&mut self.stream);
            // One piece costs the system less if it is no list.
            let written = ready!(match unsent.chunks_vectored(&mut slices) {
                1 => stream.poll_write(cx, &slices[0]),
                count => stream.poll_write_vectored(cx, &slices[..count]),
            })?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.advance(written);
        }
        self.unsent = None;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Reads more; 0 bytes at the end of the connection.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let [least, most] = ROOM;
        self.read.reserve(self.room);
        let room = self.read.capacity() - self.read.len();
        let count = ready!(pin!(self.stream.read_buf(&mut self.read)).poll(cx))?;
        self.room = if count == room { (2 * self.room).min(most) } else { least };
        self.heard |= count > 0;
        Poll::Ready(Ok(count))
    }

    /// Ready for another request, as far as can be seen from here: nothing is owed on either side, and the worker has not closed it.
    fn is_idle(&mut self) -> bool {
        self.is_even() && self.poll_read(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    /// All has been written and taken.
    pub(super) fn is_even(&self) -> bool {
        !self.deaf && self.unsent.is_none() && self.read.is_empty()
    }

    /// Sends `request` and waits for the response head.
    async fn exchange(
        mut self: Box<Self>,
        pool: Pool,
        request: Outgoing,
    ) -> Result<Response<Answer>, ExchangeError> {
        let Outgoing { head, body, method, switches, closes } = request;
        self.unsent = Some(head.chain(body));
        self.heard = false;
        let mut answered = poll_fn(|cx| self.poll_head(&method, cx)).await;
        if self.deaf && answered.is_err() {
            // It may have answered before it stopped listening (413, 401), and the system not have told of that yet.
            // Apart, as it is rare.
            let late = Box::pin(timeout(HEARD_OUT, poll_fn(|cx| self.poll_head(&method, cx)))).await;
            answered = late.ok().filter(Result::is_ok).unwrap_or(answered);
        }
        let Head { parts, body, keeps } = match answered {
            Ok(head) => head,
            Err(fault) => return Err(self.blame(fault)),
        };
        let answer = match parts.status {
            StatusCode::SWITCHING_PROTOCOLS if !switches => return Err(ExchangeError::Unasked),
            StatusCode::SWITCHING_PROTOCOLS => Answer::switched(self, pool),
            _ => Answer::new(body, keeps && !closes, self, pool),
        };
        Ok(Response::from_parts(parts, answer))
    }

    /// Writes the request and reads the head, each as far as it goes: an answer may come before the request is written.
    fn poll_head(&mut self, method: &Method, cx: &mut Context<'_>) -> Poll<Result<Head, Fault>> {
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            return Poll::Ready(Err(error.into()));
        }
        loop {
            match framing::take_head(&mut self.read, method)? {
                Some(head) if is_interim(head.parts.status) => continue,
                Some(head) => return Poll::Ready(Ok(head)),
                None => {}
            }
            if ready!(self.poll_read(cx))? == 0 {
                return Poll::Ready(Err(Fault::Closed));
            }
        }
    }

    /// What it says of the worker that no head came.
    fn blame(&self, fault: Fault) -> ExchangeError {
        match fault {
            Fault::Malformed(_) => ExchangeError::Nonsense(fault),
            _ if self.reused && !self.heard && self.since.elapsed() < STALE_WITHIN => {
                ExchangeError::Stale(fault)
            }
            _ => ExchangeError::Broken(fault),
        }
    }
}

/// The answer itself is still to come.
fn is_interim(status: StatusCode) -> bool {
    status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS
}

/// The connections of one worker. Cheap to clone.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    origin: Origin,
    secure: Secure,
    idle: Mutex<Idle>,
    open: IntGauge,
}

/// Connections that are kept, by the place of the thread that opened them, used them and hears of them: on another one each read would wake
/// that thread first.
#[derive(Default)]
struct Idle {
    /// Of each, the one used last is on top, so that the others grow old.
    #[expect(clippy::vec_box, reason = "they move in and out with each request, and are large")]
    by_place: Vec<Vec<Box<Connection>>>,
}

impl Idle {
    fn pop(&mut self) -> Option<Box<Connection>> {
        self.by_place.get_mut(place())?.pop()
    }

    /// Gives it back where too many are kept.
    fn push(&mut self, connection: Box<Connection>) -> Option<Box<Connection>> {
        if self.by_place.iter().map(Vec::len).sum::<usize>() >= IDLE_CONNECTIONS {
            return Some(connection);
        }
        let place = place();
        if place >= self.by_place.len() {
            self.by_place.resize_with(place + 1, Vec::new);
        }
        self.by_place[place].push(connection);
        None
    }
}

impl Pool {
    pub fn new(origin: Origin, secure: Secure, open: IntGauge) -> Pool {
        Pool { shared: Arc::new(Shared { origin, secure, idle: Mutex::default(), open }) }
    }

    /// A kept connection that has been idle for less than `pool_idle`, else a new one; always a new one without `pool_idle`.
    ///
    /// # Errors
    /// Those of [`ExchangeError`] that say why no connection was made.
    pub async fn connection(
        &self,
        connect: Duration,
        pool_idle: Option<Duration>,
    ) -> Result<Box<Connection>, ExchangeError> {
        match pool_idle.and_then(|pool_idle| self.take(pool_idle)) {
            Some(connection) => Ok(connection),
            // Apart, as it is rare and large.
            None => Box::pin(Connection::open(&self.shared, connect)).await,
        }
    }

    /// Sends `request` on a connection of this pool and waits for the response head.
    ///
    /// # Errors
    /// The others of [`ExchangeError`]; a stale connection is for the caller to try again, on a new one.
    pub fn exchange(
        &self,
        connection: Box<Connection>,
        request: Outgoing,
    ) -> impl Future<Output = Result<Response<Answer>, ExchangeError>> + use<> {
        connection.exchange(self.clone(), request)
    }

    /// Sends `request` on a new connection.
    ///
    /// # Errors
    /// All but [`ExchangeError::Stale`].
    pub async fn send_anew(
        &self,
        request: Outgoing,
        connect: Duration,
    ) -> Result<Response<Answer>, ExchangeError> {
        let connection = self.connection(connect, None).await?;
        self.exchange(connection, request).await
    }

    fn take(&self, pool_idle: Duration) -> Option<Box<Connection>> {
        let now = Instant::now();
        loop {
            let mut connection = self.shared.idle.lock().pop()?;
            if now.saturating_duration_since(connection.since) < pool_idle && connection.is_idle() {
                connection.reused = true;
                connection.since = now;
                return Some(connection);
            }
        }
    }

    /// Keeps a connection of which nothing more is owed.
    pub(super) fn put(&self, mut connection: Box<Connection>) {
        connection.since = Instant::now();
        let over = self.shared.idle.lock().push(connection);
        drop(over); // Its socket is closed after the lock is let go.
    }

    /// Closes the connections that have been idle for `pool_idle`, or that the worker has closed.
    pub fn close_idle(&self, pool_idle: Duration) {
        let closing: Vec<_> = {
            let mut idle = self.shared.idle.lock();
            let ends = |connection: &mut Box<Connection>| {
                connection.since.elapsed() >= pool_idle || !connection.is_idle()
            };
            idle.by_place.iter_mut().flat_map(|idle| idle.extract_if(.., ends)).collect()
        };
        drop(closing); // Sockets are closed after the lock is let go.
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, Uri};
    use http_body_util::BodyExt;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::WorkerTls;

    /// A pool before a worker that reads so much of each request, answers, and keeps the socket or closes it.
    async fn before(read: usize, answer: &'static str, keeps: bool) -> Pool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = Origin::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let (secure, _) = Secure::new(&WorkerTls::default()).unwrap();
        tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                stream.read_exact(&mut vec![0; read]).await.unwrap();
                stream.write_all(answer.as_bytes()).await.unwrap();
                kept.extend(keeps.then_some(stream));
            }
        });
        Pool::new(origin, secure, IntGauge::new("open", "test").unwrap())
    }

    fn request(bytes: usize) -> Outgoing {
        let (host, body) = (HeaderValue::from_static("a"), Bytes::from(vec![b'x'; bytes]));
        Outgoing::new(&Method::POST, &Uri::from_static("/"), &host, &HeaderMap::new(), body)
    }

    #[tokio::test]
    async fn an_answer_that_came_before_its_request_was_read_is_heard() {
        let pool = before(100, "HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno", false).await;
        for _ in 0..30 {
            let answer = pool.send_anew(request(8 << 20), Duration::from_secs(5)).await.expect("an answer");
            assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
            assert_eq!(answer.into_body().collect().await.expect("its body").to_bytes(), "no");
        }
    }

    #[tokio::test]
    async fn nothing_of_a_request_is_kept_once_it_is_written() {
        let written = request(100_000);
        let whole = written.head.len() + written.body.len();
        let pool = before(whole, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", true).await;
        let answer = pool.send_anew(written, Duration::from_secs(5)).await.expect("an answer");
        answer.into_body().collect().await.expect("its body");
        let kept = pool.take(Duration::from_secs(5)).expect("a kept connection");
        assert!(kept.unsent.is_none());
    }
}
