//! What speaks HTTP to clients and workers. The way of one request, top to bottom:
//!
//! 1. [`server`] takes the connection, and [`connection`] has hyper read the head from the [`socket`], or what [`tls`] makes of it,
//!    within its limits, polled by [`again`], as long as there is something to [`wait`] for, and in HTTP/2 by [`streams`];
//! 2. [`stack`] wraps what every request gets: catching panics, rendering errors, counting;
//! 3. [`forward`] is the middle: it asks, in this order,
//!    - [`route`] what kind of request it is,
//!    - [`body`] for the whole body under its cap,
//!    - [`place`] to read the prompt and to pick and book a worker, if [`admission`] has room, by the mode of its [`arms`],
//!    - [`failover`] to try workers until one has answered, each try made by [`upstream`],
//!    - which [`patience`] ends if the worker falls silent,
//! 4. and [`relay`] streams the answer through as it comes, while [`watch`] looks at what passes ([`usage`], [`sse`]) and tells
//!    the planner.
//!
//! [`decisions`] and [`prefixes`] are what the operator can look at. [`account`] closes with the request's [`note`]: its line in the [`access`] log (written by [`lines`]), its span in [`traces`], where there are such. With `feedback.ask_for_usage`, [`ask_usage`] changes what is sent and [`hide_usage`] what comes back.
//! A client and a worker that agree on websockets are joined by [`tunnel`]. Whatever goes wrong is one [`error::ProxyError`],
//! and [`complaints`] keeps the log short where it goes wrong for many.

pub mod access;
pub mod account;
pub mod admission;
mod again;
pub mod arms;
pub mod ask_usage;
pub mod body;
pub mod complaints;
pub mod connection;
pub mod decisions;
pub mod error;
pub mod failover;
pub mod forward;
pub mod headers;
pub mod hide_usage;
mod lines;
pub mod note;
mod others;
pub mod patience;
pub mod place;
pub mod prefixes;
pub mod relay;
pub mod route;
pub mod server;
pub mod socket;
pub mod sse;
pub mod stack;
mod streams;
pub mod tls;
pub mod traces;
pub mod tunnel;
pub mod upstream;
pub mod usage;
mod wait;
pub mod watch;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tower::retry::budget::TpsBudget;

use crate::bell::Listener;
use crate::config::{Config, Mode, Retries};
use crate::core::blocks::HashKey;
use crate::core::planner::Planner;
use crate::core::shadow::{Sampling, Shadow};
use crate::fleet::Fleet;
use crate::fleet::feedback::Feedback;
use crate::fleet::worker::Worker;
use crate::lifecycle::{Clock, Drain, Phase};
use crate::metrics::Metrics;
use crate::peers::Peers;
use complaints::Complaints;
use decisions::Decisions;
use headers::Forwarded;
use note::Records;
use prefixes::Prefixes;
use tunnel::Tunnelled;
use wait::Handed;

/// What a request needs on its way: made once, shared by all.
pub struct Proxy {
    /// The config in force; swapped whole by reloads and mode switches.
    pub config: ArcSwap<Config>,
    pub fleet: Arc<Fleet>,
    pub planner: Arc<Planner>,
    pub feedback: Feedback,
    pub metrics: Arc<Metrics>,
    pub hash_key: HashKey,
    /// Fixed for the life of the process: blocks of different lengths never match.
    pub block_bytes: usize,
    pub clock: Clock,
    pub drain: Drain,
    pub complaints: Complaints,
    pub records: Records,
    pub decisions: Decisions,
    /// The other routers, if anything is shared with them.
    pub peers: Option<Arc<Peers>>,
    pub(super) prefixes: Prefixes,
    shadow: Option<Shadow>,
    /// Its models hold too few blocks, and it was said.
    shadow_is_rare: AtomicBool,
    budget: ArcSwap<TpsBudget>,
    /// Requests that have a place at any worker.
    open: Arc<AtomicUsize>,
    /// Large bodies that are read at once: enough to use half the machine, so that the rest goes on.
    large_reads: tokio::sync::Semaphore,
    /// Held by the request that is next in the queue for a place.
    turn: tokio::sync::Mutex<()>,
}

