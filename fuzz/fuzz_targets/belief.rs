//! Bytes as operations on the believed caches of three workers and the index that follows them, against slow twins: lists that
//! are searched from end to end. What is held must also be closed under prefixes, which the look-ups lean on.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use libfuzzer_sys::fuzz_target;
use warmroute::core::cache::{Bounds, Cache, Claim, Pushed, Witness};
use warmroute::core::ids::{BlockHash, WorkerId};
use warmroute::core::index::Index;

const WORKERS: usize = 3;
const BLOCK: u64 = 16;

/// Lets the index follow.
struct Follow<'i>(&'i Index, WorkerId);

impl Witness for Follow<'_> {
    fn stored(&mut self, hash: BlockHash) {
        self.0.add(&[hash], self.1);
    }

    fn dropped(&mut self, hash: BlockHash) {
        self.0.remove(&[hash], self.1);
    }
}

/// What the engine would reuse first, in that order.
#[derive(PartialEq)]
enum Free {
    Filler(u64),
    Block(u64),
}

/// One worker's cache as on a whiteboard.
struct Twin {
    tokens: Option<u64>,
    blocks: usize,
    /// Held blocks, and how many requests use each.
    uses: BTreeMap<u64, usize>,
    /// Of held blocks, how many requests have used each since it came.
    used: BTreeMap<u64, usize>,
    /// Held blocks that a request which ended well has used.
    computed: BTreeSet<u64>,
    free: Vec<Free>,
    pinned_filler: u64,
}

impl Twin {
    fn held(&self) -> u64 {
        let filler = self.free.iter().map(|free| if let Free::Filler(tokens) = free { *tokens } else { 0 });
        self.uses.len() as u64 * BLOCK + filler.sum::<u64>() + self.pinned_filler
    }

    fn make_room(&mut self, tokens: u64, blocks: usize) {
        while !self.free.is_empty() {
            let over = self.tokens.map_or(0, |most| (self.held() + tokens).saturating_sub(most));
            if over == 0 && self.uses.len() + blocks <= self.blocks {
                return;
            }
            match self.free.remove(0) {
                Free::Block(hash) => self.forget(hash),
                Free::Filler(filler) if (1..filler).contains(&over) => {
                    self.free.insert(0, Free::Filler(filler - over));
                }
                Free::Filler(_) => {}
            }
        }
    }

    fn forget(&mut self, hash: u64) {
        self.uses.remove(&hash);
        self.used.remove(&hash);
        self.computed.remove(&hash);
    }

    fn admit(&mut self, chain: &[BlockHash], filler: u64) -> usize {
        let matched = chain.iter().take_while(|hash| self.uses.contains_key(&hash.0)).count();
        let (held, fresh): (Vec<_>, Vec<_>) =
            chain.iter().map(|hash| hash.0).partition(|hash| self.uses.contains_key(hash));
        self.free.retain(|free| !matches!(free, Free::Block(hash) if held.contains(hash)));
        let distinct = fresh.iter().collect::<BTreeSet<_>>().len();
        assert_eq!(distinct, fresh.len(), "a chain has no block twice");
        for &hash in &held {
            *self.uses.entry(hash).or_default() += 1;
            *self.used.entry(hash).or_default() += 1;
        }
        self.make_room(BLOCK * fresh.len() as u64 + filler, fresh.len());
        for hash in fresh {
            self.uses.insert(hash, 1);
            self.used.insert(hash, 1);
        }
        self.pinned_filler += filler;
        matched
    }

    fn pinned(&self) -> u64 {
        self.uses.values().filter(|uses| **uses > 0).count() as u64 * BLOCK + self.pinned_filler
    }

    fn unpin(&mut self, hash: BlockHash) -> bool {
        let uses = self.uses.get_mut(&hash.0).expect("a claimed block is held");
        *uses -= 1;
        *uses == 0
    }

    fn release(&mut self, chain: &[BlockHash], guessed: u64, filler: u64) {
        self.pinned_filler -= guessed;
        if filler > 0 {
            self.free.push(Free::Filler(filler));
        }
        for hash in chain.iter().rev() {
            self.computed.insert(hash.0);
            if self.unpin(*hash) {
                self.free.push(Free::Block(hash.0));
            }
        }
        self.make_room(0, 0);
    }

