//! The cache against its slow, obvious twin under random operations, and the engine's documented behaviour case by case.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Default)]
struct Heard(Vec<(bool, u64)>);

impl Witness for Heard {
    fn stored(&mut self, hash: BlockHash) {
        self.0.push((true, hash.0));
    }

    fn dropped(&mut self, hash: BlockHash) {
        self.0.push((false, hash.0));
    }
}

/// What is free to be reused, oldest first: one list, searched from end to end.
#[derive(Clone, Debug, PartialEq)]
enum Free {
    Filler(u64),
    Block(u64),
}

struct TwinClaim {
    hashes: Vec<u64>,
    matched: usize,
    filler: u64,
    started: bool,
    epoch: u64,
}

/// The same cache, as one would explain it on a whiteboard.
struct Twin {
    bounds: Bounds,
    pins: BTreeMap<u64, u32>,
    /// Tokens of each block.
    lengths: BTreeMap<u64, u64>,
    /// How many requests have used a block since it came.
    uses: BTreeMap<u64, u32>,
    /// Blocks that a request which ended well has used.
    computed: BTreeSet<u64>,
    free: Vec<Free>,
    pinned_filler: u64,
    epoch: u64,
}

impl Twin {
    fn held(&self) -> u64 {
        let filler: u64 = self.free.iter().map(|free| if let Free::Filler(n) = free { *n } else { 0 }).sum();
        self.pins.keys().map(|hash| self.lengths[hash]).sum::<u64>() + filler + self.pinned_filler
    }

    fn make_room(&mut self, tokens: u64, blocks: usize) {
        loop {
            let over = (self.held() + tokens).saturating_sub(self.bounds.tokens.unwrap_or(u64::MAX));
            if self.free.is_empty() || (over == 0 && self.pins.len() + blocks <= self.bounds.blocks) {
                return;
            }
            match self.free.remove(0) {
                Free::Block(hash) => {
                    self.pins.remove(&hash);
                    self.uses.remove(&hash);
                    self.computed.remove(&hash);
                }
                Free::Filler(n) if over > 0 && n > over => self.free.insert(0, Free::Filler(n - over)),
                Free::Filler(_) => {}
            }
        }
    }

    fn admit(&mut self, chain: &[u64], filler: u64) -> TwinClaim {
        let matched = chain.iter().take_while(|hash| self.pins.contains_key(hash)).count();
        let (held, fresh): (Vec<_>, Vec<_>) =
            chain.iter().copied().enumerate().partition(|(_, hash)| self.pins.contains_key(hash));
        for (_, hash) in held {
            *self.pins.entry(hash).or_default() += 1;
            *self.uses.entry(hash).or_default() += 1;
            self.free.retain(|free| *free != Free::Block(hash));
        }
        let tokens: u64 = fresh.iter().map(|(place, _)| u64::from(length(*place))).sum();
        self.make_room(tokens + filler, fresh.len());
        for (place, hash) in fresh {
            self.lengths.insert(hash, u64::from(length(place)));
            self.pins.insert(hash, 1);
            self.uses.insert(hash, 1);
        }
        self.pinned_filler += filler;
        TwinClaim { hashes: chain.to_vec(), matched, filler, started: false, epoch: self.epoch }
    }

    fn release(&mut self, claim: TwinClaim, filler: u64) {
        if claim.epoch != self.epoch {
            return;
        }
        self.pinned_filler -= claim.filler;
        if filler > 0 {
            self.free.push(Free::Filler(filler));
        }
        for &hash in claim.hashes.iter().rev() {
            self.computed.insert(hash);
            let pins = self.pins.get_mut(&hash).expect("a claimed block is held");
            *pins -= 1;
            if *pins == 0 {
                self.free.push(Free::Block(hash));
            }
        }
        self.make_room(0, 0);
    }

    fn undo(&mut self, mut claim: TwinClaim) {
        if claim.epoch != self.epoch {
            return;
        }
        let kept = claim.hashes.iter().take_while(|hash| self.computed.contains(hash)).count();
        for hash in claim.hashes.split_off(kept) {
            let pins = self.pins.get_mut(&hash).expect("a claimed block is held");
            *pins -= 1;
            if *pins == 0 {
                self.pins.remove(&hash);
                self.uses.remove(&hash);
            }
        }
        self.release(claim, 0);
    }

