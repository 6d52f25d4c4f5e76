//! What one decision costs with a million blocks believed and every cache full, at several fleet sizes and prompt lengths:
//! `decision` reads a body, hashes it, looks it up, prices, books; `end` is what the request costs after its answer; `shadow` what the
//! shadow adds to both; `threads` is both without reading and hashing, on one thread and on two.

use std::fmt::Write;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use warmroute::core::blocks::{Chain, DEFAULT_BLOCK_BYTES, HashKey};
use warmroute::core::booking::{Booking, Finished};
use warmroute::core::ids::{Time, WorkerId};
use warmroute::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};
use warmroute::core::prompt::{Endpoint, read};
use warmroute::core::shadow::{Sampling, Shadow};

const KEY: HashKey = HashKey([7; 32]);
const BYTES_PER_TOKEN: u64 = 4;
const SPEED: f64 = 10_000.0;
/// Requests that are open at a time while decisions are measured.
const OPEN: u64 = 32;

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (value >> 32)
}

/// Text of so many bytes, another for each seed.
fn text(into: &mut String, seed: u64, bytes: u64) {
    let end = into.len() + bytes as usize;
    for at in 0.. {
        if into.len() >= end {
            break;
        }
        write!(into, "{:016x} ", mix(seed ^ (at << 40))).expect("a string takes all");
    }
    into.truncate(end);
}

