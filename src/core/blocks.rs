//! From canonical prompt bytes to a chain of block hashes. A block is a fixed run of canonical bytes, longer further into a
//! prompt ([`Widths`]); its hash covers everything before it too, so equal hashes mean equal prefixes.
//!
//! Each block is digested by keyed BLAKE3, sixteen blocks side by side, and the digests are chained by a polynomial whose
//! multiplier is as secret as the key. Chaining by BLAKE3 as well would be serial and cost twice as much as all digests
//! together. Nothing is lost by it: the digests are unknown to whoever lacks the key, so two different prefixes are two
//! different polynomials with a secret argument. Hashes are cut to 64 bits: a collision can at worst send a request to
//! the wrong worker, and nobody outside can make one.

use std::cell::Cell;
use std::sync::Arc;

use blake3::IncrementCounter;
use blake3::platform::Platform;
use smallvec::SmallVec;

use crate::core::ids::BlockHash;

/// Canonical bytes in a block by default: about 64 tokens of English, four blocks of vLLM's default 16.
pub const DEFAULT_BLOCK_BYTES: usize = 256;

/// The secret under which blocks are hashed: random per process, or shared by replicas through the config.
#[derive(Clone)]
pub struct HashKey(pub [u8; 32]);

/// How long a chain's blocks are, in units of its shortest. A long prompt's later blocks are wide: the deeper in a prompt, the
/// smaller the share of it that one block is, and look-ups, claims and memory cost by the block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Blocks of one unit, before the wide ones.
    pub narrow: usize,
    /// Units in a wide block, at least 1.
    pub wide: usize,
}

impl Widths {
    /// All blocks are equally long.
    pub const EVEN: Widths = Widths { narrow: usize::MAX, wide: 1 };
    /// What [`ChainBuilder`] makes: the first 8,000 tokens or so in narrow blocks, where one wide one is 3 % of what is before it.
    pub const GROWING: Widths = Widths { narrow: 128, wide: 4 };
    /// Units in the block at `place`.
    pub fn at(self, place: usize) -> usize {
        if place < self.narrow { 1 } else { self.wide }
    }

    /// Units in the first `depth` blocks.
    pub fn within(self, depth: usize) -> usize {
        depth + (self.wide - 1) * depth.saturating_sub(self.narrow)
    }

    /// The same chain in blocks of one unit: a wide block becomes as many, of which the last is the block itself.
    pub fn evened(self, hashes: &[BlockHash]) -> Arc<[BlockHash]> {
        let units = |(place, hash): (usize, &BlockHash)| {
            let hash = *hash;
            (0..self.at(place) as u64).rev().map(move |left| BlockHash(hash.0.wrapping_add(left)))
        };
        hashes.iter().enumerate().flat_map(units).collect()
    }

    /// Whether a block ends with the unit at `unit`.
    fn ends_at(self, unit: usize) -> bool {
        unit < self.narrow || (unit - self.narrow) % self.wide == self.wide - 1
    }
}

/// The hashes of a prompt's full blocks, in order, and how many canonical bytes it had in all.
#[derive(Clone, Debug)]
pub struct Chain {
    pub hashes: Arc<[BlockHash]>,
    pub widths: Widths,
    pub bytes: u64,
}

impl Chain {
    /// The chain of a request whose prompt cannot be read: it matches nothing.
    pub fn empty() -> Chain {
        Chain::even(Arc::default(), 0)
    }

    /// Of blocks that are equally long.
    pub fn even(hashes: Arc<[BlockHash]>, bytes: u64) -> Chain {
        Chain { hashes, widths: Widths::EVEN, bytes }
    }

    /// Units in the first `depth` blocks.
    pub fn units(&self, depth: usize) -> usize {
        self.widths.within(depth)
    }
}

/// Blocks digested at once: as many as the widest instructions in use (AVX-512) take side by side.
const LANES: usize = 16;