    fn pushed_by(&self, need: u64) -> Pushed {
        let mut over = (self.held() + need).saturating_sub(self.bounds.tokens.unwrap_or(u64::MAX));
        let mut pushed = Pushed::default();
        for free in &self.free {
            match free {
                Free::Filler(n) => over -= over.min(*n),
                Free::Block(hash) => {
                    let taken = over.min(self.lengths[hash]);
                    over -= taken;
                    *if self.uses[hash] > 1 { &mut pushed.shared } else { &mut pushed.once } += taken;
                }
            }
        }
        pushed
    }
}

/// Tokens in use by these requests, what they share counted once.
fn in_use<'a>(twin: &Twin, claims: impl Iterator<Item = &'a TwinClaim>) -> (u64, BTreeSet<u64>) {
    let (mut filler, mut blocks) = (0, BTreeSet::new());
    for claim in claims {
        filler += claim.filler;
        blocks.extend(claim.hashes.iter().copied());
    }
    (filler + blocks.iter().map(|hash| twin.lengths[hash]).sum::<u64>(), blocks)
}

/// What a request for `chain` and `tokens` in all lacks beside the running ones, as a share of what these hold.
fn shortage<'a>(
    twin: &Twin,
    running: impl Iterator<Item = &'a TwinClaim>,
    chain: &[u64],
    tokens: u64,
) -> f64 {
    let (held, blocks) = in_use(twin, running);
    let shared: u64 =
        chain.iter().take_while(|hash| blocks.contains(hash)).map(|hash| twin.lengths[hash]).sum();
    let limit = twin.bounds.tokens.unwrap_or(u64::MAX);
    let lacking = (held + tokens).saturating_sub(limit).saturating_sub(shared);
    if held == 0 { 0.0 } else { (lacking as f64 / held as f64).min(1.0) }
}

const BLOCK: u16 = 16;

/// Later blocks are longer, as in prompts.
fn length(place: usize) -> u16 {
    if place < 4 { BLOCK } else { 3 * BLOCK }
}

#[derive(Clone, Debug)]
enum Step {
    Admit { stem: u64, shared: usize, own: usize, filler: u64 },
    Start { which: usize },
    End { which: usize, filler: u64 },
    Undo { which: usize },
    Clear,
    Bound { tokens: Option<u64>, blocks: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3u64, 0..6usize, 0..6usize, 0..80u64)
            .prop_map(|(stem, shared, own, filler)| Step::Admit { stem, shared, own, filler }),
        4 => any::<usize>().prop_map(|which| Step::Start { which }),
        6 => (any::<usize>(), 0..80u64).prop_map(|(which, filler)| Step::End { which, filler }),
        2 => any::<usize>().prop_map(|which| Step::Undo { which }),
        1 => Just(Step::Clear),
        1 => (proptest::option::of(0..600u64), 1..40usize).prop_map(|(tokens, blocks)| Step::Bound { tokens, blocks }),
    ]
}

/// A chain with `shared` blocks of one of a few stems and then blocks of its own: prefixes in a tree, as in real traffic.
fn chain(stem: u64, shared: usize, own: usize, serial: u64) -> Vec<u64> {
    let stem_blocks = (0..shared as u64).map(|at| 1_000 * (stem + 1) + at);
    stem_blocks.chain((0..own as u64).map(|at| 1_000_000 + 100 * serial + at)).collect()
}

/// The same without two prefixes of one hash: blocks of their own belong to where they branch off.
fn branch(stem: u64, shared: usize, own: usize, serial: u64) -> Vec<u64> {
    let place = 10_000_000 * (10 * stem + shared as u64 + 1);
    chain(stem, shared, own, serial)
        .into_iter()
        .map(|hash| if hash < 1_000_000 { hash } else { hash + place })
        .collect()
}

fn hashes(chain: &[u64]) -> Vec<BlockHash> {
    chain.iter().copied().map(BlockHash).collect()
}

