//! Who the workers are and what is known of them.
//!
//! Readers take one [`Snapshot`] and wait for nothing; whoever changes something (the worker list, a worker's health) makes
//! a new one and swaps it in.

pub mod activity;
pub mod answer;
pub mod connection;
pub mod discovery;
pub mod exposition;
pub mod feedback;
pub mod framing;
pub mod health;
pub mod listing;
pub mod models;
mod news;
pub mod probe;
pub mod reading;
pub mod roster;
mod running;
pub mod scrape;
pub mod stream;
pub mod worker;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::bell::Bell;
use crate::config::{self, Origin};
use crate::core::ids::WorkerId;
use crate::core::planner::{Planner, WorkerSpec};
use crate::lifecycle::Clock;
use crate::metrics::{Forgot, Metrics};

use activity::Found;
use connection::ExchangeError;
use health::{Event, Reason, Standing};
use models::{Directory, Group};
use news::{Board, News};
use roster::{KeptStatus, Member, Roster, Source, SourceStatus};
use running::Running;
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
    names: Names,
}

/// Who the workers of a snapshot were, for those who look back: it keeps none of them.
#[derive(Clone, Default)]
pub struct Names(Arc<[Option<Origin>]>);

impl Names {
    pub fn of(&self, id: WorkerId) -> Option<&Origin> {
        self.0.get(id.index())?.as_ref()
    }
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
        let names = Names(by_slot.iter().map(|worker| Some(worker.as_ref()?.url.clone())).collect());
        Snapshot { workers, all, models, by_slot, ranks, names }
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

    /// Those that may be given what was given to this one, in slot order: they list the same models.
    pub fn like(&self, id: WorkerId) -> Vec<WorkerId> {
        let mut alike = self.all.eligible.clone();
        if self.models.is_mixed() {
            let models = |id: &WorkerId| self.worker(*id).and_then(|worker| worker.models());
            let given = models(&id);
            alike.retain(|other| models(other) == given);
        }
        alike
    }

    /// Whether the worker is of the part that so large a share of them makes; some are and some are not, if there are two.
    pub fn is_of_part(&self, id: WorkerId, share: f64) -> bool {
        let all = self.workers.len();
        let part = (all as f64 * share).round() as usize;
        let part = if share > 0.0 && share < 1.0 && all > 1 { part.clamp(1, all - 1) } else { part };
        self.ranks.get(id.index()).is_some_and(|rank| *rank < part)
    }

    pub fn names(&self) -> Names {
        self.names.clone()
    }

    /// Those that may be given a request, in slot order, whatever model it is for.
    pub fn eligible(&self) -> &[WorkerId] {
        &self.all.eligible
    }
}

/// What the next snapshot is made from.
#[derive(Default)]
struct Writing {
    roster: Roster,
    /// Whom the present one was made of.
    members: Vec<Member>,
    /// Where the router is.
    zone: Option<String>,
}

/// How often the worker list and the settings have changed.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
struct Membership {
    workers: u64,
    settings: u64,
}

/// A number for a name, the same on all routers.
pub fn key_of(name: &str) -> u64 {
    let mut key = [0; 8];
    key.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(key)
}

fn same(one: &[Arc<Worker>], other: &[Arc<Worker>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other))
}

