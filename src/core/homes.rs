//! What several routers before the same workers can agree on without a word: each prefix has a *home*, the worker that comes first by
//! rendezvous hash of the prompt's first tokens, and a router assumes that more is cached there than it has seen to. How much more is learned
//! from the answers of workers that were their prompts' homes. Where nobody else sends them anything, nothing is assumed.
//!
//! All else stays as it is: a home that queues, or that is far behind what another worker is known to hold, is left aside. Found in
//! `simulate --routers N`; benches/README.md has what it is worth.

use parking_lot::Mutex;

use crate::core::ids::{BlockHash, mix};
use crate::core::planner::Ask;

/// Prompts that agree in so many tokens have one home. Long enough that one system prompt does not make one home of all traffic.
const KEY_TOKENS: f64 = 512.0;
/// Others send at least this share of the workers' prompt tokens: less may be an error of counting.
const SHARED_FROM: f64 = 0.1;
/// What is assumed before anything is learned: enough that routers begin to agree, as only then there is something to learn.
const AT_FIRST: f64 = 0.5;
/// Tokens after which what was learned weighs as much as that.
const FIRST_TOKENS: f64 = 200_000.0;
/// Answers that are remembered.
const MEMORY: f64 = 400.0;

/// Whether enough of the workers' prompt tokens come from others that they may fill the caches.
pub(super) fn is_shared(foreign_share: f64) -> bool {
    foreign_share >= SHARED_FROM
}

/// What the home of a prompt hangs on; `None` if it has no full block.
pub(super) fn key(ask: &Ask) -> Option<BlockHash> {
    let blocks = (KEY_TOKENS / ask.block_tokens).round().max(1.0) as usize;
    let last = blocks.min(ask.chain.hashes.len()).checked_sub(1)?;
    ask.chain.hashes.get(last).copied()
}

/// The greater, the nearer a worker of key `worker` is to being the home.
pub(super) fn rank(key: BlockHash, worker: u64) -> u64 {
    mix(worker ^ key.0)
}

/// The share of prompts' tokens that is cached at their homes, of those that this router does not know to be.
pub(super) struct Homes {
    learned: Mutex<Learned>,
}

struct Learned {
    cached: f64,
    tokens: f64,
}

impl Default for Homes {
    fn default() -> Homes {
        Homes { learned: Mutex::new(Learned { cached: AT_FIRST * FIRST_TOKENS, tokens: FIRST_TOKENS }) }
    }
}

impl Homes {
    /// 0 to 1.
    pub(super) fn share(&self) -> f64 {
        let learned = self.learned.lock();
        learned.cached / learned.tokens
    }

    /// Of the `prompt` tokens of a request to its home `believed` were believed cached and `confirmed` were.
    pub(super) fn learn(&self, prompt: f64, believed: f64, confirmed: f64) {
        let unknown = (prompt - believed).max(0.0);
        let found = (confirmed - believed).clamp(0.0, unknown);
        let keep = 1.0 - 1.0 / MEMORY;
        let mut learned = self.learned.lock();
        *learned = Learned { cached: keep * learned.cached + found, tokens: keep * learned.tokens + unknown };
        // A memory of nothing but prompts that were wholly believed would end at zero by zero.
        learned.tokens = learned.tokens.max(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_homes_hold_is_learned_from_little_to_all() {
        let homes = Homes::default();
        assert_eq!(homes.share(), AT_FIRST);
        (0..2_000).for_each(|_| homes.learn(8_000.0, 1_000.0, 8_000.0));
        assert!(homes.share() > 0.99, "{}", homes.share());
        (0..2_000).for_each(|_| homes.learn(8_000.0, 1_000.0, 500.0));
        assert!(homes.share() < 0.01, "{}", homes.share());
        (0..100_000).for_each(|_| homes.learn(8_000.0, 8_000.0, 9_000.0));
        assert!((0.0..=1.0).contains(&homes.share()), "{}", homes.share());
    }

    #[test]
    fn each_worker_is_the_home_of_its_share() {
        let mut counts = [0; 8];
        for prefix in 0..8_000u64 {
            let home = (0..8u64).max_by_key(|&worker| rank(BlockHash(mix(prefix)), mix(worker)));
            counts[home.map_or(0, |home| home as usize)] += 1;
        }
        assert!(counts.iter().all(|count| (850..=1_150).contains(count)), "{counts:?}");
    }
}
