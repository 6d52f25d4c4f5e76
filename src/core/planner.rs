//! Picks the worker for one request and books the work there, as one step, so that a burst sees itself. The proxy,
//! `explain`, the shadow and `simulate` all call [`Planner::plan`].
//!
//! Locks, in the order in which they may be taken: the table of loads (held from pricing to booking, a microsecond or so for
//! a fleet of 64), one worker's trust, its cache, the index's shards. None is held while hashing or looking up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::core::booking::Booking;
use crate::core::cache::{Bounds, Cache, Witness};
pub use crate::core::decision::{Ask, Candidate, Decision, Policy, Reason, WorkerSpec};
use crate::core::ids::{BlockHash, Time, WorkerId};
use crate::core::index::Index;
use crate::core::load::{Given, Load};
use crate::core::price::PriceSettings;
use crate::core::speed::{Line, Pace};
use crate::core::tally::Traffic;
use crate::core::trust::{Sample, Trust, Verdict};
use crate::core::view::View;

mod profile;

pub(super) use profile::Profile;

/// Settings of the planner; `Default` is the one place where its defaults are.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub price: PriceSettings,
    /// Learn each worker's prefill speed; if off, all are taken to be equally fast unless told otherwise.
    pub learn_speed: bool,
    /// Learn from what workers confirm how far their beliefs can be trusted.
    pub learn_trust: bool,
    /// Believed blocks over all workers, shared out evenly.
    pub max_blocks: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            price: PriceSettings::default(),
            learn_speed: true,
            learn_trust: true,
            max_blocks: 2_000_000,
        }
    }
}

/// A worker's place in the planner. The generation tells a slot's present worker from the one that had it before.
pub(super) struct Slot {
    pub(super) id: WorkerId,
    pub(super) generation: u64,
    pub(super) spec: WorkerSpec,
    /// `None` once the worker has left: a decision under way may still hold the slot, and must leave nothing behind.
    pub(super) cache: Mutex<Option<Cache>>,
    trust: Mutex<Trust>,
    /// A copy of what the trust gives, as the bits of an `f64`, for readers without a lock.
    credit: AtomicU64,
    engine_block_tokens: AtomicU32,
    /// How many times all that was believed of it was forgotten.
    emptied: AtomicU64,
    near: AtomicBool,
}

impl Slot {
    /// The share of what is believed cached that counts.
    pub(super) fn credit(&self) -> f64 {
        f64::from_bits(self.credit.load(Ordering::Relaxed))
    }

    /// Of two that are as good, the near one is taken.
    pub(super) fn is_near(&self) -> bool {
        self.near.load(Ordering::Relaxed)
    }

    /// Tokens in a block of the engine.
    pub(super) fn engine_block_tokens(&self) -> u32 {
        self.engine_block_tokens.load(Ordering::Relaxed)
    }
}

/// The loads of all workers, by slot. One lock, so that pricing and booking are one step.
#[derive(Default)]
pub(super) struct Table {
    seats: Vec<Seat>,
    /// Mean seconds from first to last token of late.
    decode_seconds: f64,
    line: Line,
    pub(super) traffic: Traffic,
}

#[derive(Default)]
struct Seat {
    generation: u64,
    load: Load,
}

impl Table {
    /// The load of the slot's worker, unless it has left.
    pub(super) fn load(&mut self, slot: &Slot) -> Option<&mut Load> {
        let seat = self.seats.get_mut(slot.id.index())?;
        (seat.generation == slot.generation).then_some(&mut seat.load)
    }

    pub(super) fn saw_decode(&mut self, seconds: f64) {
        const KEEP: f64 = 0.98;
        self.decode_seconds = match self.decode_seconds {
            0.0 => seconds,
            mean => KEEP * mean + (1.0 - KEEP) * seconds,
        };
    }

    pub(super) fn decode_seconds(&self) -> f64 {
        self.decode_seconds
    }

    pub(super) fn set_decode_seconds(&mut self, seconds: f64) {
        self.decode_seconds = seconds;
    }

    /// A prefill of `tokens` took the slot's worker so long.
    pub(super) fn saw_prefill(&mut self, slot: &Slot, tokens: f64, seconds: f64) {
        self.line.learn(tokens, seconds);
        let line = self.line;
        if let Some(load) = self.load(slot) {
            load.pace.learn(&line, tokens, seconds);
        }
    }

