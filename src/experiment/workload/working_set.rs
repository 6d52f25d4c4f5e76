//! What a cache of any size could hold of a workload: for every block of every prompt, how much was used since it was used
//! last (its stack distance), in one pass and exactly. A cache with room for that much has it, a smaller one has not.
//!
//! The cache is a vLLM worker's: least recently used first, a request's blocks tail before head, the part of a prompt
//! beyond its full blocks and its answer take room too and are never found. One request at a time; those in flight together
//! would need a little more.

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::Request;
use crate::core::ids::BlockHash;

/// How many tokens are found in caches of which sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkingSet {
    /// Ascending: a cache of so many tokens finds so many more.
    found: Vec<(u64, u64)>,
    pub prompt_tokens: u64,
    /// Requests that find anything in a cache without limit.
    pub requests_with_hits: usize,
    /// Different full blocks, in tokens.
    pub distinct_tokens: u64,
}

impl WorkingSet {
    /// Of one cache that meets all `requests` in their order.
    pub fn of(requests: &[Request], block_tokens: u32) -> WorkingSet {
        WorkingSet::split(requests, block_tokens, 1, 0)
    }

    /// Of `workers` caches, between which requests are drawn at random: what a Service leaves.
    pub fn split(requests: &[Request], block_tokens: u32, workers: usize, seed: u64) -> WorkingSet {
        let mut random = StdRng::seed_from_u64(seed);
        let mut parts: Vec<Vec<&Request>> = vec![Vec::new(); workers.max(1)];
        for request in requests {
            parts[random.random_range(0..workers.max(1))].push(request);
        }
        let mut whole = WorkingSet {
            found: Vec::new(),
            prompt_tokens: requests.iter().map(|request| u64::from(request.prompt_tokens)).sum(),
            requests_with_hits: 0,
            distinct_tokens: 0,
        };
        for part in parts {
            Stack::new(&part, block_tokens).run(&part, &mut whole);
        }
        whole.found.sort_unstable();
        whole.found.dedup_by(|later, first| {
            let same = later.0 == first.0;
            first.1 += if same { later.1 } else { 0 };
            same
        });
        whole
    }

    /// Share of the prompt tokens that a cache of `cache_tokens` finds; of several caches, each of that size.
    pub fn share_at(&self, cache_tokens: u64) -> f64 {
        let found = self.found.iter().take_while(|(needs, _)| *needs <= cache_tokens);
        found.map(|(_, tokens)| *tokens).sum::<u64>() as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Share that a cache without limit finds.
    pub fn ceiling(&self) -> f64 {
        self.share_at(u64::MAX)
    }

    /// The smallest cache that finds `part` of the ceiling, in tokens; 0 if there is nothing to find.
    pub fn tokens_for(&self, part: f64) -> u64 {
        let all: u64 = self.found.iter().map(|(_, tokens)| tokens).sum();
        let mut sum = 0;
        for (needs, tokens) in &self.found {
            sum += tokens;
            if sum as f64 >= part * all as f64 {
                return *needs;
            }
        }
        0
    }
}

/// The order of use of everything that was used, with room as weight: a Fenwick tree over the times of last use.
struct Stack {
    block_tokens: u32,
    tree: Vec<u64>,
    now: usize,
    /// In use in all, in blocks.
    total: u64,
    last: HashMap<BlockHash, usize>,
}

impl Stack {
    fn new(requests: &[&Request], block_tokens: u32) -> Stack {
        // One time for each full block of each prompt and one for the rest of it.
        let times: u64 = requests.iter().map(|one| u64::from(one.prompt_tokens / block_tokens) + 1).sum();
        Stack { block_tokens, tree: vec![0; times as usize + 2], now: 0, total: 0, last: HashMap::new() }
    }

