//! What lies between the router and the API server: it can be held, so that nothing passes and nobody is told, and cut.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum State {
    Open,
    /// Connections are taken and stay open; not a byte passes.
    Held,
    /// Connections are ended, and new ones refused.
    Cut,
}

pub struct Link {
    pub address: SocketAddr,
    to: SocketAddr,
    state: Arc<watch::Sender<State>>,
    taking: Option<JoinHandle<()>>,
}

impl Link {
    pub async fn to(to: SocketAddr) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let mut link = Link { address, to, state: Arc::new(watch::Sender::new(State::Open)), taking: None };
        link.take(listener);
        link
    }

    fn take(&mut self, listener: TcpListener) {
        let (to, state) = (self.to, self.state.clone());
        self.taking = Some(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(join(stream, to, state.subscribe()));
            }
        }));
    }

    pub fn hold(&self) {
        self.state.send_replace(State::Held);
    }

    pub async fn cut(&mut self) {
        if let Some(taking) = self.taking.take() {
            taking.abort();
            let _ = taking.await;
        }
        self.state.send_replace(State::Cut);
    }

    pub async fn open(&mut self) {
        self.state.send_replace(State::Open);
        if self.taking.is_none() {
            let listener = TcpListener::bind(self.address).await.expect("the port is still ours");
            self.take(listener);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(taking) = self.taking.take() {
            taking.abort();
        }
    }
}

async fn join(router: TcpStream, to: SocketAddr, mut state: watch::Receiver<State>) {
    let Ok(server) = TcpStream::connect(to).await else { return };
    let (from_router, to_router) = router.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pass(from_router, to_server, state.clone()) => {}
        () = pass(from_server, to_router, state.clone()) => {}
        _ = state.wait_for(|state| *state == State::Cut) => {}
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut state: watch::Receiver<State>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else { return };
        if state.wait_for(|state| *state != State::Held).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
