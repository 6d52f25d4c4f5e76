//! What nobody uses at present, in the order in which it would go: a list of runs, oldest first.

use smallvec::SmallVec;

use super::{Cache, NONE, Witness, put};
use crate::core::ids::BlockHash;

/// What one ended request left behind and nobody has asked for since, in chain order.
#[derive(Default)]
pub(super) struct Run {
    pub(super) blocks: Vec<u32>,
    /// Blocks before this one have been taken by later requests.
    pub(super) start: usize,
    /// Tokens of the blocks from `start` on.
    pub(super) content: u64,
    /// Tokens of the partial tail and the answer; reused before the blocks.
    pub(super) filler: u64,
    /// Later runs have greater stamps.
    pub(super) stamp: u64,
    pub(super) older: u32,
    pub(super) newer: u32,
}

impl Cache {
    pub(super) fn append(&mut self, mut run: Run) {
        self.stamp += 1;
        run.stamp = self.stamp;
        let at = put(&mut self.runs, &mut self.free_runs, run);
        let run = &mut self.runs[at as usize];
        run.older = self.newest;
        for &slot in &run.blocks {
            self.blocks[slot as usize].run = at;
        }
        match self.newest {
            NONE => self.oldest = at,
            newest => self.runs[newest as usize].newer = at,
        }
        self.newest = at;
    }

    pub(super) fn drop_if_empty(&mut self, at: u32) {
        let run = &mut self.runs[at as usize];
        if run.filler > 0 || run.start < run.blocks.len() {
            return;
        }
        let Run { older, newer, .. } = std::mem::take(run);
        match older {
            NONE => self.oldest = newer,
            older => self.runs[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.runs[newer as usize].older = older,
        }
        self.free_runs.push(at);
    }

    /// Evicts until `tokens` and `blocks` more fit, or nothing is left to evict.
    pub(super) fn make_room(&mut self, tokens: u64, blocks: usize, witness: &mut impl Witness) {
        let limit = self.bounds.tokens.unwrap_or(u64::MAX);
        // Chosen first and taken out of the table together: what is chosen does not hang on what the table's memory says.
        let mut evicted: SmallVec<[(u32, BlockHash); 16]> = SmallVec::new();
        while self.oldest != NONE {
            let over = self.held.saturating_add(tokens).saturating_sub(limit);
            let crowded = self.table.len() - evicted.len() + blocks > self.bounds.blocks;
            if over == 0 && !crowded {
                break;
            }
            evicted.extend(self.evict_one(over));
        }
        for (slot, hash) in evicted {
            self.remove_entry(slot, hash);
            witness.dropped(hash);
        }
    }

    /// Takes from the oldest run: filler first, and of it no more than needed, else its last block, which is answered and still in
    /// the table.
    fn evict_one(&mut self, over: u64) -> Option<(u32, BlockHash)> {
        let at = self.oldest;
        let run = &mut self.runs[at as usize];
        let mut evicted = None;
        if run.filler > 0 {
            // Filler costs no memory of ours: when only the bound on blocks presses, it goes whole.
            let taken = if over == 0 { run.filler } else { run.filler.min(over) };
            run.filler -= taken;
            self.held -= taken;
        } else if let Some(slot) = run.blocks.pop() {
            run.content -= u64::from(self.blocks[slot as usize].tokens);
            evicted = Some((slot, self.free(slot)));
            self.evicted += 1;
        }
        self.drop_if_empty(at);
        evicted
    }
}
