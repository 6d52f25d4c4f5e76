//! How far the belief about one worker can be trusted, learned from what the worker's answers say was cached:
//!
//! - its *effective capacity*: what is told of the KV cache's size, times a learned factor, times our share of the worker's
//!   traffic. Blocks that were believed held and are gone make it smaller, blocks that were believed evicted and are there
//!   make it larger (offload tiers, other routers).
//! - its *credit*: of what is believed cached, the share that lately was. It multiplies the hits in the price.
//!
//! Only requests that say something count: one that found nothing believed says nothing of credit, and one that met blocks
//! of another request in flight says nothing at all, because those may not have been computed yet.

use crate::core::ids::Time;

/// The effective capacity stays within these multiples of what was told.
const FACTOR: std::ops::RangeInclusive<f64> = 0.0625..=2.0;
/// Smallest effective capacity, in tokens.
const LEAST_TOKENS: f64 = 256.0;
/// How far one answer that is wrong in everything moves the capacity. Answers that agree make the steps longer, answers that
/// contradict each other shorter, so that it arrives fast and then rests.
const STEP: std::ops::RangeInclusive<f64> = 0.02..=0.25;
const FIRST_STEP: f64 = 0.2;
/// A share of the prompt below which an error is one of counting (bytes for tokens, blocks of ours for blocks of theirs).
const TOLERANCE: f64 = 0.08;
/// Requests that credit remembers, and for how many a worker is trusted from the start.
const CREDIT_MEMORY: f64 = 48.0;
const CREDIT_START: f64 = 8.0;
/// Unexpected hits count up to this multiple of the expected ones.
const SURPLUS: f64 = 1.1;
/// Recently used is what was used within this share of what blocks were found to survive.
const RECENT: f64 = 0.5;
const PROVEN_KEEP: f64 = 0.995;
/// Blocks used so lately can hardly have been evicted: requests that find nothing of them, and none that does, mean that the
/// cache was emptied, as soon as they weigh so much together.
const VANISHED: u32 = 6;

/// What one answer showed. Tokens.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub prompt: f64,
    /// Believed cached when the request was placed, without credit.
    pub believed: f64,
    /// What the worker says was cached.
    pub confirmed: f64,
    /// Tokens of one believed block: what a belief can be wrong by for no reason.
    pub block: f64,
    /// Used since the believed blocks were, as far as it was looked up: whatever was evicted must have been older than that.
    pub newer: f64,
    /// Believed held on the worker in all.
    pub held: f64,
    /// When the believed blocks were used last, and now, as stamps of the cache.
    pub used: u64,
    pub now: u64,
}

/// What follows from a sample.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    Same,
    /// The effective capacity is another.
    Resized,
    /// The worker has emptied its cache.
    Emptied,
}

#[derive(Copy, Clone, Debug)]
pub struct Trust {
    told: Option<f64>,
    /// Believed held when a believed block was found missing for the first time: stands for the capacity while none is told.
    found: Option<f64>,
    factor: f64,
    step: f64,
    /// The last correction was upward.
    rising: Option<bool>,
    /// The worker's prompt tokens that did not come through us, as a share.
    foreign: f64,
    believed: f64,
    confirmed: f64,
    /// Blocks were found cached though so many tokens had been used since; fades.
    proven: f64,
    /// What the misses in a row weigh, see [`VANISHED`].
    vanished: u32,
    /// The cache's stamp at the first of them.
    vanished_at: u64,
    confirmed_at: Option<Time>,
}

impl Trust {
    pub fn new(told: Option<u64>) -> Trust {
        Trust {
            told: told.map(|tokens| tokens as f64),
            found: None,
            factor: 1.0,
            step: FIRST_STEP,
            rising: None,
            foreign: 0.0,
            believed: CREDIT_START,
            confirmed: CREDIT_START,
            proven: 0.0,
            vanished: 0,
            vanished_at: 0,
            confirmed_at: None,
        }
    }

    /// What the config or the engine says; a new figure starts a new factor.
    pub fn tell(&mut self, told: Option<u64>) {
        let told = told.map(|tokens| tokens as f64);
        if told != self.told {
            (self.told, self.found) = (told, None);
            (self.factor, self.step, self.rising) = (1.0, FIRST_STEP, None);
        }
    }

    /// The share of the worker's prompt tokens that others send.
    pub fn set_foreign(&mut self, share: f64) {
        self.foreign = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    }

    pub fn foreign(&self) -> f64 {
        self.foreign
    }

    fn base(&self) -> Option<f64> {
        self.told.or(self.found)
    }

