//! What the same traffic would have found cached under the policy that it does not go by, and in a cache without end: the other
//! policy's planner places every request once more, on models of the workers' caches that nothing else touches.
//!
//! To cost little, the models hold only some blocks: those whose hash says so, as SHARDS (Waldspurger et al., FAST '15) samples a
//! cache. Each stands for as many tokens as are left out with it, so shares of tokens come out the same on average, and a cache
//! of the same capacity holds the same prefixes. Small caches are modelled whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::core::blocks::Chain;
use crate::core::booking::{Booking, Finished};
use crate::core::cache::{Bounds, Cache, Witness};
use crate::core::ids::mix;
use crate::core::ids::{BlockHash, Time, WorkerId};
use crate::core::planner::{Ask, Planner, Policy, Profile, Settings, WorkerSpec};

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
const ENOUGH_BLOCKS: u64 = 512;
/// Blocks of prompts that the cache without end goes back over.
const IDEAL_BLOCKS: usize = 1 << 18;

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
    booking: Option<Booking>,
}

impl Followed {
    /// The worker has taken the request.
    pub fn commit(&mut self, now: Time) {
        if let Some(booking) = &mut self.booking {
            booking.commit(now);
        }
    }

    /// The answer is complete; it had so many tokens, if it said so.
    pub fn finish(mut self, output_tokens: Option<u32>, now: Time) {
        let Some(booking) = self.booking.take() else { return };
        let prompt_tokens = output_tokens.map(|_| self.prompt_tokens as u32);
        booking.finish(Finished { prompt_tokens, cached_tokens: None, output_tokens }, now);
    }
}

/// A worker of the fleet and its like in both models, which has the same place in each.
#[derive(Clone)]
struct Member {
    of: Profile,
    id: WorkerId,
}

pub struct Shadow {
    sampling: Sampling,
    /// Blocks are one in so many; 0 while no worker is known.
    one_in: AtomicUsize,
    /// By [`Policy`].
    models: [Arc<Planner>; 2],
    /// By place in the fleet.
    members: ArcSwap<Vec<Option<Member>>>,
    ideal: Mutex<Cache>,
}

impl Shadow {
    /// `settings` are those of the planner that is shadowed.
    pub fn new(sampling: Sampling, settings: &Settings) -> Shadow {
        let model = || Planner::new(Settings { learn_speed: false, learn_trust: false, ..settings.clone() });
        Shadow {
            sampling,
            one_in: AtomicUsize::new(0),
            models: [model(), model()],
            members: ArcSwap::default(),
            ideal: Mutex::new(Cache::new(Bounds { tokens: None, blocks: IDEAL_BLOCKS })),
        }
    }

    /// The blocks are one in so many; `None` while no worker is known.
    pub fn one_in(&self) -> Option<usize> {
        Some(self.one_in.load(Ordering::Relaxed)).filter(|one_in| *one_in > 0)
    }

    /// Takes up who the workers are and what is known of them. One caller at a time.
    pub fn sync(&self, planner: &Planner, block_tokens: f64) {
        let profiles = planner.profiles();
        let mut members = Vec::clone(&self.members.load());
        members.resize(members.len().max(profiles.len()), None);
        for (at, member) in members.iter_mut().enumerate() {
            let profile = profiles.get(at).cloned().flatten();
            *member = self.follow_member(member.take(), profile);
        }
        let decode_seconds = planner.common.decode_seconds();
        self.models.iter().for_each(|model| model.common.set_decode_seconds(decode_seconds));
        let smallest = members.iter().flatten().map(|member| member.of.blocks(block_tokens)).min();
        self.members.store(Arc::new(members));
        if let Some(blocks) = smallest {
            self.resample(blocks);
        }
    }

    fn follow_member(&self, was: Option<Member>, is: Option<Profile>) -> Option<Member> {
        let same = |was: &Member, is: &Profile| was.of.generation == is.generation;
        let kept = was.filter(|was| {
            let stays = is.as_ref().is_some_and(|is| same(was, is));
            if !stays {
                self.models.iter().for_each(|model| model.remove_worker(was.id));
            }
            stays
        });
        let is = is?;
        let id = match &kept {
            Some(member) => member.id,
            None => {
                let spec = WorkerSpec {
                    key: is.key,
                    capacity_tokens: is.capacity_tokens,
                    engine_block_tokens: 1,
                    prefill_speed: is.prefill_speed,
                };
                let [id, twin] = self.models.each_ref().map(|model| model.add_worker(spec.clone()));
                debug_assert_eq!(id, twin, "both models hear of the same changes");
                id
            }
        };
        for model in kept.iter().flat_map(|_| &self.models) {
            let was = kept.as_ref().map(|kept| &kept.of);
            if was.is_some_and(|was| was.emptied != is.emptied) {
                model.forget(id);
            }
            if was.is_some_and(|was| was.capacity_tokens != is.capacity_tokens) {
                model.set_capacity(id, is.capacity_tokens);
            }
            model.set_prefill_speed(id, is.prefill_speed);
        }
        Some(Member { of: is, id })
    }

