//! The prompt prefixes that are asked for most, so that the operator can see where they live. A bounded count (as Metwally's
//! space-saving does it: who comes takes the place, and the count, of the least); keyed hashes only, never text.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::Proxy;
use crate::core::blocks::Chain;
use crate::core::ids::BlockHash;
use crate::core::index::AsIs;

/// Prefixes that are counted at a time.
const COUNTED: usize = 256;
/// The block that stands for a prompt's prefix, or its last if it is shorter: about a thousand tokens in, behind what short system
/// prompts share.
const KEY_BLOCK: usize = 16;

struct Counted {
    requests: u64,
    /// Of the last request.
    hashes: Arc<[BlockHash]>,
}

#[derive(Default)]
pub struct Prefixes(Mutex<HashMap<BlockHash, Counted, BuildHasherDefault<AsIs>>>);

impl Prefixes {
    /// A request has come with this prompt.
    pub fn saw(&self, chain: &Chain) {
        let hashes = &chain.hashes;
        let Some(key) = hashes.get(KEY_BLOCK - 1).or(hashes.last()) else { return };
        let mut counted = self.0.lock();
        if let Some(known) = counted.get_mut(key) {
            known.requests += 1;
            known.hashes = hashes.clone();
            return;
        }
        let mut requests = 1;
        if counted.len() >= COUNTED {
            let least = counted.iter().min_by_key(|(_, known)| known.requests).map(|(key, _)| *key);
            requests += least.and_then(|least| counted.remove(&least)).map_or(0, |gone| gone.requests);
        }
        counted.insert(*key, Counted { requests, hashes: hashes.clone() });
    }

    /// The `most` that were asked for most: hash, requests, and the blocks of the last one.
    fn most_asked(&self, most: usize) -> Vec<(BlockHash, u64, Arc<[BlockHash]>)> {
        let counted = self.0.lock();
        let mut all: Vec<_> =
            counted.iter().map(|(key, known)| (*key, known.requests, known.hashes.clone())).collect();
        all.sort_by_key(|(key, requests, _)| (std::cmp::Reverse(*requests), *key));
        all.truncate(most);
        all
    }
}

/// A prefix and who is believed to hold it.
#[derive(Clone, Debug, Serialize)]
pub struct Home {
    /// Hash of its first thousand tokens or so.
    pub prefix: String,
    /// Since the process started, at most.
    pub requests: u64,
    /// Full blocks of the last prompt that began with it.
    pub blocks: usize,
    pub holders: Vec<Holder>,
}

/// A worker and how many of those blocks, from the first on, it is believed to hold.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    pub worker: String,
    pub blocks: usize,
}

impl Proxy {
    /// Where the prefixes live that are asked for most.
    pub fn homes(&self, most: usize) -> Vec<Home> {
        let fleet = self.fleet.snapshot();
        let home = |(key, requests, hashes): (BlockHash, u64, Arc<[BlockHash]>)| {
            let mut holders: Vec<Holder> = self
                .planner
                .holders(&hashes)
                .into_iter()
                .filter_map(|(worker, blocks)| {
                    Some(Holder { worker: fleet.worker(worker)?.url.label(), blocks })
                })
                .collect();
            holders.sort_by(|a, b| b.blocks.cmp(&a.blocks).then_with(|| a.worker.cmp(&b.worker)));
            Home { prefix: format!("{:016x}", key.0), requests, blocks: hashes.len(), holders }
        };
        self.prefixes.most_asked(most).into_iter().map(home).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(root: u64, blocks: u64) -> Chain {
        Chain::even((0..blocks).map(|at| BlockHash(root * 1_000 + at)).collect(), 0)
    }

    #[test]
    fn prompts_count_by_what_they_begin_with() {
        let prefixes = Prefixes::default();
        prefixes.saw(&chain(1, 20));
        prefixes.saw(&chain(1, 24));
        prefixes.saw(&chain(2, 3));
        prefixes.saw(&chain(3, 0));
        let most = prefixes.most_asked(10);
        let seen: Vec<_> =
            most.iter().map(|(key, requests, hashes)| (key.0, *requests, hashes.len())).collect();
        assert_eq!(seen, [(1_015, 2, 24), (2_002, 1, 3)]);
    }

    #[test]
    fn what_is_hot_stays_among_many_that_come_once() {
        let prefixes = Prefixes::default();
        for serial in 0..10_000 {
            prefixes.saw(&chain(1 + serial % 3, 4));
            prefixes.saw(&chain(100 + serial, 4));
        }
        let mut hot: Vec<u64> = prefixes.most_asked(3).iter().map(|(key, ..)| key.0 / 1_000).collect();
        hot.sort();
        assert_eq!(hot, [1, 2, 3]);
        assert_eq!(prefixes.most_asked(usize::MAX).len(), COUNTED);
    }
}