    /// Tokens that are believed to stay cached for us; `None` if nobody told and nothing was learned.
    pub fn capacity(&self) -> Option<u64> {
        let base = self.base()?;
        let share = (self.factor * (1.0 - self.foreign)).max(*FACTOR.start());
        Some((base * share).max(LEAST_TOKENS.min(base)) as u64)
    }

    /// Of what is believed cached, the share that lately was. 0 to 1.
    pub fn credit(&self) -> f64 {
        (self.confirmed / self.believed).clamp(0.0, 1.0)
    }

    /// When the worker last confirmed or denied a belief.
    pub fn confirmed_at(&self) -> Option<Time> {
        self.confirmed_at
    }

    /// The worker starts anew: what it does with a given capacity is the same as before.
    pub fn emptied(&mut self) {
        self.vanished = 0;
    }

    pub fn learn(&mut self, sample: Sample, now: Time) -> Verdict {
        let Sample { prompt, believed, confirmed, block, held, .. } = sample;
        self.confirmed_at = Some(now);
        let missed = self.missed(&sample);
        if missed > 0 {
            if self.vanished == 0 {
                self.vanished_at = sample.now;
            }
            self.vanished += missed;
            if self.vanished >= VANISHED {
                self.vanished = 0;
                return Verdict::Emptied;
            }
            // Whether that was an accident or the first of many is not known yet.
            return Verdict::Same;
        }
        self.proven *= PROVEN_KEEP;
        if believed > 0.0 && confirmed >= believed - 2.0 * block {
            self.proven = self.proven.max(sample.newer);
        }
        // What came back since the first was missed is no sign that nothing was lost.
        if confirmed > 0.0 && sample.used < self.vanished_at {
            self.vanished = 0;
        }
        self.learn_credit(believed / prompt.max(1.0), confirmed / prompt.max(1.0));
        let error = believed - confirmed;
        if error.abs() <= (TOLERANCE * prompt).max(2.0 * block) {
            return Verdict::Same;
        }
        let share = (error.abs() / prompt.max(1.0)).min(1.0);
        if error > 0.0 {
            self.shrink(share, held)
        } else if self.capacity().is_some_and(|capacity| held >= 0.9 * capacity as f64) {
            // Only a full belief has forgotten anything.
            self.grow(share)
        } else {
            Verdict::Same
        }
    }

    /// Hits that nobody expected make up for some that did not come, so that predictions are right in all.
    fn learn_credit(&mut self, believed: f64, confirmed: f64) {
        if believed > 0.0 || confirmed > TOLERANCE {
            let keep = 1.0 - 1.0 / CREDIT_MEMORY;
            self.believed = self.believed * keep + believed;
            self.confirmed = (self.confirmed * keep + confirmed).min(SURPLUS * self.believed);
        }
    }

    /// How much it says for an emptied cache that the worker found nothing: 2 where the blocks were used so lately that they
    /// cannot have been evicted, 1 where others were found after more use, or where that has begun and nothing was found since; 0
    /// where they may have been evicted.
    fn missed(&self, sample: &Sample) -> u32 {
        match sample {
            _ if sample.confirmed > 0.0 || sample.believed <= 2.0 * sample.block => 0,
            _ if sample.newer < RECENT * self.proven => 2,
            _ => u32::from(sample.newer < self.proven || self.vanished > 0),
        }
    }

    fn shrink(&mut self, share: f64, held: f64) -> Verdict {
        let Some(capacity) = self.capacity() else {
            self.found = Some(held.max(LEAST_TOKENS));
            return Verdict::Resized;
        };
        let step = self.step(false) * share;
        // The missing block was among what is believed held, which may be far less than the capacity.
        let full = (held / capacity as f64).clamp(0.25, 1.0);
        self.set_factor(self.factor * full * (1.0 - step))
    }

    fn grow(&mut self, share: f64) -> Verdict {
        let step = self.step(true) * share;
        self.set_factor(self.factor * (1.0 + step))
    }

    fn set_factor(&mut self, factor: f64) -> Verdict {
        let factor = factor.clamp(*FACTOR.start(), *FACTOR.end());
        if factor == self.factor {
            return Verdict::Same;
        }
        self.factor = factor;
        Verdict::Resized
    }

