//! Accepts client connections, as many at once as may be, and gives each to a thread that serves it to its end.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Proxy;
use super::connection;
use super::tls::Acceptor;
use crate::lifecycle::Phase;
use crate::threads::Threads;

/// After a failed `accept` (out of file descriptors), the next one is tried this much later.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until the drain has come so far that no connection is taken any more. Running ones go on by themselves and block
/// the drain's end.
pub async fn serve(listener: TcpListener, tls: Option<Acceptor>, threads: Arc<Threads>, proxy: Arc<Proxy>) {
    let limits = proxy.config.load().limits.clone();
    let slots = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    let mut draining = pin!(proxy.drain.at_least(Phase::Draining));
    loop {
        let taken = tokio::select! {
            biased;
            () = &mut draining => return,
            taken = take(&listener, &slots) => taken,
        };
        let served = taken.and_then(|(stream, peer, slot)| {
            let (tls, proxy, blocker) = (tls.clone(), proxy.clone(), proxy.drain.block());
            threads.serve(stream, async move |stream| {
                connection::serve(stream, peer, tls, proxy, blocker).await;
                drop(slot);
            })
        });
        if let Err(error) = served {
            proxy.complaints.warn("accept", "", &format_args!("no connection could be taken: {error}"));
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// Waits for a free slot before it takes a connection, so that what is too many waits in the system's queue.
async fn take(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, slot))
}
