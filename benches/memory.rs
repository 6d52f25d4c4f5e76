//! What the belief costs in memory: resident bytes per believed block, and whether it stays flat at the bound. Prints a table.

#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::sync::Arc;

use warmroute::core::blocks::Chain;
use warmroute::core::ids::{BlockHash, Time, WorkerId};
use warmroute::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * 4096
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (value >> 32)
}

fn prompt(serial: u64, blocks: u64) -> Ask {
    let hashes: Arc<[BlockHash]> = (0..blocks).map(|at| BlockHash(mix((serial << 20) | at))).collect();
    Ask {
        chain: Chain::even(hashes, blocks * 256),
        block_tokens: 64.0,
        prompt_tokens: blocks as f64 * 64.0,
        output_tokens: 64.0,
        streams: true,
    }
}

fn serve(planner: &Arc<Planner>, fleet: &[WorkerId], ask: &Ask, serial: u64) {
    let now = Time(serial as f64);
    if let Some((_, mut booking)) = planner.plan(ask, fleet, Policy::Kv, now, serial) {
        booking.commit(now);
    }
}

fn main() {
    println!("{:>12} {:>9} {:>14} {:>12} {:>12}", "prompts", "blocks", "distinct", "RSS MiB", "bytes/block");
    let base = resident_bytes();
    let max_blocks = 2_000_000;
    let planner = Planner::new(Settings { max_blocks, ..Settings::default() });
    let spec = |key| WorkerSpec { key, capacity_tokens: None, engine_block_tokens: 16, prefill_speed: None };
    let fleet: Vec<WorkerId> = (0..64).map(|key| planner.add_worker(spec(key))).collect();
    for serial in 0..64_000u64 {
        serve(&planner, &fleet, &prompt(serial, 125), serial);
        if serial % 4_000 == 3_999 {
            let used = resident_bytes() - base;
            let blocks: usize = fleet
                .iter()
                .filter_map(|id| planner.belief(*id, Time(0.0)))
                .map(|belief| belief.blocks)
                .sum();
            let mib = used as f64 / f64::from(1 << 20);
            let each = used as f64 / blocks.max(1) as f64;
            println!(
                "{:>12} {blocks:>9} {:>14} {mib:>12.1} {each:>12.1}",
                serial + 1,
                planner.believed_blocks()
            );
        }
    }
}
