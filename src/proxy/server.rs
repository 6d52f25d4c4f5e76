//! Accepts client connections and serves HTTP/1.1 on them, within limits on heads, time and number.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::IntGauge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tower::ServiceExt;

use super::stack;
use super::{Client, Proxy};
use crate::config::Limits;
use crate::lifecycle::{Blocker, Phase};

/// Smallest buffer that hyper works with.
const LEAST_BUFFER: usize = 8 << 10;
/// After a failed `accept` (out of file descriptors), the next one is tried this much later.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long, and for how many bytes, a client whose request made no sense is listened to after it was told so.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: u64 = 1 << 20;

/// Serves until the drain has come so far that no connection is taken any more. Running ones go on by themselves and block
/// the drain's end.
pub async fn serve(listener: TcpListener, proxy: Arc<Proxy>) {
    let limits = proxy.config.load().limits.clone();
    let slots = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    let mut draining = pin!(proxy.drain.at_least(Phase::Draining));
    loop {
        let taken = tokio::select! {
            biased;
            () = &mut draining => return,
            taken = take(&listener, &slots) => taken,
        };
        match taken {
            Ok((stream, peer, slot)) => {
                let serving = serve_connection(stream, peer, proxy.clone(), proxy.drain.block());
                tokio::spawn(async move {
                    serving.await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!("no connection could be taken: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Waits for a free slot before it takes a connection, so that what is too many waits in the system's queue.
async fn take(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, slot))
}

async fn serve_connection(stream: TcpStream, peer: SocketAddr, proxy: Arc<Proxy>, _blocker: Blocker) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("client connection ended at once: {error}");
        return;
    }
    let _open = Open::count(proxy.metrics.client_connections.clone());
    let client = Arc::new(Client::new(peer));
    let stack = stack::stack(proxy.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        stack.clone().oneshot((request, client.clone())).map(stack::rendered)
    });
    let (head, time) = {
        let config = proxy.config.load();
        (config.limits.clone(), config.timeouts.client_head)
    };
    let mut connection = http1_builder(&head, time).serve_connection(TokioIo::new(stream), service);
    let result = tokio::select! {
        result = poll_fn(|cx| connection.poll_without_shutdown(cx)) => result,
        () = proxy.drain.at_least(Phase::Draining) => {
            std::pin::Pin::new(&mut connection).graceful_shutdown();
            tokio::select! {
                result = poll_fn(|cx| connection.poll_without_shutdown(cx)) => result,
                () = proxy.drain.at_least(Phase::Cut) => return,
            }
        }
    };
    match result {
        Ok(()) => close(connection.into_parts().io.into_inner(), Duration::ZERO).await,
        Err(error) => {
            tracing::debug!("client connection ended: {error}");
            if error.is_parse() {
                // hyper has answered 400, 414 or 431: the client gets to read that before what it still sends turns into
                // a reset.
                close(connection.into_parts().io.into_inner(), LINGER).await;
            }
        }
    }
}

/// Ends the sending side, and listens on for a while.
async fn close(mut stream: TcpStream, linger: Duration) {
    if stream.shutdown().await.is_ok() && !linger.is_zero() {
        let mut rest = stream.take(LINGER_BYTES);
        let _ = timeout(linger, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    }
}

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

fn http1_builder(limits: &Limits, head_time: Option<Duration>) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(head_time)
        .max_buf_size(limits.head.max(LEAST_BUFFER))
        .max_header_size(limits.head);
    builder
}
