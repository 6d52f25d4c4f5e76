//! What the same traffic would have found cached under the policy that it does not go by, and in a cache without end: the other
//! policy's planner places every request once more, on models of the workers' caches that nothing else touches.
//!
//! To cost little, the models hold only some blocks: those whose hash says so, as SHARDS (Waldspurger et al., FAST '15) samples a
//! cache. Each stands for as many tokens as are left out with it, so shares of tokens come out the same on average, and a cache
//! of the same capacity holds the same prefixes. The beginnings of prompts are held in even steps: many requests may share a system prompt
//! of so few blocks that chance would leave out all of them, or count them for many more. Small caches are modelled whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::core::blocks::{Chain, Widths};
use crate::core::booking::{Booking, Finished};
use crate::core::cache::{Bounds, Witness};
use crate::core::ids::{BlockHash, Time, WorkerId};
use crate::core::planner::{Ask, Planner, Policy, Profile, Settings, WorkerSpec};

mod drawn;
mod ideal;

use drawn::{Drawn, Stay, drawn};
use ideal::Ideal;

/// How many of the blocks the models hold.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// As few as leave [`ENOUGH_BLOCKS`] for the smallest worker.
    Auto,
    /// One in so many; 1, or a power of two from 4 to 512.
    OneIn(usize),
}

impl Sampling {
    /// The rarest: one in so many.
    pub const MOST: usize = 512;

    /// `None` for what it cannot be.
    pub fn one_in(blocks: usize) -> Option<Sampling> {
        let sound = blocks == 1 || (blocks.is_power_of_two() && (4..=Sampling::MOST).contains(&blocks));
        sound.then_some(Sampling::OneIn(blocks))
    }
}

/// Blocks in the model of a full worker: enough for shares that are true to a point or so.
const ENOUGH_BLOCKS: u64 = 128;
/// The beginning of a prompt, which many requests may share, is held in steps of so many tokens.
const STEP_TOKENS: f64 = 512.0;
const STEPS: usize = 2;
/// Blocks of prompts that the cache without end goes back over.
const IDEAL_BLOCKS: usize = 1 << 18;
/// An odd number whose product's upper bits hang on all of a hash's (Knuth, The Art of Computer Programming, 6.4: the golden ratio).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Workers that the model of `kv` prices for one request: those that hold the most of it, and some of the others.
const PRICED: usize = 8;

/// Tokens of one request, or of the blocks that stand for it.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Share {
    pub prompt: f64,
    pub cached: f64,
}

/// One request in the models. Dropped before [`Followed::commit`] it was never there.
#[must_use = "a request that is dropped at once leaves no trace in the models"]
pub struct Followed {
    /// What the other policy's worker held.
    pub other: Share,
    /// What the cache without end held.
    pub ideal: Share,
    prompt_tokens: f64,
    place: Place,
}

/// What a request takes in the other policy's model.
enum Place {
    Priced(Booking),
    Drawn(Stay),
}

impl Followed {
    /// The worker has taken the request.
    pub fn commit(&mut self, now: Time) {
        match &mut self.place {
            Place::Priced(booking) => booking.commit(now),
            Place::Drawn(stay) => stay.commit(),
        }
    }

    /// The answer is complete; it had so many tokens, if it said so.
    pub fn finish(mut self, output_tokens: Option<u32>, now: Time) {
        self.commit(now);
        let prompt_tokens = output_tokens.map(|_| self.prompt_tokens as u32);
        match self.place {
            Place::Priced(booking) => {
                booking.finish(Finished { prompt_tokens, cached_tokens: None, output_tokens }, now);
            }
            Place::Drawn(mut stay) => {
                if let (Some(prompt), Some(output)) = (prompt_tokens, output_tokens) {
                    stay.correct(u64::from(prompt) + u64::from(output));
                }
            }
        }
    }
}

/// A worker of the fleet and its like in both models.
#[derive(Clone)]
struct Member {
    of: Profile,
    /// In the model of `kv`.
    id: WorkerId,
    drawn: Drawn,
}

/// By place in the fleet.
#[derive(Default)]
struct Members {
    all: Vec<Option<Member>>,
    /// Of `all`, in the model of `kv`: close together, as each request looks at all of them.
    ids: Vec<Option<WorkerId>>,
}

