//! What one worker's KV cache is believed to hold, run the way vLLM V1 runs it (`KVCacheManager`, `BlockPool`): blocks of
//! running requests are pinned; a request that ends frees its blocks together; the request that ended longest ago loses
//! blocks first, and inside it the tail goes before the head. A request's unique tail and its answer take room too, though
//! nobody will ask for them by hash: they are *filler*.
//!
//! Two properties follow from that order, and the rest leans on them. Held blocks are closed under prefixes: whoever holds
//! block `i` of a chain holds all before it. And what one request freed and nobody asked for since is a run of consecutive
//! blocks of one chain, so a later request takes blocks only from a run's front and eviction takes them only from its back.

use hashbrown::HashTable;

use crate::core::ids::BlockHash;
use crate::core::tally::Tally;

mod outlook;
mod runs;

pub use outlook::Pushed;
use runs::Run;

const NONE: u32 = u32::MAX;
const FREED: u16 = u16::MAX;
/// More requests than this cannot pin one block; no engine runs nearly as many.
const MAX_PINS: u16 = FREED - 1;

/// One believed block. While `pins > 0` a request in flight uses it and `run` is [`NONE`].
struct Block {
    hash: BlockHash,
    tokens: u16,
    /// [`FREED`] once the block is no longer held.
    pins: u16,
    /// Of the pins, those of requests that have their memory for certain.
    running: u16,
    /// A request that the worker took has ended with it: the worker has computed it.
    computed: bool,
    /// Requests of late that used it.
    uses: Tally,
    run: u32,
    /// The block that last followed this one in a chain: where to look first, without hashing. Only a hint.
    next: u32,
}

/// The blocks that one request in flight uses. Give it back with [`Cache::release`] or [`Cache::undo`].
#[derive(Debug)]
#[must_use = "a claim that is not given back pins its blocks for ever"]
pub struct Claim {
    slots: Vec<u32>,
    /// How many of `slots` were held before the claim.
    matched: usize,
    reused: Reused,
    filler: u64,
    running: bool,
    epoch: u64,
}

/// From where a claim got the blocks that were held before it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Reused {
    /// Some were in use by another request in flight, which may not have computed them yet.
    pub busy: bool,
    /// When the first of them was used last, as a stamp for [`Cache::newer_than`]; of idle blocks only.
    pub stamp: u64,
}

impl Claim {
    /// Blocks of the prompt that were believed cached when it was admitted.
    pub fn matched(&self) -> usize {
        self.matched
    }

    pub fn reused(&self) -> Reused {
        self.reused
    }
}

/// Hears which blocks the cache took up and let go, so that an index can follow.
pub trait Witness {
    fn stored(&mut self, hash: BlockHash);
    fn dropped(&mut self, hash: BlockHash);
}

/// How much the cache may believe in. Both bounds hold on every insert; blocks of requests in flight are never dropped.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The engine's cache in tokens (`num_gpu_blocks x block_size`); `None` if unknown.
    pub tokens: Option<u64>,
    /// Believed blocks, a bound on our own memory.
    pub blocks: usize,
}

pub struct Cache {
    bounds: Bounds,
    table: HashTable<u32>,
    blocks: Vec<Block>,
    free_blocks: Vec<u32>,
    runs: Vec<Run>,
    free_runs: Vec<u32>,
    oldest: u32,
    newest: u32,
    /// Tokens of all blocks and fillers, pinned or not.
    held: u64,
    /// Of these, those in use by requests in flight; and by those that are past their first token.
    pinned: u64,
    running: u64,
    /// The stamp of the newest run.
    stamp: u64,
    epoch: u64,
    /// Blocks pushed out by others.
    evicted: u64,
}

impl Cache {
    pub fn new(bounds: Bounds) -> Cache {
        Cache {
            bounds,
            table: HashTable::new(),
            blocks: Vec::new(),
            free_blocks: Vec::new(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            oldest: NONE,
            newest: NONE,
            held: 0,
            pinned: 0,
            running: 0,
            stamp: 0,
            epoch: 0,
            evicted: 0,
        }
    }

    /// Believed blocks.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Tokens believed held, fillers and requests in flight included.
    pub fn held_tokens(&self) -> u64 {
        self.held
    }

    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Blocks pushed out since the cache was made, by what others needed or by new bounds.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Memory of the tables that hold the belief, by their sizes.
    pub fn bytes(&self) -> usize {
        // A slot of the table has a byte beside it; each block that nobody uses stands in a run.
        self.table.capacity() * (size_of::<u32>() + 1)
            + self.blocks.capacity() * (size_of::<Block>() + size_of::<u32>())
            + self.runs.capacity() * size_of::<Run>()
    }

    /// How many of the chain's blocks, from its first on, are held.
    pub fn depth(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.find(**hash).is_some()).count()
    }

    /// How many requests of late have used the block.
    pub fn uses(&self, hash: BlockHash, era: u16) -> u16 {
        self.find(hash).map_or(0, |slot| self.blocks[slot as usize].uses.at(era))
    }

