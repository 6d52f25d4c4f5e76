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
    // Spread over all bits as real hashes are, and so over the map's shards.
    (0..len as u64).map(|at| BlockHash((stem * 1_000 + at).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

proptest! {
    /// Workers hold whole prefixes, as their caches do; depths grow and shrink at random.
    #[test]
    fn agrees_with_asking_every_worker(
        steps in proptest::collection::vec((prop_oneof![0..6u32, 0..200u32], 0..3u64, 0..70usize), 1..150),
        lookups in proptest::collection::vec((0..3u64, 0..70usize), 1..20),
    ) {
        let index = Index::default();
        let mut held: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        let mut depths: BTreeMap<(u32, u64), usize> = BTreeMap::new();
        for (worker, stem, depth) in steps {
            let now = depths.entry((worker, stem)).or_default();
            let set = held.entry(worker).or_default();
            let chain = chain(stem, 70);
            let (grown, shrunk) = (chain.get(*now..depth), chain.get(depth..*now));
            index.add(grown.unwrap_or_default(), WorkerId(worker));
            set.extend(grown.unwrap_or_default().iter().map(|hash| hash.0));
            index.remove(shrunk.unwrap_or_default(), WorkerId(worker));
            shrunk.unwrap_or_default().iter().for_each(|hash| {
                set.remove(&hash.0);
            });
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
    index.remove(&[hash], a);
    index.add(&[hash], a);
    index.add(&[hash], a);
    index.remove(&[hash], b);
    assert_eq!(index.depths(&[hash])[..], [(a, 1)]);
    index.add(&[hash], b);
    index.add(&[hash], b);
    index.remove(&[hash], a);
    index.remove(&[hash], a);
    assert_eq!(index.depths(&[hash])[..], [(b, 1)]);
    index.remove(&[hash], b);
    assert!(index.is_empty());
}

#[test]
fn an_empty_chain_matches_nothing() {
    let index = Index::default();
    index.add(&[BlockHash(1)], WorkerId(0));
    assert!(index.depths(&[]).is_empty());
}

/// As a look-up may see it while others change the index, or if two prefixes have one hash.
#[test]
fn more_holders_further_on_hold_up_nothing() {
    let index = Index::default();
    let [a, b] = [WorkerId(0), WorkerId(1)];
    let [first, second, third] = [1, 2, 3].map(BlockHash);
    index.add(&[first, second, third], a);
    index.add(&[second, third], b);
    assert_eq!(index.depths(&[first, second])[..], [(a, 2)]);
    assert_eq!(index.depths(&[first, second, third])[..], [(a, 3)]);
    index.remove(&[second], a);
    assert_eq!(index.depths(&[first, second, third])[0].0, a);
}

proptest! {
    #[test]
    fn a_lookup_ends_whoever_holds_what(
        held in proptest::collection::vec((0..4u32, 0..40u64), 0..120),
        len in 0..40usize,
    ) {
        let index = Index::default();
        held.iter().for_each(|&(worker, hash)| index.add(&[BlockHash(hash)], WorkerId(worker)));
        let chain: Vec<BlockHash> = (0..len as u64).map(BlockHash).collect();
        for (worker, depth) in index.depths(&chain) {
            prop_assert!((1..=len).contains(&depth));
            prop_assert!(held.contains(&(worker.0, 0)));
        }
    }
}
