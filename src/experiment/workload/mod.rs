//! What is asked of the fleet: requests, and when each comes. A workload is plain data made from a seed, so that every
//! policy and every target is judged on exactly the same requests: `simulate` plays it in virtual time, `bench` over HTTP.
//!
//! [`shared`] makes prompts around shared prefixes (the Service experiment, hot prefixes, groups), [`chats`] makes growing
//! conversations, [`popularity`] says which prefix comes how often; [`made`] has all that for the command line. [`schema`] reads traces and users' own files, [`bodies`]
//! the latter, [`replay`] makes workloads of them. [`working_set`] says what caches of any size could hold of one.

pub mod bodies;
pub mod chats;
pub mod made;
pub mod popularity;
pub mod replay;
pub mod schema;
pub mod shared;
pub mod working_set;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::core::ids::BlockHash;
use bodies::Body;

/// Everything that one run sends.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Tokens of one block, of the engines' caches and of the prompts' chains.
    pub block_tokens: u32,
    pub requests: Arc<[Request]>,
    pub arrivals: Arrivals,
    /// How many requests at the start (in their order) are served but not measured.
    pub uncounted: usize,
    /// Blocks at the head of a prompt that tell families of prompts apart: the key of the rendezvous policy.
    pub key_blocks: usize,
    /// Prefill work without any cache over the fleet's capacity, where arrivals were scaled to it.
    pub load: Option<f64>,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    pub blocks: Blocks,
    /// At least 1.
    pub prompt_tokens: u32,
    /// At least 1.
    pub output_tokens: u32,
    /// Tokens at the head of the prompt that its family shares by construction; 0 where only the trace knows.
    pub shared_tokens: u32,
    /// The prefix, group or session it belongs to.
    pub group: u32,
    pub content: Content,
}

/// What stands in a prompt when it is sent for real.
#[derive(Clone, Default)]
pub enum Content {
    /// Words made up from the block identities, so that two texts are equal exactly as far as their chains are.
    #[default]
    Made,
    /// This text.
    Text(Arc<str>),
    /// A request body as its user wrote it.
    Body(Arc<Body>),
}

/// Without the text: it may be a user's.
impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Content::Made => "Made",
            Content::Text(_) => "Text",
            Content::Body(_) => "Body",
        })
    }
}

/// When requests come.
#[derive(Clone, Debug)]
pub enum Arrivals {
    /// Open loop: request i at `.0[i]` seconds, ascending.
    Open(Vec<f64>),
    /// Closed loop: the first `warm_up` requests one after another, then `clients` of which each sends the next request
    /// when its last one has been answered.
    Closed { clients: usize, warm_up: usize },
    /// Sessions, each a closed loop: `starts` gives time and first request of each; a request with a think time follows
    /// the one before it, so many seconds after its answer.
    Sessions { starts: Vec<(f64, u32)>, think: Vec<Option<f64>> },
}

/// The identity of a prompt's full blocks.
#[derive(Clone, Debug)]
pub enum Blocks {
    /// Runs of block identities, hashed into a chain when asked for: small, for prompts that are made up.
    Runs(SmallVec<[Run; 2]>),
    /// A chain as it is. From block `shared` on it is told apart by `salt` (0: not at all), so that copies of a session
    /// share their heads only.
    Chain { hashes: Arc<[BlockHash]>, shared: u32, salt: u64 },
}

/// `blocks` blocks named `first`, `first + 1`, ...
#[derive(Copy, Clone, Debug)]
pub struct Run {
    pub first: u64,
    pub blocks: u32,
}

impl Blocks {
    /// A chain as it is.
    pub fn of(hashes: Arc<[BlockHash]>) -> Blocks {
        Blocks::Chain { hashes, shared: 0, salt: 0 }
    }

    /// The chained hashes.
    pub fn chain(&self) -> Arc<[BlockHash]> {
        match self {
            Blocks::Runs(runs) => {
                let ids = runs.iter().flat_map(|run| run.first..run.first + u64::from(run.blocks));
                chain_ids(ids)
            }
            Blocks::Chain { hashes, salt: 0, .. } => hashes.clone(),
            Blocks::Chain { hashes, shared, salt } => {
                let salted = |(i, hash): (usize, &BlockHash)| match i < *shared as usize {
                    true => *hash,
                    false => BlockHash(mix(hash.0 ^ mix(*salt))),
                };
                hashes.iter().enumerate().map(salted).collect()
            }
        }
    }
}

