//! Accepts client connections, as many at once as may be, and gives each to a thread that serves it to its end.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::yield_now;

use super::Proxy;
use super::connection;
use super::tls::Acceptor;
use crate::lifecycle::Phase;
use crate::threads::Threads;

/// After a failed `accept` (out of file descriptors), the next one is tried this much later.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that the system may have opened for clients before it is told to open no more, at most.
const BACKLOG: usize = 1_024;

/// Serves until the drain has come so far that no connection is taken any more. Running ones go on by themselves and block
/// the drain's end.
pub async fn serve(listener: TcpListener, tls: Option<Acceptor>, threads: Arc<Threads>, proxy: Arc<Proxy>) {
    let limits = proxy.config.load().limits.clone();
    let slots = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    let mut draining = pin!(proxy.drain.at_least(Phase::Draining));
    let give = |taken: io::Result<Taken>| {
        taken.and_then(|(stream, peer, slot)| {
            let (tls, proxy, blocker) = (tls.clone(), proxy.clone(), proxy.drain.block());
            threads.serve(stream, async move |stream| {
                connection::serve(stream, peer, tls, proxy, blocker).await;
                drop(slot);
            })
        })
    };
    loop {
        let taken = tokio::select! {
            biased;
            () = &mut draining => break,
            taken = take(&listener, &slots) => taken,
        };
        if let Err(error) = give(taken) {
            proxy.complaints.warn("accept", "", &format_args!("no connection could be taken: {error}"));
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
    // Those that stand in the system's queue may have asked already; the runtime looks first who is there.
    yield_now().await;
    for _ in 0..BACKLOG {
        match take(&listener, &slots).now_or_never().map(&give) {
            Some(Ok(())) => {}
            Some(Err(_)) | None => return,
        }
    }
}

type Taken = (TcpStream, SocketAddr, OwnedSemaphorePermit);

/// Waits for a free slot before it takes a connection, so that what is too many waits in the system's queue.
async fn take(listener: &TcpListener, slots: &Arc<Semaphore>) -> io::Result<Taken> {
    let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, slot))
}
