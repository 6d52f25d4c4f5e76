//! One client connection: finds out whether HTTP/1.1 or HTTP/2 is spoken on it and serves that, within limits on heads and
//! time, until it ends or the drain ends it.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::IntGauge;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::server::TlsStream;
use tower::Service;

use super::again::Again;
use super::socket::{Remote, Socket};
use super::streams::Streams;
use super::tls::{Acceptor, Begun, agreed_http2};
use super::wait::{Awaited, Wait};
use super::{Busy, Client, Proxy, stack};
use crate::config::{Config, Timeouts};
use crate::lifecycle::{Blocker, Phase};

/// Smallest buffer that hyper works with.
const LEAST_BUFFER: usize = 8 << 10;
/// How long, and for how many bytes, a client whose request made no sense is listened to after it was told so.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: u64 = 1 << 20;
/// How long clients whose requests are cut by the drain have to take what they are told of it: less than the process waits for them.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long the process, when it ends, waits for a client that has nothing under way and takes nothing: for the rest of a head, or for its
/// answer to the ping of the goodbye. Of HTTP/2 the last of an answer may still wait for the client to have room.
const GOODBYE: Duration = PING_TIMEOUT;
/// For a TLS handshake, from the connection's opening.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// What an HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The time between looks at a preface that comes in pieces, which none does in practice: at first, and when nothing comes.
const PREFACE_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PREFACE_PAUSE: Duration = Duration::from_millis(500);
/// Requests at once on one HTTP/2 connection, and bytes that may be under way to us on each and on all of them.
const STREAMS: u32 = 256;
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Most that is held of one HTTP/2 answer before its client takes it.
const SEND_BUFFER: usize = 64 << 10;
/// How long an HTTP/2 client may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Serves the connection to its end, which the drain waits for by `_blocker`.
pub async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<Acceptor>,
    proxy: Arc<Proxy>,
    _blocker: Blocker,
) {
    let (socket, remote) = match Socket::new(stream) {
        Ok(both) => both,
        Err(error) => return tracing::debug!("client connection ended at once: {error}"),
    };
    let opened = Instant::now();
    let _open = Open::count(proxy.metrics.client_connections.clone());
    let config = proxy.config.load_full();
    let head_time = config.timeouts.client_head.unwrap_or(Duration::MAX);
    let begin_time = if tls.is_some() { head_time.min(HANDSHAKE_TIME) } else { head_time };
    let spoken = tokio::select! {
        biased;
        spoken = timeout(begin_time, begin(socket, &remote, tls)) => spoken,
        // Nothing was asked on it yet, so nothing is lost.
        () = drained_unasked(&proxy, &remote) => return,
    };
    let client = |proto| Arc::new(Client::new(peer, proto, proxy.drain.clone()));
    let streams = |proto| Arc::new(Client::with_streams(peer, proto, proxy.drain.clone()));
    match spoken {
        Ok(Ok(Spoken::Http1(socket))) => {
            serve_http1(socket, remote, opened, client("http"), proxy, &config).await
        }
        Ok(Ok(Spoken::Http2(socket))) => serve_http2(socket, remote, streams("http"), proxy, &config).await,
        Ok(Ok(Spoken::Https1(stream))) => {
            serve_http1(stream, remote, opened, client("https"), proxy, &config).await
        }
        Ok(Ok(Spoken::Https2(stream))) => serve_http2(stream, remote, streams("https"), proxy, &config).await,
        Ok(Ok(Spoken::NoTls(socket))) => turn_away(socket).await,
        Ok(Err(error)) => tracing::debug!("client connection ended before a request: {error}"),
        Err(_) => tracing::debug!("client connection brought nothing in time"),
    }
}

/// Waits until no more is wanted of a client that has asked for nothing yet.
async fn drained_unasked(proxy: &Proxy, remote: &Remote) {
    proxy.drain.at_least(Phase::Draining).await;
    // The runtime looks first what has come.
    yield_now().await;
    if remote.has_unread() {
        sleep(GOODBYE).await;
    }
}

