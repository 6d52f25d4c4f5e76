//! The shadow beside the true planner, and what it makes of a changing fleet.

use super::*;
use crate::core::ids::mix;

const BLOCK: f64 = 64.0;

fn spec(key: u64, blocks: u64) -> WorkerSpec {
    WorkerSpec {
        key,
        capacity_tokens: Some(blocks * BLOCK as u64),
        engine_block_tokens: 16,
        prefill_speed: Some(10_000.0),
    }
}

/// A prompt of `shared` blocks of a prefix and `own` blocks of its own, and half a block.
fn ask(prefix: u64, shared: u64, serial: u64, own: u64) -> Ask {
    let shared = (0..shared).map(|at| (prefix << 20) | at);
    let hashes = shared.chain((0..own).map(|at| (1 << 60) | (serial << 10) | at));
    let hashes: Arc<[BlockHash]> = hashes.map(|seed| BlockHash(mix(seed + 1))).collect();
    let prompt_tokens = hashes.len() as f64 * BLOCK + BLOCK / 2.0;
    Ask {
        chain: Chain::even(hashes, prompt_tokens as u64 * 4),
        block_tokens: BLOCK,
        prompt_tokens,
        output_tokens: 32.0,
        streams: true,
    }
}

/// Serves requests for `prefixes` prefixes in no order; answers the share that was predicted, and what the shadow said.
fn serve(policy: Policy, sampling: Sampling, prefixes: u64) -> (f64, Share, Share) {
    let planner = Planner::new(Settings::default());
    let workers: Vec<WorkerId> = (0..4).map(|key| planner.add_worker(spec(key, 400))).collect();
    let shadow = Shadow::new(sampling, &Settings::default());
    shadow.sync(&planner, BLOCK);
    let add = |sum: &mut Share, share: Share| {
        *sum = Share { prompt: sum.prompt + share.prompt, cached: sum.cached + share.cached };
    };
    let (mut own, mut other, mut ideal) = (Share::default(), Share::default(), Share::default());
    for serial in 0..4_000 {
        let now = Time(serial as f64);
        let ask = ask(mix(serial) % prefixes, 40, serial, 8);
        let (decision, mut booking) = planner.plan(&ask, &workers, policy, now, mix(!serial)).unwrap();
        let mut followed = shadow.follow(&ask, &workers, policy, now, mix(serial + 7)).unwrap();
        if serial >= 1_000 {
            add(&mut own, Share { prompt: ask.prompt_tokens, cached: decision.predicted_cached_tokens });
            add(&mut other, followed.other);
            add(&mut ideal, followed.ideal);
        }
        booking.commit(now);
        followed.commit(now);
        let finished = Finished {
            prompt_tokens: Some(ask.prompt_tokens as u32),
            cached_tokens: None,
            output_tokens: Some(32),
        };
        booking.finish(finished, now + 0.5);
        followed.finish(Some(32), now + 0.5);
    }
    (of(own), other, ideal)
}

fn of(share: Share) -> f64 {
    share.cached / share.prompt
}

#[test]
fn each_policy_is_told_what_the_other_one_finds() {
    for sampling in [Sampling::OneIn(1), Sampling::OneIn(4)] {
        // 24 prefixes of 40 blocks: more than two workers hold, less than four.
        let (kv, beside_kv, ideal) = serve(Policy::Kv, sampling, 24);
        let (random, beside_random, _) = serve(Policy::Random, sampling, 24);
        assert!(kv > random + 0.3, "{kv} {random}");
        assert!((of(beside_kv) - random).abs() < 0.03, "{sampling:?}: {} for {random}", of(beside_kv));
        assert!((of(beside_random) - kv).abs() < 0.03, "{sampling:?}: {} for {kv}", of(beside_random));
        assert!((of(ideal) - 40.0 / 48.5).abs() < 0.02, "{}", of(ideal));
    }
}

#[test]
fn thinned_prompts_keep_their_tokens_on_average() {
    let (mut whole, mut thin) = (0.0, 0.0);
    for serial in 0..4_000 {
        let ask = ask(serial, serial % 100, serial, 3);
        whole += ask.prompt_tokens;
        thin += thinned(&ask, 16).prompt_tokens;
    }
    assert!((thin / whole - 1.0).abs() < 0.05, "{}", thin / whole);
}

/// However rare the blocks: what all share is counted for what it is, to a step.
#[test]
fn the_beginning_of_a_prompt_is_never_left_out() {
    for blocks in 1..=16 {
        let thin = thinned(&ask(1, blocks, 0, 0), 512);
        let held = thin.chain.units(thin.chain.hashes.len()) as f64 * thin.block_tokens;
        assert!((held - blocks as f64 * BLOCK).abs() <= STEP_TOKENS / 2.0, "{held} for {blocks} blocks");
    }
}

#[test]
fn a_block_never_counts_more_tokens_than_it_can() {
    let planner = Planner::new(Settings::default());
    planner.add_worker(spec(1, 1_900_000));
    for (block_tokens, most) in [(64.0, 512), (256.0, 128), (30_000.0, 1), (1e9, 1)] {
        let shadow = Shadow::new(Sampling::OneIn(512), &Settings::default());
        shadow.sync(&planner, block_tokens);
        assert_eq!(shadow.one_in(), Some(most), "blocks of {block_tokens} tokens");
    }
}