thread_local! {
    /// The memory of a thread's last batch, empty, for its next one: most prompts are shorter than what it costs to get it anew.
    static BATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Builds a [`Chain`] from canonical bytes that arrive in pieces of any size. Large pieces are hashed where they lie.
pub struct ChainBuilder {
    digester: Digester,
    multiplier: Field,
    state: Field,
    /// Less than one batch, waiting for its rest.
    pending: Vec<u8>,
    hashes: SmallVec<[BlockHash; 32]>,
    units: usize,
    bytes: u64,
}

impl ChainBuilder {
    /// `namespace` roots the chain: prompts in different namespaces share no block. `block_bytes`, the length of the narrow blocks, is
    /// at least 1; 64, 128, 256, 512 and 1,024 are the fast ones.
    pub fn new(key: &HashKey, block_bytes: usize, namespace: &[u8]) -> ChainBuilder {
        ChainBuilder::rooted(key, block_bytes, *blake3::keyed_hash(&key.0, namespace).as_bytes())
    }

    /// As [`ChainBuilder::new`], from the namespace's digest under the same key. One half of it is the state to start from, the
    /// other the multiplier.
    pub(super) fn rooted(key: &HashKey, block_bytes: usize, root: Digest) -> ChainBuilder {
        let digester = Digester::new(key, block_bytes.max(1));
        let (state, multiplier) = Field::halves_of(&root);
        ChainBuilder {
            multiplier,
            state,
            pending: BATCH.take(),
            hashes: SmallVec::new(),
            units: 0,
            bytes: 0,
            digester,
        }
    }

    pub fn update(&mut self, mut piece: &[u8]) {
        self.bytes += piece.len() as u64;
        let batch = self.digester.batch_bytes();
        while !piece.is_empty() {
            if self.pending.is_empty() && piece.len() >= batch {
                let (now, later) = piece.split_at(batch);
                self.absorb(now);
                piece = later;
                continue;
            }
            let room = batch - self.pending.len();
            let (now, later) = piece.split_at(room.min(piece.len()));
            self.pending.extend_from_slice(now);
            piece = later;
            if self.pending.len() == batch {
                self.absorb_pending();
            }
        }
    }

    /// The chain of all full blocks; a partial block at the end has no hash, as in vLLM.
    pub fn finish(mut self) -> Chain {
        self.absorb_pending();
        BATCH.set(self.pending);
        Chain { hashes: Arc::from(self.hashes.as_slice()), widths: Widths::GROWING, bytes: self.bytes }
    }

    fn absorb_pending(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        self.absorb(&pending);
        pending.clear();
        self.pending = pending;
    }

    /// Chains the full blocks of at most one batch.
    fn absorb(&mut self, blocks: &[u8]) {
        for digest in self.digester.digest(blocks).iter().take(blocks.len() / self.digester.block_bytes) {
            self.state = self.state.times_plus(self.multiplier, Field::halves_of(digest).0);
            // A hash covers all before it, so the last unit's stands for a wide block.
            if Widths::GROWING.ends_at(self.units) {
                self.hashes.push(self.state.hash());
            }
            self.units += 1;
        }
    }
}

type Digest = [u8; 32];

/// Keyed BLAKE3 of many blocks of one length.
struct Digester {
    key: [u8; 32],
    words: [u32; 8],
    platform: Platform,
    block_bytes: usize,
}

impl Digester {
    fn new(key: &HashKey, block_bytes: usize) -> Digester {
        let (quads, _) = key.0.as_chunks::<4>();
        let words = std::array::from_fn(|at| quads.get(at).map_or(0, |quad| u32::from_le_bytes(*quad)));
        Digester { key: key.0, words, platform: Platform::detect(), block_bytes }
    }

    fn batch_bytes(&self) -> usize {
        self.block_bytes * LANES
    }

    /// The digests of the full blocks in `blocks`, at most [`LANES`] of them; what lies behind them in the answer is void.
    fn digest(&self, blocks: &[u8]) -> [Digest; LANES] {
        match self.block_bytes {
            64 => self.side_by_side::<64>(blocks),
            128 => self.side_by_side::<128>(blocks),
            256 => self.side_by_side::<256>(blocks),
            512 => self.side_by_side::<512>(blocks),
            1024 => self.side_by_side::<1024>(blocks),
            _ => self.one_by_one(blocks),
        }
    }

    /// What the public interface of `blake3` offers; [`Digester::side_by_side`] gives the same six times faster.
    fn one_by_one(&self, blocks: &[u8]) -> [Digest; LANES] {
        let mut digests = [[0; 32]; LANES];
        for (digest, block) in digests.iter_mut().zip(blocks.chunks_exact(self.block_bytes)) {
            *digest = *blake3::keyed_hash(&self.key, block).as_bytes();
        }
        digests
    }

    /// `Platform` is public but undocumented in `blake3`, and may change in a new minor version. It saves 24 of 29 us on a
    /// 32 KB prompt. Should it go, [`Digester::one_by_one`] alone gives the same hashes.
    fn side_by_side<const N: usize>(&self, blocks: &[u8]) -> [Digest; LANES] {
        // The flags of the BLAKE3 paper (section 2.1): every block is a message of one chunk, hashed under a key.
        const CHUNK_START: u8 = 1;
        const CHUNK_END: u8 = 2;
        const ROOT: u8 = 8;
        const KEYED_HASH: u8 = 16;
        let (blocks, _) = blocks.as_chunks::<N>();
        let mut digests = [[0; 32]; LANES];
        let count = blocks.len().min(LANES);
        let Some(last) = count.checked_sub(1) else { return digests };
        let lanes: [&[u8; N]; LANES] = std::array::from_fn(|lane| &blocks[lane.min(last)]);
        self.platform.hash_many(
            &lanes[..count],
            &self.words,
            0,
            IncrementCounter::No,
            KEYED_HASH,
            CHUNK_START,
            CHUNK_END | ROOT,
            &mut digests.as_flattened_mut()[..count * 32],
        );
        digests
    }
}

/// A number modulo 2^127 - 1. In a prime field a polynomial of degree n has at most n roots, so that no prompts, however made,
/// collide for more than a vanishing share of keys; modulo a power of two there are prompts that collide for every key.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
struct Field(u128);

impl Field {
    const MODULUS: u128 = (1 << 127) - 1;

    fn halves_of(digest: &Digest) -> (Field, Field) {
        let (halves, _) = digest.as_chunks::<16>();
        let half = |at: usize| Field::reduced(u128::from_le_bytes(halves[at]));
        (half(0), half(1))
    }

    /// 2^127 is 1 here, so the top bit comes in again at the bottom: the same number, at most 2^127.
    fn folded(number: u128) -> u128 {
        (number & Field::MODULUS) + (number >> 127)
    }

    fn reduced(number: u128) -> Field {
        let folded = Field::folded(number);
        Field(if folded >= Field::MODULUS { folded - Field::MODULUS } else { folded })
    }

    /// No sum in it reaches 2^128: both factors and the addend are below 2^127 - 1, and `high`, their product over 2^128, below 2^126.
    fn times_plus(self, other: Field, addend: Field) -> Field {
        let (a, b) = (self.halves(), other.halves());
        let middle = a.0 * b.1 + a.1 * b.0;
        let (low, carried) = (a.1 * b.1).overflowing_add(middle << 64);
        let high = a.0 * b.0 + (middle >> 64) + u128::from(carried);
        let product = Field::folded(Field::folded(low) + (high << 1));
        Field::reduced(product + addend.0)
    }

    fn halves(self) -> (u128, u128) {
        (self.0 >> 64, self.0 & u128::from(u64::MAX))
    }

    fn hash(self) -> BlockHash {
        BlockHash(self.halves().1 as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> HashKey {
        HashKey(std::array::from_fn(|at| at as u8 * 7 + 1))
    }

    fn chain(block_bytes: usize, namespace: &[u8], bytes: &[u8]) -> Vec<u64> {
        let mut builder = ChainBuilder::new(&key(), block_bytes, namespace);
        builder.update(bytes);
        let chain = builder.finish();
        assert_eq!(chain.bytes, bytes.len() as u64);
        chain.hashes.iter().map(|hash| hash.0).collect()
    }

    /// The definition, with digests from the public interface and schoolbook arithmetic: multiply by doubling and adding.
    fn slow_chain(block_bytes: usize, namespace: &[u8], bytes: &[u8]) -> Vec<u64> {
        let number = |digest: &[u8]| u128::from_le_bytes(digest[..16].try_into().unwrap()) % Field::MODULUS;
        let add = |a: u128, b: u128| (a + b) % Field::MODULUS;
        let multiply = |a: u128, b: u128| {
            (0..128).rev().fold(0, |sum, bit| {
                let twice = add(sum, sum);
                if b >> bit & 1 == 1 { add(twice, a) } else { twice }
            })
        };
        let root = blake3::keyed_hash(&key().0, namespace);
        let (mut state, multiplier) = (number(root.as_bytes()), number(&root.as_bytes()[16..]));
        let mut hashes = Vec::new();
        for block in bytes.chunks_exact(block_bytes) {
            let digest = blake3::keyed_hash(&key().0, block);
            state = add(multiply(state, multiplier), number(digest.as_bytes()));
            hashes.push(state as u64);
        }
        // Of the units after the first 128, each fourth.
        let wide = hashes.split_off(hashes.len().min(128));
        hashes.extend(wide.iter().skip(3).step_by(4));
        hashes
    }

    #[test]
    fn a_prefix_has_the_first_hashes_of_the_whole() {
        let bytes: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
        let whole = chain(256, b"m", &bytes);
        assert_eq!(whole.len(), 78, "the partial block at the end has no hash");
        for length in [0, 1, 255, 256, 257, 4095, 4096, 4097, 16_384, 19_968] {
            assert_eq!(chain(256, b"m", &bytes[..length]), whole[..length / 256]);
        }
    }

    #[test]
    fn later_blocks_are_wide() {
        let units: Vec<usize> = [0, 1, 128, 129, 130].map(|depth| Widths::GROWING.within(depth)).into();
        assert_eq!(units, [0, 1, 128, 132, 136]);
        for depth in 0..300 {
            let (before, here) = (Widths::GROWING.within(depth), Widths::GROWING.at(depth));
            assert_eq!(Widths::GROWING.within(depth + 1), before + here);
            assert_eq!((0..before + here).filter(|&unit| Widths::GROWING.ends_at(unit)).count(), depth + 1);
        }
        assert_eq!((Widths::EVEN.within(1_000_000), Widths::EVEN.at(1_000_000)), (1_000_000, 1));
    }

    #[test]
    fn one_changed_byte_changes_its_block_and_all_after_it() {
        let bytes = vec![b'a'; 8192];
        let mut changed = bytes.clone();
        changed[5000] = b'b';
        let (left, right) = (chain(256, b"m", &bytes), chain(256, b"m", &changed));
        let first = 5000 / 256;
        assert_eq!(left[..first], right[..first]);
        assert!(left[first..].iter().zip(&right[first..]).all(|(l, r)| l != r));
    }

    #[test]
    fn equal_blocks_at_different_places_differ() {
        let hashes = chain(64, b"m", &[b'x'; 64 * 1000]);
        assert_eq!(hashes.len(), 128 + (1000 - 128) / 4);
        let distinct: std::collections::HashSet<_> = hashes.iter().collect();
        assert_eq!(distinct.len(), hashes.len());
    }

    #[test]
    fn namespaces_and_keys_share_nothing() {
        let bytes = vec![b'a'; 4096];
        let mine = chain(256, b"m", &bytes);
        assert!(chain(256, b"n", &bytes).iter().all(|hash| !mine.contains(hash)));
        let mut other = ChainBuilder::new(&HashKey([9; 32]), 256, b"m");
        other.update(&bytes);
        assert!(other.finish().hashes.iter().all(|hash| !mine.contains(&hash.0)));
    }

    #[test]
    fn field_arithmetic_holds_at_its_edges() {
        let [zero, one, two] = [0, 1, 2].map(Field);
        let top = Field(Field::MODULUS - 1); // is -1
        assert_eq!(top.times_plus(top, zero), one);
        assert_eq!(top.times_plus(top, top), zero);
        assert_eq!(top.times_plus(one, one), zero);
        assert_eq!(top.times_plus(one, top), Field(Field::MODULUS - 2));
        assert_eq!(Field::reduced(u128::MAX), one, "2^128 - 1 is 2 * 2^127 - 1");
        assert_eq!(Field::reduced(Field::MODULUS), zero);
        assert_eq!(Field(1 << 126).times_plus(two, zero), one);
        assert_eq!(Field(1 << 126).times_plus(two, top), zero);
        assert_eq!(Field(1 << 64).times_plus(Field(1 << 64), zero), two);
        let low = Field(u128::from(u64::MAX));
        assert_eq!(low.times_plus(low, zero), Field::reduced(low.0 * low.0));
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition_however_it_is_cut(
            bytes in proptest::collection::vec(any::<u8>(), 0..12_000),
            cuts in proptest::collection::vec(0usize..6000, 0..12),
            block_bytes in prop::sample::select(vec![1usize, 7, 64, 100, 128, 256, 512, 1024, 1500]),
        ) {
            let mut builder = ChainBuilder::new(&key(), block_bytes, b"m");
            let mut rest = bytes.as_slice();
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                builder.update(now);
                rest = later;
            }
            builder.update(rest);
            let hashes: Vec<u64> = builder.finish().hashes.iter().map(|hash| hash.0).collect();
            prop_assert_eq!(hashes, slow_chain(block_bytes, b"m", &bytes));
        }
    }
}