    fn undo(&mut self, chain: &[BlockHash], guessed: u64) {
        let kept: Vec<BlockHash> =
            chain.iter().copied().filter(|hash| self.computed.contains(&hash.0)).collect();
        for hash in chain.iter().filter(|hash| !kept.contains(hash)) {
            if self.unpin(*hash) {
                self.forget(hash.0);
            }
        }
        self.release(&kept, guessed, 0);
    }

    fn pushed_by(&self, need: u64) -> Pushed {
        let mut over = self.tokens.map_or(0, |most| (self.held() + need).saturating_sub(most));
        let mut pushed = Pushed::default();
        for free in &self.free {
            match free {
                Free::Filler(tokens) => over -= over.min(*tokens),
                Free::Block(hash) => {
                    let taken = over.min(BLOCK);
                    over -= taken;
                    *if self.used[hash] > 1 { &mut pushed.shared } else { &mut pushed.once } += taken;
                }
            }
        }
        pushed
    }
}

/// A request in flight.
struct Open {
    worker: usize,
    claim: Claim,
    chain: Vec<BlockHash>,
    filler: u64,
    /// Past its first token.
    started: bool,
    /// Made since the worker was last emptied.
    current: bool,
}

/// What a request lacks of memory beside those that have started, as a share of what they hold.
fn shortage(open: &[Open], twins: &[Twin], worker: usize, chain: &[BlockHash], tokens: u64) -> f64 {
    let running = || open.iter().filter(|open| open.worker == worker && open.current && open.started);
    let blocks: BTreeSet<u64> = running().flat_map(|open| open.chain.iter().map(|hash| hash.0)).collect();
    let held = blocks.len() as u64 * BLOCK + running().map(|open| open.filler).sum::<u64>();
    let lacking = twins[worker].tokens.map_or(0, |most| (held + tokens).saturating_sub(most));
    let shared = chain.iter().take_while(|hash| blocks.contains(&hash.0)).count() as u64 * BLOCK;
    if held == 0 { 0.0 } else { (lacking.saturating_sub(shared) as f64 / held as f64).min(1.0) }
}