/// What a connection turned out to be.
enum Spoken {
    Http1(Socket),
    Http2(Socket),
    Https1(Box<TlsStream<Socket>>),
    Https2(Box<TlsStream<Socket>>),
    NoTls(Socket),
}

async fn begin(socket: Socket, remote: &Remote, tls: Option<Acceptor>) -> io::Result<Spoken> {
    let Some(tls) = tls else {
        return Ok(if speaks_http2(&socket, remote).await? {
            Spoken::Http2(socket)
        } else {
            Spoken::Http1(socket)
        });
    };
    Ok(match tls.accept(socket).await? {
        Begun::Secure(stream) if agreed_http2(&stream) => Spoken::Https2(stream),
        Begun::Secure(stream) => Spoken::Https1(stream),
        Begun::Plain(socket) => Spoken::NoTls(socket),
    })
}

/// Tells a client that speaks plain HTTP where TLS is spoken.
async fn turn_away(mut socket: Socket) {
    let body = r#"{"error":{"message":"This port speaks TLS: use https://.","type":"invalid_request_error","param":null,"code":"tls_required"}}"#;
    let head =
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length";
    let answer = format!("{head}: {}\r\n\r\n{body}", body.len());
    if socket.write_all(answer.as_bytes()).await.is_ok() {
        close(socket, LINGER).await;
    }
}

/// Looks at the first bytes without taking them.
async fn speaks_http2(socket: &Socket, remote: &Remote) -> io::Result<bool> {
    let mut first = [0; PREFACE.len()];
    let mut pause = PREFACE_PAUSE;
    loop {
        let seen = socket.peek(&mut first).await?;
        if seen == 0 || first[..seen] != PREFACE[..seen] {
            return Ok(false);
        }
        if seen == PREFACE.len() {
            return Ok(true);
        }
        // Of more bytes nobody tells while these are not taken.
        if timeout(pause, remote.left()).await.is_ok() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        pause = (2 * pause).min(LONGEST_PREFACE_PAUSE);
    }
}

async fn serve_http1<S: Stream>(
    stream: S,
    remote: Remote,
    opened: Instant,
    client: Arc<Client>,
    proxy: Arc<Proxy>,
    config: &Config,
) {
    let stack = stack::stack(proxy.clone());
    let (asking, asked) = (client.clone(), remote.clone());
    let serving = proxy.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let busy = Busy::begin(asking.clone());
        let version = request.version();
        let remote = (version == Version::HTTP_10).then(|| asked.clone());
        let proxy = serving.clone();
        // Always ready.
        stack.clone().call((request, asking.clone())).map(move |answer| {
            stack::rendered(answer, &proxy, version).map(|response| {
                if let Some(remote) = remote.filter(|_| response.body().size_hint().exact().is_none()) {
                    remote.ends_by_close();
                }
                response.map(|body| body.keeping(busy))
            })
        })
    });
    let mut connection = http1_builder(config).serve_connection(TokioIo::new(stream), service);
    // While a request is under way hyper looks for the client's end only if nothing stands before it.
    let mut left = pin!(remote.left());
    // Of a worker that is lost the requests hear by being polled.
    let (mut lost, mut phases) = (proxy.fleet.lost.listener(), proxy.drain.listener());
    let mut again = Again::default();
    let mut wait = Wait::of_opening(opened, config.timeouts.client_head);
    let mut poll = |connection: &mut http1::Connection<_, _>, cx: &mut Context<'_>| {
        lost.listen(cx);
        poll_within(cx, &client, &remote, &config.timeouts, &mut wait, |cx| {
            match again.poll(cx, |cx| connection.poll_without_shutdown(cx)) {
                Poll::Pending if client.is_busy() => left.as_mut().poll(cx).map(|()| Ended::Left),
                polled => polled.map(Ended::Served),
            }
        })
    };
    let served = poll_fn(|cx| {
        phases.listen(cx);
        match proxy.drain.phase() {
            Phase::Serving | Phase::Leaving => poll(&mut connection, cx).map(Some),
            Phase::Draining | Phase::Cut => Poll::Ready(None),
        }
    });
    let ended = match served.await {
        Some(ended) => ended,
        None => {
            // What has come is served: the runtime looks for it, and it is read before no more is wanted.
            yield_now().await;
            let mut told = false;
            let last = poll_fn(|cx| match poll(&mut connection, cx) {
                Poll::Pending if !std::mem::replace(&mut told, true) => {
                    Pin::new(&mut connection).graceful_shutdown();
                    poll(&mut connection, cx)
                }
                polled => polled,
            });
            tokio::select! {
                ended = last => ended,
                () = cut(&proxy) => return,
            }
        }
    };
    let parts = connection.into_parts();
    close_http1(ended, parts.io.into_inner(), parts.read_buf, &remote, &client, &proxy).await;
}

