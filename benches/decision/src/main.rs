//! Decides for chats of 32 KB of which nine tenths are cached, as the proxy does: reads the body, hashes it, prices the workers, books,
//! and takes the end; as often as the first argument says, once the caches are full.

#![allow(dead_code, unused_imports, reason = "not all of the core is used here")]

#[path = "../../../src/core/mod.rs"]
mod core;

use std::hint::black_box;
use std::sync::Arc;

use crate::core::blocks::{DEFAULT_BLOCK_BYTES, HashKey};
use crate::core::booking::Finished;
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};
use crate::core::prompt::{Endpoint, read};

const WORKERS: u64 = 16;
const PREFIXES: u64 = 64;
const BYTES_PER_TOKEN: f64 = 4.0;

/// Words from a seed, so many bytes of them.
fn text(seed: u64, bytes: usize) -> String {
    let mut words = String::new();
    let mut state = seed;
    while words.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        words.push_str(&format!("{:08x} ", state >> 32));
    }
    words.truncate(bytes);
    words
}

struct Bench {
    key: HashKey,
    planner: Arc<Planner>,
    workers: Vec<WorkerId>,
}

impl Bench {
    #[inline(never)]
    fn decide(&self, body: &[u8], serial: u64) {
        let chain = read(Endpoint::Chat, body, &self.key, DEFAULT_BLOCK_BYTES).chain;
        let chain = chain.expect("a chat that can be read");
        let ask = Ask {
            block_tokens: DEFAULT_BLOCK_BYTES as f64 / BYTES_PER_TOKEN,
            prompt_tokens: chain.bytes as f64 / BYTES_PER_TOKEN,
            chain,
            output_tokens: 64.0,
            streams: true,
        };
        let now = Time(serial as f64);
        let planned = self.planner.plan(&ask, &self.workers, Policy::Kv, now, serial);
        let (decision, mut booking) = planned.expect("there are workers");
        black_box(decision);
        booking.commit(now);
        booking.first_token(now + 0.1);
        booking.finish(Finished::default(), now + 0.5);
    }

    /// The same, under a name by which callgrind knows what to count.
    #[inline(never)]
    fn counted(&self, body: &[u8], serial: u64) {
        self.decide(body, serial);
    }
}

fn main() {
    let count: u64 = std::env::args().nth(1).and_then(|count| count.parse().ok()).expect("how many to count");
    let planner = Planner::new(Settings::default());
    let spec = |key| WorkerSpec {
        key,
        capacity_tokens: Some(100_000),
        engine_block_tokens: 16,
        prefill_speed: Some(10_000.0),
    };
    let workers = (0..WORKERS).map(|key| planner.add_worker(spec(key))).collect();
    let bench = Bench { key: HashKey([7; 32]), planner, workers };
    let prefixes: Vec<String> = (0..PREFIXES).map(|seed| text(seed, 28_800)).collect();
    // Four rounds fill the caches.
    for serial in 0..4 * PREFIXES + count {
        let prefix = &prefixes[(serial % PREFIXES) as usize];
        let own = text(!serial, 3_200);
        let body = format!(
            r#"{{"model":"m","stream":true,"messages":[{{"role":"system","content":"{prefix}"}},{{"role":"user","content":"{own}"}}]}}"#
        );
        let call = if serial < 4 * PREFIXES { Bench::decide } else { Bench::counted };
        call(&bench, black_box(body.as_bytes()), serial);
    }
}