    /// Pins the chain's blocks for a request that is sent now, taking room for those not held and for `filler` tokens. `tokens` are
    /// those of the block at a place.
    pub fn admit(
        &mut self,
        chain: &[BlockHash],
        tokens: impl Fn(usize) -> u16,
        filler: u64,
        era: u16,
        witness: &mut impl Witness,
    ) -> Claim {
        // In three steps, each of which touches memory in no order: the processor then waits for many blocks at a time. First what
        // is held, so that making room for the rest does not take it.
        let (mut slots, matched, reused) = self.pin_held(chain, era);
        let mut lacking = (0, 0);
        for (place, _) in slots.iter().enumerate().filter(|(_, slot)| **slot == NONE) {
            lacking = (lacking.0 + u64::from(tokens(place)), lacking.1 + 1);
        }
        self.make_room(lacking.0 + filler, lacking.1, witness);
        self.held += filler;
        self.pinned += filler;
        self.take_up(chain, &mut slots, tokens, era, witness);
        Claim { slots, matched, reused, filler, running: false, epoch: self.epoch }
    }

    /// Pins what is held of the chain; the others' places are [`NONE`]. Answers how many are held from the first on, and where
    /// those were.
    fn pin_held(&mut self, chain: &[BlockHash], era: u16) -> (Vec<u32>, usize, Reused) {
        let mut slots = Vec::with_capacity(chain.len());
        let mut matched = 0;
        let mut reused = Reused::default();
        let mut last = NONE;
        for &hash in chain {
            let slot = self.find_after(last, hash).unwrap_or(NONE);
            if let Some(block) = self.blocks.get_mut(slot as usize) {
                if block.pins == MAX_PINS {
                    break;
                }
                block.uses.add(era);
                if matched == slots.len() {
                    let run = self.runs.get(block.run as usize);
                    reused.busy |= run.is_none();
                    // Heads are used at least as lately as what follows them.
                    reused.stamp = reused.stamp.max(run.map_or(0, |run| run.stamp));
                    matched += 1;
                }
                self.pin(slot);
            }
            last = slot;
            slots.push(slot);
        }
        (slots, matched, reused)
    }

    /// Takes up the blocks whose place in `slots` is still [`NONE`].
    fn take_up(
        &mut self,
        chain: &[BlockHash],
        slots: &mut [u32],
        tokens: impl Fn(usize) -> u16,
        era: u16,
        witness: &mut impl Witness,
    ) {
        let mut last = NONE;
        for (place, (slot, &hash)) in slots.iter_mut().zip(chain).enumerate() {
            if *slot == NONE {
                *slot = match self.find(hash) {
                    // Twice in one chain: two different prefixes share a 64-bit hash.
                    Some(twice) => {
                        self.pin(twice);
                        twice
                    }
                    None => {
                        witness.stored(hash);
                        self.insert(hash, tokens(place))
                    }
                };
                self.blocks[*slot as usize].uses.add(era);
            }
            if let Some(before) = self.blocks.get_mut(last as usize) {
                before.next = *slot;
            }
            last = *slot;
        }
    }

    /// The request is past its first token: whatever it needs, the engine has given it.
    pub fn start(&mut self, claim: &mut Claim) {
        if claim.epoch != self.epoch || claim.running {
            return;
        }
        claim.running = true;
        self.running += claim.filler;
        for &slot in &claim.slots {
            let block = &mut self.blocks[slot as usize];
            block.running += 1;
            if block.running == 1 {
                self.running += u64::from(block.tokens);
            }
        }
    }

    /// The claim no longer counts as in flight.
    fn stop(&mut self, claim: &mut Claim) {
        self.pinned -= claim.filler;
        if !std::mem::take(&mut claim.running) {
            return;
        }
        self.running -= claim.filler;
        for &slot in &claim.slots {
            let block = &mut self.blocks[slot as usize];
            block.running -= 1;
            if block.running == 0 {
                self.running -= u64::from(block.tokens);
            }
        }
    }

    /// The request has ended; its blocks become the most recently used. `filler` corrects the guess made at admission.
    pub fn release(&mut self, mut claim: Claim, filler: u64, witness: &mut impl Witness) {
        if claim.epoch != self.epoch {
            return;
        }
        self.stop(&mut claim);
        self.held = self.held - claim.filler + filler;
        let mut content = 0;
        claim.slots.retain(|&slot| {
            let unused = self.unpin(slot);
            let block = &mut self.blocks[slot as usize];
            block.computed = true;
            content += if unused { u64::from(block.tokens) } else { 0 };
            unused
        });
        if filler > 0 || !claim.slots.is_empty() {
            claim.slots.shrink_to_fit();
            self.append(Run {
                blocks: claim.slots,
                content,
                filler,
                older: NONE,
                newer: NONE,
                ..Run::default()
            });
        }
        self.make_room(0, 0, witness);
    }

