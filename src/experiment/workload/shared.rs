//! Workloads made around shared prefixes: the Service experiment (closed loop), hot prefixes (open loop), and groups of
//! requests that share more or less of their prompts.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngExt, SeedableRng};
use smallvec::{SmallVec, smallvec};

use super::popularity::Popularity;
use super::{Arrivals, Blocks, Content, Request, Run, Workload};

/// Block size of these workloads: vLLM's default.
pub const BLOCK_TOKENS: u32 = 16;

/// A number of tokens between two limits, both possible.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub from: u32,
    pub to: u32,
}

impl Span {
    pub const fn just(tokens: u32) -> Span {
        Span { from: tokens, to: tokens }
    }

    pub(super) fn draw(self, random: &mut impl Rng) -> u32 {
        random.random_range(self.from..=self.to.max(self.from))
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.from == self.to {
            true => write!(f, "{}", self.from),
            false => write!(f, "{}-{}", self.from, self.to),
        }
    }
}

/// The sizes of a request: a prefix that others share, a prompt around it, an answer. Tokens.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub prefix: u32,
    /// The whole prompt; below `prefix` it is taken as the prefix and one token.
    pub prompt: Span,
    pub output: Span,
}

impl Shape {
    /// The published Service experiment.
    pub const SERVICE: Shape = Shape { prefix: 2032, prompt: Span::just(2371), output: Span::just(64) };
    /// The same in round numbers.
    pub const ROUND: Shape = Shape { prefix: 2000, prompt: Span::just(2300), output: Span::just(64) };
    /// The run on real vLLM: short answers of mixed length.
    pub const REAL: Shape =
        Shape { prefix: 2000, prompt: Span::just(2300), output: Span { from: 16, to: 64 } };

    /// Prompt tokens in the mean.
    pub fn mean_prompt(&self) -> f64 {
        f64::from(self.prompt.from.max(self.prefix + 1) + self.prompt.to.max(self.prefix + 1)) / 2.0
    }

    fn request(&self, prefix: u32, number: usize, random: &mut impl Rng) -> Request {
        let prompt_tokens = self.prompt.draw(random).max(self.prefix + 1);
        let shared = self.prefix / BLOCK_TOKENS;
        Request {
            blocks: Blocks::Runs(smallvec![
                prefix_run(0, prefix, shared),
                own_run(number, prompt_tokens / BLOCK_TOKENS - shared)
            ]),
            prompt_tokens,
            output_tokens: self.output.draw(random).max(1),
            shared_tokens: shared * BLOCK_TOKENS,
            group: prefix,
            content: Content::Made,
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.prefix, self.prompt, self.output)
    }
}

/// Blocks of a prefix: level 0, 1, ... of nested prefixes.
pub(super) fn prefix_run(level: u64, prefix: u32, blocks: u32) -> Run {
    Run { first: 1 << 62 | level << 56 | u64::from(prefix) << 24, blocks }
}

/// Blocks that only request `number` has.
pub(super) fn own_run(number: usize, blocks: u32) -> Run {
    Run { first: 1 << 63 | (number as u64) << 24, blocks }
}

/// What is sent before a closed loop is measured.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum WarmUp {
    /// One request for each prefix, one after another, not measured.
    EachPrefix,
    /// So many requests of the list itself are not measured.
    First(usize),
}

/// The Service experiment: `clients` in a closed loop ask for `prefixes` at random, uniformly.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    pub shape: Shape,
    pub prefixes: u32,
    pub clients: usize,
    /// Measured and, with [`WarmUp::First`], unmeasured ones.
    pub requests: usize,
    pub warm_up: WarmUp,
    pub popularity: Popularity,
}

impl Service {
    pub fn make(&self, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let sampler = self.popularity.over(self.prefixes as usize);
        let (warm_up, uncounted) = match self.warm_up {
            WarmUp::EachPrefix => (self.prefixes as usize, self.prefixes as usize),
            WarmUp::First(requests) => (0, requests),
        };
        let mut warm: Vec<u32> = (0..self.prefixes).take(warm_up).collect();
        warm.shuffle(&mut random);
        let drawn: Vec<u32> = (0..self.requests).map(|_| sampler.draw(&mut random)).collect();
        let request = |(i, prefix)| self.shape.request(prefix, i, &mut random);
        let requests = warm.into_iter().chain(drawn).enumerate().map(request).collect();
        Workload {
            block_tokens: BLOCK_TOKENS,
            requests,
            arrivals: Arrivals::Closed { clients: self.clients, warm_up },
            uncounted,
            key_blocks: (self.shape.prefix / BLOCK_TOKENS) as usize,
            load: None,
        }
    }
}

/// Prefixes of different popularity in an open loop: Poisson arrivals whose prefill work without any cache is `load` of
/// the capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Hot {
    pub shape: Shape,
    pub prefixes: u32,
    pub popularity: Popularity,
    pub load: f64,
    pub requests: usize,
}

impl Hot {
    /// `capacity`: prompt tokens that the fleet can prefill in a second.
    pub fn make(&self, capacity: f64, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let sampler = self.popularity.over(self.prefixes as usize);
        let requests = (0..self.requests)
            .map(|i| self.shape.request(sampler.draw(&mut random), i, &mut random))
            .collect();
        let mean_gap = self.shape.mean_prompt() / (capacity * self.load);
        Workload {
            block_tokens: BLOCK_TOKENS,
            requests,
            arrivals: Arrivals::Open(poisson(self.requests, mean_gap, &mut random)),
            uncounted: 0,
            key_blocks: (self.shape.prefix / BLOCK_TOKENS) as usize,
            load: Some(self.load),
        }
    }
}