proptest! {
    #[test]
    fn agrees_with_its_slow_twin(steps in proptest::collection::vec(step(), 1..120), collisions: bool) {
        let bounds = Bounds { tokens: Some(400), blocks: 30 };
        let mut cache = Cache::new(bounds);
        let mut twin = Twin {
            bounds, pins: BTreeMap::new(), lengths: BTreeMap::new(), uses: BTreeMap::new(), computed: BTreeSet::new(), free: Vec::new(), pinned_filler: 0, epoch: 0,
        };
        let mut heard = Heard::default();
        let mut open: Vec<(Claim, TwinClaim)> = Vec::new();
        for (serial, step) in steps.into_iter().enumerate() {
            match step {
                Step::Admit { stem, shared, own, filler } => {
                    // Every fourth request repeats an earlier one's own blocks.
                    let chain = if collisions { chain } else { branch }(stem, shared, own, (serial as u64) / 4);
                    let claim = cache.admit(&hashes(&chain), length, filler, 0, &mut heard);
                    let slow = twin.admit(&chain, filler);
                    prop_assert_eq!(claim.matched(), slow.matched);
                    open.push((claim, slow));
                }
                Step::Start { which } if !open.is_empty() => {
                    let which = which % open.len();
                    let (claim, slow) = &mut open[which];
                    cache.start(claim);
                    slow.started = true;
                }
                Step::End { which, filler } if !open.is_empty() => {
                    let (claim, slow) = open.swap_remove(which % open.len());
                    cache.release(claim, filler, &mut heard);
                    twin.release(slow, filler);
                }
                Step::Undo { which } if !open.is_empty() => {
                    let (claim, slow) = open.swap_remove(which % open.len());
                    cache.undo(claim, &mut heard);
                    twin.undo(slow);
                }
                Step::Clear => {
                    prop_assert_eq!(cache.clear(&mut heard), twin.pins.len());
                    twin = Twin { pins: BTreeMap::new(), uses: BTreeMap::new(), computed: BTreeSet::new(), free: Vec::new(), pinned_filler: 0, epoch: twin.epoch + 1, ..twin };
                }
                Step::Bound { tokens, blocks } => {
                    let bounds = Bounds { tokens, blocks };
                    cache.set_bounds(bounds, &mut heard);
                    twin.bounds = bounds;
                    twin.make_room(0, 0);
                }
                Step::Start { .. } | Step::End { .. } | Step::Undo { .. } => {}
            }
            prop_assert_eq!(cache.held_tokens(), twin.held());
            prop_assert_eq!(cache.len(), twin.pins.len());
            for need in [0, 16, 100, 1_000] {
                let (fast, slow) = (cache.pushed_by(need, 0), twin.pushed_by(need));
                prop_assert_eq!(fast.shared + fast.once, slow.shared + slow.once, "need {}", need);
                prop_assert!(collisions || fast == slow, "{:?} {:?} need {}", fast, slow, need);
            }
            let current = || open.iter().map(|(_, slow)| slow).filter(|slow| slow.epoch == twin.epoch);
            let roomy = twin.bounds.tokens.is_none_or(|limit| in_use(&twin, current()).0 <= limit);
            prop_assert_eq!(cache.is_roomy(), roomy);
            for asked in [chain(0, 5, 0, 0), chain(1, 3, 4, serial as u64 / 4)] {
                let running = current().filter(|slow| slow.started);
                prop_assert_eq!(cache.shortage(&hashes(&asked), 100), shortage(&twin, running, &asked, 100));
            }
            let mut told = BTreeMap::new();
            for &(stored, hash) in &heard.0 {
                prop_assert_ne!(told.insert(hash, stored), Some(stored), "{} told twice", hash);
            }
            let held: Vec<u64> = told.into_iter().filter(|(_, stored)| *stored).map(|(hash, _)| hash).collect();
            prop_assert_eq!(held, twin.pins.keys().copied().collect::<Vec<_>>());
        }
    }
}

fn cache(tokens: u64) -> Cache {
    Cache::new(Bounds { tokens: Some(tokens), blocks: usize::MAX })
}

fn run(cache: &mut Cache, chain: &[BlockHash], filler: u64) -> usize {
    let claim = cache.admit(chain, |_| BLOCK, filler, 0, &mut Heard::default());
    let matched = claim.matched();
    cache.release(claim, filler, &mut Heard::default());
    matched
}

fn prefix(of: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|at| BlockHash(of * 1_000 + at)).collect()
}

/// vLLM 0.32 measured: five prompts of 125 blocks in turn, in 584 usable blocks, hit 84 blocks each, not none.
#[test]
fn heads_survive_a_cycle_that_does_not_fit() {
    let mut cache = cache(584 * 16);
    for round in 0..4 {
        for of in 0..5 {
            let matched = run(&mut cache, &prefix(of, 125), 0);
            if round > 0 {
                assert_eq!(matched, 84, "prompt {of} in round {round}");
            }
        }
    }
}