/// Retries are allowed against what was served in this time.
const BUDGET_WINDOW: Duration = Duration::from_secs(10);

/// A share that is taken from fewer blocks of the shadow's is off by three points and more.
const FEW_BLOCKS: u64 = 128;

fn half_the_machine() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2))
}

fn budget(retries: &Retries) -> TpsBudget {
    TpsBudget::new(BUDGET_WINDOW, retries.reserve as u32, retries.ratio as f32)
}

impl Proxy {
    pub fn new(
        config: Config,
        fleet: Arc<Fleet>,
        planner: Arc<Planner>,
        metrics: Arc<Metrics>,
        clock: Clock,
        drain: Drain,
        records: Records,
    ) -> Arc<Proxy> {
        metrics.set_mode(config.mode);
        let shadow = config.shadow.one_in.map(|sampling| Shadow::new(sampling, planner.settings()));
        let hash_key = config.hash_key.clone().unwrap_or_else(|| HashKey(rand::random()));
        Arc::new(Proxy {
            feedback: Feedback::new(config.cache.bytes_per_token),
            block_bytes: config.cache.block_bytes,
            budget: ArcSwap::from_pointee(budget(&config.retries)),
            open: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            large_reads: tokio::sync::Semaphore::new(half_the_machine()),
            complaints: Complaints::default(),
            decisions: Decisions::new(config.explain.keep),
            peers: config.sharing.as_ref().map(|_| Peers::new(config.listen.port(), metrics.clone())),
            prefixes: Prefixes::default(),
            config: ArcSwap::from_pointee(config),
            shadow,
            shadow_is_rare: AtomicBool::new(false),
            fleet,
            planner,
            metrics,
            hash_key,
            clock,
            drain,
            records,
        })
    }

    /// Puts `config` in force, but for its mode, which is left as it is unless another `mode` is given. What is only read at
    /// the start must not differ.
    pub fn reconfigure(&self, config: Config, mode: Option<Mode>) {
        let old = self.config.load_full();
        if old.retries != config.retries {
            self.budget.store(Arc::new(budget(&config.retries)));
        }
        if old.health != config.health {
            self.fleet.set_health_settings(config.health.clone());
        }
        if old.scrape != config.scrape {
            self.fleet.set_scrape_settings(config.scrape.clone());
        }
        self.fleet.configure(&config.workers);
        self.decisions.limit(config.explain.keep);
        self.config.rcu(|now| Config { mode: mode.unwrap_or(now.mode), ..config.clone() });
        // There may be more places now than those who wait for one know of.
        self.fleet.capacity.notify_one();
        self.metrics.set_mode(self.config.load().mode);
    }

    /// Has the shadow hear what has become known of the workers.
    pub fn sync_shadow(&self) {
        let Some(shadow) = &self.shadow else { return };
        shadow.sync(&self.planner, self.block_bytes as f64 / self.feedback.estimate("").bytes_per_token);
        self.metrics.shadow.one_in.set(shadow.one_in().unwrap_or(0) as i64);
        self.warn_of_rare_blocks();
    }

    /// Says once, until it is well again, that the shadow's models hold too few blocks to say anything.
    fn warn_of_rare_blocks(&self) {
        // A cache that is modelled whole is told exactly, however small.
        let Some(Sampling::OneIn(one_in @ 2..)) = self.config.load().shadow.one_in else { return };
        let few = self.modelled_blocks(one_in).filter(|few| *few < FEW_BLOCKS);
        if few.is_some() == self.shadow_is_rare.swap(few.is_some(), Ordering::Relaxed) {
            return;
        }
        match few {
            Some(blocks) => tracing::warn!(
                blocks,
                enough = FEW_BLOCKS,
                "shadow.one_in: 1 in {one_in} leaves too few blocks of the smallest worker's cache for shares that mean anything; `auto` takes \
                 as many as it needs"
            ),
            None => tracing::info!("shadow.one_in: the models of the workers' caches hold enough blocks now"),
        }
    }