    /// Blocks sampled one way are not there when sampled another way, so everything is forgotten: done only where it matters.
    fn resample(&self, blocks: u64) {
        let wanted = match self.sampling {
            Sampling::OneIn(one_in) => one_in,
            Sampling::Auto => match blocks / ENOUGH_BLOCKS {
                0..4 => 1,
                times => (1 << times.ilog2()).min(Sampling::MOST),
            },
        };
        let now = self.one_in.load(Ordering::Relaxed);
        let near = self.sampling == Sampling::Auto && (now * 2 == wanted || wanted * 2 == now);
        if now == wanted || (now > 0 && near) {
            return;
        }
        self.one_in.store(wanted, Ordering::Relaxed);
        for member in self.members.load().iter().flatten() {
            self.models.iter().for_each(|model| {
                model.forget(member.id);
            });
        }
        self.ideal.lock().clear(&mut Unheard);
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
        let known = |id: &WorkerId| members.get(id.index())?.as_ref().map(|member| member.id);
        let (model, eligible): (_, SmallVec<[WorkerId; 64]>) = match policy {
            Policy::Random => {
                (&self.models[Policy::Kv as usize], eligible.iter().filter_map(known).collect())
            }
            Policy::Kv if eligible.is_empty() => return None,
            // A random draw needs no look at the others.
            Policy::Kv => {
                let drawn = eligible[(random % eligible.len() as u64) as usize];
                (&self.models[Policy::Random as usize], SmallVec::from_slice(&[known(&drawn)?]))
            }
        };
        let (decision, booking) = model.plan(&ask, &eligible, Policy::Kv, now, random)?;
        let prompt = ask.prompt_tokens;
        Some(Followed {
            other: Share { prompt, cached: decision.predicted_cached_tokens },
            ideal: Share { prompt, cached: self.remember(&ask) },
            prompt_tokens: prompt,
            booking: Some(booking),
        })
    }

    /// Tokens of the prompt that were ever asked for before.
    fn remember(&self, ask: &Ask) -> f64 {
        let mut ideal = self.ideal.lock();
        let claim = ideal.admit(&ask.chain.hashes, |_| 1, 0, 0, &mut Unheard);
        let matched = ask.chain.units(claim.matched()) as f64;
        ideal.release(claim, 0, &mut Unheard);
        (matched * ask.block_tokens).min(ask.prompt_tokens)
    }
}

struct Unheard;

impl Witness for Unheard {
    fn stored(&mut self, _: BlockHash) {}
    fn dropped(&mut self, _: BlockHash) {}
}

/// The request in one of so many blocks, each of which stands for all: on average, over prompts, of as many tokens.
fn thinned(ask: &Ask, one_in: usize) -> Ask {
    if one_in == 1 {
        return Ask { streams: false, ..ask.clone() };
    }
    let full = &ask.chain;
    // A wide block stands for several narrow ones already, so it is as many times as likely to be taken. Mixed, since tables find
    // their places by the bits of the hash itself.
    let taken = |(place, hash): (usize, &BlockHash)| {
        let rarity = (one_in / full.widths.at(place)).max(1) as u64;
        mix(hash.0).is_multiple_of(rarity).then_some(*hash)
    };
    let hashes: Arc<[BlockHash]> = full.hashes.iter().enumerate().filter_map(taken).collect();
    let block_tokens = ask.block_tokens * one_in as f64;
    let tail = ask.prompt_tokens - full.units(full.hashes.len()) as f64 * ask.block_tokens;
    Ask {
        prompt_tokens: hashes.len() as f64 * block_tokens + tail.max(0.0),
        chain: Chain::even(hashes, full.bytes),
        block_tokens,
        output_tokens: ask.output_tokens,
        // The first token that will be seen is another worker's.
        streams: false,
    }
}

#[cfg(test)]
mod tests;
