//! Picks the worker for one request and books the work there, as one step, so that a burst sees itself. The proxy,
//! `explain`, the shadow and `simulate` all call [`Planner::plan`].
//!
//! Locks, in the order in which they may be taken: one worker's trust, its cache, the index's shards; a worker's load and what is
//! common to all are taken alone. None is held while hashing, looking up or pricing: a price is from loads that were read one after
//! another, and the booking fails if its worker was given anything since it was read. Then the fleet is looked at again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::core::booking::Booking;
use crate::core::cache::{Bounds, Cache, Witness};
pub use crate::core::decision::{Ask, Candidate, Decision, Policy, Reason, WorkerSpec};
use crate::core::ids::{BlockHash, Time, WorkerId};
use crate::core::index::Index;
use crate::core::load::{Given, Load, Ticket};
use crate::core::price::{PriceSettings, Terms};
use crate::core::slot::{Common, Slot};
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
    /// Workers that are priced for one request: where more are eligible, those that hold the most of it come first, and chance says
    /// who of the others. 2 or more.
    pub most_priced: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            price: PriceSettings::default(),
            learn_speed: true,
            learn_trust: true,
            max_blocks: 2_000_000,
            most_priced: usize::MAX,
        }
    }
}

/// The share of a request's generation that counts as work when the recent past is tallied: decoding shares the worker with
/// others, a prefill has it nearly to itself.
const DECODE_SHARE: f64 = 0.1;

/// Looks at the fleet for one request. Each time but the last, another request has meanwhile been booked on the worker that was
/// picked, so as many threads as this have to place requests there at once before one is placed by loads that are not exact.
const MOST_LOOKS: u32 = 16;

pub(super) type Fleet = Vec<Option<Arc<Slot>>>;

pub struct Planner {
    pub(super) settings: Settings,
    fleet: ArcSwap<Fleet>,
    /// Membership changes one at a time; holds the next generation.
    membership: Mutex<u64>,
    pub(super) common: Common,
    pub(super) index: Index,
}

impl Planner {
    pub fn new(settings: Settings) -> Arc<Planner> {
        Arc::new(Planner {
            settings,
            fleet: ArcSwap::default(),
            membership: Mutex::new(1),
            common: Common::default(),
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
        let bounds = Bounds { tokens: spec.capacity_tokens, blocks: 0 };
        fleet[place] = Some(Arc::new(Slot::new(id, generation, spec, Cache::new(bounds))));
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
        if let Some(mut cache) = slot.leave() {
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
        slot.with_load(|load| load.tell_speed(tokens_per_s));
    }

    /// Others have so many uncached tokens queued at the worker, as far as is known until `until`.
    pub fn set_foreign_queue(&self, worker: WorkerId, tokens: f64, until: Time) {
        let Some(slot) = self.slot(worker) else { return };
        slot.with_load(|load| load.set_foreign(tokens, until));
    }

    /// Others send this share of the worker's prompt tokens, and use as much of its cache, but for what they and we share there.
    pub fn set_foreign_share(&self, worker: WorkerId, share: f64) {
        let Some(slot) = self.slot(worker) else { return };
        let mut trust = slot.trust.lock();
        slot.foreign_share.set(share);
        if share > 0.0 {
            self.common.saw_others();
        }
        trust.set_foreign(share * (1.0 - self.common.homes.share()));
        self.resize(&slot, &trust);
    }

    /// What has been given to the worker since it joined.
    pub fn given(&self, worker: WorkerId) -> Option<Given> {
        self.slot(worker)?.with_load(|load| load.given())
    }

    /// An answer has shown what was cached; answers how many blocks were forgotten if it shows that all is lost.
    pub(super) fn learn_trust(&self, slot: &Slot, sample: Sample, now: Time) -> Option<usize> {
        let mut trust = slot.trust.lock();
        let verdict = trust.learn(sample, now);
        slot.credit.set(trust.credit());
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
        let mut view = View::new(self, ask, eligible, &fleet, random)?;
        for look in 1.. {
            let decision = view.decide(self, policy, now, random);
            let slot = fleet.get(decision.worker.index())?.as_ref()?;
            let terms = view.terms(&decision);
            let booked = slot.with_load(|load| {
                let overtaken = load.snapshot().requests() != view.seen(&decision);
                (!overtaken || look == MOST_LOOKS).then(|| self.book(load, ask, &terms, now))
            });
            match booked {
                Some(Some(ticket)) => {
                    let era = self.common.count(fleet.iter().flatten().count()).era();
                    let booking =
                        Booking::new(Arc::clone(self), Arc::clone(slot), ask, ticket, &terms, era, now);
                    return Some((Decision { candidates: view.candidates, ..decision }, booking));
                }
                Some(None) => {}
                // The worker left while we looked; the fleet without it is in place already.
                None => break,
            }
        }
        self.plan(ask, eligible, policy, now, random)
    }

    fn book(&self, load: &mut Load, ask: &Ask, terms: &Terms, now: Time) -> Ticket {
        let seconds = terms.uncached / terms.speed + DECODE_SHARE * self.common.decode_seconds();
        let ticket = load.book(terms.uncached, seconds, ask.streams, now);
        load.ask(ask.prompt_tokens, terms.cached);
        ticket
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
        let mut view = View::new(self, ask, eligible, &fleet, random)?;
        let decision = view.decide(self, policy, now, random);
        Some(Decision { candidates: view.candidates, ..decision })
    }

    /// What is believed and booked of one worker.
    pub fn belief(&self, worker: WorkerId, now: Time) -> Option<Belief> {
        let slot = self.slot(worker)?;
        let typical = self.common.typical_speed();
        let (load, prefill_speed) = slot.snapshot_at(now, typical);
        let trust = *slot.trust.lock();
        let guard = slot.cache.lock();
        let cache = guard.as_ref()?;
        Some(Belief {
            blocks: cache.len(),
            bytes: cache.bytes(),
            evicted_blocks: cache.evicted(),
            held_tokens: cache.held_tokens(),
            capacity_tokens: cache.bounds().tokens,
            queue_tokens: load.queue(now, prefill_speed.unwrap_or(typical)),
            open: load.open(),
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
        self.index.depths(hashes).into_vec()
    }

    /// Distinct blocks believed to be held by anybody.
    pub fn believed_blocks(&self) -> usize {
        self.index.len()
    }

    /// Memory of the index.
    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
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
    stored: SmallVec<[BlockHash; 16]>,
    dropped: SmallVec<[BlockHash; 16]>,
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