/// The workers, their health and their place in the planner.
pub struct Fleet {
    snapshot: ArcSwap<Snapshot>,
    /// Workers that have left the list while requests were under way there: somebody has to notice if they go down with them.
    leaving: Mutex<Vec<Weak<Worker>>>,
    /// Taken by whoever makes a new snapshot, so that none is lost.
    writing: Mutex<Writing>,
    /// Counts changes, for those who run a task per worker.
    membership: watch::Sender<Membership>,
    /// Where workers are to be found.
    sources: watch::Sender<Vec<Source>>,
    /// Told when a worker may have room again, or there is another one.
    pub capacity: Notify,
    /// Rung when connections to a worker begin to fail.
    pub lost: Bell,
    settings: ArcSwap<config::Health>,
    scrape: ArcSwap<config::Scrape>,
    planner: Arc<Planner>,
    metrics: Arc<Metrics>,
    /// What is still to be said of workers in the log.
    board: Board,
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
            writing: Mutex::default(),
            membership: watch::Sender::default(),
            sources: watch::Sender::default(),
            capacity: Notify::new(),
            lost: Bell::default(),
            settings: ArcSwap::from_pointee(settings),
            scrape: ArcSwap::from_pointee(config::Scrape::default()),
            planner,
            metrics,
            board: Board::default(),
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
        self.membership.send_modify(|membership| membership.settings += 1);
    }

    pub fn scrape_settings(&self) -> Arc<config::Scrape> {
        self.scrape.load_full()
    }

    pub fn set_scrape_settings(&self, settings: config::Scrape) {
        self.scrape.store(Arc::new(settings));
        self.membership.send_modify(|membership| membership.settings += 1);
    }

    /// Takes up whom the config names and where others are to be found.
    pub fn configure(&self, workers: &config::Workers) {
        self.writing.lock().zone.clone_from(&workers.zone);
        let mut kept = Vec::new();
        self.publish(|roster| {
            roster.configure(workers);
            kept = roster.kept();
            true
        });
        for KeptStatus { workers, until_heard } in kept {
            let (workers, until_heard) = (workers.len(), until_heard.join(", "));
            tracing::info!(
                workers,
                until_heard,
                "workers that no source names any more stay until others are heard"
            );
        }
        self.sources.send_if_modified(|sources| {
            let now = Source::all(workers);
            let differ = *sources != now;
            *sources = now;
            differ
        });
    }

    /// Takes up whom a source lists now: all of them; `fault` is what is wrong with others.
    pub(super) fn found(&self, source: &Source, members: Vec<Member>, fault: Option<&str>) {
        self.publish(|roster| roster.found(source, members, fault));
    }

    /// A source was asked, and told nothing.
    pub(super) fn told_nothing(&self, source: &Source, why: &str) {
        self.writing.lock().roster.failed(source, why);
    }

    /// How it stands with each source of workers, and who is in the fleet though none names it any more.
    pub fn sources_status(&self) -> (Vec<SourceStatus>, Vec<KeptStatus>) {
        let writing = self.writing.lock();
        (writing.roster.sources(), writing.roster.kept())
    }

    /// Sources of workers that have not been asked yet: the process has only just started.
    pub fn awaited_sources(&self) -> usize {
        self.writing.lock().roster.awaited()
    }

    /// Makes whom all sources list the fleet. Workers that stay keep their health, connections, counts and beliefs, whatever else
    /// of them was edited.
    fn publish(&self, change: impl FnOnce(&mut Roster) -> bool) {
        let mut writing = self.writing.lock();
        if !change(&mut writing.roster) {
            return;
        }
        let wanted = writing.roster.members();
        if wanted == writing.members {
            return;
        }
        let old = self.snapshot.load_full();
        let mut known: HashMap<_, _> = old.workers.iter().map(|worker| (&worker.url, worker)).collect();
        let mut workers = Vec::with_capacity(wanted.len());
        let (mut leaving, mut news) = (Vec::new(), Vec::new());
        for member in &wanted {
            match known.remove(&member.worker.url) {
                Some(worker) if worker.is_other_than(member.pod.as_ref()) => {
                    worker.replace();
                    leaving.push(worker);
                    workers.push(self.join(member, &mut news));
                }
                Some(worker) => {
                    self.edit(worker, member, &mut news);
                    workers.push(worker.clone());
                }
                None => workers.push(self.join(member, &mut news)),
            }
        }
        leaving.extend(known.into_values());
        for gone in leaving {
            news.push((gone.url.clone(), News::Left));
            self.planner.remove_worker(gone.id);
            self.leaving.lock().push(Arc::downgrade(gone));
        }
        self.board.put_all(news, self.clock.now());
        for (worker, member) in workers.iter().zip(&wanted) {
            let near = member.zone.is_some() && member.zone.as_deref() == writing.zone.as_deref();
            self.planner.set_near(worker.id, near);
        }
        let joined_or_left = !same(&old.workers, &workers);
        self.snapshot.store(Arc::new(Snapshot::of(workers)));
        writing.members = wanted;
        if joined_or_left {
            self.membership.send_modify(|membership| membership.workers += 1);
        }
        self.capacity.notify_one();
    }

    fn edit(&self, worker: &Arc<Worker>, member: &Member, news: &mut Vec<(Origin, News)>) {
        if worker.list(member) {
            news.push((worker.url.clone(), News::ListedOtherwise(member.intake)));
        }
        let config = &member.worker;
        let before = worker.reconfigure(config.clone());
        if before == *config {
            return;
        }
        news.push((worker.url.clone(), News::Edited));
        if before.capacity_tokens != config.capacity_tokens {
            // Where neither says, the readers of the pages assume one.
            self.planner.set_capacity(worker.id, scrape::told_capacity(worker));
        }
        if before.prefill_speed != config.prefill_speed {
            self.planner.set_prefill_speed(worker.id, config.prefill_speed);
        }
    }

    fn join(&self, member: &Member, news: &mut Vec<(Origin, News)>) -> Arc<Worker> {
        let config = &member.worker;
        let id = self.planner.add_worker(WorkerSpec {
            key: key_of(&config.url.to_string()),
            capacity_tokens: config.capacity_tokens,
            engine_block_tokens: ENGINE_BLOCK_TOKENS,
            prefill_speed: config.prefill_speed,
        });
        let probed = self.settings.load().interval.is_some();
        let pod = member.pod.as_ref().map(|pod| pod.name.to_string());
        news.push((config.url.clone(), News::Joined { pod }));
        Arc::new(Worker::new(id, member, probed, self.secure.clone(), self.lost.clone(), &self.metrics))
    }

    /// Workers that have left the list and still have requests, and of which their address still tells something.
    fn leaving(&self) -> Vec<Arc<Worker>> {
        let mut leaving = self.leaving.lock();
        leaving.retain(|worker| worker.strong_count() > 0);
        leaving.iter().filter_map(Weak::upgrade).filter(|worker| !worker.is_replaced()).collect()
    }

    /// Runs `task` for each worker, and if asked to for those that are leaving, for as long as it is polled. A change of the
    /// settings begins all tasks anew; one of the worker list, which may change many times a second, only those of who joined.
    async fn for_each_worker<F: Future<Output = ()> + Send + 'static>(
        &self,
        with_leaving: bool,
        task: impl Fn(Arc<Worker>) -> F,
    ) {
        let mut membership = self.membership.subscribe();
        let mut settings = membership.borrow().settings;
        // Dropped, it ends what runs in it.
        let mut running = Running::default();
        loop {
            let now = *membership.borrow_and_update();
            if std::mem::replace(&mut settings, now.settings) != now.settings {
                running = Running::default();
            }
            let mut wanted = self.snapshot().workers.clone();
            if with_leaving {
                wanted.extend(self.leaving());
            }
            running.adapt(&wanted, &task);
            drop(wanted);
            if membership.changed().await.is_err() {
                return;
            }
        }
    }

    /// Tells the health of `worker` what happened to it.
    pub fn report(&self, worker: &Worker, event: Event) {
        if worker.is_calm() && event.is_good() {
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
        self.tell(worker, News::Forgotten { reason, blocks });
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
        match now {
            Standing::Up => {
                self.tell(worker, News::Up);
                worker.relist.notify_one();
            }
            Standing::Out(reason) => {
                self.tell(worker, News::Out(reason));
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
                Found::Progress => self.report(worker, Event::Moved),
                Found::Stall => self.record(worker, Event::Stalled),
                Found::Nothing => {}
            }
            self.record(worker, Event::Tick);
            worker.pool.close_idle(pool_idle);
        }
        self.board.tell(now, false);
    }

    /// Has the log say what has become of a worker.
    fn tell(&self, worker: &Worker, news: News) {
        self.board.put(&worker.url, news, self.clock.now());
    }

    /// Says in the log what is still to be said: nobody ticks any more.
    pub fn last_words(&self) {
        self.board.tell(self.clock.now(), true);
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

    /// Waits for other places where workers are to be found.
    pub(super) fn sources(&self) -> watch::Receiver<Vec<Source>> {
        self.sources.subscribe()
    }
}