#[test]
fn blocks_in_use_are_never_dropped() {
    let mut cache = cache(32 * 16);
    let kept = cache.admit(&prefix(0, 20), |_| BLOCK, 0, 0, &mut Heard::default());
    for of in 1..6 {
        run(&mut cache, &prefix(of, 20), 0);
    }
    assert_eq!(cache.depth(&prefix(0, 20)), 20);
    cache.release(kept, 0, &mut Heard::default());
    assert!(cache.held_tokens() <= 32 * 16);
}

#[test]
fn a_claim_from_before_a_restart_changes_nothing() {
    let mut cache = cache(1_000);
    let before = cache.admit(&prefix(0, 5), |_| BLOCK, 7, 0, &mut Heard::default());
    assert_eq!(cache.clear(&mut Heard::default()), 5);
    run(&mut cache, &prefix(1, 5), 3);
    cache.release(before, 7, &mut Heard::default());
    assert_eq!((cache.held_tokens(), cache.len()), (83, 5));
}

#[test]
fn memory_is_bounded_without_a_known_capacity() {
    let mut cache = Cache::new(Bounds { tokens: None, blocks: 50 });
    for of in 0..100 {
        run(&mut cache, &prefix(of, 20), 9);
    }
    assert_eq!(cache.len(), 50);
    assert!(cache.blocks.len() <= 51 && cache.runs.len() < 20, "{} {}", cache.blocks.len(), cache.runs.len());
}

#[test]
fn uses_are_counted_per_block_and_fade() {
    let mut cache = cache(1_000_000);
    for serial in 0..10 {
        let own = (0..5).map(|at| BlockHash(1_000_000 + serial * 100 + at));
        let chain: Vec<BlockHash> = prefix(0, 20).into_iter().chain(own).collect();
        let claim = cache.admit(&chain, |_| BLOCK, 0, 0, &mut Heard::default());
        cache.release(claim, 0, &mut Heard::default());
    }
    let shared = prefix(0, 20)[19];
    assert_eq!(cache.uses(shared, 0), 10);
    assert_eq!(cache.uses(BlockHash(1_000_900), 0), 1);
    assert_eq!(cache.uses(BlockHash(u64::MAX), 0), 0, "not held");
    assert_eq!(cache.uses(shared, 1), 5, "an era later half of it is forgotten");
}

/// Four prompts of 10 blocks fit beside each other; what running requests share needs its room once.
#[test]
fn memory_is_short_only_beside_running_requests() {
    let mut cache = cache(40 * 16);
    let mut claims: Vec<Claim> =
        (0..4).map(|of| cache.admit(&prefix(of, 10), |_| BLOCK, 0, 0, &mut Heard::default())).collect();
    assert_eq!(cache.shortage(&prefix(9, 10), 160), 0.0, "those that wait hold nothing yet");
    claims.iter_mut().for_each(|claim| cache.start(claim));
    assert_eq!(cache.shortage(&prefix(9, 10), 160), 0.25, "one of the four has to end");
    assert_eq!(cache.shortage(&prefix(0, 10), 160), 0.0, "a running one holds all of it");
    assert_eq!(cache.shortage(&prefix(0, 10), 176), 0.025, "but for one block more");
    assert!(cache.is_roomy());
    let more = cache.admit(&prefix(9, 1), |_| BLOCK, 0, 0, &mut Heard::default());
    assert!(!cache.is_roomy());
    for claim in claims.into_iter().chain([more]) {
        cache.release(claim, 0, &mut Heard::default());
    }
    assert_eq!((cache.shortage(&prefix(9, 10), 160), cache.is_roomy()), (0.0, true));
}

/// A request that is given up leaves what another one, which needed it, has computed meanwhile: without the head, what that one left
/// behind would be a tail that no look-up can reach.
#[test]
fn what_another_request_has_computed_outlives_the_one_that_brought_it_in() {
    let mut cache = cache(100 * 16);
    let lost = cache.admit(&prefix(0, 2), |_| BLOCK, 0, 0, &mut Heard::default());
    assert_eq!(run(&mut cache, &prefix(0, 3), 0), 2);
    cache.undo(lost, &mut Heard::default());
    assert_eq!(cache.depth(&prefix(0, 3)), 3);
    let lost = cache.admit(&prefix(1, 2), |_| BLOCK, 0, 0, &mut Heard::default());
    let also = cache.admit(&prefix(1, 3), |_| BLOCK, 0, 0, &mut Heard::default());
    cache.undo(lost, &mut Heard::default());
    cache.undo(also, &mut Heard::default());
    assert_eq!((cache.len(), cache.held_tokens()), (3, 48), "nobody has computed any of it");
}
