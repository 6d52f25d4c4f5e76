//! The pool against one written as on paper, operation by operation.

use proptest::prelude::*;

use super::*;

/// The pool as one would write it on paper: a list of free blocks, searched from end to end.
struct Paper {
    content: Vec<Content>,
    filled_at: Vec<u64>,
    users: Vec<u32>,
    free: Vec<usize>,
    clock: u64,
}

impl Paper {
    fn new(usable: usize) -> Paper {
        Paper {
            content: vec![Content::Partial; usable],
            filled_at: vec![0; usable],
            users: vec![0; usable],
            free: (0..usable).collect(),
            clock: 0,
        }
    }

    fn find(&self, hash: BlockHash) -> Option<usize> {
        let holders = (0..self.content.len()).filter(|&block| self.content[block] == Content::Known(hash));
        holders.min_by_key(|&block| self.filled_at[block])
    }

    fn look_up(&self, hashes: &[BlockHash]) -> Vec<usize> {
        hashes.iter().map_while(|&hash| self.find(hash)).collect()
    }

    fn touch(&mut self, hits: &[usize]) {
        for &block in hits {
            self.users[block] += 1;
            self.free.retain(|&free| free != block);
        }
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<usize>> {
        if count > self.free.len() {
            return None;
        }
        let taken: Vec<usize> = self.free.drain(..count).collect();
        for &block in &taken {
            self.content[block] = Content::Partial;
            self.users[block] = 1;
        }
        Some(taken)
    }

    fn fill(&mut self, block: usize, content: Content) {
        self.clock += 1;
        self.content[block] = content;
        self.filled_at[block] = self.clock;
    }

    fn release(&mut self, table: &[usize]) {
        let mut first = Vec::new();
        for &block in table.iter().rev() {
            self.users[block] -= 1;
            if self.users[block] == 0 {
                let list = if self.content[block] == Content::Partial { &mut first } else { &mut self.free };
                list.push(block);
            }
        }
        first.append(&mut self.free);
        self.free = first;
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A request of a family's first `blocks` blocks; the last one is left partial or filled without a name.
    Start {
        family: u64,
        blocks: u64,
        tail: u8,
    },
    End(usize),
    /// Takes back the last block of a running request.
    Forget(usize),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..4u64, 1..9u64, 0..3u8).prop_map(|(family, blocks, tail)| Op::Start { family, blocks, tail }),
        6 => any::<prop::sample::Index>().prop_map(|index| Op::End(index.index(64))),
        1 => any::<prop::sample::Index>().prop_map(|index| Op::Forget(index.index(64))),
        1 => Just(Op::Reset),
    ]
}

/// Families share their first two blocks.
fn chain(family: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|i| BlockHash(if i < 2 { i } else { 100 * (family + 1) + i })).collect()
}

fn numbers(blocks: &[BlockId]) -> Vec<usize> {
    blocks.iter().map(|block| block.0 as usize).collect()
}

fn start(pool: &mut BlockPool, paper: &mut Paper, hashes: &[BlockHash], tail: u8) -> Option<Vec<BlockId>> {
    let reusable = &hashes[..hashes.len() - 1];
    let mut hits = Vec::new();
    let free_hits = pool.look_up(reusable, &mut hits);
    assert_eq!(numbers(&hits), paper.look_up(reusable));
    assert_eq!(pool.matching(reusable), hits.len());
    let missing = hashes.len() - hits.len();
    if missing as u32 + free_hits > pool.free() {
        return None;
    }
    pool.touch(&hits);
    paper.touch(&numbers(&hits));
    let mut table = hits.clone();
    assert!(pool.allocate(missing as u32, &mut table));
    let taken = paper.allocate(missing).expect("the two agree on what is free");
    assert_eq!(numbers(&table[hits.len()..]), taken);
    for index in hits.len()..hashes.len() {
        let last = index + 1 == hashes.len();
        let content = match tail {
            0 if last => continue,
            1 if last => Content::Unmatched,
            _ => Content::Known(hashes[index]),
        };
        pool.fill(table[index], content);
        paper.fill(table[index].0 as usize, content);
    }
    Some(table)
}

proptest! {
    #[test]
    fn agrees_with_paper(usable in 6..40usize, ops in prop::collection::vec(op(), 1..120)) {
        let (mut pool, mut paper) = (BlockPool::new(usable as u32), Paper::new(usable));
        let mut running: Vec<Vec<BlockId>> = Vec::new();
        for op in ops {
            match op {
                Op::Start { family, blocks, tail } => {
                    running.extend(start(&mut pool, &mut paper, &chain(family, blocks), tail));
                }
                Op::End(index) if !running.is_empty() => {
                    let mut table = running.swap_remove(index % running.len());
                    paper.release(&numbers(&table));
                    pool.release(&mut table);
                }
                Op::Forget(index) if !running.is_empty() => {
                    let table = &running[index % running.len()];
                    let last = table[table.len() - 1];
                    pool.forget(last);
                    paper.content[last.0 as usize] = Content::Partial;
                }
                Op::Reset => {
                    let idle = running.is_empty();
                    prop_assert_eq!(pool.reset(), idle);
                    if idle {
                        paper.content.fill(Content::Partial);
                    }
                }
                _ => {}
            }
            prop_assert_eq!(pool.free() as usize, paper.free.len());
            prop_assert_eq!(pool.free() + pool.used(), usable as u32);
        }
        for mut table in running {
            pool.release(&mut table);
        }
        prop_assert_eq!(pool.used(), 0);
        prop_assert!(pool.blocks.iter().all(|block| block.users == 0));
    }
}

#[test]
fn allocating_too_much_takes_nothing() {
    let mut pool = BlockPool::new(4);
    let mut table = Vec::new();
    assert!(!pool.allocate(5, &mut table));
    assert_eq!((table.len(), pool.free()), (0, 4));
    assert!(pool.allocate(4, &mut table));
    assert!(!pool.reset(), "blocks are in use");
}
