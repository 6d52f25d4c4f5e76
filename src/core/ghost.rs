//! Where evicted prefixes used to live. Only when every worker queues is this worth anything: a prefix that returns then goes
//! back to its former worker instead of pushing something out of another, so the fleet settles into a partition. Bounded:
//! the oldest memories go first.

use std::collections::VecDeque;
use std::hash::BuildHasherDefault;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::core::ids::{BlockHash, WorkerId};
use crate::core::index::AsIs;

#[derive(Default)]
struct Memory {
    home: HashMap<BlockHash, WorkerId, BuildHasherDefault<AsIs>>,
    order: VecDeque<BlockHash>,
}

pub struct Ghosts {
    /// Blocks remembered at most.
    bound: usize,
    memory: Mutex<Memory>,
}

impl Ghosts {
    pub fn new(bound: usize) -> Ghosts {
        Ghosts { bound, memory: Mutex::default() }
    }

    pub fn len(&self) -> usize {
        self.memory.lock().home.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `worker` has let go of these blocks.
    pub fn remember(&self, evicted: &[BlockHash], worker: WorkerId) {
        if evicted.is_empty() || self.bound == 0 {
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
        let [a, b, c] = [1, 2, 3].map(BlockHash);
        ghosts.remember(&[a, b], WorkerId(0));
        ghosts.remember(&[a], WorkerId(1));
        assert_eq!(homes(&ghosts, &[a, b, c]), [(0, 1), (1, 0)]);
        ghosts.remember(&[c], WorkerId(1));
        assert_eq!(homes(&ghosts, &[a, b, c]), [(1, 0), (2, 1)]);
        assert_eq!(ghosts.len(), 2);
    }
}