    /// Blocks in the shadow's model of the smallest worker's cache; `None` where no size is known.
    fn modelled_blocks(&self, one_in: usize) -> Option<u64> {
        let now = self.clock.now();
        let fleet = self.fleet.snapshot();
        let capacity = |worker: &Arc<Worker>| self.planner.belief(worker.id, now)?.capacity_tokens;
        let smallest = fleet.workers.iter().filter_map(capacity).min()?;
        let block_tokens = self.block_bytes as f64 / self.feedback.estimate("").bytes_per_token;
        Some((smallest as f64 / block_tokens / one_in as f64) as u64)
    }

    /// The shadow's models hold one block in so many; `None` without a shadow, and while no worker is known.
    pub fn shadow_one_in(&self) -> Option<usize> {
        self.shadow.as_ref()?.one_in()
    }

    /// Switches the mode until the next switch, or edit of `mode` in the config file.
    pub fn set_mode(&self, mode: Mode) {
        self.config.rcu(|config| Config { mode, ..Config::clone(config) });
        self.metrics.set_mode(mode);
    }
}

/// One client connection, as far as its requests care.
pub struct Client {
    forwarded: Forwarded,
    /// The worker drawn for this connection in mode `random`. Weak: an idle connection does not hold a worker that left.
    pinned: Mutex<Weak<Worker>>,
    /// What the connection becomes when the response under way is written.
    tunnel: Mutex<Option<Tunnelled>>,
    /// Requests under way.
    busy: AtomicUsize,
    /// All there have been.
    asked: AtomicU64,
    drain: Drain,
    /// Each of its requests has a task of its own (HTTP/2).
    streams: bool,
    /// Of the request that was begun last, until it has its task.
    begun: Mutex<Option<Arc<Handed>>>,
}

impl Client {
    /// Of HTTP/1; `proto` is what it speaks: `http` or `https`.
    pub fn new(peer: SocketAddr, proto: &'static str, drain: Drain) -> Client {
        Client {
            drain,
            streams: false,
            begun: Mutex::new(None),
            forwarded: Forwarded::new(peer, proto),
            pinned: Mutex::new(Weak::new()),
            tunnel: Mutex::new(None),
            busy: AtomicUsize::new(0),
            asked: AtomicU64::new(0),
        }
    }

    /// Of HTTP/2.
    pub fn with_streams(peer: SocketAddr, proto: &'static str, drain: Drain) -> Client {
        Client { streams: true, ..Client::new(peer, proto, drain) }
    }

    /// For one of its requests.
    fn cut(self: &Arc<Self>) -> Cut {
        Cut { client: self.clone(), listener: self.streams.then(|| self.drain.listener()) }
    }

    fn pinned(&self) -> Option<Arc<Worker>> {
        self.pinned.lock().upgrade()
    }

    fn pin(&self, worker: &Arc<Worker>) {
        *self.pinned.lock() = Arc::downgrade(worker);
    }

    fn unpin(&self) {
        *self.pinned.lock() = Weak::new();
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) > 0
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

/// Tells one request when the drain cuts it.
struct Cut {
    client: Arc<Client>,
    /// Only where the request has its own task; the one that polls all requests of a connection (HTTP/1) listens for them.
    listener: Option<Listener>,
}

impl Cut {
    fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        if let Some(listener) = &mut self.listener {
            listener.listen(cx);
        }
        if self.is_made() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn is_made(&self) -> bool {
        self.client.drain.phase() >= Phase::Cut
    }
}

/// A request of the client is under way for as long as this lives.
pub struct Busy {
    client: Arc<Client>,
    /// Of its answer, where each is taken by itself (HTTP/2).
    handed: Option<Arc<Handed>>,
}

impl Busy {
    fn begin(client: Arc<Client>) -> Busy {
        client.busy.fetch_add(1, Ordering::Relaxed);
        client.asked.fetch_add(1, Ordering::Relaxed);
        let handed = client.streams.then(Arc::<Handed>::default);
        if handed.is_some() {
            client.begun.lock().clone_from(&handed);
        }
        Busy { client, handed }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.client.busy.fetch_sub(1, Ordering::Relaxed);
    }
}
