//! One request's view of the fleet: who could serve it, what it would find there, what that costs, who wins.

use std::cell::LazyCell;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::core::decision::{Ask, Candidate, Decision, Policy, Reason};
use crate::core::homes;
use crate::core::ids::{BlockHash, Time, WorkerId, mix};
use crate::core::planner::{Fleet, Planner};
use crate::core::price::Terms;
use crate::core::slot::Slot;
use crate::core::tally::Traffic;

/// Fewer uses than this are no sign of popularity.
const MIN_USES: f64 = 3.0;

/// A prefix moves only to a worker that is so many times as fast: what is less may be chance, or pass.
const MUCH_FASTER: f64 = 1.5;

/// Candidates for which displacement is worked out, at most; beyond that, the price without it decides.
const MAX_DISPLACEMENTS: usize = 64;

/// The eligible workers and what one request would find there.
pub(super) struct View<'a> {
    ask: &'a Ask,
    fleet: &'a Fleet,
    /// As of the last look at their loads.
    pub(super) candidates: Vec<Candidate>,
    /// In the order of the candidates.
    looks: Vec<Look<'a>>,
    /// Blocks that every eligible worker holds.
    common: usize,
    /// Blocks that whoever holds the most of the prompt does.
    deepest: usize,
    home: Option<WorkerId>,
}

/// What is not part of a candidate's price.
struct Look<'a> {
    worker: WorkerId,
    slot: &'a Arc<Slot>,
    /// Blocks of the prompt, from its first on, that it is believed to hold.
    depth: usize,
    /// How many requests it had been given when its load was read.
    seen: u64,
}