/// A path in a tree: each hash stands for all before it, as in a chain of blocks.
fn path(turns: impl Iterator<Item = u8>, parents: &mut BTreeMap<u64, u64>) -> Vec<BlockHash> {
    let mut at = 0u64;
    let step = |turn: u8| {
        let next = (at.rotate_left(23) ^ (u64::from(turn) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        parents.insert(next, at);
        at = next;
        BlockHash(next)
    };
    turns.map(step).collect()
}

fuzz_target!(|data: &[u8]| {
    let index = Index::default();
    let first = Bounds { tokens: Some(400), blocks: 30 };
    let mut caches: Vec<Cache> = (0..WORKERS).map(|_| Cache::new(first)).collect();
    let new = |bounds: Bounds| Twin {
        tokens: bounds.tokens,
        blocks: bounds.blocks,
        uses: BTreeMap::new(),
        used: BTreeMap::new(),
        computed: BTreeSet::new(),
        free: Vec::new(),
        pinned_filler: 0,
    };
    let mut twins: Vec<Twin> = (0..WORKERS).map(|_| new(first)).collect();
    let mut open: Vec<Open> = Vec::new();
    let mut parents = BTreeMap::new();
    let mut bytes = data.iter().copied();
    while let Some(op) = bytes.next() {
        let worker = usize::from(op >> 4) % WORKERS;
        let mut follow = Follow(&index, WorkerId(worker as u32 * 70));
        let (cache, twin) = (&mut caches[worker], &mut twins[worker]);
        let mut next = || bytes.next().unwrap_or(0);
        match op & 15 {
            0..8 => {
                let (length, filler) = (usize::from(next() % 14), u64::from(next() % 90));
                // Few turns, so that many paths begin alike; long runs of the same turn make long prefixes.
                let turns: Vec<u8> = (0..length.div_ceil(4)).map(|_| next()).collect();
                let turns = (0..length).map(|at| turns[at / 4] >> (2 * (at % 4)) & 3);
                let chain = path(turns, &mut parents);
                let claim = cache.admit(&chain, |_| BLOCK as u16, filler, 0, &mut follow);
                let matched = twin.admit(&chain, filler);
                assert_eq!(claim.matched(), matched);
                open.push(Open { worker, claim, chain, filler, started: false, current: true });
            }
            8 if !open.is_empty() => {
                let at = usize::from(next()) % open.len();
                let started = &mut open[at];
                caches[started.worker].start(&mut started.claim);
                started.started = true;
            }
            kind @ 9..13 if !open.is_empty() => {
                let Open { worker, claim, chain, filler, current, .. } =
                    open.swap_remove(usize::from(next()) % open.len());
                let mut follow = Follow(&index, WorkerId(worker as u32 * 70));
                assert_eq!(caches[worker].is_current(&claim), current);
                let corrected = u64::from(next() % 90);
                match kind {
                    12 => caches[worker].undo(claim, &mut follow),
                    _ => caches[worker].release(claim, corrected, &mut follow),
                }
                match kind {
                    _ if !current => {}
                    12 => twins[worker].undo(&chain, filler),
                    _ => twins[worker].release(&chain, filler, corrected),
                }
            }
            13 => {
                assert_eq!(cache.clear(&mut follow), twin.uses.len());
                *twin = new(cache.bounds());
                open.iter_mut().filter(|open| open.worker == worker).for_each(|open| open.current = false);
            }
            14 => {
                let tokens = Some(u64::from(next()) * 5).filter(|tokens| *tokens > 0);
                let bounds = Bounds { tokens, blocks: usize::from(next() % 40) + 1 };
                cache.set_bounds(bounds, &mut follow);
                (twin.tokens, twin.blocks) = (bounds.tokens, bounds.blocks);
                twin.make_room(0, 0);
            }
            _ => {
                let chain = path((0..12).map(|_| next() & 3), &mut parents);
                look_up(&index, &twins, &chain);
                for tokens in [0, 100, 400] {
                    let slow = shortage(&open, &twins, worker, &chain, tokens);
                    assert_eq!(caches[worker].shortage(&chain, tokens), slow);
                }
            }
        }
        for (cache, twin) in caches.iter().zip(&twins) {
            assert_eq!(cache.held_tokens(), twin.held());
            assert_eq!(cache.len(), twin.uses.len());
            assert_eq!(cache.is_roomy(), twin.tokens.is_none_or(|most| twin.pinned() <= most));
            for need in [0, 16, 100, 1_000] {
                assert_eq!(cache.pushed_by(need, 0), twin.pushed_by(need));
            }
            let held = |hash: &u64| *hash == 0 || twin.uses.contains_key(hash);
            assert!(
                twin.uses.keys().all(|hash| held(&parents[hash])),
                "a block is held without the one before it"
            );
        }
    }
    for request in &open {
        look_up(&index, &twins, &request.chain);
        if request.current {
            assert_eq!(
                caches[request.worker].depth(&request.chain),
                request.chain.len(),
                "what is in use is held"
            );
        }
    }
    let distinct: BTreeSet<&u64> = twins.iter().flat_map(|twin| twin.uses.keys()).collect();
    assert_eq!(index.len(), distinct.len());
});

/// Every worker asked in turn, block by block.
fn look_up(index: &Index, twins: &[Twin], chain: &[BlockHash]) {
    let depth = |twin: &Twin| chain.iter().take_while(|hash| twin.uses.contains_key(&hash.0)).count();
    let slow = twins.iter().enumerate().map(|(at, twin)| (at as u32 * 70, depth(twin)));
    let slow: BTreeMap<u32, usize> = slow.filter(|(_, depth)| *depth > 0).collect();
    let fast: BTreeMap<u32, usize> =
        index.depths(chain).into_iter().map(|(worker, depth)| (worker.0, depth)).collect();
    assert_eq!(fast, slow);
}