pub struct Shadow {
    sampling: Sampling,
    /// Blocks are one in so many; 0 while no worker is known.
    one_in: AtomicUsize,
    kv: Arc<Planner>,
    members: ArcSwap<Members>,
    /// Held by whoever changes the members.
    syncing: Mutex<()>,
    ideal: Mutex<Ideal>,
}

impl Shadow {
    /// `settings` are those of the planner that is shadowed.
    pub fn new(sampling: Sampling, settings: &Settings) -> Shadow {
        let settings =
            Settings { learn_speed: false, learn_trust: false, most_priced: PRICED, ..settings.clone() };
        Shadow {
            sampling,
            one_in: AtomicUsize::new(0),
            kv: Planner::new(settings),
            members: ArcSwap::default(),
            syncing: Mutex::default(),
            ideal: Mutex::new(Ideal::new(IDEAL_BLOCKS)),
        }
    }

    /// The blocks are one in so many; `None` while no worker is known.
    pub fn one_in(&self) -> Option<usize> {
        Some(self.one_in.load(Ordering::Relaxed)).filter(|one_in| *one_in > 0)
    }

    /// Takes up who the workers are and what is known of them.
    pub fn sync(&self, planner: &Planner, block_tokens: f64) {
        let _syncing = self.syncing.lock();
        let profiles = planner.profiles();
        let mut members = self.members.load().all.clone();
        members.resize(members.len().max(profiles.len()), None);
        for (at, member) in members.iter_mut().enumerate() {
            let profile = profiles.get(at).cloned().flatten();
            *member = self.follow_member(member.take(), profile);
        }
        self.kv.common.set_decode_seconds(planner.common.decode_seconds());
        let smallest = members.iter().flatten().map(|member| member.of.blocks(block_tokens)).min();
        let ids = members.iter().map(|member| member.as_ref().map(|member| member.id)).collect();
        self.members.store(Arc::new(Members { all: members, ids }));
        if let Some(blocks) = smallest {
            self.resample(blocks, block_tokens);
        }
    }

    fn follow_member(&self, was: Option<Member>, is: Option<Profile>) -> Option<Member> {
        let same = |was: &Member, is: &Profile| was.of.generation == is.generation;
        let kept = was.filter(|was| {
            let stays = is.as_ref().is_some_and(|is| same(was, is));
            if !stays {
                self.kv.remove_worker(was.id);
            }
            stays
        });
        let is = is?;
        let (id, drawn) = match &kept {
            Some(member) => (member.id, Arc::clone(&member.drawn)),
            None => {
                let spec = WorkerSpec {
                    key: is.key,
                    capacity_tokens: is.capacity_tokens,
                    engine_block_tokens: 1,
                    prefill_speed: is.prefill_speed,
                };
                (self.kv.add_worker(spec), drawn())
            }
        };
        if let Some(was) = kept.as_ref().map(|kept| &kept.of) {
            if was.emptied != is.emptied {
                self.forget(id, &drawn);
            }
            if was.capacity_tokens != is.capacity_tokens {
                self.kv.set_capacity(id, is.capacity_tokens);
            }
            self.kv.set_prefill_speed(id, is.prefill_speed);
        }
        let bounds = Bounds { tokens: is.capacity_tokens, blocks: is.most_blocks };
        drawn.lock().set_bounds(bounds, &mut Unheard);
        Some(Member { of: is, id, drawn })
    }

    fn forget(&self, id: WorkerId, drawn: &Drawn) {
        self.kv.forget(id);
        drawn.lock().clear(&mut Unheard);
    }

    /// Blocks sampled one way are not there when sampled another way, so everything is forgotten: done only where it matters.
    fn resample(&self, blocks: u64, block_tokens: f64) {
        // A block counts its tokens in sixteen bits.
        let most = (f64::from(u16::MAX) / block_tokens).clamp(1.0, Sampling::MOST as f64) as usize;
        let wanted = match self.sampling {
            Sampling::OneIn(one_in) => one_in,
            Sampling::Auto => match blocks / ENOUGH_BLOCKS {
                0..4 => 1,
                times => 1 << times.ilog2(),
            },
        };
        let wanted = if most < 4 { 1 } else { wanted.min(1 << most.ilog2()) };
        let now = self.one_in.load(Ordering::Relaxed);
        let near = self.sampling == Sampling::Auto && (now * 2 == wanted || wanted * 2 == now);
        if now == wanted || (now > 0 && near) {
            return;
        }
        self.one_in.store(wanted, Ordering::Relaxed);
        for member in self.members.load().all.iter().flatten() {
            self.forget(member.id, &member.drawn);
        }
        self.ideal.lock().clear();
    }

