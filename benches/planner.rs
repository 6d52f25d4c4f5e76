//! Decisions a second: look-up, pricing, booking and giving back, at several fleet sizes and prompt lengths, with a million
//! blocks believed; and how they scale with threads. Hashing is in `prompt.rs`.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use warmroute::core::blocks::{Chain, Widths};
use warmroute::core::booking::Finished;
use warmroute::core::ids::{BlockHash, Time, WorkerId};
use warmroute::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};

const UNIT_TOKENS: u64 = 64;
const SPEED: f64 = 10_000.0;

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (value >> 32)
}

/// Blocks of a prompt.
fn blocks_of(tokens: u64) -> u64 {
    (0..).take_while(|&depth| Widths::GROWING.within(depth + 1) as u64 * UNIT_TOKENS <= tokens).count() as u64
}

/// A prompt whose first nine tenths belong to `prefix` and whose rest is `serial`'s own.
fn ask(prefix: u64, serial: u64, tokens: u64) -> Ask {
    let blocks = blocks_of(tokens);
    let shared = blocks * 9 / 10;
    let hash =
        |at: u64| if at < shared { mix((prefix << 20) | at) } else { mix((1 << 63) | (serial << 12) | at) };
    let hashes: Arc<[BlockHash]> = (0..blocks).map(|at| BlockHash(hash(at))).collect();
    Ask {
        chain: Chain { hashes, widths: Widths::GROWING, bytes: tokens * 4 },
        block_tokens: UNIT_TOKENS as f64,
        prompt_tokens: tokens as f64,
        output_tokens: 64.0,
        streams: true,
    }
}

fn serve(planner: &Arc<Planner>, fleet: &[WorkerId], ask: &Ask, serial: u64) {
    // Seldom enough, and answered as fast as the workers are, that all of them are idle and equal.
    let now = Time(serial as f64);
    if let Some((decision, mut booking)) = planner.plan(ask, fleet, Policy::Kv, now, serial) {
        let first_token = now + (ask.prompt_tokens - decision.predicted_cached_tokens) / SPEED;
        booking.commit(now);
        booking.first_token(first_token);
        booking.finish(Finished::default(), first_token + 0.01);
        black_box(decision);
    }
}

/// A fleet whose caches are full, together holding `held` blocks, so that every insert evicts.
fn warm_fleet(workers: u64, held: u64, tokens: u64) -> (Arc<Planner>, Vec<WorkerId>, u64) {
    let blocks = blocks_of(tokens);
    let planner = Planner::new(Settings { max_blocks: 4_000_000, ..Settings::default() });
    let spec = |key| WorkerSpec {
        key,
        capacity_tokens: Some(held / workers * tokens / blocks),
        engine_block_tokens: 16,
        prefill_speed: Some(SPEED),
    };
    let fleet: Vec<WorkerId> = (0..workers).map(|key| planner.add_worker(spec(key))).collect();
    let prefixes = held / blocks * 3 / 4;
    for serial in 0..prefixes * 3 {
        serve(&planner, &fleet, &ask(serial % prefixes, serial, tokens), serial);
    }
    (planner, fleet, prefixes)
}

/// `warm`: nine tenths of the prompt are held. `cold`: nothing is, and as much is evicted.
fn decisions(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision");
    group.sample_size(20);
    for (workers, tokens) in [(4, 1_000), (64, 1_000), (4, 8_000), (64, 8_000), (1_024, 8_000), (64, 128_000)]
    {
        let (planner, fleet, prefixes) = warm_fleet(workers, 1_000_000, tokens);
        let mut serial = 1 << 30;
        for warm in [true, false] {
            let state = if warm { "warm" } else { "cold" };
            let id = BenchmarkId::new(format!("{state}/{workers}_workers"), format!("{tokens}_tokens"));
            group.bench_function(id, |b| {
                b.iter_batched(
                    || {
                        serial += 1;
                        let prefix = if warm { mix(serial) % prefixes } else { serial };
                        (ask(prefix, serial, tokens), serial)
                    },
                    |(ask, serial)| serve(&planner, &fleet, &ask, serial),
                    criterion::BatchSize::SmallInput,
                );
            });
        }
    }
    group.finish();
}

fn threads(c: &mut Criterion) {
    const EACH: u64 = 2_000;
    let (planner, fleet, prefixes) = warm_fleet(64, 1_000_000, 8_000);
    let serial = AtomicU64::new(1 << 40);
    let mut group = c.benchmark_group("threads");
    group.sample_size(10);
    for threads in [1, 2] {
        group.throughput(Throughput::Elements(EACH * threads));
        group.bench_function(BenchmarkId::from_parameter(threads), |b| {
            b.iter(|| {
                std::thread::scope(|scope| {
                    for _ in 0..threads {
                        scope.spawn(|| {
                            for _ in 0..EACH {
                                let serial = serial.fetch_add(1, Ordering::Relaxed);
                                serve(&planner, &fleet, &ask(mix(serial) % prefixes, serial, 8_000), serial);
                            }
                        });
                    }
                });
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decisions, threads);
criterion_main!(benches);
