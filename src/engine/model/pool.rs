//! The paged KV blocks of one worker, run as vLLM V1's block pool runs them: reference counts while requests use a block,
//! and one queue of free blocks in the order in which they will be reused.
//!
//! Rules, as measured on vLLM 0.32 and read in 0.24 and later:
//! - A block can be found once it is full and its content is known; it stays findable until it is reused.
//! - Freed blocks with content go to the end of the queue (so the queue is least recently *freed* first), those without to
//!   its front. Requests free tail first, so the head of a prompt outlives its tail.
//! - A hit on a free block takes it out of the queue.
//! - The same content may be held twice (the last block of a prompt is always computed again); the older copy is found.

use hashbrown::HashMap;

use crate::core::ids::BlockHash;

/// A block's number in its pool.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(u32);

/// What a block holds.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing, or a block that is not full.
    Partial,
    /// Full, and found by this hash.
    Known(BlockHash),
    /// Full and aged like any other, but nobody will ever ask for it.
    Unmatched,
}

#[derive(Clone, Debug)]
struct Block {
    content: Content,
    users: u32,
    /// Neighbours in the free queue; meaningless while in use.
    prev: u32,
    next: u32,
    /// Ring of the blocks with the same known content, oldest first from the one in the map.
    twin_prev: u32,
    twin_next: u32,
}

/// Blocks `0..usable` and, at index `usable`, the sentinel of the free queue.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: u32,
    found: HashMap<BlockHash, u32>,
}

impl BlockPool {
    /// A pool of `usable` empty blocks (vLLM's `num_gpu_blocks` less the null block).
    pub fn new(usable: u32) -> BlockPool {
        let ring = usable + 1;
        let block = |i: u32| Block {
            content: Content::Partial,
            users: 0,
            prev: (i + ring - 1) % ring,
            next: (i + 1) % ring,
            twin_prev: i,
            twin_next: i,
        };
        BlockPool { blocks: (0..ring).map(block).collect(), free: usable, found: HashMap::new() }
    }

    pub fn usable(&self) -> u32 {
        self.blocks.len() as u32 - 1
    }

    /// Blocks that no request uses, whatever they still hold.
    pub fn free(&self) -> u32 {
        self.free
    }

    pub fn used(&self) -> u32 {
        self.usable() - self.free
    }

    /// How many of `hashes`, from the first on, are held without a gap. Changes nothing.
    pub fn matching(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.found.contains_key(*hash)).count()
    }

    /// Puts the blocks of the longest held head of `hashes` into `hits` and says how many of them are free now, that is, how
    /// many free blocks using them would cost.
    pub fn look_up(&self, hashes: &[BlockHash], hits: &mut Vec<BlockId>) -> u32 {
        hits.clear();
        let mut free = 0;
        for hash in hashes {
            let Some(&block) = self.found.get(hash) else { break };
            hits.push(BlockId(block));
            free += u32::from(self.blocks[block as usize].users == 0);
        }
        free
    }

    /// One more user for each of `hits`; those that were free leave the queue.
    pub fn touch(&mut self, hits: &[BlockId]) {
        for &BlockId(block) in hits {
            if self.blocks[block as usize].users == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].users += 1;
        }
    }

    /// Takes `count` blocks from the front of the free queue, forgetting what they held, and appends them to `table`.
    /// Takes nothing and answers false if there are fewer.
    #[must_use]
    pub fn allocate(&mut self, count: u32, table: &mut Vec<BlockId>) -> bool {
        if count > self.free {
            return false;
        }
        let sentinel = self.usable();
        for _ in 0..count {
            let block = self.blocks[sentinel as usize].next;
            self.unlink(block);
            self.forget(BlockId(block));
            self.blocks[block as usize].users = 1;
            table.push(BlockId(block));
        }
        true
    }

    /// Says what a block in use holds now that it is full.
    pub fn fill(&mut self, BlockId(block): BlockId, content: Content) {
        self.forget(BlockId(block));
        self.blocks[block as usize].content = content;
        let Content::Known(hash) = content else { return };
        let oldest = *self.found.entry(hash).or_insert(block);
        if oldest != block {
            let last = self.blocks[oldest as usize].twin_prev;
            self.blocks[last as usize].twin_next = block;
            self.blocks[block as usize].twin_prev = last;
            self.blocks[block as usize].twin_next = oldest;
            self.blocks[oldest as usize].twin_prev = block;
        }
    }

    /// The block holds nothing that can be found any more.
    pub fn forget(&mut self, BlockId(block): BlockId) {
        let Block { content, twin_prev, twin_next, .. } = self.blocks[block as usize];
        self.blocks[block as usize].content = Content::Partial;
        let Content::Known(hash) = content else { return };
        if twin_next == block {
            self.found.remove(&hash);
            return;
        }
        if let Some(oldest) = self.found.get_mut(&hash)
            && *oldest == block
        {
            *oldest = twin_next;
        }
        self.blocks[twin_prev as usize].twin_next = twin_next;
        self.blocks[twin_next as usize].twin_prev = twin_prev;
        self.blocks[block as usize].twin_prev = block;
        self.blocks[block as usize].twin_next = block;
    }

    /// One user less for each block of `table`, which is emptied; blocks without users go back to the queue, the last of the
    /// table to be reused first.
    pub fn release(&mut self, table: &mut Vec<BlockId>) {
        let sentinel = self.usable();
        let mut front = sentinel;
        for BlockId(block) in table.drain(..).rev() {
            let Block { ref mut users, content, .. } = self.blocks[block as usize];
            *users -= 1;
            if *users > 0 {
                continue;
            }
            if content == Content::Partial {
                self.link_after(front, block);
                front = block;
            } else {
                self.link_after(self.blocks[sentinel as usize].prev, block);
            }
        }
    }

    /// Forgets the content of all blocks, unless some are in use.
    #[must_use]
    pub fn reset(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.found.clear();
        for (i, block) in self.blocks.iter_mut().enumerate() {
            block.content = Content::Partial;
            block.twin_prev = i as u32;
            block.twin_next = i as u32;
        }
        true
    }

    fn unlink(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
        self.free -= 1;
    }

    fn link_after(&mut self, before: u32, block: u32) {
        let after = self.blocks[before as usize].next;
        self.blocks[before as usize].next = block;
        self.blocks[block as usize].prev = before;
        self.blocks[block as usize].next = after;
        self.blocks[after as usize].prev = block;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests;
