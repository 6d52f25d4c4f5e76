//! The threads that serve clients, each with a runtime of its own. A connection stays on the thread that it was given to, and what its
//! requests need at their workers is opened there: so no request has to wake another thread, which costs more than a small one does.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, available_parallelism};

use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// By its name tokio's own runtimes are told the same.
const COUNT: &str = "TOKIO_WORKER_THREADS";

/// Places that were given to threads, in this process.
static PLACES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PLACE: Cell<usize> = const { Cell::new(0) };
}

/// The caller's place among the threads that serve clients, from 1; every other thread of the process has 0.
pub fn place() -> usize {
    PLACE.get()
}

/// Where connections are served. Dropped, it ends its threads, and with them what still runs there.
pub struct Threads {
    all: Vec<Thread>,
}

struct Thread {
    runtime: Handle,
    /// Connections that it serves.
    open: Arc<AtomicUsize>,
    own: Option<Own>,
}

/// A thread that was started for this.
struct Own {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

impl Threads {
    /// One for each CPU that this process may use, or as many as the variable `TOKIO_WORKER_THREADS` says; where that is one, the caller's,
    /// as another would only take turns with it. To be called within a runtime.
    ///
    /// # Errors
    /// If the variable is no number above 0, or the system has no thread left.
    pub fn one_a_cpu() -> io::Result<Threads> {
        let count = match std::env::var(COUNT) {
            Ok(count) => count.parse().map_err(|_| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{COUNT}: {count:?} is no number above 0"),
                )
            })?,
            Err(_) => available_parallelism().unwrap_or(NonZero::<usize>::MIN),
        };
        match count.get() {
            1 => Ok(Threads::here()),
            count => Threads::start(count),
        }
    }

    /// The runtime of the caller alone.
    pub fn here() -> Threads {
        Threads { all: vec![Thread { runtime: Handle::current(), open: Arc::default(), own: None }] }
    }

    /// So many new ones.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(count: usize) -> io::Result<Threads> {
        Ok(Threads { all: (0..count).map(|_| Thread::start()).collect::<io::Result<_>>()? })
    }

    /// Serves a connection on the thread that has the fewest.
    ///
    /// # Errors
    /// If there is no thread, or the system does not let it change to that one.
    pub fn serve<F>(
        &self,
        stream: TcpStream,
        serve: impl FnOnce(TcpStream) -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = ()> + Send,
    {
        let fewest = self.all.iter().min_by_key(|thread| thread.open.load(Ordering::Relaxed));
        let thread = fewest.ok_or_else(|| io::Error::other("no thread serves clients"))?;
        let open = Open::count(&thread.open);
        if thread.own.is_none() {
            thread.runtime.spawn(async move {
                serve(stream).await;
                drop(open);
            });
            return Ok(());
        }
        // Whichever runtime takes a socket up hears of it from then on.
        let stream = stream.into_std()?;
        thread.runtime.spawn(async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => serve(stream).await,
                Err(error) => tracing::debug!("client connection ended at once: {error}"),
            }
            drop(open);
        });
        Ok(())
    }
}

impl Thread {
    fn start() -> io::Result<Thread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let place = 1 + PLACES.fetch_add(1, Ordering::Relaxed);
        let ended = thread::Builder::new().name(format!("serve-{place}")).spawn(move || {
            PLACE.set(place);
            // Told by the other end's drop.
            let _ = runtime.block_on(stopped);
            // What reads a large prompt apart is not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Thread { runtime: handle, open: Arc::default(), own: Some(Own { stop, ended }) })
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let (stops, ended): (Vec<_>, Vec<_>) = self
            .all
            .iter_mut()
            .filter_map(|thread| thread.own.take())
            .map(|own| (own.stop, own.ended))
            .unzip();
        drop(stops);
        for thread in ended {
            // A panic there has printed where it was.
            let _ = thread.join();
        }
    }
}

/// Counts a connection while it is served, or waits for that.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn count(open: &Arc<AtomicUsize>) -> Open {
        open.fetch_add(1, Ordering::Relaxed);
        Open(open.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// A client's end of a connection, whose other end says on which thread it is served, and is until the client's is dropped.
    struct Client {
        stream: TcpStream,
        place: u8,
    }

    impl Client {
        async fn connect(threads: &Threads) -> Client {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (stream, accepted) =
                tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
            let (mut stream, (served, _)) = (stream.unwrap(), accepted.unwrap());
            let serve = async |mut served: TcpStream| {
                served.write_u8(place() as u8).await.unwrap();
                let _ = served.read_u8().await;
            };
            threads.serve(served, serve).unwrap();
            let place = stream.read_u8().await.unwrap();
            Client { stream, place }
        }

        /// Waits for the other end, and until only so many are left.
        async fn leave(mut self, threads: &Threads, left: usize) {
            self.stream.shutdown().await.unwrap();
            assert_eq!(self.stream.read(&mut [0]).await.unwrap(), 0);
            // The count falls just after that.
            while threads.all.iter().map(|thread| thread.open.load(Ordering::Relaxed)).sum::<usize>() > left {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn connections_go_where_the_fewest_are() {
        let threads = Threads::start(3).unwrap();
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(Client::connect(&threads).await);
        }
        let places: Vec<u8> = clients.iter().map(|client| client.place).collect();
        assert_eq!(places[..3].iter().collect::<BTreeSet<_>>().len(), 3, "each has one: {places:?}");
        assert_eq!(places[..3], places[3..], "and then another");
        assert!(!places.contains(&0) && place() == 0, "who started them is none of them");
        clients.remove(4).leave(&threads, 5).await;
        clients.remove(1).leave(&threads, 4).await;
        assert_eq!(Client::connect(&threads).await.place, places[1]);
    }

    #[tokio::test]
    async fn what_runs_ends_with_the_threads() {
        let threads = Threads::start(2).unwrap();
        let mut clients = [Client::connect(&threads).await, Client::connect(&threads).await];
        drop(threads);
        for client in &mut clients {
            assert_eq!(client.stream.read(&mut [0]).await.unwrap(), 0, "closed");
        }
    }

    #[tokio::test]
    async fn the_callers_own_runtime_has_no_place() {
        let threads = Threads::here();
        let client = Client::connect(&threads).await;
        assert_eq!(client.place, 0);
        client.leave(&threads, 0).await;
    }
}