impl<'a> View<'a> {
    pub(super) fn new(
        planner: &Planner,
        ask: &'a Ask,
        eligible: &[WorkerId],
        fleet: &'a Fleet,
        random: u64,
    ) -> Option<View<'a>> {
        let mut by_slot: SmallVec<[usize; 64]> = smallvec![0; fleet.len()];
        for (worker, depth) in planner.index.depths(&ask.chain.hashes) {
            if let Some(place) = by_slot.get_mut(worker.index()) {
                *place = depth;
            }
        }
        let mut looks = Vec::with_capacity(eligible.len());
        looks.extend(eligible.iter().filter_map(|worker| {
            let slot = fleet.get(worker.index())?.as_ref()?;
            Some(Look { worker: *worker, slot, depth: by_slot[worker.index()], seen: 0 })
        }));
        let common = looks.iter().map(|look| look.depth).min()?;
        if looks.len() > planner.settings.most_priced {
            leave_some(&mut looks, planner.settings.most_priced, random);
        }
        let deepest = looks.iter().map(|look| look.depth).max().unwrap_or(0);
        let home = if planner.common.has_others() { home(ask, &looks) } else { None };
        let candidates = Vec::with_capacity(looks.len());
        Some(View { ask, fleet, candidates, looks, common, deepest, home })
    }

    /// The terms of the worker that was decided for.
    pub(super) fn terms(&self, decision: &Decision) -> Terms {
        self.candidates[decision.pick].terms
    }

    /// How many requests that worker had been given when it was looked at.
    pub(super) fn seen(&self, decision: &Decision) -> u64 {
        self.looks[decision.pick].seen
    }

    pub(super) fn decide(&mut self, planner: &Planner, policy: Policy, now: Time, random: u64) -> Decision {
        let traffic = planner.common.traffic();
        let shortest = self.add_loads(planner, now);
        let (pick, runner_up) = match policy {
            Policy::Random => ((random % self.looks.len() as u64) as usize, None),
            Policy::Kv => {
                self.add_popular(planner, traffic);
                self.add_moves(traffic.era());
                self.cheapest(planner, shortest, traffic.era(), random)
            }
        };
        let chosen = &self.candidates[pick];
        Decision {
            worker: chosen.worker,
            pick,
            reason: self.reason(policy, pick),
            predicted_cached_tokens: chosen.terms.cached,
            candidates: Vec::new(),
            runner_up,
        }
    }

    /// What the workers have to do; also undoes what a look before this one found. Answers the shortest queue, in seconds.
    fn add_loads(&mut self, planner: &Planner, now: Time) -> f64 {
        let typical = planner.common.typical_speed();
        let at_homes = planner.common.homes.share();
        let (mut least_recent, mut shortest) = (f64::INFINITY, f64::INFINITY);
        self.candidates.clear();
        for look in &mut self.looks {
            let at_home = self.home == Some(look.worker);
            let believed = look.believed_tokens(self.ask);
            let assumed = if at_home { at_homes * (self.ask.prompt_tokens - believed).max(0.0) } else { 0.0 };
            let cached = believed + assumed;
            let uncached = (self.ask.prompt_tokens - cached).max(0.0);
            let (load, speed) = look.slot.snapshot_at(now, typical);
            let speed = speed.unwrap_or(typical);
            let queue = load.queue(now, speed) + load.foreign(now);
            let (open, recent) = (load.open(), load.recent(now));
            look.seen = load.requests();
            least_recent = least_recent.min(recent);
            shortest = shortest.min(queue / speed);
            let terms =
                Terms { cached, assumed, at_home, uncached, speed, queue, open, recent, ..Terms::default() };
            self.candidates.push(Candidate { worker: look.worker, terms });
        }
        let price = &planner.settings.price;
        for candidate in &mut self.candidates {
            let terms = &mut candidate.terms;
            terms.recent = price.recent_tokens(terms.uncached, terms.recent, least_recent);
        }
        shortest
    }

    /// The cheapest candidate and the next. Displacement needs a look into a worker's cache, so it is worked out only for those
    /// that could still win without it.
    fn cheapest(
        &mut self,
        planner: &Planner,
        shortest: f64,
        era: u16,
        random: u64,
    ) -> (usize, Option<usize>) {
        let price = &planner.settings.price;
        let crowding = price.crowding(shortest);
        for candidate in &mut self.candidates {
            candidate.terms.seconds = price.seconds(&candidate.terms, crowding);
        }
        let mut best = self.cheapest_but(None, random).unwrap_or(0);
        self.look_into(best, planner, era, crowding);
        let first = best;
        let mut left = MAX_DISPLACEMENTS;
        // Where more could win than are looked at, chance says who is: else low slots would be favoured.
        let offset = (random % self.candidates.len() as u64) as usize;
        for at in (offset..self.candidates.len()).chain(0..offset) {
            if at == first || self.candidates[at].terms.seconds > self.candidates[best].terms.seconds {
                continue;
            }
            left -= 1;
            if left == 0 {
                break;
            }
            self.look_into(at, planner, era, crowding);
            if self.compare(at, best, random).is_lt() {
                best = at;
            }
        }
        (best, self.cheapest_but(Some(best), random))
    }

    fn cheapest_but(&self, but: Option<usize>, random: u64) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (at, candidate) in self.candidates.iter().enumerate() {
            let dearer = |best: usize| candidate.terms.seconds > self.candidates[best].terms.seconds;
            if Some(at) == but || best.is_some_and(dearer) {
                continue;
            }
            if best.is_none_or(|best| self.compare(at, best, random).is_lt()) {
                best = Some(at);
            }
        }
        best
    }

    /// A prefix that draws more than their share of all requests to the workers that hold it gets another copy. Without that, a
    /// system prompt that all traffic starts with keeps all traffic on the worker that met it first, as long as it is fast enough.
    fn add_popular(&mut self, planner: &Planner, traffic: Traffic) {
        let depth = self.deepest;
        if depth == self.common {
            return;
        }
        // Of all workers, as the requests are those of all: these may be only the ones that serve the model.
        let share = f64::from(traffic.requests()) / self.fleet.iter().flatten().count() as f64;
        let each = (planner.settings.price.replicate_shares * share).max(MIN_USES);
        let holders: SmallVec<[&Slot; 16]> =
            self.looks.iter().filter(|look| look.depth == depth).map(|look| &**look.slot).collect();
        let wanted = each * holders.len() as f64;
        if f64::from(traffic.requests()) < wanted {
            return;
        }
        let uses = |slot: &&Slot, hash| {
            slot.cache.lock().as_ref().map_or(0, |cache| cache.uses(hash, traffic.era()))
        };
        let enough =
            |hash: &BlockHash| holders.iter().map(|slot| f64::from(uses(slot, *hash))).sum::<f64>() >= wanted;
        // Whoever uses a block uses all before it, so counts only fall along the chain; most prompts are not popular at all.
        if !enough(&self.ask.chain.hashes[self.common]) {
            return;
        }
        let popular = self.common + self.ask.chain.hashes[self.common..depth].partition_point(enough);
        if popular == self.common {
            return;
        }
        let units = |depth| self.ask.chain.units(depth);
        for (candidate, &Look { depth, .. }) in self.candidates.iter_mut().zip(&self.looks) {
            let terms = &mut candidate.terms;
            let lacking = units(popular).saturating_sub(units(depth));
            terms.popular = (lacking as f64 * self.ask.block_tokens).min(terms.uncached);
        }
    }

    /// A prefix that lives on slow workers alone moves to a faster one, if nothing that is shared has to go for it there, once the
    /// seconds that as many requests as used it of late would save are worth the prefill: this request does not bear its cost.
    fn add_moves(&mut self, era: u16) {
        let depth = self.deepest;
        if depth == self.common {
            return;
        }
        let speed = |at: &usize| self.candidates[*at].terms.speed;
        let holders = (0..self.looks.len()).filter(|&at| self.looks[at].depth == depth);
        let Some(home) = holders.max_by(|a, b| speed(a).total_cmp(&speed(b))) else { return };
        let Terms { uncached: rest, speed: slow, .. } = self.candidates[home].terms;
        let last = self.ask.chain.hashes[depth - 1];
        let uses = LazyCell::new(|| {
            self.looks[home].slot.cache.lock().as_ref().map_or(0, |cache| cache.uses(last, era))
        });
        for (candidate, Look { slot, .. }) in self.candidates.iter_mut().zip(&self.looks) {
            let terms = &mut candidate.terms;
            let extra = terms.uncached - terms.popular - rest;
            if terms.speed < MUCH_FASTER * slow || extra <= 0.0 {
                continue;
            }
            let saved = f64::from(*uses) * rest * (1.0 / slow - 1.0 / terms.speed);
            let need = (terms.uncached + self.ask.output_tokens) as u64;
            let spared =
                || slot.cache.lock().as_ref().is_some_and(|cache| cache.pushed_by(need, era).shared == 0);
            if saved >= extra / terms.speed && spared() {
                terms.popular += extra;
            }
        }
    }

    /// Adds what only the worker's cache tells: what the request would push out, and how long it would wait for memory.
    fn look_into(&mut self, at: usize, planner: &Planner, era: u16, crowding: f64) {
        let terms = &mut self.candidates[at].terms;
        let need = (terms.uncached + self.ask.output_tokens) as u64;
        let guard = self.looks[at].slot.cache.lock();
        if let Some(cache) = guard.as_ref() {
            let pushed = cache.pushed_by(need, era);
            (terms.pushed, terms.pushed_once) = (pushed.shared as f64, pushed.once as f64);
            let whole = (self.ask.prompt_tokens + self.ask.output_tokens) as u64;
            // Running requests end evenly over the time that one takes.
            terms.memory = cache.shortage(&self.ask.chain.hashes, whole) * planner.common.decode_seconds();
        }
        terms.seconds = planner.settings.price.seconds(terms, crowding);
    }

    /// Cheaper first; then fewer open requests; then the near ones; then by rendezvous hash of the first block that not all hold, so that
    /// replicas which know nothing of each other agree.
    fn compare(&self, a: usize, b: usize, random: u64) -> std::cmp::Ordering {
        let (left, right) = (&self.candidates[a].terms, &self.candidates[b].terms);
        let by_price = left.seconds.total_cmp(&right.seconds).then(left.open.cmp(&right.open));
        let by_place = self.looks[b].slot.is_near().cmp(&self.looks[a].slot.is_near());
        by_price.then(by_place).then_with(|| self.rank(a, random).cmp(&self.rank(b, random)))
    }

    fn rank(&self, at: usize, random: u64) -> u64 {
        let prefix = self.ask.chain.hashes.get(self.common).or(self.ask.chain.hashes.last());
        mix(self.looks[at].slot.spec.key ^ prefix.map_or(random, |hash| hash.0))
    }

    fn reason(&self, policy: Policy, pick: usize) -> Reason {
        let most = self.deepest;
        match policy {
            Policy::Random => Reason::Random,
            Policy::Kv if self.looks.len() == 1 => Reason::Only,
            Policy::Kv if self.ask.chain.hashes.is_empty() => Reason::Load,
            Policy::Kv
                if self.looks[pick].depth < most.max(1) && self.candidates[pick].terms.assumed > 0.0 =>
            {
                Reason::Home
            }
            Policy::Kv if most == 0 => Reason::Cold,
            Policy::Kv if self.looks[pick].depth == most => Reason::Warm,
            Policy::Kv => Reason::Spill,
        }
    }
}