/// Chains block identities: each hash stands for its id and all ids before it.
pub fn chain_ids(ids: impl Iterator<Item = u64>) -> Arc<[BlockHash]> {
    let mut parent = 0x5741_524d;
    ids.map(|id| {
        parent = mix(parent ^ mix(id));
        BlockHash(parent)
    })
    .collect()
}

/// A bijection of 64 bits whose outputs look random (the finaliser of SplitMix64).
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Request {
    /// One whose family, if it has any, only its blocks tell. Lengths are at least 1.
    pub fn new(blocks: Blocks, prompt_tokens: u32, output_tokens: u32) -> Request {
        Request {
            blocks,
            prompt_tokens: prompt_tokens.max(1),
            output_tokens: output_tokens.max(1),
            shared_tokens: 0,
            group: 0,
            content: Content::Made,
        }
    }

    /// Blocks at the head of the prompt that an engine can take from its cache: full ones, and never the last token.
    pub fn reusable_blocks(&self, block_tokens: u32) -> usize {
        ((self.prompt_tokens.max(1) - 1) / block_tokens) as usize
    }
}

impl Workload {
    /// Prompt tokens of all requests.
    pub fn prompt_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.prompt_tokens)).sum()
    }

    /// Of each request's prompt, the tokens that one cache without limit would have had: requests in their order, full
    /// blocks only, the last token always computed.
    pub fn reusable(&self) -> Vec<u32> {
        let mut held = HashSet::new();
        let one = |request: &Request| {
            let chain = request.blocks.chain();
            let most = request.reusable_blocks(self.block_tokens);
            let found = chain.iter().take(most).take_while(|hash| held.contains(*hash)).count() as u32;
            held.extend(chain.iter().copied());
            found * self.block_tokens
        };
        self.requests.iter().map(one).collect()
    }

    /// The same as a share of each prompt.
    pub fn reusable_shares(&self) -> Vec<f64> {
        let share =
            |(found, request): (u32, &Request)| f64::from(found) / f64::from(request.prompt_tokens.max(1));
        self.reusable().into_iter().zip(self.requests.iter()).map(share).collect()
    }

    /// The share of the measured requests' prompt tokens that is [`Workload::reusable`].
    pub fn ceiling(&self) -> f64 {
        let counted = self.uncounted.min(self.requests.len());
        let hit: u64 = self.reusable()[counted..].iter().map(|&tokens| u64::from(tokens)).sum();
        let asked: u64 = self.requests[counted..].iter().map(|one| u64::from(one.prompt_tokens)).sum();
        hit as f64 / asked.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn a_chain_tells_prefixes_apart() {
        let chain = |ids: &[u64]| chain_ids(ids.iter().copied());
        let (a, b, c) = (chain(&[1, 2, 3]), chain(&[1, 2, 4]), chain(&[9, 2, 3]));
        assert_eq!(a[..2], b[..2]);
        assert_ne!(a[2], b[2]);
        assert!(a.iter().zip(c.iter()).all(|(x, y)| x != y));
        let runs = Blocks::Runs(smallvec![Run { first: 1, blocks: 2 }, Run { first: 4, blocks: 1 }]);
        assert_eq!(runs.chain(), b);
    }

    #[test]
    fn copies_share_their_heads_only() {
        let hashes = chain_ids(1..=4);
        let copy = |salt| Blocks::Chain { hashes: hashes.clone(), shared: 2, salt }.chain();
        assert_eq!(copy(0), hashes);
        assert_eq!(copy(1)[..2], hashes[..2]);
        assert!((2..4).all(|i| copy(1)[i] != hashes[i] && copy(1)[i] != copy(2)[i]));
    }

    #[test]
    fn the_ceiling_never_counts_the_last_token() {
        let request = |prompt_tokens| {
            let run = Run { first: 0, blocks: prompt_tokens / 16 };
            Request::new(Blocks::Runs(smallvec![run]), prompt_tokens, 1)
        };
        let workload = |requests: Vec<Request>, uncounted| Workload {
            block_tokens: 16,
            requests: requests.into(),
            arrivals: Arrivals::Closed { clients: 1, warm_up: 0 },
            uncounted,
            key_blocks: 1,
            load: None,
        };
        assert_eq!(workload(vec![request(48), request(48)], 1).ceiling(), 32.0 / 48.0);
        assert_eq!(workload(vec![request(48), request(49)], 1).ceiling(), 48.0 / 49.0);
        assert_eq!(workload(vec![request(48), request(48)], 0).ceiling(), 32.0 / 96.0);
    }
}
