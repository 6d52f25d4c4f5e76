//! What is known of each worker, for whoever models the same fleet.

use std::sync::atomic::Ordering;

use super::Planner;

/// One worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Another one is another worker.
    pub generation: u64,
    pub key: u64,
    /// As far as it is trusted.
    pub capacity_tokens: Option<u64>,
    /// Tokens a second; what is assumed where nothing is known.
    pub prefill_speed: Option<f64>,
    /// Counts how many times all that was believed of it was forgotten.
    pub emptied: u64,
    /// Blocks that may be believed of it.
    pub most_blocks: usize,
}

impl Profile {
    /// Blocks of so many tokens that are believed of it once its cache is full.
    pub fn blocks(&self, tokens: f64) -> u64 {
        let most = self.most_blocks as u64;
        self.capacity_tokens.map_or(most, |capacity| most.min((capacity as f64 / tokens) as u64))
    }
}

impl Planner {
    /// By place in the fleet.
    pub(in crate::core) fn profiles(&self) -> Vec<Option<Profile>> {
        let fleet = self.fleet.load_full();
        let typical = self.common.typical_speed();
        let profile = |slot: &std::sync::Arc<super::Slot>| {
            let prefill_speed = Some(slot.snapshot().speed(typical).unwrap_or(typical));
            let bounds = slot.cache.lock().as_ref()?.bounds();
            Some(Profile {
                generation: slot.generation,
                key: slot.spec.key,
                capacity_tokens: bounds.tokens,
                prefill_speed,
                emptied: slot.emptied.load(Ordering::Relaxed),
                most_blocks: bounds.blocks,
            })
        };
        fleet.iter().map(|slot| slot.as_ref().and_then(profile)).collect()
    }
}
