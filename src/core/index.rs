//! Who is believed to hold which block: one map from block hash to the set of workers, so that a look-up costs the same in
//! a fleet of four and of a thousand. It follows the per-worker [`caches`](crate::core::cache) and never leads them.
//!
//! Caches are closed under prefixes, so along a chain the sets only shrink, and two places with equally many holders have
//! the same holders: a look-up jumps from change to change instead of walking. While others change the index it may see neither
//! order, and answers roughly; it always ends.

use std::hash::{BuildHasherDefault, Hasher};

use dashmap::{DashMap, SharedValue};
use smallvec::{SmallVec, smallvec};

use crate::core::ids::{BlockHash, WorkerId};

/// Block hashes are uniform already (keyed blake3): hashing them again would only cost time.
#[derive(Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// A set of worker slots, never empty. Nearly all blocks have few holders, or a fleet has few workers, and need no allocation.
#[derive(Clone, Debug)]
enum Holders {
    /// One bit for each of the first slots, and nobody beyond.
    Low(u64),
    /// The first `count` of `who`, in no order.
    Few {
        count: u8,
        who: [u32; FEW],
    },
    Many(Box<Members>),
}

/// Slots that have a bit in `Low`.
const LOW: u32 = u64::BITS;
/// As many as there is room for beside a pointer's.
const FEW: usize = 3;
/// `Many` become a few again only here, so that one who comes and goes moves nothing.
const FEW_AGAIN: usize = 2;

const _: () = assert!(size_of::<Holders>() == 2 * size_of::<u64>());

#[derive(Clone, Debug, Default)]
struct Members {
    count: usize,
    bits: SmallVec<[u64; 2]>,
}

