//! Several routers before the same workers as one: each tells the others, over a Redis or Valkey that is there already, what it places and
//! how that ends, and books what the others tell as its own. So all believe and count the same, within the time that a word takes.
//!
//! A request only hands over what is to be said ([`claim`]). [`publisher`] writes it to a stream of the [`store`] in batches ([`news`]);
//! [`listener`] reads the stream and has [`heard`] keep what is open of others. There is no leader and no lock, and nothing waits for
//! the store: while it is away each router goes on by what it sees itself, and afterwards all catch up from where they were. A router
//! that starts reads what the stream still has before it says that it is ready.

pub mod claim;
mod company;
pub mod heard;
mod listener;
pub mod news;
mod publisher;
mod reach;
mod skew;
pub mod store;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::core::booking::Booking;
use crate::core::elsewhere::Tell;
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::{Ask, Planner};
use crate::core::shadow::Followed;
use crate::fleet::worker::Worker;
use crate::fleet::{Fleet, key_of};
use crate::lifecycle::Clock;
use crate::metrics::Metrics;
use claim::{Claim, Events, Teller};
use listener::Listener;
use news::{Name, News};
use reach::Reach;
use store::Store;

/// Takes up beside the planner what others place: the shadow.
pub trait Follow: Send + Sync {
    /// What was said before is about to be read, and it is known who the workers are.
    fn prepare(&self);

    /// Another router has placed a request on `worker` at `at`.
    fn follow(&self, ask: &Ask, worker: WorkerId, at: Time) -> Option<Followed>;
}

/// How long readiness waits for what others have said. Then it is better to serve cold than not at all.
pub const READY_WITHIN: Duration = Duration::from_secs(15);
/// Letters of a host's name; the system knows no longer ones.
const LONGEST_HOST: usize = 64;
/// How long the last word may take.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Another router.
#[derive(Clone, Debug)]
pub struct Other {
    /// What it calls itself, once it has said so.
    pub name: Option<Arc<str>>,
    /// When it spoke last.
    pub spoke: Time,
}

/// What was seen of the others when they were looked at last.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub others: Vec<Other>,
    /// Workers that others place on for long and that are not known here.
    pub unknown_workers: usize,
}

/// What this router tells others, and what it knows of them.
pub struct Peers {
    /// Of this process: what comes back is known by it.
    id: u64,
    /// What people call it.
    name: String,
    teller: Arc<Teller>,
    /// Taken by the task that sends.
    events: Mutex<Option<Events>>,
    seen: Mutex<Seen>,
    ready: AtomicBool,
    has_left: Notify,
    reach: Reach,
    metrics: Arc<Metrics>,
}

impl Peers {
    /// Of a router that clients reach at this port.
    pub fn new(port: u16, metrics: Arc<Metrics>) -> Arc<Peers> {
        let (teller, events) = Teller::new(metrics.clone());
        Arc::new(Peers {
            id: rand::random(),
            name: format!("{}:{port}", host_name()),
            seen: Mutex::default(),
            teller: Arc::new(teller),
            events: Mutex::new(Some(events)),
            ready: AtomicBool::new(false),
            has_left: Notify::new(),
            reach: Reach::new(metrics.clone()),
            metrics,
        })
    }

    /// The claim of a request that was placed at `now`, of which the others are told.
    pub fn claim(&self, booking: Booking, ask: &Ask, worker: &Worker, now: Time) -> Claim {
        self.teller.claim(booking, ask, name_of(worker), now)
    }

    /// Whether all that others had said before this router began is taken up, or has been waited for long enough.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Other routers that live.
    pub fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// What this router calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is wrong with the store, and for how long.
    pub fn fault(&self) -> Option<(Duration, String)> {
        self.reach.fault()
    }

    /// Whether the store can be read and written.
    pub fn is_connected(&self) -> bool {
        self.metrics.sharing.connected.get() == 1
    }

    /// Speaks and listens for as long as it is polled; once only.
    pub async fn run(
        self: Arc<Self>,
        store: Arc<Store>,
        delay: Duration,
        fleet: Arc<Fleet>,
        planner: Arc<Planner>,
        beside: Arc<dyn Follow>,
        clock: Clock,
    ) {
        let Some(events) = self.events.lock().take() else { return };
        let listener = Listener::new(&self, &store, fleet, planner, beside, clock);
        tokio::join!(
            publisher::run(&self, &store, events, delay, clock),
            listener.run(),
            self.be_ready(&store)
        );
    }

    async fn be_ready(&self, store: &Store) {
        sleep(READY_WITHIN).await;
        if !self.ready.swap(true, Ordering::AcqRel) {
            let fault = self.fault().map_or_else(|| "there is more than that".to_owned(), |(_, fault)| fault);
            tracing::warn!(
                "ready without what other routers have said: it could not be read from {} in {READY_WITHIN:?}: {fault}",
                store.address()
            );
        }
    }

    /// Tells the others that this router leaves: what it has open is over.
    pub async fn leave(&self, now: Time) {
        self.teller.tell(now, 0, News::Left);
        if timeout(LAST_WORD, self.has_left.notified()).await.is_err() {
            tracing::debug!("the store did not take the last word in {LAST_WORD:?}");
        }
    }
}

/// In a cluster the pod's.
fn host_name() -> String {
    let system = rustix::system::uname();
    let sound = |byte: &char| byte.is_ascii_alphanumeric() || "-_.".contains(*byte);
    let name: String = system.nodename().to_string_lossy().chars().filter(sound).take(LONGEST_HOST).collect();
    if name.is_empty() { "router".to_owned() } else { name }
}

fn name_of(worker: &Worker) -> Name {
    let pod = worker.pod.get().map_or(0, |pod| key_of(pod.uid.as_ref()));
    Name { key: worker.key, pod }
}