/// What comes behind the last answer on a connection; `unread` was read of it and not asked for.
async fn close_http1<S: Stream>(
    ended: Ended,
    stream: S,
    unread: Bytes,
    remote: &Remote,
    client: &Client,
    proxy: &Proxy,
) {
    match ended {
        Ended::Left => tracing::debug!("client left with a request under way"),
        Ended::Idle(awaited) => tracing::debug!(?awaited, "client connection idle for too long"),
        Ended::Served(Ok(())) => {
            remote.finished();
            let tunnel = client.tunnel.lock().take();
            match tunnel {
                // With something left unread the system would take back what the client has still to read.
                None if remote.has_unread() => close(stream, LINGER).await,
                None => close(stream, Duration::ZERO).await,
                Some(tunnel) => tokio::select! {
                    result = tunnel.join(stream, unread) => {
                        if let Err(error) = result {
                            tracing::debug!("a tunnel broke: {error}");
                        }
                    }
                    () = proxy.drain.at_least(Phase::Cut) => {}
                },
            }
        }
        Ended::Served(Err(error)) => {
            tracing::debug!("client connection ended: {error}");
            if error.is_parse() {
                // hyper has answered 400, 414 or 431: the client gets to read that before what it still sends turns into
                // a reset.
                close(stream, LINGER).await;
            }
        }
    }
}

/// Waits until what still runs is to be cut, and its last words have had their time.
async fn cut(proxy: &Proxy) {
    proxy.drain.at_least(Phase::Cut).await;
    sleep(LAST_WORDS).await;
}

/// How an HTTP/1 connection has ended.
enum Ended {
    Served(hyper::Result<()>),
    /// The client was gone before its answer.
    Left,
    /// The client was waited for, for too long.
    Idle(Awaited),
}

/// Polls a connection; also ready when its client has been waited for too long.
fn poll_within(
    cx: &mut Context<'_>,
    client: &Client,
    remote: &Remote,
    timeouts: &Timeouts,
    wait: &mut Wait,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<Ended>,
) -> Poll<Ended> {
    let mut probed = false;
    loop {
        if let Poll::Ready(ended) = poll(cx) {
            return Poll::Ready(ended);
        }
        let Some((awaited, limit)) = awaited(client, remote, timeouts) else { return Poll::Pending };
        ready!(wait.poll(cx, awaited, limit));
        if probed || remote.handed().awaited().is_none() {
            return Poll::Ready(Ended::Idle(awaited));
        }
        // It may have taken something, and less than the system tells of.
        probed = true;
        remote.probe();
    }
}

/// What a client is waited for, and for how long at most; `None` while it waits for us.
fn awaited(client: &Client, remote: &Remote, timeouts: &Timeouts) -> Option<(Awaited, Option<Duration>)> {
    let (asked, written) = (client.asked(), remote.handed().count());
    if let Some(awaited) = remote.handed().awaited() {
        Some((awaited, timeouts.client_read))
    } else if client.is_busy() {
        None
    } else if client.drain.phase() >= Phase::Draining {
        Some((Awaited::Goodbye { asked, written }, Some(GOODBYE)))
    } else if client.streams {
        // Its pings say that it is there.
        None
    } else {
        Some((Awaited::Head { asked }, timeouts.client_head))
    }
}