    /// What is assumed of a worker whose speed is not known.
    pub(super) fn typical_speed(&self) -> f64 {
        self.line.tokens_per_s()
    }
}

/// The share of a request's generation that counts as work when the recent past is tallied: decoding shares the worker with
/// others, a prefill has it nearly to itself.
const DECODE_SHARE: f64 = 0.1;

pub(super) type Fleet = Vec<Option<Arc<Slot>>>;

pub struct Planner {
    pub(super) settings: Settings,
    fleet: ArcSwap<Fleet>,
    /// Membership changes one at a time; holds the next generation.
    membership: Mutex<u64>,
    table: Mutex<Table>,
    pub(super) index: Index,
}

impl Planner {
    pub fn new(settings: Settings) -> Arc<Planner> {
        Arc::new(Planner {
            settings,
            fleet: ArcSwap::default(),
            membership: Mutex::new(1),
            table: Mutex::default(),
            index: Index::default(),
        })
    }

    pub fn add_worker(&self, spec: WorkerSpec) -> WorkerId {
        let mut next_generation = self.membership.lock();
        let mut fleet = Fleet::clone(&self.fleet.load());
        let place = fleet.iter().position(Option::is_none).unwrap_or(fleet.len());
        if place == fleet.len() {
            fleet.push(None);
        }
        let id = WorkerId(u32::try_from(place).expect("a fleet has fewer than 2^32 workers"));
        let generation = *next_generation;
        *next_generation += 1;
        let mut load = Load::default();
        load.pace = Pace::told(spec.prefill_speed);
        {
            let mut table = self.table.lock();
            if table.seats.len() <= place {
                table.seats.resize_with(place + 1, Seat::default);
            }
            table.seats[place] = Seat { generation, load };
        }
        let bounds = Bounds { tokens: spec.capacity_tokens, blocks: 0 };
        fleet[place] = Some(Arc::new(Slot {
            id,
            generation,
            cache: Mutex::new(Some(Cache::new(bounds))),
            trust: Mutex::new(Trust::new(spec.capacity_tokens)),
            credit: AtomicU64::new(1f64.to_bits()),
            engine_block_tokens: AtomicU32::new(spec.engine_block_tokens),
            emptied: AtomicU64::new(0),
            near: AtomicBool::new(false),
            spec,
        }));
        self.share_blocks(&fleet);
        self.fleet.store(Arc::new(fleet));
        id
    }

    /// Forgets the worker and frees its slot; bookings on it that are still open become no-ops.
    pub fn remove_worker(&self, worker: WorkerId) {
        let _membership = self.membership.lock();
        let mut fleet = Fleet::clone(&self.fleet.load());
        let Some(slot) = fleet.get_mut(worker.index()).and_then(Option::take) else { return };
        self.share_blocks(&fleet);
        self.fleet.store(Arc::new(fleet));
        self.table.lock().seats[worker.index()] = Seat::default();
        if let Some(mut cache) = slot.cache.lock().take() {
            self.follow(worker, &mut cache, Cache::clear);
        }
    }

    /// Empties what is believed of the worker's cache (it restarted); answers how many blocks were dropped.
    pub fn forget(&self, worker: WorkerId) -> usize {
        let Some(slot) = self.slot(worker) else { return 0 };
        self.empty(&slot)
    }

    fn empty(&self, slot: &Slot) -> usize {
        slot.trust.lock().emptied();
        slot.emptied.fetch_add(1, Ordering::Relaxed);
        self.with_cache(slot, Cache::clear).unwrap_or(0)
    }

    /// The engine's cache size in tokens is known, has changed, or is no longer known.
    pub fn set_capacity(&self, worker: WorkerId, tokens: Option<u64>) {
        let Some(slot) = self.slot(worker) else { return };
        let mut trust = slot.trust.lock();
        trust.tell(tokens);
        self.resize(&slot, &trust);
    }

    /// The engine caches whole blocks of so many tokens.
    pub fn set_engine_block(&self, worker: WorkerId, tokens: u32) {
        if let Some(slot) = self.slot(worker) {
            slot.engine_block_tokens.store(tokens, Ordering::Relaxed);
        }
    }

    /// Whether the worker is nearer than others; so none is, unless it is said. For ties only.
    pub fn set_near(&self, worker: WorkerId, near: bool) {
        if let Some(slot) = self.slot(worker) {
            slot.near.store(near, Ordering::Relaxed);
        }
    }