    fn run(mut self, requests: &[&Request], into: &mut WorkingSet) {
        let block = u64::from(self.block_tokens);
        for request in requests {
            let chain = request.blocks.chain();
            let before = into.found.len();
            for hash in chain.iter().take(request.reusable_blocks(self.block_tokens)) {
                let Some(&used) = self.last.get(hash) else { break };
                let since = self.total - self.sum(used);
                into.found.push(((since + 1) * block, block));
            }
            into.requests_with_hits += usize::from(into.found.len() > before);
            let whole = u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
            let unshared = whole.div_ceil(block).saturating_sub(chain.len() as u64);
            self.use_anew(None, unshared);
            for hash in chain.iter().rev() {
                let used = self.last.get(hash).copied();
                let now = self.use_anew(used, 1);
                into.distinct_tokens += if used.is_none() { block } else { 0 };
                self.last.insert(*hash, now);
            }
        }
    }

    /// Uses what was used at `before`, and answers the new time.
    fn use_anew(&mut self, before: Option<usize>, blocks: u64) -> usize {
        if let Some(before) = before {
            self.add(before, blocks, false);
        }
        self.now += 1;
        self.add(self.now, blocks, true);
        self.now
    }

    fn add(&mut self, time: usize, blocks: u64, more: bool) {
        self.total = if more { self.total + blocks } else { self.total - blocks };
        let mut at = time;
        while at < self.tree.len() {
            self.tree[at] = if more { self.tree[at] + blocks } else { self.tree[at] - blocks };
            at += at & at.wrapping_neg();
        }
    }

    /// Blocks last used at `time` or before.
    fn sum(&self, time: usize) -> u64 {
        let (mut at, mut sum) = (time, 0);
        while at > 0 {
            sum += self.tree[at];
            at -= at & at.wrapping_neg();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;
    use crate::experiment::workload::{Blocks, Content, Run};

    /// A list in the order of use, searched from its end.
    fn slow_share(requests: &[Request], block: u32, cache_blocks: usize) -> f64 {
        let (mut list, mut found, mut asked): (Vec<(u64, u64)>, u64, u64) = (Vec::new(), 0, 0);
        for (number, request) in requests.iter().enumerate() {
            let chain = request.blocks.chain();
            asked += u64::from(request.prompt_tokens);
            for hash in chain.iter().take(request.reusable_blocks(block)) {
                if !list.contains(&(0, hash.0)) {
                    break;
                }
                found += u64::from(block);
            }
            let rest = (request.prompt_tokens + request.output_tokens).div_ceil(block) - chain.len() as u32;
            let own = (0..rest).map(|i| (1 + number as u64, u64::from(i)));
            for item in own.chain(chain.iter().rev().map(|hash| (0, hash.0))) {
                list.retain(|other| *other != item);
                list.push(item);
            }
            list.drain(..list.len().saturating_sub(cache_blocks));
        }
        found as f64 / asked as f64
    }

    proptest! {
        #[test]
        fn every_size_of_cache_finds_what_a_list_finds(
            asked in prop::collection::vec((0..4u64, 0..5u32, 0..5u32, 0..16u32, 1..40u32), 1..40)
        ) {
            let request = |(i, &(family, shared, own, tail, output_tokens)): (usize, &(u64, u32, u32, u32, u32))| Request {
                blocks: Blocks::Runs(smallvec![
                    Run { first: family << 20, blocks: shared },
                    Run { first: (100 + i as u64 / 3) << 20, blocks: own }
                ]),
                prompt_tokens: (16 * (shared + own) + tail).max(1),
                output_tokens,
                shared_tokens: 0,
                group: 0,
                content: Content::Made,
            };
            let requests: Vec<Request> = asked.iter().enumerate().map(request).collect();
            let set = WorkingSet::of(&requests, 16);
            for blocks in [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 1000] {
                let slow = slow_share(&requests, 16, blocks);
                prop_assert_eq!(set.share_at(16 * blocks as u64), slow, "{} blocks", blocks);
            }
            prop_assert_eq!(set.share_at(set.tokens_for(1.0)), set.ceiling());
        }
    }
}