fn http1_builder(config: &Config) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(config.limits.head.max(LEAST_BUFFER)).max_header_size(config.limits.head);
    builder
}

/// HTTP/2: in TLS by agreement, without by prior knowledge.
async fn serve_http2<S: Stream>(
    stream: S,
    remote: Remote,
    client: Arc<Client>,
    proxy: Arc<Proxy>,
    config: &Config,
) {
    let stack = stack::stack(proxy.clone());
    let (asking, serving) = (client.clone(), proxy.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let busy = Busy::begin(asking.clone());
        let (proxy, version) = (serving.clone(), request.version());
        stack.clone().call((request, asking.clone())).map(move |answer| {
            stack::rendered(answer, &proxy, version).map(|response| response.map(|body| body.keeping(busy)))
        })
    });
    let mut connection = pin!(http2_builder(&client, config).serve_connection(TokioIo::new(stream), service));
    let mut wait = Wait::default();
    let mut phases = proxy.drain.listener();
    let mut told = false;
    let served = poll_fn(|cx| {
        phases.listen(cx);
        if !told && proxy.drain.phase() >= Phase::Draining {
            told = true;
            connection.as_mut().graceful_shutdown();
        }
        poll_within(cx, &client, &remote, &config.timeouts, &mut wait, |cx| {
            connection.as_mut().poll(cx).map(Ended::Served)
        })
    });
    tokio::select! {
        ended = served => match ended {
            Ended::Served(Ok(())) | Ended::Left => {}
            Ended::Served(Err(error)) => tracing::debug!("client connection ended: {error}"),
            Ended::Idle(awaited) => tracing::debug!(?awaited, "client connection idle for too long"),
        },
        () = cut(&proxy) => {}
    }
}

fn http2_builder(client: &Arc<Client>, config: &Config) -> http2::Builder<Streams> {
    let mut builder = http2::Builder::new(Streams::of(client.clone(), config.timeouts.client_read));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_header_list_size(u32::try_from(config.limits.head).unwrap_or(u32::MAX))
        .keep_alive_interval(config.timeouts.client_head)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// Ends the sending side, and listens on for a while.
async fn close<S: Stream>(mut stream: S, linger: Duration) {
    if stream.shutdown().await.is_ok() && !linger.is_zero() {
        let mut rest = stream.take(LINGER_BYTES);
        let _ = timeout(linger, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    }
}

/// A socket, or TLS over one.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// Counts a client connection while it lives.
struct Open(IntGauge);

impl Open {
    fn count(gauge: IntGauge) -> Open {
        gauge.inc();
        Open(gauge)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::lifecycle::Drain;

    #[tokio::test]
    async fn a_client_is_waited_for_only_when_it_has_to_do_something() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _there = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let (mut socket, remote) = Socket::new(stream).unwrap();
        let timeouts = Timeouts {
            client_head: Some(Duration::from_secs(1)),
            client_read: Some(Duration::from_secs(2)),
            ..Timeouts::default()
        };
        let drain = Drain::default();
        let http1 = Arc::new(Client::new(peer, "http", drain.clone()));
        let http2 = Arc::new(Client::with_streams(peer, "http", drain.clone()));
        let limit = |client| awaited(client, &remote, &timeouts).map(|(_, limit)| limit.unwrap());
        assert_eq!((limit(&http1), limit(&http2)), (timeouts.client_head, None), "it is asked by pings");
        drain.advance(Phase::Draining);
        assert_eq!((limit(&http1), limit(&http2)), (Some(GOODBYE), Some(GOODBYE)));
        let busy = [&http1, &http1, &http2].map(|client| Busy::begin(client.clone()));
        assert_eq!((limit(&http1), limit(&http2)), (None, None), "it waits itself");
        while socket.write(&[0; 64 << 10]).now_or_never().is_some() {}
        assert_eq!((limit(&http1), limit(&http2)), (timeouts.client_read, timeouts.client_read));
        drop(busy);
        assert_eq!((limit(&http1), limit(&http2)), (timeouts.client_read, timeouts.client_read));
    }
}