/// `count` arrivals with exponential gaps of `mean_gap` seconds.
pub(super) fn poisson(count: usize, mean_gap: f64, random: &mut impl Rng) -> Vec<f64> {
    let mut at = 0.0;
    let next = |_| {
        at -= mean_gap * (1.0 - random.random::<f64>()).ln();
        at
    };
    (0..count).map(next).collect()
}

/// Groups of requests that share part of their prompts, shuffled, in a closed loop: small workloads on which routers pile
/// everything onto one worker or scatter it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Blocks of a prompt of 100 that all requests of all groups share.
    pub global: u32,
    /// Blocks after those that a group shares.
    pub group: u32,
    pub groups: u32,
    pub requests_each: u32,
    pub clients: usize,
}

impl Groups {
    /// Blocks of each prompt.
    const BLOCKS: u32 = 100;

    pub fn make(&self, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let all = (0..self.groups).flat_map(|group| (0..self.requests_each).map(move |_| group));
        let mut order: Vec<u32> = all.collect();
        order.shuffle(&mut random);
        let requests = order.into_iter().enumerate().map(|(i, group)| self.request(group, i)).collect();
        Workload {
            block_tokens: BLOCK_TOKENS,
            requests,
            arrivals: Arrivals::Closed { clients: self.clients, warm_up: 0 },
            uncounted: 0,
            key_blocks: (self.global + self.group) as usize,
            load: None,
        }
    }

    fn request(&self, group: u32, number: usize) -> Request {
        let shared = self.global + self.group;
        let runs: SmallVec<[Run; 2]> = smallvec![
            prefix_run(0, 0, self.global),
            prefix_run(1, group, self.group),
            own_run(number, Self::BLOCKS - shared)
        ];
        Request {
            blocks: Blocks::Runs(runs),
            prompt_tokens: Self::BLOCKS * BLOCK_TOKENS,
            output_tokens: 16,
            shared_tokens: shared * BLOCK_TOKENS,
            group,
            content: Content::Made,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(prefixes: u32, warm_up: WarmUp) -> Service {
        let popularity = Popularity::Uniform;
        Service { shape: Shape::SERVICE, prefixes, clients: 8, requests: 200, warm_up, popularity }
    }

    #[test]
    fn a_seed_makes_the_same_requests_and_another_seed_others() {
        let groups = |seed| {
            let requests = service(7, WarmUp::EachPrefix).make(seed).requests;
            requests.iter().map(|request| request.group).collect::<Vec<_>>()
        };
        assert_eq!(groups(1), groups(1));
        assert_ne!(groups(1), groups(2));
    }

    #[test]
    fn the_service_shape_has_127_shared_blocks_and_a_tail_of_its_own() {
        let workload = service(2, WarmUp::EachPrefix).make(3);
        let mut warm: Vec<u32> = workload.requests[..2].iter().map(|request| request.group).collect();
        warm.sort_unstable();
        assert_eq!((warm, workload.uncounted, workload.requests.len()), (vec![0, 1], 2, 202));
        let same = workload.requests[2..].iter().filter(|request| request.group == 0).take(2);
        let chains: Vec<_> = same.map(|request| request.blocks.chain()).collect();
        assert_eq!((chains[0].len(), chains[0][..127] == chains[1][..127]), (148, true));
        assert!((127..148).all(|i| chains[0][i] != chains[1][i]));
        // Everything is warm: all that can be had is the prefix.
        assert!((workload.ceiling() - 2032.0 / 2371.0).abs() < 1e-9);
    }

    #[test]
    fn open_arrivals_have_the_load_asked_for() {
        let hot = Hot {
            shape: Shape::SERVICE,
            prefixes: 96,
            popularity: Popularity::Uniform,
            load: 2.0,
            requests: 20_000,
        };
        let workload = hot.make(64_000.0, 1);
        let Arrivals::Open(at) = &workload.arrivals else { panic!("not open") };
        let offered = workload.prompt_tokens() as f64 / at[at.len() - 1];
        assert!((offered / 64_000.0 - 2.0).abs() < 0.05, "{offered}");
        assert!(at.is_sorted());
    }

    #[test]
    fn groups_share_what_they_say() {
        let workload = Groups { global: 65, group: 33, groups: 16, requests_each: 20, clients: 4 }.make(1);
        assert_eq!(workload.requests.len(), 320);
        let (a, others) = workload.requests.split_first().unwrap();
        let same = others.iter().find(|request| request.group == a.group).unwrap().blocks.chain();
        let other = others.iter().find(|request| request.group != a.group).unwrap().blocks.chain();
        let a = a.blocks.chain();
        assert_eq!((a[..98] == same[..98], a[98] == same[98]), (true, false));
        assert_eq!((a[..65] == other[..65], a[65] == other[65]), (true, false));
    }

    #[test]
    fn mixed_lengths_stay_in_their_span() {
        let prompt = Span { from: 500, to: 8000 };
        let shape = Shape { prefix: 400, prompt, output: Span { from: 1, to: 9 } };
        let popularity = Popularity::Uniform;
        let workload =
            Service { shape, prefixes: 3, clients: 1, requests: 500, warm_up: WarmUp::First(0), popularity }
                .make(1);
        assert!(workload.requests.iter().all(|r| (500..=8000).contains(&r.prompt_tokens)));
        assert!(workload.requests.iter().all(|r| (1..=9).contains(&r.output_tokens)));
        assert!(workload.requests.iter().any(|r| r.prompt_tokens > 6000));
    }
}