/// A fleet of 64 in which some workers hold the prompt: those are priced in any case.
#[test]
fn few_workers_are_priced_but_those_that_hold_the_prompt_are() {
    let planner = Planner::new(Settings::default());
    let workers: Vec<WorkerId> = (0..64).map(|key| planner.add_worker(spec(key, 400))).collect();
    let shadow = Shadow::new(Sampling::OneIn(1), &Settings::default());
    shadow.sync(&planner, BLOCK);
    for serial in 0..200 {
        let ask = ask(serial % 50, 8, serial, 1);
        let mut followed =
            shadow.follow(&ask, &workers, Policy::Random, Time(serial as f64), mix(serial)).unwrap();
        assert_eq!(followed.other.cached, if serial < 50 { 0.0 } else { 8.0 * BLOCK }, "request {serial}");
        followed.commit(Time(serial as f64));
        followed.finish(Some(1), Time(serial as f64 + 0.1));
    }
}

#[test]
fn a_wide_block_is_taken_as_often_as_its_tokens_ask_for() {
    let narrow: Vec<BlockHash> = (0..128).map(|at| BlockHash(mix(at))).collect();
    let (mut taken, mut units) = (0, 0);
    for prompt in 0..200u64 {
        let wide = (0..100).map(|at| BlockHash(mix((prompt << 32) | at)));
        let hashes: Arc<[BlockHash]> = narrow.iter().copied().chain(wide).collect();
        let chain = Chain { hashes, widths: Widths::GROWING, bytes: 0 };
        let tokens = chain.units(228) as f64 * BLOCK;
        let whole =
            Ask { chain, block_tokens: BLOCK, prompt_tokens: tokens, output_tokens: 0.0, streams: true };
        let thin = thinned(&whole, 16);
        let in_front = thin.chain.hashes.iter().filter(|hash| narrow.contains(hash)).count();
        taken += thin.chain.hashes.len() - in_front;
        units += 400;
    }
    // Of so many blocks one in four, each for four units: one in sixteen of the units.
    let share = taken as f64 * 16.0 / units as f64;
    assert!((share - 1.0).abs() < 0.05, "{share}");
}

#[test]
fn a_request_that_no_worker_took_leaves_no_trace() {
    let planner = Planner::new(Settings::default());
    let workers = [planner.add_worker(spec(1, 400))];
    let shadow = Shadow::new(Sampling::Auto, &Settings::default());
    assert!(shadow.follow(&ask(1, 8, 1, 0), &workers, Policy::Kv, Time(0.0), 0).is_none(), "nobody is known");
    shadow.sync(&planner, BLOCK);
    let followed = shadow.follow(&ask(1, 8, 1, 0), &workers, Policy::Kv, Time(0.0), 0).unwrap();
    drop(followed);
    let mut again = shadow.follow(&ask(1, 8, 2, 0), &workers, Policy::Kv, Time(1.0), 0).unwrap();
    assert_eq!(again.other.cached, 0.0);
    again.commit(Time(1.0));
    drop(again);
    let third = shadow.follow(&ask(1, 8, 3, 0), &workers, Policy::Kv, Time(2.0), 0).unwrap();
    assert_eq!(third.other, Share { prompt: 8.5 * BLOCK, cached: 8.0 * BLOCK });
}

#[test]
fn what_befalls_a_worker_befalls_its_models() {
    let planner = Planner::new(Settings::default());
    let worker = planner.add_worker(spec(1, 400));
    let shadow = Shadow::new(Sampling::Auto, &Settings::default());
    shadow.sync(&planner, BLOCK);
    let cached = |worker: WorkerId, serial: u64| {
        let mut followed =
            shadow.follow(&ask(1, 8, serial, 0), &[worker], Policy::Kv, Time(serial as f64), 0).unwrap();
        followed.commit(Time(serial as f64));
        followed.other.cached
    };
    assert_eq!((cached(worker, 1), cached(worker, 2)), (0.0, 8.0 * BLOCK));
    planner.forget(worker);
    shadow.sync(&planner, BLOCK);
    assert_eq!((cached(worker, 3), cached(worker, 4)), (0.0, 8.0 * BLOCK), "it restarted");
    planner.remove_worker(worker);
    let next = planner.add_worker(spec(2, 400));
    assert_eq!(next, worker, "the place is used again");
    shadow.sync(&planner, BLOCK);
    assert_eq!(cached(next, 5), 0.0, "another worker");
    planner.remove_worker(next);
    shadow.sync(&planner, BLOCK);
    assert!(shadow.follow(&ask(1, 8, 6, 0), &[next], Policy::Kv, Time(6.0), 0).is_none(), "nobody is left");
}

#[test]
fn the_larger_the_caches_the_fewer_blocks() {
    let one_in = |sampling, blocks| {
        let planner = Planner::new(Settings::default());
        planner.add_worker(spec(1, blocks));
        let shadow = Shadow::new(sampling, &Settings::default());
        assert_eq!(shadow.one_in(), None);
        shadow.sync(&planner, BLOCK);
        shadow.one_in()
    };
    assert_eq!(one_in(Sampling::Auto, 100), Some(1));
    assert_eq!(one_in(Sampling::Auto, 511), Some(1));
    assert_eq!(one_in(Sampling::Auto, 8_192), Some(64));
    assert_eq!(one_in(Sampling::Auto, 1_900_000), Some(512));
    assert_eq!(one_in(Sampling::OneIn(64), 100), Some(64));
    assert_eq!(Sampling::one_in(64), Some(Sampling::OneIn(64)));
    assert_eq!(
        (Sampling::one_in(0), Sampling::one_in(2), Sampling::one_in(12), Sampling::one_in(1024)),
        (None, None, None, None)
    );
}