/// A chat whose first nine tenths belong to `prefix` and whose rest is `serial`'s own.
fn body(prefix: u64, serial: u64, tokens: u64) -> Vec<u8> {
    let bytes = tokens * BYTES_PER_TOKEN;
    let mut body = String::with_capacity(bytes as usize + 256);
    body.push_str(r#"{"model":"m","stream":true,"messages":[{"role":"system","content":""#);
    text(&mut body, mix(prefix), bytes * 9 / 10);
    body.push_str(r#""},{"role":"user","content":""#);
    text(&mut body, !mix(serial), bytes / 10);
    body.push_str(r#""}]}"#);
    body.into_bytes()
}

fn ask(body: &[u8]) -> Ask {
    let chain = read(Endpoint::Chat, body, &KEY, DEFAULT_BLOCK_BYTES).chain;
    let chain = chain.unwrap_or_else(|_| Chain::empty());
    Ask {
        block_tokens: DEFAULT_BLOCK_BYTES as f64 / BYTES_PER_TOKEN as f64,
        prompt_tokens: chain.bytes as f64 / BYTES_PER_TOKEN as f64,
        chain,
        output_tokens: 64.0,
        streams: true,
    }
}

struct Warm {
    planner: Arc<Planner>,
    workers: Vec<WorkerId>,
    prefixes: u64,
    tokens: u64,
}

impl Warm {
    /// A fleet whose caches are full, together holding `held` blocks, so that every insert evicts.
    fn new(workers: u64, held: u64, tokens: u64) -> Warm {
        let blocks = ask(&body(0, 0, tokens)).chain.hashes.len() as u64;
        let planner = Planner::new(Settings { max_blocks: 4_000_000, ..Settings::default() });
        let spec = |key| WorkerSpec {
            key,
            capacity_tokens: Some(held / workers * tokens / blocks),
            engine_block_tokens: 16,
            prefill_speed: Some(SPEED),
        };
        let workers = (0..workers).map(|key| planner.add_worker(spec(key))).collect();
        let fleet = Warm { planner, workers, prefixes: held / blocks * 3 / 4, tokens };
        for serial in 0..fleet.prefixes * 3 {
            fleet.end(fleet.decide(&ask(&body(serial % fleet.prefixes, serial, tokens)), serial));
        }
        fleet
    }

    /// Seldom enough, and answered as fast as the workers are, that all of them are idle and equal.
    fn decide(&self, ask: &Ask, serial: u64) -> Option<(Booking, Time)> {
        let now = Time(serial as f64);
        let (decision, booking) = self.planner.plan(ask, &self.workers, Policy::Kv, now, serial)?;
        Some((booking, now + (ask.prompt_tokens - black_box(decision).predicted_cached_tokens) / SPEED))
    }

    fn end(&self, decided: Option<(Booking, Time)>) {
        if let Some((mut booking, first_token)) = decided {
            booking.commit(first_token);
            booking.first_token(first_token);
            booking.finish(Finished::default(), first_token + 0.01);
        }
    }

    fn body(&self, warm: bool, serial: u64) -> Vec<u8> {
        body(if warm { mix(serial) % self.prefixes } else { serial }, serial, self.tokens)
    }
}

/// `warm`: nine tenths of the prompt are held. `cold`: nothing is, and as much is evicted.
fn decisions(c: &mut Criterion) {
    let serial = AtomicU64::new(1 << 30);
    let next = || serial.fetch_add(1, Ordering::Relaxed);
    for (workers, tokens) in [(4, 1_000), (64, 1_000), (4, 8_000), (64, 8_000), (1_024, 8_000), (64, 128_000)]
    {
        let fleet = Warm::new(workers, 1_000_000, tokens);
        for warm in [true, false] {
            let state = if warm { "warm" } else { "cold" };
            let id = |what| format!("{what}/{state}/{workers}_workers/{tokens}_tokens");
            let prepared = || {
                let serial = next();
                (fleet.body(warm, serial), serial)
            };
            c.bench_function(&id("decision"), |b| {
                b.iter_batched(
                    prepared,
                    |(body, serial)| fleet.decide(&ask(&body), serial),
                    BatchSize::NumIterations(OPEN),
                );
            });
            c.bench_function(&id("end"), |b| {
                b.iter_batched(
                    || {
                        let (body, serial) = prepared();
                        fleet.decide(&ask(&body), serial)
                    },
                    |decided| fleet.end(decided),
                    BatchSize::NumIterations(OPEN),
                );
            });
        }
    }
}

/// What the shadow adds to a request, from its placement to its end, once its models are full: in mode `kv` it plays `random`, and
/// the other way round.
fn shadow(c: &mut Criterion) {
    let fleet = Warm::new(64, 1_000_000, 8_000);
    let serial = AtomicU64::new(1 << 41);
    for (mode, policy) in [("kv", Policy::Kv), ("random", Policy::Random)] {
        let shadow = Shadow::new(Sampling::Auto, fleet.planner.settings());
        shadow.sync(&fleet.planner, DEFAULT_BLOCK_BYTES as f64 / BYTES_PER_TOKEN as f64);
        let follow = |(ask, serial): (Ask, u64)| {
            let now = Time(serial as f64);
            let Some(mut followed) = shadow.follow(&ask, &fleet.workers, policy, now, mix(serial)) else {
                return;
            };
            followed.commit(now);
            followed.finish(Some(64), now + 0.5);
        };
        let next = || {
            let serial = serial.fetch_add(1, Ordering::Relaxed);
            (ask(&fleet.body(true, serial)), serial)
        };
        (0..fleet.prefixes * 2).for_each(|_| follow(next()));
        let id = format!("shadow/{mode}/64_workers/8000_tokens/one_in_{}", shadow.one_in().unwrap_or(0));
        c.bench_function(&id, |b| b.iter_batched(next, follow, BatchSize::NumIterations(OPEN)));
    }
}

fn threads(c: &mut Criterion) {
    const EACH: u64 = 2_000;
    let fleet = Warm::new(64, 1_000_000, 8_000);
    let serial = AtomicU64::new(1 << 40);
    let mut group = c.benchmark_group("threads");
    group.sample_size(10);
    for threads in [1, 2] {
        group.throughput(Throughput::Elements(EACH * threads));
        group.bench_function(BenchmarkId::from_parameter(threads), |b| {
            b.iter_batched(
                || {
                    let asks = (0..EACH * threads).map(|_| {
                        let serial = serial.fetch_add(1, Ordering::Relaxed);
                        (ask(&fleet.body(true, serial)), serial)
                    });
                    asks.collect::<Vec<_>>()
                },
                |asks| {
                    std::thread::scope(|scope| {
                        for asks in asks.chunks(EACH as usize) {
                            scope.spawn(|| {
                                asks.iter().for_each(|(ask, serial)| fleet.end(fleet.decide(ask, *serial)));
                            });
                        }
                    });
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = decisions, shadow, threads
}
criterion_main!(benches);
