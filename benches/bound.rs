//! How much of the Service experiment any placement could hit, found by search: the formula's `workers x held / prefixes` cannot be
//! reached, because prompts' own ends and answers push prefixes out too. `cargo bench --bench bound` prints the table of README.md.
//!
//! A light model: requests one at a time, each worker's cache in vLLM's order (the request that ended longest ago loses first its own end
//! and answer, then its prefix from the back). The search knows the whole future, which no router does, and keeps the best few hundred
//! ways to place all requests so far; what it finds is possible, so the true bound is no lower.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::collections::HashSet;
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const CAPACITY: u32 = 9_344;
const BLOCK: u32 = 16;
/// Ways to place all requests so far that are kept.
const KEPT: usize = 300;
const REQUESTS: usize = 4_000;
const WARM_UP: usize = 400;

/// What one request left in a cache, or what is left of it.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
struct Run {
    prefix: u8,
    prefix_tokens: u32,
    own_tokens: u32,
}

/// A worker's cache, oldest run first.
type Stack = Vec<Run>;

#[derive(Copy, Clone)]
struct Shape {
    prefix: u32,
    /// The prompt's own tokens and the answer.
    own: u32,
}

fn cached(stack: &Stack, prefix: u8) -> u32 {
    stack.iter().find(|run| run.prefix == prefix && run.prefix_tokens > 0).map_or(0, |run| run.prefix_tokens)
}

/// The stack after a request for `prefix`.
fn served(stack: &Stack, prefix: u8, shape: Shape) -> Stack {
    let mut stack = stack.clone();
    for run in stack.iter_mut().filter(|run| run.prefix == prefix) {
        run.prefix_tokens = 0;
    }
    let held = |stack: &Stack| stack.iter().map(|run| run.prefix_tokens + run.own_tokens).sum::<u32>();
    let mut over = (held(&stack) + shape.prefix + shape.own).saturating_sub(CAPACITY);
    for run in &mut stack {
        let own = over.min(run.own_tokens);
        run.own_tokens -= own;
        over -= own;
        let blocks = over.div_ceil(BLOCK) * BLOCK;
        let prefix = blocks.min(run.prefix_tokens);
        run.prefix_tokens -= prefix;
        over = over.saturating_sub(prefix);
    }
    stack.retain(|run| run.prefix_tokens + run.own_tokens > 0);
    stack.push(Run { prefix, prefix_tokens: shape.prefix, own_tokens: shape.own });
    stack
}

/// One way to place all requests so far.
#[derive(Clone)]
struct Way {
    hit: u64,
    /// Of these, after the warm-up.
    counted: u64,
    workers: Vec<Rc<Stack>>,
}

impl Way {
    /// Hits so far, and what the caches are worth: of each prefix what some worker holds, the more the sooner it comes again.
    fn promise(&self, next_use: &[usize], now: usize) -> f64 {
        let worth = next_use.iter().enumerate().map(|(prefix, &at)| {
            let most = self.workers.iter().map(|stack| cached(stack, prefix as u8)).max().unwrap_or(0);
            f64::from(most) / (1.0 + 0.02 * (at - now) as f64)
        });
        self.hit as f64 + worth.sum::<f64>()
    }
}

/// For each request, when each prefix comes next.
fn next_uses(requests: &[u8], prefixes: usize) -> Vec<Vec<usize>> {
    let mut next = vec![requests.len() + 100; prefixes];
    let mut all: Vec<Vec<usize>> = requests
        .iter()
        .enumerate()
        .rev()
        .map(|(at, &prefix)| {
            let then = next.clone();
            next[usize::from(prefix)] = at;
            then
        })
        .collect();
    all.reverse();
    all
}

/// The share of prefix tokens that the best way found hits.
fn search(workers: usize, prefixes: usize, shape: Shape, seed: u64) -> f64 {
    let mut random = StdRng::seed_from_u64(seed);
    let requests: Vec<u8> = (0..REQUESTS).map(|_| random.random_range(0..prefixes) as u8).collect();
    let mut ways = vec![Way { hit: 0, counted: 0, workers: vec![Rc::default(); workers] }];
    for (now, (&prefix, next)) in requests.iter().zip(next_uses(&requests, prefixes)).enumerate() {
        let mut seen = HashSet::new();
        let mut grown: Vec<(f64, Way)> = Vec::new();
        for way in &ways {
            for at in 0..workers {
                let mut way = way.clone();
                let hit = u64::from(cached(&way.workers[at], prefix));
                way.hit += hit;
                way.counted += if now < WARM_UP { 0 } else { hit };
                way.workers[at] = Rc::new(served(&way.workers[at], prefix, shape));
                // Workers are alike: the same stacks in another order are the same way.
                let mut stacks = way.workers.clone();
                stacks.sort_by_key(|stack| {
                    stack.iter().map(|run| (run.prefix, run.prefix_tokens)).collect::<Vec<_>>()
                });
                if seen.insert(stacks) {
                    grown.push((way.promise(&next, now), way));
                }
            }
        }
        grown.sort_by(|a, b| b.0.total_cmp(&a.0));
        grown.truncate(KEPT);
        ways = grown.into_iter().map(|(_, way)| way).collect();
    }
    let best = ways.iter().map(|way| way.counted).max().unwrap();
    best as f64 / (f64::from(shape.prefix) * (REQUESTS - WARM_UP) as f64)
}

/// The same model with each prefix on a worker of its own choice, the same number on each.
fn fixed(workers: usize, prefixes: usize, shape: Shape, seed: u64) -> f64 {
    let mut random = StdRng::seed_from_u64(seed);
    let mut stacks = vec![Stack::new(); workers];
    let mut hit = 0;
    for now in 0..REQUESTS {
        let prefix = random.random_range(0..prefixes) as u8;
        let stack = &mut stacks[usize::from(prefix) % workers];
        hit += if now < WARM_UP { 0 } else { u64::from(cached(stack, prefix)) };
        *stack = served(stack, prefix, shape);
    }
    hit as f64 / (f64::from(shape.prefix) * (REQUESTS - WARM_UP) as f64)
}

fn main() {
    println!(
        "| shape (prefix / prompt / output) | workers, prefixes | formula | four on each worker | whole future known, by search |"
    );
    println!("| --- | --- | --- | --- | --- |");
    for (prefix, prompt) in [(2_032, 2_371), (2_000, 2_300)] {
        let shape = Shape { prefix, own: prompt - prefix + 64 };
        for (workers, prefixes) in [(6, 24), (3, 12)] {
            let mean = |share: fn(usize, usize, Shape, u64) -> f64| {
                (1..=3).map(|seed| 100.0 * share(workers, prefixes, shape, seed)).sum::<f64>() / 3.0
            };
            let held = f64::from(CAPACITY) / f64::from(prompt);
            let formula = 100.0 * (workers as f64 * held / prefixes as f64).min(1.0);
            println!(
                "| {prefix} / {prompt} / 64 | {workers}, {prefixes} | {formula:.1} | {:.1} | {:.1} |",
                mean(fixed),
                mean(search)
            );
        }
    }
}