    /// The worker never worked on the request: blocks that no other request has computed are forgotten again. Those are the end of
    /// the chain, since whoever computes a block has all before it.
    pub fn undo(&mut self, mut claim: Claim, witness: &mut impl Witness) {
        if claim.epoch != self.epoch {
            return;
        }
        self.stop(&mut claim);
        let kept = claim.slots.iter().take_while(|slot| self.blocks[**slot as usize].computed).count();
        for &slot in claim.slots[kept..].iter().rev() {
            if self.unpin(slot) {
                self.remove(slot, witness);
            }
        }
        claim.slots.truncate(kept);
        self.held -= claim.filler;
        claim.filler = 0;
        self.release(claim, 0, witness);
    }

    /// Greater after each request that ended.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Whether nothing was forgotten since `claim` was made.
    pub fn is_current(&self, claim: &Claim) -> bool {
        claim.epoch == self.epoch
    }

    /// Forgets everything: the engine restarted or reset its cache. Claims made before become void.
    pub fn clear(&mut self, witness: &mut impl Witness) -> usize {
        let dropped = self.table.len();
        for &slot in self.table.iter() {
            witness.dropped(self.blocks[slot as usize].hash);
        }
        let (epoch, stamp, evicted) = (self.epoch + 1, self.stamp, self.evicted);
        *self = Cache { epoch, stamp, evicted, ..Cache::new(self.bounds) };
        dropped
    }

    /// New bounds hold at once.
    pub fn set_bounds(&mut self, bounds: Bounds, witness: &mut impl Witness) {
        self.bounds = bounds;
        self.make_room(0, 0, witness);
    }

    fn find(&self, hash: BlockHash) -> Option<u32> {
        self.table.find(hash.0, |&slot| self.blocks[slot as usize].hash == hash).copied()
    }

    /// [`Cache::find`], looking first at the block that followed `last` the last time.
    fn find_after(&self, last: u32, hash: BlockHash) -> Option<u32> {
        let hint = self.blocks.get(last as usize).map_or(NONE, |block| block.next);
        match self.blocks.get(hint as usize) {
            Some(block) if block.hash == hash && block.pins != FREED => Some(hint),
            _ => self.find(hash),
        }
    }

    fn insert(&mut self, hash: BlockHash, tokens: u16) -> u32 {
        let block = Block {
            hash,
            tokens,
            pins: 1,
            running: 0,
            computed: false,
            uses: Tally::default(),
            run: NONE,
            next: NONE,
        };
        let slot = put(&mut self.blocks, &mut self.free_blocks, block);
        let blocks = &self.blocks;
        self.table.insert_unique(hash.0, slot, |&slot| blocks[slot as usize].hash.0);
        self.held += u64::from(tokens);
        self.pinned += u64::from(tokens);
        slot
    }

    fn remove(&mut self, slot: u32, witness: &mut impl Witness) {
        let hash = self.free(slot);
        self.remove_entry(slot, hash);
        witness.dropped(hash);
    }

    /// Frees the block's place; the table still has it.
    fn free(&mut self, slot: u32) -> BlockHash {
        let block = &mut self.blocks[slot as usize];
        block.pins = FREED;
        self.free_blocks.push(slot);
        self.held -= u64::from(block.tokens);
        block.hash
    }

    fn remove_entry(&mut self, slot: u32, hash: BlockHash) {
        if let Ok(entry) = self.table.find_entry(hash.0, |&other| other == slot) {
            entry.remove();
        }
    }

    fn pin(&mut self, slot: u32) {
        let block = &mut self.blocks[slot as usize];
        block.pins += 1;
        self.pinned += if block.pins == 1 { u64::from(block.tokens) } else { 0 };
        let at = std::mem::replace(&mut block.run, NONE);
        if at == NONE {
            return;
        }
        let run = &mut self.runs[at as usize];
        run.content -= u64::from(block.tokens);
        if run.blocks[run.start] == slot {
            run.start += 1;
        } else if let Some(place) = run.blocks[run.start..].iter().position(|&other| other == slot) {
            // Only if two different prefixes share a 64-bit hash: then order no longer matters, only that counts hold.
            run.blocks.remove(run.start + place);
        }
        self.drop_if_empty(at);
    }

    /// Answers whether nobody uses the block any more.
    fn unpin(&mut self, slot: u32) -> bool {
        let block = &mut self.blocks[slot as usize];
        block.pins -= 1;
        self.pinned -= if block.pins == 0 { u64::from(block.tokens) } else { 0 };
        block.pins == 0
    }
}

/// Puts a value into a slab: a freed place if there is one, else a new one.
fn put<T>(slab: &mut Vec<T>, free: &mut Vec<u32>, value: T) -> u32 {
    match free.pop() {
        Some(slot) => {
            slab[slot as usize] = value;
            slot
        }
        None => {
            slab.push(value);
            u32::try_from(slab.len() - 1).expect("the bound on blocks keeps slabs far below 2^32")
        }
    }
}

#[cfg(test)]
mod tests;