    /// Places a request that goes by `policy` as the other one would. `None` while no worker is known.
    pub fn follow(
        &self,
        ask: &Ask,
        eligible: &[WorkerId],
        policy: Policy,
        now: Time,
        random: u64,
    ) -> Option<Followed> {
        let ask = thinned(ask, self.one_in()?);
        let members = self.members.load();
        let (place, cached) = match policy {
            Policy::Random => {
                let id = |worker: &WorkerId| *members.ids.get(worker.index())?;
                let eligible: SmallVec<[WorkerId; 64]> = eligible.iter().filter_map(id).collect();
                let (decision, booking) = self.kv.plan(&ask, &eligible, Policy::Kv, now, random)?;
                (Place::Priced(booking), decision.predicted_cached_tokens)
            }
            Policy::Kv => {
                let drawn = eligible.get((random % eligible.len().max(1) as u64) as usize)?;
                let member = members.all.get(drawn.index())?.as_ref()?;
                let (stay, cached) = Stay::begin(&member.drawn, &ask);
                (Place::Drawn(stay), cached)
            }
        };
        let prompt = ask.prompt_tokens;
        Some(Followed {
            other: Share { prompt, cached },
            ideal: Share { prompt, cached: self.remember(&ask) },
            prompt_tokens: prompt,
            place,
        })
    }

    /// Tokens of the prompt that were ever asked for before.
    fn remember(&self, ask: &Ask) -> f64 {
        let known = self.ideal.lock().ask(&ask.chain.hashes);
        (ask.chain.units(known) as f64 * ask.block_tokens).min(ask.prompt_tokens)
    }
}

struct Unheard;

impl Witness for Unheard {
    fn stored(&mut self, _: BlockHash) {}
    fn dropped(&mut self, _: BlockHash) {}
}

/// The request in few blocks: of its beginning the middle one of each step, which stands for the step; of the rest one in so many by chance,
/// which stands for as many. On average, over prompts, of as many tokens.
fn thinned(ask: &Ask, one_in: usize) -> Ask {
    if one_in == 1 {
        return Ask { streams: false, ..ask.clone() };
    }
    let full = &ask.chain;
    let step = ((STEP_TOKENS / ask.block_tokens) as usize).clamp(1, one_in);
    // Powers of two, so that the one in so many is a multiple of the step.
    let step = 1 << step.ilog2();
    let (head, rest) = full.hashes.split_at((STEPS * step).min(full.hashes.len()));
    let mut hashes: SmallVec<[BlockHash; 64]> = head.iter().skip(step / 2).step_by(step).copied().collect();
    let widths = Widths { narrow: hashes.len(), wide: one_in / step };
    // A wide block stands for several narrow ones already, so it is as many times as likely to be taken.
    let narrow = full.widths.narrow.saturating_sub(head.len()).min(rest.len());
    for (part, units) in [(&rest[..narrow], 1), (&rest[narrow..], full.widths.wide)] {
        let limit = u64::MAX / (one_in / units).max(1) as u64;
        // Multiplied, since tables find their places by the bits of the hash itself.
        hashes.extend(part.iter().filter(|hash| hash.0.wrapping_mul(SPREAD) <= limit).copied());
    }
    let block_tokens = ask.block_tokens * step as f64;
    let units = widths.within(hashes.len()) as f64;
    let tail = ask.prompt_tokens - full.units(full.hashes.len()) as f64 * ask.block_tokens;
    Ask {
        chain: Chain { hashes: Arc::from(hashes.as_slice()), widths, bytes: full.bytes },
        block_tokens,
        prompt_tokens: units * block_tokens + tail.max(0.0),
        output_tokens: ask.output_tokens,
        // The first token that will be seen is another worker's.
        streams: false,
    }
}

#[cfg(test)]
mod tests;
