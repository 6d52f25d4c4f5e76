//! Listeners and connections of simulated workers. Everything is bound first and served later, so that addresses are known
//! and a taken port is an error at start.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::body::Idle;
use super::config::{ConfigError, EngineConfig};
use super::routes;
use super::worker::{Command, Shared, Worker};

/// Headers of one request at most; vLLM has no limit.
const MOST_HEADERS: usize = 1100;

/// Why a fleet cannot start. `worker` counts from 0.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("worker {worker}: {error}")]
    Config { worker: usize, error: ConfigError },
    #[error("worker {worker}: cannot listen on {address}: {error}")]
    Listen { worker: usize, address: SocketAddr, error: io::Error },
}

/// Any number of simulated workers in this process.
pub struct Fleet;

/// A fleet that has its addresses but answers nothing yet.
pub struct Bound {
    workers: Vec<BoundWorker>,
    addresses: Vec<SocketAddr>,
}

struct BoundWorker {
    listener: TcpListener,
    shared: Arc<Shared>,
    worker: Worker,
    inbox: mpsc::UnboundedReceiver<Command>,
}

/// A fleet at work in the background. Dropped, it ends at once, and its connections with it.
pub struct Running {
    addresses: Vec<SocketAddr>,
    stop: oneshot::Sender<()>,
    task: AbortOnDrop,
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Fleet {
    /// Checks every worker's settings and takes its port.
    pub async fn bind(configs: Vec<EngineConfig>) -> Result<Bound, BindError> {
        let mut workers = Vec::with_capacity(configs.len());
        let mut addresses = Vec::with_capacity(configs.len());
        for (worker, config) in configs.into_iter().enumerate() {
            config.check().map_err(|error| BindError::Config { worker, error })?;
            let address = config.listen;
            let failed = |error| BindError::Listen { worker, address, error };
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            addresses.push(listener.local_addr().map_err(failed)?);
            let (shared, inbox) = Shared::new(config);
            let model = Worker::new(&shared);
            let model = model.map_err(|error| BindError::Config { worker, error: error.into() })?;
            workers.push(BoundWorker { listener, shared, worker: model, inbox });
        }
        Ok(Bound { workers, addresses })
    }

    /// Binds and serves in the background.
    pub async fn start(configs: Vec<EngineConfig>) -> Result<Running, BindError> {
        let bound = Fleet::bind(configs).await?;
        let addresses = bound.addresses.clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(bound.run(async move {
            // A dropped sender stops too, but then the task is being aborted anyway.
            let _ = stopped.await;
        }));
        Ok(Running { addresses, stop, task: AbortOnDrop(task) })
    }
}

impl Bound {
    /// Where each worker listens, in the order of the configs.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Serves until `stop` resolves; then takes no new connections, lets the answers in flight end, and returns.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (stopping, stopped) = watch::channel(false);
        let mut workers = JoinSet::new();
        let mut models = JoinSet::new();
        for BoundWorker { listener, shared, worker, inbox } in self.workers {
            models.spawn(worker.run(inbox));
            workers.spawn(accept(listener, shared, stopped.clone()));
        }
        stop.await;
        let _ = stopping.send(true);
        while workers.join_next().await.is_some() {}
    }
}

impl Running {
    /// Where each worker listens, in the order of the configs.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Takes no new connections, lets the answers in flight end, and returns when all is done.
    pub async fn stop(mut self) {
        let _ = self.stop.send(());
        let _ = (&mut self.task.0).await;
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, mut stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, shared.clone(), stopped.clone()));
                }
                // Out of files, or the client has gone already: what comes next may succeed.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
            () = told_to_stop(&mut stopped) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn told_to_stop(stopped: &mut watch::Receiver<bool>) {
    // The sender's end is a stop too.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// One connection, until either side closes it.
async fn converse(stream: TcpStream, shared: Arc<Shared>, mut stopped: watch::Receiver<bool>) {
    // Only makes small writes slower if it fails.
    let _ = stream.set_nodelay(true);
    let idle = Arc::new(Idle::default());
    let keep_alive = shared.config.keep_alive();
    let busy = idle.clone();
    let service = service_fn(move |request| routes::serve(shared.clone(), busy.busy(), request));
    let mut server = http1::Builder::new();
    // A client that closes its sending side ends its request, as in uvicorn.
    server.half_close(false).max_headers(MOST_HEADERS);
    let connection = server.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        // An error is the client's going away, or bytes that are not HTTP; hyper has answered those.
        _ = connection.as_mut() => return,
        () = idle.expired(keep_alive) => {}
        () = told_to_stop(&mut stopped) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
