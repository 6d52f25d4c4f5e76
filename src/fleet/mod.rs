//! Who the workers are and what is known of them.
//!
//! Readers take one [`Snapshot`] and wait for nothing; whoever changes something (the worker list, a worker's health) makes
//! a new one and swaps it in.

pub mod activity;
pub mod connection;
pub mod exposition;
pub mod feedback;
pub mod health;
pub mod listing;
pub mod models;
pub mod probe;
pub mod reading;
pub mod scrape;
pub mod stream;
pub mod worker;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::config;
use crate::core::ids::WorkerId;
use crate::core::planner::{Planner, WorkerSpec};
use crate::lifecycle::Clock;
use crate::metrics::{Forgot, Metrics};

use activity::Found;
use connection::ExchangeError;
use health::{Event, Reason, Standing};
use models::{Directory, Group};
use stream::Secure;
use worker::Worker;

/// Tokens in a block of the engine, until it is told otherwise: vLLM's default.
const ENGINE_BLOCK_TOKENS: u32 = 16;

/// The fleet at one moment.
#[derive(Default)]
pub struct Snapshot {
    /// All workers, in the order of the config.
    pub workers: Vec<Arc<Worker>>,
    /// Those that may be given a request, whatever model it is for.
    pub all: Group,
    /// Who can serve which model.
    pub models: Directory,
    by_slot: Vec<Option<Arc<Worker>>>,
    /// By slot: the workers' places in an order that has nothing to do with anything and is the same on every replica.
    ranks: Vec<usize>,
}

impl Snapshot {
    fn of(workers: Vec<Arc<Worker>>) -> Snapshot {
        let slots = workers.iter().map(|worker| worker.id.index() + 1).max().unwrap_or(0);
        let mut by_slot = vec![None; slots];
        for worker in &workers {
            by_slot[worker.id.index()] = Some(worker.clone());
        }
        let present = || by_slot.iter().flatten().map(Arc::as_ref);
        let all = Group::of(present());
        let listed: Vec<_> = present().map(|worker| (worker, worker.models())).collect();
        let models = Directory::of(&listed);
        let mut shuffled: Vec<&Arc<Worker>> = workers.iter().collect();
        shuffled.sort_by_cached_key(|worker| *blake3::hash(worker.url.label().as_bytes()).as_bytes());
        let mut ranks = vec![0; slots];
        shuffled.iter().enumerate().for_each(|(rank, worker)| ranks[worker.id.index()] = rank);
        Snapshot { workers, all, models, by_slot, ranks }
    }

    pub fn worker(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.by_slot.get(id.index())?.as_ref()
    }

    /// The workers that can serve `model`; all of them where nobody lists it, which is said.
    pub fn serving(&self, model: &str) -> (&Group, bool) {
        match self.models.find(model) {
            models::Found::Only(group) => (group, false),
            models::Found::Anyone => (&self.all, false),
            models::Found::Nobody => (&self.all, true),
        }
    }

    /// Whether the worker is of the part that so large a share of them makes; some are and some are not, if there are two.
    pub fn is_of_part(&self, id: WorkerId, share: f64) -> bool {
        let all = self.workers.len();
        let part = (all as f64 * share).round() as usize;
        let part = if share > 0.0 && share < 1.0 && all > 1 { part.clamp(1, all - 1) } else { part };
        self.ranks.get(id.index()).is_some_and(|rank| *rank < part)
    }

    /// Those that may be given a request, in slot order, whatever model it is for.
    pub fn eligible(&self) -> &[WorkerId] {
        &self.all.eligible
    }
}

/// The workers, their health and their place in the planner.
pub struct Fleet {
    snapshot: ArcSwap<Snapshot>,
    /// Workers that have left the list while requests were under way there: somebody has to notice if they go down with them.
    leaving: Mutex<Vec<Weak<Worker>>>,
    /// Taken by whoever makes a new snapshot, so that none is lost.
    writing: Mutex<()>,
    /// Counts the changes of the worker list, for those who run a task per worker.
    membership: watch::Sender<u64>,
    /// Told when a worker may have room again, or there is another one.
    pub capacity: Notify,
    settings: ArcSwap<config::Health>,
    scrape: ArcSwap<config::Scrape>,
    planner: Arc<Planner>,
    metrics: Arc<Metrics>,
    secure: Secure,
    clock: Clock,
}

impl Fleet {
    pub fn new(
        settings: config::Health,
        planner: Arc<Planner>,
        metrics: Arc<Metrics>,
        secure: Secure,
        clock: Clock,
    ) -> Arc<Fleet> {
        Arc::new(Fleet {
            snapshot: ArcSwap::default(),
            leaving: Mutex::default(),
            writing: Mutex::new(()),
            membership: watch::Sender::new(0),
            capacity: Notify::new(),
            settings: ArcSwap::from_pointee(settings),
            scrape: ArcSwap::from_pointee(config::Scrape::default()),
            planner,
            metrics,
            secure,
            clock,
        })
    }