    /// The config says another speed, or none any more. It counts until samples contradict it.
    pub fn set_prefill_speed(&self, worker: WorkerId, tokens_per_s: Option<f64>) {
        let Some(slot) = self.slot(worker) else { return };
        if let Some(load) = self.table.lock().load(&slot) {
            load.pace.tell(tokens_per_s);
        }
    }

    /// Others have so many uncached tokens queued at the worker, as far as is known until `until`.
    pub fn set_foreign_queue(&self, worker: WorkerId, tokens: f64, until: Time) {
        let Some(slot) = self.slot(worker) else { return };
        if let Some(load) = self.table.lock().load(&slot) {
            load.set_foreign(tokens, until);
        }
    }

    /// Others send this share of the worker's prompt tokens, and use as much of its cache.
    pub fn set_foreign_share(&self, worker: WorkerId, share: f64) {
        let Some(slot) = self.slot(worker) else { return };
        let mut trust = slot.trust.lock();
        trust.set_foreign(share);
        self.resize(&slot, &trust);
    }

    /// What has been given to the worker since it joined.
    pub fn given(&self, worker: WorkerId) -> Option<Given> {
        let slot = self.slot(worker)?;
        self.table.lock().load(&slot).map(|load| load.given())
    }

    /// An answer has shown what was cached; answers how many blocks were forgotten if it shows that all is lost.
    pub(super) fn learn_trust(&self, slot: &Slot, sample: Sample, now: Time) -> Option<usize> {
        let mut trust = slot.trust.lock();
        let verdict = trust.learn(sample, now);
        slot.credit.store(trust.credit().to_bits(), Ordering::Relaxed);
        match verdict {
            Verdict::Same => None,
            Verdict::Resized => {
                self.resize(slot, &trust);
                None
            }
            Verdict::Emptied => {
                drop(trust);
                Some(self.empty(slot))
            }
        }
    }

    /// Sizes the believed cache by what is trusted of its capacity.
    fn resize(&self, slot: &Slot, trust: &Trust) {
        self.with_cache(slot, |cache, changes| {
            let bounds = Bounds { tokens: trust.capacity(), ..cache.bounds() };
            if bounds != cache.bounds() {
                cache.set_bounds(bounds, changes);
            }
        });
    }

    /// Picks among `eligible` and books the request there. `random` decides draws and ties. `None` if nobody is eligible.
    pub fn plan(
        self: &Arc<Self>,
        ask: &Ask,
        eligible: &[WorkerId],
        policy: Policy,
        now: Time,
        random: u64,
    ) -> Option<(Decision, Booking)> {
        let fleet = self.fleet.load();
        let mut view = View::new(self, ask, eligible, &fleet)?;
        let mut table = self.table.lock();
        let decision = view.decide(self, &mut table, policy, now, random);
        let slot = Arc::clone(fleet.get(decision.worker.index())?.as_ref()?);
        let terms = view.terms(decision.worker)?;
        let seconds = terms.uncached / terms.speed + DECODE_SHARE * table.decode_seconds;
        let Some(load) = table.load(&slot) else {
            // The worker left while we looked; the fleet without it is in place already.
            drop(table);
            return self.plan(ask, eligible, policy, now, random);
        };
        let ticket = load.book(terms.uncached, seconds, ask.streams, now);
        load.ask(ask.prompt_tokens, terms.cached);
        let workers = fleet.iter().flatten().count();
        table.traffic.add(workers);
        let era = table.traffic.era();
        drop(table);
        let decision = Decision { candidates: view.candidates, ..decision };
        Some((decision, Booking::new(Arc::clone(self), slot, ask, ticket, &terms, era, now)))
    }

    /// What [`Planner::plan`] would do, without doing it.
    pub fn explain(
        &self,
        ask: &Ask,
        eligible: &[WorkerId],
        policy: Policy,
        now: Time,
        random: u64,
    ) -> Option<Decision> {
        let fleet = self.fleet.load();
        let mut view = View::new(self, ask, eligible, &fleet)?;
        let decision = view.decide(self, &mut self.table.lock(), policy, now, random);
        Some(Decision { candidates: view.candidates, ..decision })
    }

