//! The claim of one request on one worker: counted in the worker's queue and in its believed cache, and taken back by drop.

use std::sync::Arc;

use crate::core::blocks::Widths;
use crate::core::cache::Claim;
use crate::core::ids::{Time, WorkerId};
use crate::core::load::{Served, Ticket};
use crate::core::planner::{Ask, Planner};
use crate::core::price::Terms;
use crate::core::slot::Slot;
use crate::core::trust::Sample;

/// What is known when a request has ended. Absent means the worker did not say.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
}

/// Dropped before [`Booking::commit`] it undoes both counts, because the worker never worked on the request; dropped after,
/// it ends the request there, whose blocks the worker keeps.
#[must_use = "a booking dropped at once counts for nothing"]
pub struct Booking {
    planner: Arc<Planner>,
    slot: Arc<Slot>,
    ticket: Ticket,
    claim: Option<Claim>,
    committed: bool,
    /// Tokens of the chain's full blocks, for telling filler from content.
    content_tokens: u64,
    guessed_tokens: u64,
    uncached: f64,
    /// Cached by belief, of a worker that is the prompt's home.
    at_home: Option<f64>,
    /// What the worker's tally has of this request.
    asked: f64,
    expected: f64,
    /// Of one unit of the chain's blocks.
    block_tokens: f64,
    widths: Widths,
    /// Nothing that was sent to the worker had to wait for memory when this request was.
    roomy: bool,
    served: Option<(Served, Time)>,
    /// The latest time this booking has been told.
    at: Time,
}

impl Booking {
    pub(super) fn new(
        planner: Arc<Planner>,
        slot: Arc<Slot>,
        ask: &Ask,
        ticket: Ticket,
        terms: &Terms,
        era: u16,
        now: Time,
    ) -> Booking {
        let block_tokens = ask.block_tokens.round().max(1.0) as u16;
        let widths = ask.chain.widths;
        let content_tokens = ask.chain.units(ask.chain.hashes.len()) as u64 * u64::from(block_tokens);
        let tokens = |place| block_tokens.saturating_mul(widths.at(place) as u16);
        let guessed_tokens = (ask.prompt_tokens + ask.output_tokens).max(0.0) as u64;
        let filler = guessed_tokens.saturating_sub(content_tokens);
        let admitted = planner.with_cache(&slot, |cache, changes| {
            let mut claim = cache.admit(&ask.chain.hashes, tokens, filler, era, changes);
            if !ask.streams {
                // Nobody will tell when it begins.
                cache.start(&mut claim);
            }
            (claim, cache.is_roomy())
        });
        let (claim, roomy) = admitted.unzip();
        Booking {
            planner,
            slot,
            ticket,
            claim,
            committed: false,
            content_tokens,
            guessed_tokens,
            uncached: terms.uncached,
            at_home: terms.at_home.then_some(terms.cached - terms.assumed),
            asked: ask.prompt_tokens,
            expected: terms.cached,
            block_tokens: ask.block_tokens,
            widths,
            roomy: roomy.unwrap_or(false),
            served: None,
            at: now,
        }
    }

    pub fn worker(&self) -> WorkerId {
        self.slot.id
    }

    /// The worker has taken the request: its blocks stay, however the request ends.
    pub fn commit(&mut self, now: Time) {
        self.committed = true;
        self.at = now;
    }

    /// The first generated token came: the prefill is over.
    pub fn first_token(&mut self, now: Time) {
        self.at = now;
        let served = self.slot.with_load(|load| load.first_token(self.ticket, now));
        if let Some(served) = served.flatten() {
            self.served = Some((served, now));
        }
        if let Some(claim) = &mut self.claim {
            self.planner.with_cache(&self.slot, |cache, _| cache.start(claim));
        }
    }

    /// The answer is complete. Answers how many blocks the planner forgot, if this answer was the one that showed that the
    /// worker has emptied its cache.
    pub fn finish(mut self, finished: Finished, now: Time) -> Option<usize> {
        self.committed = true;
        self.at = now;
        if let (Some(prompt), Some(output)) = (finished.prompt_tokens, finished.output_tokens) {
            self.guessed_tokens = u64::from(prompt) + u64::from(output);
        }
        if let (Some(prompt), Some(cached)) = (finished.prompt_tokens, finished.cached_tokens) {
            self.uncached = f64::from(prompt.saturating_sub(cached));
        }
        self.learn(now);
        let prompt = f64::from(finished.prompt_tokens?);
        if let (Some(believed), Some(confirmed)) = (self.at_home, finished.cached_tokens) {
            self.planner.common.homes.learn(prompt, believed, f64::from(confirmed));
        }
        let emptied = finished.cached_tokens.and_then(|cached| self.compare(prompt, f64::from(cached), now));
        self.slot.with_load(|load| {
            load.correct(prompt - self.asked, 0.0);
            load.answered();
        });
        self.asked = prompt;
        emptied
    }

    /// Holds what was believed against what the worker confirms.
    fn compare(&self, prompt: f64, confirmed: f64, now: Time) -> Option<usize> {
        /// Requests that are looked at to see how long ago a block was used that is gone.
        const LOOK_BACK: usize = 1024;
        const SOME: u64 = 4;
        /// Beyond it the bytes that are counted here are not what the worker counts (pictures, several prompts).
        const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.5..=2.0;
        let claim = self.claim.as_ref().filter(|claim| !claim.reused().busy)?;
        if !self.planner.settings.learn_trust {
            return None;
        }
        // The estimate of the prompt was as wrong in the believed part as in the whole.
        let scale = prompt / self.asked;
        if !PLAUSIBLE.contains(&scale) {
            return None;
        }
        let unit = self.block_tokens * scale;
        let block = unit * self.widths.at(claim.matched()) as f64;
        let believed = (self.widths.within(claim.matched()) as f64 * unit).min((prompt - 1.0).max(0.0));
        let used = claim.reused().stamp;
        let (newer, held, stamp) = self.planner.with_cache(&self.slot, |cache, _| {
            let gone = believed - confirmed > 2.0 * block;
            // Of those that are right, some are enough.
            let newer = if gone || used % SOME == 0 { cache.newer_than(used, LOOK_BACK) } else { 0 };
            cache.is_current(claim).then(|| (newer as f64, cache.held_tokens() as f64, cache.stamp()))
        })??;
        let sample = Sample { prompt, believed, confirmed, block, newer, held, used, now: stamp };
        self.planner.learn_trust(&self.slot, sample, now)
    }

    fn learn(&self, now: Time) {
        let Some((served, first_token)) = self.served else { return };
        let common = &self.planner.common;
        common.saw_decode(now - first_token);
        // A wait for memory says nothing of the speed.
        if served.in_order && self.roomy && self.planner.learns_speed() {
            common.saw_prefill(&self.slot, self.uncached, served.seconds);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.slot.with_load(|load| {
            load.end(self.ticket, self.at);
            if !self.committed {
                load.correct(-self.asked, -self.expected);
            }
        });
        let Some(claim) = self.claim.take() else { return };
        let filler = self.guessed_tokens.saturating_sub(self.content_tokens);
        let committed = self.committed;
        self.planner.with_cache(&self.slot, |cache, changes| match committed {
            true => cache.release(claim, filler, changes),
            false => cache.undo(claim, changes),
        });
    }
}