    pub fn snapshot(&self) -> Guard<Arc<Snapshot>> {
        self.snapshot.load()
    }

    pub fn health_settings(&self) -> Arc<config::Health> {
        self.settings.load_full()
    }

    pub fn set_health_settings(&self, settings: config::Health) {
        self.settings.store(Arc::new(settings));
        self.membership.send_modify(|changes| *changes += 1);
    }

    pub fn scrape_settings(&self) -> Arc<config::Scrape> {
        self.scrape.load_full()
    }

    pub fn set_scrape_settings(&self, settings: config::Scrape) {
        self.scrape.store(Arc::new(settings));
        self.membership.send_modify(|changes| *changes += 1);
    }

    /// Makes `wanted` the fleet. Workers that stay keep their health, connections, counts and beliefs, whatever else of them
    /// was edited.
    pub fn set_workers(&self, wanted: &[config::Worker]) {
        let _writing = self.writing.lock();
        let old = self.snapshot.load_full();
        let mut known: HashMap<_, _> = old.workers.iter().map(|worker| (&worker.url, worker)).collect();
        let mut workers = Vec::with_capacity(wanted.len());
        for config in wanted {
            match known.remove(&config.url) {
                Some(worker) => {
                    self.edit(worker, config);
                    workers.push(worker.clone());
                }
                None => workers.push(self.join(config)),
            }
        }
        for gone in known.into_values() {
            tracing::info!(worker = %gone.url, "worker left");
            self.planner.remove_worker(gone.id);
            self.leaving.lock().push(Arc::downgrade(gone));
        }
        self.snapshot.store(Arc::new(Snapshot::of(workers)));
        self.membership.send_modify(|changes| *changes += 1);
        self.capacity.notify_one();
    }

    fn edit(&self, worker: &Arc<Worker>, config: &config::Worker) {
        let before = worker.reconfigure(config.clone());
        if before == *config {
            return;
        }
        tracing::info!(worker = %worker.url, "worker edited");
        if before.capacity_tokens != config.capacity_tokens {
            // Where neither says, the readers of the pages assume one.
            self.planner.set_capacity(worker.id, scrape::told_capacity(worker));
        }
        if before.prefill_speed != config.prefill_speed {
            self.planner.set_prefill_speed(worker.id, config.prefill_speed);
        }
    }

    fn join(&self, config: &config::Worker) -> Arc<Worker> {
        let hash = blake3::hash(config.url.to_string().as_bytes());
        let mut key = [0; 8];
        key.copy_from_slice(&hash.as_bytes()[..8]);
        let id = self.planner.add_worker(WorkerSpec {
            key: u64::from_le_bytes(key),
            capacity_tokens: config.capacity_tokens,
            engine_block_tokens: ENGINE_BLOCK_TOKENS,
            prefill_speed: config.prefill_speed,
        });
        let probed = self.settings.load().interval.is_some();
        tracing::info!(worker = %config.url, "worker joined");
        Arc::new(Worker::new(id, config.clone(), probed, self.secure.clone(), &self.metrics))
    }

    /// Workers that have left the list and still have requests.
    fn leaving(&self) -> Vec<Arc<Worker>> {
        let mut leaving = self.leaving.lock();
        leaving.retain(|worker| worker.strong_count() > 0);
        leaving.iter().filter_map(Weak::upgrade).collect()
    }

