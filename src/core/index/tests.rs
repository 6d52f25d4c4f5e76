//! The index against a map of sets under random operations.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Every worker asked in turn, block by block.
fn slow_depths(held: &BTreeMap<u32, BTreeSet<u64>>, chain: &[BlockHash]) -> BTreeMap<u32, usize> {
    let depth = |set: &BTreeSet<u64>| chain.iter().take_while(|hash| set.contains(&hash.0)).count();
    held.iter().map(|(&worker, set)| (worker, depth(set))).filter(|(_, depth)| *depth > 0).collect()
}

fn chain(stem: u64, len: usize) -> Vec<BlockHash> {
    (0..len as u64).map(|at| BlockHash(stem * 1_000 + at)).collect()
}

proptest! {
    /// Workers hold whole prefixes, as their caches do; depths grow and shrink at random.
    #[test]
    fn agrees_with_asking_every_worker(
        steps in proptest::collection::vec((0..200u32, 0..3u64, 0..70usize), 1..150),
        lookups in proptest::collection::vec((0..3u64, 0..70usize), 1..20),
    ) {
        let index = Index::default();
        let mut held: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let mut depths: BTreeMap<(u32, u64), usize> = BTreeMap::new();
        for (worker, stem, depth) in steps {
            let now = depths.entry((worker, stem)).or_default();
            let set = held.entry(worker).or_default();
            for hash in chain(stem, 70).into_iter().skip(*now).take(depth.saturating_sub(*now)) {
                index.add(hash, WorkerId(worker));
                set.insert(hash.0);
            }
            for hash in chain(stem, *now).into_iter().skip(depth) {
                index.remove(hash, WorkerId(worker));
                set.remove(&hash.0);
            }
            *now = depth;
        }
        for (stem, len) in lookups {
            let chain = chain(stem, len);
            let fast: BTreeMap<u32, usize> =
                index.depths(&chain).into_iter().map(|(worker, depth)| (worker.0, depth)).collect();
            prop_assert_eq!(fast, slow_depths(&held, &chain));
        }
        let distinct: BTreeSet<u64> = held.values().flatten().copied().collect();
        prop_assert_eq!(index.len(), distinct.len());
    }
}

#[test]
fn adding_twice_and_removing_what_is_not_there_change_nothing() {
    let index = Index::default();
    let [a, b] = [WorkerId(3), WorkerId(700)];
    let hash = BlockHash(9);
    index.remove(hash, a);
    index.add(hash, a);
    index.add(hash, a);
    index.remove(hash, b);
    assert_eq!(index.depths(&[hash]), [(a, 1)]);
    index.add(hash, b);
    index.add(hash, b);
    index.remove(hash, a);
    index.remove(hash, a);
    assert_eq!(index.depths(&[hash]), [(b, 1)]);
    index.remove(hash, b);
    assert!(index.is_empty());
}

#[test]
fn an_empty_chain_matches_nothing() {
    let index = Index::default();
    index.add(BlockHash(1), WorkerId(0));
    assert!(index.depths(&[]).is_empty());
}
