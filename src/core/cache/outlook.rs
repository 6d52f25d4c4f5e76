//! What can be told of a worker's cache before a request is sent there: whether it would wait for memory, and what it would push
//! out.

use super::runs::Run;
use super::{Cache, NONE};
use crate::core::ids::BlockHash;

/// Tokens of believed content that would be pushed out.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Of blocks that more than one request of late has used.
    pub shared: u64,
    /// Of all others: most are the ends of prompts, which nobody asks for again unless it is the same conversation.
    pub once: u64,
}

impl Cache {
    /// Whether all requests in flight fit at the same time, so that none has to wait for another's memory.
    pub fn is_roomy(&self) -> bool {
        self.bounds.tokens.is_none_or(|capacity| self.pinned <= capacity)
    }

    /// What a request for `chain` and `tokens` in all would lack of memory beside the running requests, as a share of what
    /// these hold: so much of them has to end before it can begin. 0 to 1.
    pub fn shortage(&self, chain: &[BlockHash], tokens: u64) -> f64 {
        let Some(capacity) = self.bounds.tokens else { return 0.0 };
        let lacking = (self.running + tokens).saturating_sub(capacity);
        if lacking == 0 || self.running == 0 {
            return 0.0;
        }
        let mut shared = 0;
        let mut last = NONE;
        for &hash in chain {
            let slot = self.find_after(last, hash);
            let Some(block) = slot.map(|slot| &self.blocks[slot as usize]).filter(|block| block.running > 0)
            else {
                break;
            };
            shared += u64::from(block.tokens);
            last = slot.unwrap_or(NONE);
        }
        (lacking.saturating_sub(shared) as f64 / self.running as f64).min(1.0)
    }

    /// What taking `need` more tokens would push out.
    pub fn pushed_by(&self, need: u64, era: u16) -> Pushed {
        let mut pushed = Pushed::default();
        let Some(capacity) = self.bounds.tokens else { return pushed };
        let mut over = (self.held + need).saturating_sub(capacity);
        let mut at = self.oldest;
        while over > 0 && at != NONE {
            let run = &self.runs[at as usize];
            over -= over.min(run.filler);
            let content = over.min(run.content);
            over -= content;
            let once = content.min(self.used_once(run, era));
            pushed.once += once;
            pushed.shared += content - once;
            at = run.newer;
        }
        pushed
    }

    /// Tokens of the run's blocks that no second request of late has used. Whoever uses a block uses all before it, so they are
    /// its end.
    fn used_once(&self, run: &Run, era: u16) -> u64 {
        let blocks = &run.blocks[run.start..];
        let block = |slot: &u32| &self.blocks[*slot as usize];
        let shared = blocks.partition_point(|slot| block(slot).uses.at(era) > 1);
        let once = &blocks[shared..];
        let (Some(first), Some(last)) = (once.first(), once.last()) else { return 0 };
        // Narrow blocks come before wide ones.
        let (first, last) = (block(first).tokens, block(last).tokens);
        let narrow = once.partition_point(|slot| block(slot).tokens == first);
        let tokens = narrow as u64 * u64::from(first) + (once.len() - narrow) as u64 * u64::from(last);
        run.content.min(tokens)
    }

    /// Tokens that ended requests have used since `stamp`, as far as `most` requests tell.
    pub fn newer_than(&self, stamp: u64, most: usize) -> u64 {
        let mut newer = 0;
        let mut at = self.newest;
        for _ in 0..most {
            let Some(run) = self.runs.get(at as usize).filter(|run| run.stamp > stamp) else { break };
            newer += run.content + run.filler;
            at = run.older;
        }
        newer
    }
}