    /// Runs `task` for each worker, and if asked to for those that are leaving, for as long as it is polled. Any change of the
    /// worker list or the settings begins the few tasks there are anew.
    async fn for_each_worker<F: Future<Output = ()> + Send + 'static>(
        &self,
        with_leaving: bool,
        task: impl Fn(Arc<Worker>) -> F,
    ) {
        let mut membership = self.membership();
        loop {
            membership.mark_unchanged();
            // Ends its tasks when it is dropped.
            let mut tasks = JoinSet::new();
            let leaving = if with_leaving { self.leaving() } else { Vec::new() };
            for worker in self.snapshot().workers.iter().chain(&leaving) {
                tasks.spawn(task(worker.clone()));
            }
            drop(leaving);
            if membership.changed().await.is_err() {
                return;
            }
        }
    }

    /// Tells the health of `worker` what happened to it.
    pub fn report(&self, worker: &Worker, event: Event) {
        if worker.is_calm() && event == Event::Answered {
            return; // The path of nearly every request: nothing to change, nothing to lock.
        }
        self.record(worker, event);
    }

    /// An exchange with `worker` failed. Where nobody listens there is no process any more, and so no cache.
    pub fn exchange_failed(&self, worker: &Arc<Worker>, error: &ExchangeError) {
        if error.is_refused() {
            self.forget(worker, Forgot::Refused);
        }
    }

    /// Forgets what is believed cached on `worker`.
    pub fn forget(&self, worker: &Arc<Worker>, reason: Forgot) {
        if !self.is_current(worker) {
            return;
        }
        let blocks = self.planner.forget(worker.id);
        worker.relist.notify_one();
        // A worker that is down is refused again and again: it is told once.
        if blocks > 0 || reason != Forgot::Refused {
            self.forgot(worker, reason, blocks);
        }
    }

    /// Records that what was believed cached on `worker` has been forgotten.
    pub fn forgot(&self, worker: &Worker, reason: Forgot, blocks: usize) {
        worker.metrics.forgot(reason);
        let reason = crate::metrics::Label::as_str(reason);
        tracing::warn!(worker = %worker.url, reason, blocks, "its cache is believed empty");
    }

    /// Still the fleet's worker: its slot may have passed to another one since.
    fn is_current(&self, worker: &Worker) -> bool {
        self.snapshot
            .load()
            .worker(worker.id)
            .is_some_and(|present| std::ptr::eq(&raw const **present, worker))
    }

    /// Has the worker of that name (its address, or its label on the metrics page) take nothing new, or again. `None` if there is
    /// no such worker. Holds as long as the worker stays in the list.
    pub fn set_draining(&self, name: &str, draining: bool) -> Option<Arc<Worker>> {
        let is_meant = |worker: &&Arc<Worker>| worker.url.label() == name || worker.url.to_string() == name;
        let worker = self.snapshot.load().workers.iter().find(is_meant)?.clone();
        if worker.set_draining(draining) {
            let running = worker.open.load(std::sync::atomic::Ordering::Acquire);
            tracing::info!(worker = %worker.url, draining, running, "an operator's word on what a worker takes");
            self.republish();
        }
        Some(worker)
    }

    fn record(&self, worker: &Worker, event: Event) {
        let Some(now) = worker.record(event, self.clock.now(), &self.settings.load()) else { return };
        let url = &worker.url;
        match now {
            Standing::Up => {
                tracing::info!(worker = %url, "worker is up");
                worker.relist.notify_one();
            }
            Standing::Out(reason) => {
                tracing::warn!(worker = %url, ?reason, "worker is out");
                if reason == Reason::Unreachable {
                    // A kept connection of a worker that takes no new ones would only hang; and whatever it had cached is
                    // gone with it.
                    worker.pool.close_idle(Duration::ZERO);
                    let blocks = if self.is_current(worker) { self.planner.forget(worker.id) } else { 0 };
                    if blocks > 0 {
                        self.forgot(worker, Forgot::Unreachable, blocks);
                    }
                }
            }
            Standing::Starting | Standing::Trial => {}
        }
        self.republish();
    }

    /// To be called about ten times a second: notices workers that stall, lets those that have been out for long enough be
    /// tried again, and closes connections that were idle for too long.
    pub fn tick(&self, pool_idle: Duration) {
        let stalled_after = self.settings.load().stalled_after.map(|limit| limit.as_secs_f64());
        let now = self.clock.now();
        for worker in &self.snapshot.load().workers {
            match worker.activity.tick(now, stalled_after) {
                Found::Progress => self.report(worker, Event::Answered),
                Found::Stall => self.record(worker, Event::Stalled),
                Found::Nothing => {}
            }
            self.record(worker, Event::Tick);
            worker.pool.close_idle(pool_idle);
        }
    }

    /// Brings those gauges up to date that follow what is believed and booked, for somebody who is about to read them.
    pub fn show(&self) {
        let now = self.clock.now();
        let mut bytes = self.planner.index_bytes();
        for worker in &self.snapshot.load().workers {
            worker.show_age(now);
            let Some(belief) = self.planner.belief(worker.id, now) else { continue };
            bytes += belief.bytes;
            let shown = &worker.metrics;
            shown.queue_tokens.set(belief.queue_tokens.round() as i64);
            shown.believed_tokens.set(belief.held_tokens as i64);
            shown.believed_blocks.set(belief.blocks as i64);
            shown.set_evicted(belief.evicted_blocks);
            shown.set_speed(belief.prefill_speed);
        }
        self.metrics.believed_blocks.set(self.planner.believed_blocks() as i64);
        self.metrics.belief_bytes.set(bytes as f64);
    }

    fn republish(&self) {
        let _writing = self.writing.lock();
        let workers = self.snapshot.load().workers.clone();
        self.snapshot.store(Arc::new(Snapshot::of(workers)));
        self.capacity.notify_one();
    }

    /// Waits for changes of the worker list.
    pub fn membership(&self) -> watch::Receiver<u64> {
        self.membership.subscribe()
    }
}
