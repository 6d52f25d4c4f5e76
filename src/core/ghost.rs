//! Where evicted prefixes used to live. Only when every worker queues is this worth anything: a prefix that returns then goes
//! back to its former worker instead of pushing something out of another, so the fleet settles into a partition. Nothing is
//! remembered, and no decision pays for it, while somebody was idle for long. Bounded: the oldest memories go first.

use std::collections::VecDeque;
use std::hash::BuildHasherDefault;
use std::sync::atomic::{AtomicU32, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::core::ids::{BlockHash, WorkerId};
use crate::core::index::AsIs;

/// Decisions in a row that found somebody idle, after which evictions are not remembered any more.
const ATTENTION: u32 = 4096;

#[derive(Default)]
struct Memory {
    home: HashMap<BlockHash, WorkerId, BuildHasherDefault<AsIs>>,
    order: VecDeque<BlockHash>,
}

pub struct Ghosts {
    /// Blocks remembered at most.
    bound: usize,
    /// Decisions left for which evictions are remembered.
    attention: AtomicU32,
    memory: Mutex<Memory>,
}

impl Ghosts {
    pub fn new(bound: usize) -> Ghosts {
        Ghosts { bound, attention: AtomicU32::new(0), memory: Mutex::default() }
    }

    pub fn len(&self) -> usize {
        self.memory.lock().home.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A decision was made, while every worker queued or not.
    pub fn decided(&self, crowded: bool) {
        let left = self.attention.load(Ordering::Relaxed);
        // Racing decisions may count as one: the number is no more than an order of magnitude.
        self.attention.store(if crowded { ATTENTION } else { left.saturating_sub(1) }, Ordering::Relaxed);
    }

    /// `worker` has let go of these blocks.
    pub fn remember(&self, evicted: &[BlockHash], worker: WorkerId) {
        if evicted.is_empty() || self.bound == 0 || self.attention.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut memory = self.memory.lock();
        for &hash in evicted {
            if memory.home.insert(hash, worker).is_none() {
                memory.order.push_back(hash);
            }
        }
        while memory.order.len() > self.bound {
            if let Some(hash) = memory.order.pop_front() {
                memory.home.remove(&hash);
            }
        }
    }

    /// Per worker, how many of the chain's blocks were last there; `visit` gets the place of each remembered block.
    pub fn visit(&self, chain: &[BlockHash], mut visit: impl FnMut(usize, WorkerId)) {
        let memory = self.memory.lock();
        for (place, hash) in chain.iter().enumerate() {
            if let Some(&worker) = memory.home.get(hash) {
                visit(place, worker);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn homes(ghosts: &Ghosts, chain: &[BlockHash]) -> Vec<(usize, u32)> {
        let mut seen = Vec::new();
        ghosts.visit(chain, |place, worker| seen.push((place, worker.0)));
        seen
    }

    #[test]
    fn the_last_home_counts_and_the_oldest_memory_goes() {
        let ghosts = Ghosts::new(2);
        ghosts.decided(true);
        let [a, b, c] = [1, 2, 3].map(BlockHash);
        ghosts.remember(&[a, b], WorkerId(0));
        ghosts.remember(&[a], WorkerId(1));
        assert_eq!(homes(&ghosts, &[a, b, c]), [(0, 1), (1, 0)]);
        ghosts.remember(&[c], WorkerId(1));
        assert_eq!(homes(&ghosts, &[a, b, c]), [(1, 0), (2, 1)]);
        assert_eq!(ghosts.len(), 2);
    }

    #[test]
    fn nothing_is_remembered_while_somebody_is_idle_for_long() {
        let ghosts = Ghosts::new(8);
        let [a, b, c] = [1, 2, 3].map(BlockHash);
        ghosts.remember(&[a], WorkerId(0));
        assert!(ghosts.is_empty());
        ghosts.decided(true);
        ghosts.decided(false);
        ghosts.remember(&[b], WorkerId(0));
        (0..ATTENTION).for_each(|_| ghosts.decided(false));
        ghosts.remember(&[c], WorkerId(0));
        assert_eq!(homes(&ghosts, &[a, b, c]), [(1, 0)]);
    }
}