impl Look<'_> {
    /// Tokens of the prompt that are believed cached there, as far as its beliefs can be trusted. Where nothing is, as on most of a large
    /// fleet, no memory of the worker is touched for it.
    fn believed_tokens(&self, ask: &Ask) -> f64 {
        match self.depth {
            0 => 0.0,
            depth => self.slot.credit.get() * cached_tokens(ask, depth, self.slot.engine_block_tokens()),
        }
    }
}

/// Leaves `most`: those that hold as much as anybody, but half of all at most, and others in a row from anywhere.
fn leave_some(looks: &mut Vec<Look>, most: usize, random: u64) {
    let start = (random % looks.len() as u64) as usize;
    looks.rotate_left(start);
    let deepest = looks.iter().map(|look| look.depth).max().unwrap_or(0).max(1);
    let mut front = 0;
    for at in 0..looks.len() {
        if front < most / 2 && looks[at].depth == deepest {
            looks.swap(front, at);
            front += 1;
        }
    }
    looks.truncate(most);
}

/// The prompt's home, if others use these workers too: of all of them, as others may not have come to each yet.
fn home(ask: &Ask, looks: &[Look]) -> Option<WorkerId> {
    let foreign = looks.iter().map(|look| look.slot.foreign_share.get()).sum::<f64>();
    if !homes::is_shared(foreign / looks.len() as f64) {
        return None;
    }
    let key = homes::key(ask)?;
    looks.iter().max_by_key(|look| homes::rank(key, look.slot.spec.key)).map(|look| look.worker)
}

/// What the engine will report as cached if it holds `depth` blocks of the prompt: whole engine blocks, and never the last
/// token, which is always computed (vLLM, `KVCacheManager.get_computed_blocks`).
fn cached_tokens(ask: &Ask, depth: usize, engine_block_tokens: u32) -> f64 {
    let block = f64::from(engine_block_tokens.max(1));
    let most = ((ask.prompt_tokens - 1.0).max(0.0) / block).floor() * block;
    (ask.chain.units(depth) as f64 * ask.block_tokens).min(most)
}