    /// What is believed and booked of one worker.
    pub fn belief(&self, worker: WorkerId, now: Time) -> Option<Belief> {
        let slot = self.slot(worker)?;
        let (queue_tokens, open, prefill_speed) = {
            let mut table = self.table.lock();
            let typical = table.typical_speed();
            let load = table.load(&slot)?;
            let speed = load.pace.known(typical);
            (load.queue(now, speed.unwrap_or(typical)), load.open(), speed)
        };
        let trust = *slot.trust.lock();
        let guard = slot.cache.lock();
        let cache = guard.as_ref()?;
        Some(Belief {
            blocks: cache.len(),
            bytes: cache.bytes(),
            evicted_blocks: cache.evicted(),
            held_tokens: cache.held_tokens(),
            capacity_tokens: cache.bounds().tokens,
            queue_tokens,
            open,
            prefill_speed,
            credit: trust.credit(),
            foreign_share: trust.foreign(),
            confirmed_at: trust.confirmed_at(),
        })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Who holds how many of the blocks of a prompt, from its first on.
    pub fn holders(&self, hashes: &[BlockHash]) -> Vec<(WorkerId, usize)> {
        self.index.depths(hashes)
    }

    /// Distinct blocks believed to be held by anybody.
    pub fn believed_blocks(&self) -> usize {
        self.index.len()
    }

    /// Memory of the index.
    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
    }

    pub(super) fn table(&self) -> parking_lot::MutexGuard<'_, Table> {
        self.table.lock()
    }

    pub(super) fn learns_speed(&self) -> bool {
        self.settings.learn_speed
    }

    /// Does something to the slot's cache while the index follows; `None` if the worker has left.
    pub(super) fn with_cache<T>(
        &self,
        slot: &Slot,
        act: impl FnOnce(&mut Cache, &mut Changes) -> T,
    ) -> Option<T> {
        slot.cache.lock().as_mut().map(|cache| self.follow(slot.id, cache, act))
    }

    /// The caller holds the cache's lock, so that the index hears of a worker's changes in their order.
    fn follow<T>(
        &self,
        worker: WorkerId,
        cache: &mut Cache,
        act: impl FnOnce(&mut Cache, &mut Changes) -> T,
    ) -> T {
        let mut changes = Changes::default();
        let result = act(cache, &mut changes);
        self.index.add(&changes.stored, worker);
        self.index.remove(&changes.dropped, worker);
        result
    }

    fn slot(&self, worker: WorkerId) -> Option<Arc<Slot>> {
        self.fleet.load().get(worker.index())?.clone()
    }

    fn share_blocks(&self, fleet: &Fleet) {
        let workers = fleet.iter().flatten().count().max(1);
        for slot in fleet.iter().flatten() {
            self.with_cache(slot, |cache, changes| {
                let bounds = Bounds { blocks: self.settings.max_blocks / workers, ..cache.bounds() };
                cache.set_bounds(bounds, changes);
            });
        }
    }
}

/// What is believed and booked of one worker, for operators.
#[derive(Clone, Debug, PartialEq)]
pub struct Belief {
    pub blocks: usize,
    /// Memory of what is believed of it, without the index.
    pub bytes: usize,
    /// Blocks pushed out by others since it joined.
    pub evicted_blocks: u64,
    /// Tokens in use or reusable, answers included.
    pub held_tokens: u64,
    /// Tokens that are believed to stay cached: what is known of the KV cache's size, corrected by what was confirmed.
    pub capacity_tokens: Option<u64>,
    pub queue_tokens: f64,
    pub open: usize,
    pub prefill_speed: Option<f64>,
    /// The share of what is believed cached that counts, by what was confirmed of late.
    pub credit: f64,
    /// The share of the worker's prompt tokens that others send.
    pub foreign_share: f64,
    /// When an answer last told what was cached.
    pub confirmed_at: Option<Time>,
}

/// What one step changed in a worker's cache, for the index to follow. No step both stores a block and drops it: what it stores
/// is pinned.
#[derive(Default)]
pub(super) struct Changes {
    stored: Vec<BlockHash>,
    dropped: Vec<BlockHash>,
}

impl Witness for Changes {
    fn stored(&mut self, hash: BlockHash) {
        self.stored.push(hash);
    }

    fn dropped(&mut self, hash: BlockHash) {
        self.dropped.push(hash);
    }
}

#[cfg(test)]
mod tests;