impl Members {
    fn set(&mut self, worker: u32, member: bool) {
        let (word, mask) = (worker as usize / 64, 1u64 << (worker % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        if (self.bits[word] & mask != 0) != member {
            self.bits[word] ^= mask;
            self.count = if member { self.count + 1 } else { self.count - 1 };
        }
    }

    fn has(&self, worker: u32) -> bool {
        self.bits.get(worker as usize / 64).is_some_and(|word| word & (1 << (worker % 64)) != 0)
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.bits.iter().zip(0u32..).flat_map(|(&word, at)| ones(word).map(move |bit| at * 64 + bit))
    }
}

/// The places of a word's bits that are set.
fn ones(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}

impl Holders {
    fn one(worker: u32) -> Holders {
        match worker {
            0..LOW => Holders::Low(1 << worker),
            _ => Holders::Few { count: 1, who: [worker; FEW] },
        }
    }

    /// More than there is a bit for.
    fn of(all: &[u32]) -> Holders {
        if all.len() <= FEW {
            let mut who = [0; FEW];
            who[..all.len()].copy_from_slice(all);
            return Holders::Few { count: all.len() as u8, who };
        }
        let mut members = Members::default();
        all.iter().for_each(|who| members.set(*who, true));
        Holders::Many(Box::new(members))
    }

    fn count(&self) -> usize {
        match self {
            Holders::Low(bits) => bits.count_ones() as usize,
            Holders::Few { count, .. } => usize::from(*count),
            Holders::Many(members) => members.count,
        }
    }

    fn has(&self, worker: u32) -> bool {
        match self {
            Holders::Low(bits) => worker < LOW && bits & (1 << worker) != 0,
            Holders::Few { count, who } => who[..usize::from(*count)].contains(&worker),
            Holders::Many(members) => members.has(worker),
        }
    }

    fn all(&self) -> SmallVec<[u32; 16]> {
        match self {
            Holders::Low(bits) => ones(*bits).collect(),
            Holders::Few { count, who } => SmallVec::from_slice(&who[..usize::from(*count)]),
            Holders::Many(members) => members.iter().collect(),
        }
    }

    fn add(&mut self, worker: u32) {
        if self.has(worker) {
            return;
        }
        match self {
            Holders::Low(bits) if worker < LOW => *bits |= 1 << worker,
            Holders::Few { count, who } if usize::from(*count) < FEW => {
                who[usize::from(*count)] = worker;
                *count += 1;
            }
            Holders::Low(_) | Holders::Few { .. } => {
                let mut all = self.all();
                all.push(worker);
                *self = Holders::of(&all);
            }
            Holders::Many(members) => members.set(worker, true),
        }
    }

    /// Answers whether nobody is left.
    fn remove(&mut self, worker: u32) -> bool {
        match self {
            Holders::Low(bits) => {
                *bits &= if worker < LOW { !(1 << worker) } else { u64::MAX };
                *bits == 0
            }
            Holders::Few { count, who } => {
                let Some(at) = who[..usize::from(*count)].iter().position(|who| *who == worker) else {
                    return false;
                };
                *count -= 1;
                who[at] = who[usize::from(*count)];
                *count == 0
            }
            Holders::Many(members) => {
                members.set(worker, false);
                if members.count == FEW_AGAIN {
                    *self = Holders::of(&self.all());
                }
                false
            }
        }
    }
}

/// A worker and how many of the chain's blocks, from the first on, it is believed to hold.
pub type Depth = (WorkerId, usize);
pub type Depths = SmallVec<[Depth; 16]>;

#[derive(Default)]
pub struct Index {
    holders: DashMap<BlockHash, Holders, BuildHasherDefault<AsIs>>,
}

impl Index {
    /// Memory of the map, by its size; blocks with many holders take some more.
    pub fn bytes(&self) -> usize {
        self.holders.capacity() * (size_of::<(BlockHash, Holders)>() + 1)
    }

    /// Distinct blocks that somebody holds.
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// `worker` has taken up these blocks.
    pub fn add(&self, hashes: &[BlockHash], worker: WorkerId) {
        self.by_shard(hashes, |at, hashes| {
            let mut shard = self.holders.shards()[at].write();
            for &hash in hashes {
                match shard.get_mut(hash.0, |(key, _)| *key == hash) {
                    Some((_, holders)) => holders.get_mut().add(worker.0),
                    None => {
                        let entry = (hash, SharedValue::new(Holders::one(worker.0)));
                        shard.insert(hash.0, entry, |(key, _)| key.0);
                    }
                }
            }
        });
    }

    /// `worker` has let go of these blocks.
    pub fn remove(&self, hashes: &[BlockHash], worker: WorkerId) {
        self.by_shard(hashes, |at, hashes| {
            let mut shard = self.holders.shards()[at].write();
            for &hash in hashes {
                let held = shard.get_mut(hash.0, |(key, _)| *key == hash);
                if held.is_some_and(|(_, holders)| holders.get_mut().remove(worker.0)) {
                    shard.remove_entry(hash.0, |(key, _)| *key == hash);
                }
            }
        });
    }

    /// Hands out the blocks by the map's shard they belong to, so that each is locked once. In between nothing orders one block's
    /// reads of memory after another's, and the processor waits for many of them at a time.
    fn by_shard(&self, hashes: &[BlockHash], mut act: impl FnMut(usize, &[BlockHash])) {
        if hashes.is_empty() {
            return;
        }
        let shard = |hash: &BlockHash| self.holders.determine_shard(hash.0 as usize);
        // A counting sort: there are few shards, and two thousand blocks in the longest prompts.
        let mut ends: SmallVec<[usize; 128]> = smallvec![0; self.holders.shards().len() + 1];
        hashes.iter().for_each(|hash| ends[shard(hash) + 1] += 1);
        (1..ends.len()).for_each(|at| ends[at] += ends[at - 1]);
        let mut sorted: SmallVec<[BlockHash; 128]> = smallvec![BlockHash(0); hashes.len()];
        for hash in hashes {
            let end = &mut ends[shard(hash)];
            sorted[*end] = *hash;
            *end += 1;
        }
        let mut start = 0;
        for (at, &end) in ends.iter().enumerate() {
            if start < end {
                act(at, &sorted[start..end]);
            }
            start = end;
        }
    }

    /// The depth of every worker that holds at least the chain's first block, in no particular order.
    pub fn depths(&self, chain: &[BlockHash]) -> Depths {
        let Some(mut current) = chain.first().and_then(|first| self.holders_of(*first)) else {
            return Depths::new();
        };
        let mut found = Depths::with_capacity(current.len());
        let mut at = 0;
        loop {
            let change = self.next_change(chain, at, current.len());
            let next = chain.get(change).and_then(|hash| self.holders.get(hash));
            let Some(next) = next else {
                found.extend(current.iter().map(|&worker| (WorkerId(worker), change)));
                return found;
            };
            current.retain(|&mut worker| {
                let stays = next.has(worker);
                if !stays {
                    found.push((WorkerId(worker), change));
                }
                stays
            });
            if current.is_empty() {
                return found;
            }
            at = change;
        }
    }

    fn holders_of(&self, hash: BlockHash) -> Option<SmallVec<[u32; 16]>> {
        self.holders.get(&hash).map(|holders| holders.all())
    }

    fn count(&self, hash: BlockHash) -> usize {
        self.holders.get(&hash).map_or(0, |holders| holders.count())
    }

    /// The first place after `at` that has fewer holders than `count`, or the chain's end: doubling steps, then bisection. More
    /// holders are no change: others may take blocks up, and let them go, while this looks.
    fn next_change(&self, chain: &[BlockHash], at: usize, count: usize) -> usize {
        let fewer = |place: usize| self.count(chain[place]) < count;
        let mut same = at;
        let mut step = 1;
        let mut differs = loop {
            let probe = (same + step).min(chain.len() - 1);
            if probe == same {
                return chain.len();
            }
            if fewer(probe) {
                break probe;
            }
            same = probe;
            step *= 2;
        };
        while differs - same > 1 {
            let middle = same + (differs - same) / 2;
            match fewer(middle) {
                true => differs = middle,
                false => same = middle,
            }
        }
        differs
    }
}

#[cfg(test)]
mod tests;
