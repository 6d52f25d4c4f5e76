//! A cache without end, as far back as bounded memory goes: which blocks were ever asked for.

use std::collections::HashSet;
use std::hash::BuildHasherDefault;

use crate::core::ids::BlockHash;
use crate::core::index::AsIs;

type Blocks = HashSet<BlockHash, BuildHasherDefault<AsIs>>;

/// In two generations: the younger one, once it is half of all, becomes the older one, whose blocks are forgotten unless they were
/// asked for meanwhile.
pub(super) struct Ideal {
    young: Blocks,
    old: Blocks,
    /// Of both together.
    most: usize,
}

impl Ideal {
    /// Goes back over `most` blocks at least half, and never holds more.
    pub(super) fn new(most: usize) -> Ideal {
        Ideal { young: Blocks::default(), old: Blocks::default(), most }
    }

    /// How many of the chain's blocks, from its first on, were asked for before; from now on all were.
    pub(super) fn ask(&mut self, chain: &[BlockHash]) -> usize {
        let known =
            chain.iter().take_while(|hash| self.young.contains(hash) || self.old.contains(hash)).count();
        for &hash in chain {
            if self.young.len() >= self.most / 2 && !self.young.contains(&hash) {
                std::mem::swap(&mut self.old, &mut self.young);
                self.young.clear();
            }
            self.young.insert(hash);
        }
        known
    }

    pub(super) fn clear(&mut self) {
        *self = Ideal::new(self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(prefix: u64, blocks: u64) -> Vec<BlockHash> {
        (0..blocks).map(|at| BlockHash((prefix << 32) | at)).collect()
    }

    #[test]
    fn what_was_asked_for_is_known_as_far_as_it_was() {
        let mut ideal = Ideal::new(100);
        assert_eq!([4, 6, 6, 2].map(|blocks| ideal.ask(&chain(1, blocks))), [0, 4, 6, 2]);
        ideal.clear();
        assert_eq!(ideal.ask(&chain(1, 4)), 0);
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let mut ideal = Ideal::new(100);
        for other in 0..50 {
            assert_eq!(ideal.ask(&chain(7, 10)), if other == 0 { 0 } else { 10 });
            assert_eq!(ideal.ask(&chain(100 + other, 10)), 0);
            assert!(ideal.young.len() + ideal.old.len() <= 100);
        }
        assert_eq!(ideal.ask(&chain(100, 10)), 0, "long forgotten");
    }
}