    fn step(&mut self, rising: bool) -> f64 {
        let agrees = self.rising.replace(rising).is_none_or(|before| before == rising);
        self.step = (self.step * if agrees { 1.2 } else { 0.5 }).clamp(*STEP.start(), *STEP.end());
        self.step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(0.0);

    /// A prompt of 2,300 tokens, 2,000 of them shared, on a worker whose belief is full.
    fn sample(believed: f64, confirmed: f64) -> Sample {
        let (newer, held) = (8000.0, 9000.0);
        Sample { prompt: 2300.0, believed, confirmed, block: 64.0, newer, held, used: 1, now: 9 }
    }

    fn feed(trust: &mut Trust, times: usize, sample: Sample) {
        for _ in 0..times {
            trust.learn(sample, NOW);
        }
    }

    #[test]
    fn blocks_that_are_gone_make_the_capacity_smaller_and_found_ones_larger() {
        let mut trust = Trust::new(Some(9_344));
        assert_eq!(trust.learn(sample(2000.0, 0.0), NOW), Verdict::Resized);
        let less = trust.capacity().unwrap();
        assert!((6_000..9_000).contains(&less), "{less}");
        let full = Sample { held: less as f64, ..sample(0.0, 2000.0) };
        assert_eq!(trust.learn(full, NOW), Verdict::Resized);
        assert!(trust.capacity().unwrap() > less);
    }

    #[test]
    fn it_stays_within_bounds_however_long_one_side_errs() {
        let mut trust = Trust::new(Some(16_000));
        feed(&mut trust, 500, Sample { held: 16_000.0, ..sample(2000.0, 100.0) });
        assert_eq!(trust.capacity(), Some(1_000));
        feed(&mut trust, 500, Sample { held: 1e9, ..sample(0.0, 2000.0) });
        assert_eq!(trust.capacity(), Some(32_000));
    }

    #[test]
    fn small_errors_are_of_counting() {
        let mut trust = Trust::new(Some(9_344));
        for confirmed in [1900.0, 2100.0] {
            assert_eq!(trust.learn(sample(2000.0, confirmed), NOW), Verdict::Same);
        }
        assert_eq!(trust.capacity(), Some(9_344));
    }

    #[test]
    fn a_belief_that_is_not_full_has_forgotten_nothing() {
        let mut trust = Trust::new(Some(100_000));
        assert_eq!(trust.learn(Sample { held: 10_000.0, ..sample(0.0, 2000.0) }, NOW), Verdict::Same);
    }

    #[test]
    fn an_unknown_capacity_is_found_by_what_is_missing() {
        let mut trust = Trust::new(None);
        assert_eq!(trust.capacity(), None);
        assert_eq!(trust.learn(sample(2000.0, 0.0), NOW), Verdict::Resized);
        assert_eq!(trust.capacity(), Some(9_000));
        trust.tell(Some(50_000));
        assert_eq!(trust.capacity(), Some(50_000), "what is told counts more");
    }

    #[test]
    fn recent_blocks_that_are_gone_three_times_mean_an_empty_cache_and_nothing_less_does() {
        let mut trust = Trust::new(Some(9_344));
        trust.learn(sample(2000.0, 2000.0), NOW);
        let gone = Sample { newer: 300.0, ..sample(2000.0, 0.0) };
        let there = Sample { newer: 300.0, ..sample(2000.0, 2000.0) };
        let again = Sample { used: 10, ..there };
        for sample in [gone, gone, there, gone, again, gone] {
            assert_eq!(trust.learn(sample, NOW), Verdict::Same);
        }
        assert_eq!(trust.capacity(), Some(9_344), "the capacity had no part in it");
        assert_eq!(trust.learn(gone, NOW), Verdict::Emptied);
        assert!(trust.credit() > 0.99);
    }

    #[test]
    fn blocks_used_longer_ago_weigh_half_and_the_oldest_speak_of_the_capacity() {
        let mut trust = Trust::new(Some(9_344));
        trust.learn(sample(2000.0, 2000.0), NOW);
        let older = Sample { newer: 6_000.0, ..sample(2000.0, 0.0) };
        for _ in 0..5 {
            assert_eq!(trust.learn(older, NOW), Verdict::Same);
        }
        assert_eq!(trust.learn(older, NOW), Verdict::Emptied);
        assert_eq!(trust.learn(Sample { newer: 8_100.0, ..older }, NOW), Verdict::Resized);
    }

    #[test]
    fn credit_follows_what_is_confirmed_and_a_request_that_reuses_nothing_says_nothing() {
        let mut trust = Trust::new(None);
        feed(&mut trust, 20, sample(0.0, 0.0));
        assert_eq!(trust.credit(), 1.0);
        feed(&mut trust, 300, sample(2000.0, 1000.0));
        assert!((trust.credit() - 0.5).abs() < 0.02, "{}", trust.credit());
        feed(&mut trust, 300, sample(2000.0, 2300.0));
        assert!(trust.credit() > 0.98, "{}", trust.credit());
    }

    #[test]
    fn the_share_of_others_shrinks_the_capacity() {
        let mut trust = Trust::new(Some(10_000));
        trust.set_foreign(0.5);
        assert_eq!(trust.capacity(), Some(5_000));
        trust.set_foreign(f64::NAN);
        assert_eq!(trust.capacity(), Some(10_000));
    }
}
