//! Connections to one worker: opening, keeping, and one exchange on one of them.
//!
//! A connection has no task of its own. Whoever waits for the answer drives it, so that an answer costs no hand-over between
//! tasks, and dropping the answer closes the socket there and then: a client that leaves takes its work off the worker at
//! once. An idle connection is driven by nobody; whether it still lives is looked up when it is taken out again.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus::IntGauge;
use rustix::io::Errno;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpSocket;
use tokio::time::Instant;

use super::stream::{self, Secure, Stream};
use crate::config::Origin;

/// A request as it goes to a worker: its body is whole.
pub type Outgoing = Request<Full<Bytes>>;

/// Idle connections kept for one worker; above it they are closed after use.
const IDLE_CONNECTIONS: usize = 512;

/// A kept connection that ends so soon after a request was put on it had been closed already; later, the worker has ended
/// it with the request in hand.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// Most that is read from a worker ahead of what its client takes, and the largest response head.
const READ_AHEAD: usize = 64 << 10;
/// Pieces of an answer that are there at once are joined up to this length, give or take a piece.
const JOINED: usize = 16 << 10;

/// What the system says when it has no socket, port or memory left for a connection.
const OUT_OF_SOCKETS: [Errno; 5] =
    [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS, Errno::NOMEM];

fn is_out_of_sockets(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| OUT_OF_SOCKETS.contains(&errno))
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
    Stale(#[source] hyper::Error),
    /// The worker ended the connection before it had sent a whole head: whatever it did for the request is lost.
    #[error("broke off before the response head: {0}")]
    Broken(#[source] hyper::Error),
    /// What the worker sent is not an HTTP response.
    #[error("did not answer in HTTP: {0}")]
    Nonsense(#[source] hyper::Error),
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

/// The socket, noting whether anything has been read since it was last asked.
struct Socket {
    stream: Stream,
    heard: Arc<AtomicBool>,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.heard.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

async fn within<T>(limit: Duration, connecting: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
    tokio::time::timeout(limit, connecting).await.map_err(late)?
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
    sender: http1::SendRequest<Full<Bytes>>,
    /// `None` once it has ended.
    driver: Option<http1::Connection<TokioIo<Socket>, Full<Bytes>>>,
    ended: bool,
    /// The last answer was a switch of protocols.
    switched: bool,
    heard: Arc<AtomicBool>,
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
        let heard = Arc::new(AtomicBool::new(false));
        let socket = Socket { stream, heard: heard.clone() };
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(READ_AHEAD)
            .handshake(TokioIo::new(socket))
            .await
            .map_err(ExchangeError::Broken)?;
        open.inc();
        Ok(Box::new(Connection {
            sender,
            driver: Some(driver),
            ended: false,
            switched: false,
            heard,
            reused: false,
            since: Instant::now(),
            _counted: Counted(open.clone()),
        }))
    }

    /// Moves bytes as far as they go.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.ended
            && let Some(driver) = &mut self.driver
            && let Poll::Ready(result) = driver.poll_without_shutdown(cx)
        {
            // Whatever ended it has been handed to the exchange under way, if there is one. After a switch of protocols the
            // socket is still wanted.
            self.ended = true;
            if result.is_err() || !self.switched {
                self.driver = None;
            }
        }
    }

    /// Takes the socket out of HTTP after a switch of protocols, with what was read of it already.
    async fn into_tunnel(mut self) -> Option<Tunnel> {
        std::future::poll_fn(|cx| {
            self.drive(cx);
            if self.ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let parts = self.driver.take()?.into_parts();
        Some(Tunnel { stream: parts.io.into_inner().stream, early: parts.read_buf, _counted: self._counted })
    }

    /// Ready for another request, as far as can be seen from here.
    fn is_idle(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.driver.is_some() && self.sender.is_ready()
    }

    /// Sends `request` and waits for the response head.
    fn exchange(
        mut self: Box<Self>,
        pool: Pool,
        request: Outgoing,
    ) -> impl Future<Output = Result<Response<Answer>, ExchangeError>> {
        self.heard.store(false, Ordering::Relaxed);
        let asks_to_switch = request.headers().contains_key(header::UPGRADE);
        // Handed over here, so that the future does not hold it too.
        let sending = self.sender.try_send_request(request);
        self.answer(pool, sending, asks_to_switch)
    }

    async fn answer(
        mut self: Box<Self>,
        pool: Pool,
        sending: impl Future<Output = Result<Response<Incoming>, TrySendError<Outgoing>>>,
        asks_to_switch: bool,
    ) -> Result<Response<Answer>, ExchangeError> {
        let mut sending = pin!(sending);
        let sent = std::future::poll_fn(|cx| {
            if let Poll::Ready(sent) = sending.as_mut().poll(cx) {
                return Poll::Ready(sent);
            }
            // Kept for the case that the answer is a switch; if it is not, the connection is whole all the same.
            self.switched = asks_to_switch;
            self.drive(cx);
            sending.as_mut().poll(cx)
        })
        .await;
        match sent {
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                if asks_to_switch {
                    Ok(response.map(|body| Answer::new(body, self, pool)))
                } else {
                    Err(ExchangeError::Unasked)
                }
            }
            Ok(response) => Ok(response.map(|body| {
                self.switched = false;
                let mut answer = Answer::new(body, self, pool);
                answer.notice_end();
                answer
            })),
            Err(error) => {
                let error = error.into_error();
                let silent = !self.heard.load(Ordering::Relaxed);
                Err(if error.is_parse() {
                    ExchangeError::Nonsense(error)
                } else if self.reused && silent && self.since.elapsed() < STALE_WITHIN {
                    ExchangeError::Stale(error)
                } else {
                    ExchangeError::Broken(error)
                })
            }
        }
    }
}

/// The body of a worker's response, bound to the connection that it comes over. Read to its end, it gives the connection
/// back to the pool; dropped before, it closes it.
pub struct Answer {
    body: Incoming,
    /// What was read of it in advance.
    ahead: Option<Bytes>,
    /// What came after the piece that was given last, and was no data: trailers or an error.
    after: Option<Result<Frame<Bytes>, hyper::Error>>,
    /// The end has come.
    ended: bool,
    connection: Option<Box<Connection>>,
    pool: Pool,
}

impl Answer {
    fn new(body: Incoming, connection: Box<Connection>, pool: Pool) -> Answer {
        Answer { body, ahead: None, after: None, ended: false, connection: Some(connection), pool }
    }

    /// The whole response has been taken.
    pub fn is_over(&self) -> bool {
        self.connection.is_none() && self.ahead.is_none() && self.after.is_none()
    }

    /// Ends it here, and with it the connection.
    pub fn close(&mut self) {
        self.connection = None;
        self.ahead = None;
        self.after = None;
    }

    /// After a switch of protocols: the socket. `None` if the worker has ended it.
    pub async fn into_tunnel(self) -> Option<Tunnel> {
        self.connection?.into_tunnel().await
    }

    /// Reads the whole body in advance if it is promised to be no longer than `limit`; it can still be taken as if it had
    /// not been read. `None` if it is longer, or did not come.
    pub async fn peek(&mut self, limit: u64) -> Option<Bytes> {
        self.body.size_hint().exact().filter(|length| (1..=limit).contains(length))?;
        let mut whole = BytesMut::new();
        while let Some(frame) = self.frame().await {
            whole.extend_from_slice(frame.ok()?.data_ref()?);
        }
        self.ahead = Some(whole.freeze());
        self.ahead.clone()
    }

    fn notice_end(&mut self) {
        if self.body.is_end_stream() {
            self.ended = true;
            self.release();
        }
    }

    fn release(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.put(connection);
        }
    }

    /// The next frame, as the worker has framed it.
    fn poll_one(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut polled = Pin::new(&mut self.body).poll_frame(cx);
        if polled.is_pending()
            && let Some(connection) = &mut self.connection
        {
            connection.drive(cx);
            polled = Pin::new(&mut self.body).poll_frame(cx);
        }
        match &polled {
            Poll::Pending => {}
            Poll::Ready(Some(Ok(frame))) if frame.is_data() => self.notice_end(),
            // Trailers are the last frame.
            Poll::Ready(Some(Ok(_)) | None) => {
                self.ended = true;
                self.release();
            }
            Poll::Ready(Some(Err(_))) => self.connection = None,
        }
        polled
    }

    /// Puts to `first` what else is there already, so that what came at once leaves at once: a stream whose client is slower than its
    /// worker costs by the byte, not by the event.
    fn join(&mut self, first: Bytes, cx: &mut Context<'_>) -> Bytes {
        let mut joined = BytesMut::new();
        while !self.ended && first.len().max(joined.len()) < JOINED {
            match self.poll_one(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(more) if joined.is_empty() => {
                        joined.reserve(JOINED);
                        joined.extend_from_slice(&first);
                        joined.extend_from_slice(&more);
                    }
                    Ok(more) => joined.extend_from_slice(&more),
                    Err(trailers) => self.after = Some(Ok(trailers)),
                },
                Poll::Ready(Some(Err(error))) => {
                    self.after = Some(Err(error));
                    break;
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        if joined.is_empty() { first } else { joined.freeze() }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(ahead) = self.ahead.take() {
            return Poll::Ready(Some(Ok(Frame::data(ahead))));
        }
        if self.after.is_some() || self.ended {
            return Poll::Ready(self.after.take());
        }
        self.poll_one(cx).map(|polled| {
            polled.map(|frame| {
                frame.map(|frame| match frame.into_data() {
                    Ok(data) => Frame::data(self.join(data, cx)),
                    Err(trailers) => trailers,
                })
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_none() && self.after.is_none() && (self.ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.ahead {
            Some(ahead) => SizeHint::with_exact(ahead.len() as u64),
            None => self.body.size_hint(),
        }
    }
}

/// The connections of one worker. Cheap to clone.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    origin: Origin,
    secure: Secure,
    /// The one used last is on top, so that the others grow old.
    #[expect(clippy::vec_box, reason = "they move in and out with each request, and are large")]
    idle: Mutex<Vec<Box<Connection>>>,
    open: IntGauge,
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

    fn put(&self, mut connection: Box<Connection>) {
        if !connection.is_idle() {
            return;
        }
        connection.since = Instant::now();
        let mut idle = self.shared.idle.lock();
        if idle.len() < IDLE_CONNECTIONS {
            idle.push(connection);
        }
    }

    /// Closes the connections that have been idle for `pool_idle`, or that the worker has closed.
    pub fn close_idle(&self, pool_idle: Duration) {
        let closing: Vec<_> = {
            let mut idle = self.shared.idle.lock();
            idle.extract_if(.., |connection| connection.since.elapsed() >= pool_idle || !connection.is_idle())
                .collect()
        };
        drop(closing); // Sockets are closed after the lock is let go.
    }
}
