//! What holds for any work: everything ends, every block comes back, and time may be cut in any way.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
struct Arrival {
    gap: f64,
    seed: u64,
    shared: u64,
    prompt: u32,
    output: u32,
    aborted_after: Option<f64>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let abort = prop::option::weighted(0.2, 0.0..0.5f64);
    (0.0..0.2f64, 0..4u64, 0..30u64, 1..700u32, 1..300u32, abort).prop_map(
        |(gap, seed, shared, prompt, output, aborted_after)| Arrival {
            gap,
            seed,
            shared,
            prompt,
            output,
            aborted_after,
        },
    )
}

fn spec() -> impl Strategy<Value = Spec> {
    let chunked = (1..600u32, prop_oneof![Just(0.0), Just(0.02)]).prop_map(|(budget, frontend_seconds)| {
        Timing::Chunked(Chunked { max_num_batched_tokens: budget, frontend_seconds, ..Chunked::default() })
    });
    let timing = prop_oneof![3 => chunked, 1 => Just(Timing::Serial(Serial::default()))];
    (timing, 64..200u32, 1..8u32, any::<bool>()).prop_map(
        |(timing, num_blocks, max_num_seqs, token_events)| Spec {
            num_blocks,
            max_num_seqs,
            timing,
            token_events,
            ..Spec::default()
        },
    )
}

/// Plays `arrivals`, letting time pass to each arrival and abort, and besides in steps of `cut`.
fn play(spec: &Spec, arrivals: &[Arrival], cut: Option<f64>) -> (Engine, Vec<Event>, usize) {
    let mut engine = engine(spec.clone());
    let mut plan = Vec::new();
    let mut at = 0.0;
    for (index, arrival) in arrivals.iter().enumerate() {
        at += arrival.gap;
        plan.push((at, true, index));
        plan.extend(arrival.aborted_after.map(|after| (at + after, false, index)));
    }
    plan.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut ids = vec![None; arrivals.len()];
    let (mut events, mut now, mut aborted) = (Vec::new(), 0.0, 0);
    for (at, arrives, index) in plan {
        while let Some(cut) = cut
            && now + cut < at
        {
            now += cut;
            engine.advance(Time(now), &mut events);
        }
        engine.advance(Time(at), &mut events);
        if arrives {
            let Arrival { seed, shared, prompt, output, .. } = arrivals[index];
            let text = Text { seed: seed + 10 * index as u64, shared_blocks: 0 };
            let mut blocks = text.hashes(prompt + output, 16).to_vec();
            let common = Text::new(seed).hashes(16 * shared as u32, 16);
            blocks.iter_mut().zip(common.iter()).for_each(|(own, &shared)| *own = shared);
            let work = Work { blocks: blocks.into(), prompt_tokens: prompt, output_tokens: output };
            ids[index] = engine.submit(work, Time(at)).ok();
        } else if let Some(id) = ids[index] {
            aborted += usize::from(engine.abort(id, Time(at)));
        }
    }
    events.extend(drain(&mut engine));
    (engine, events, aborted)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn everything_ends_and_every_block_comes_back(spec in spec(), arrivals in prop::collection::vec(arrival(), 1..25)) {
        let (engine, events, aborted) = play(&spec, &arrivals, None);
        let finished = events.iter().filter(|event| event.what == What::Finished).count();
        let refused = arrivals.iter().filter(|arrival| {
            let spared = u32::from(matches!(spec.timing, Timing::Chunked(_)));
            (arrival.prompt + arrival.output - spared).div_ceil(16) > spec.usable_blocks()
        });
        prop_assert_eq!(finished + aborted + refused.count(), arrivals.len());
        prop_assert_eq!(engine.kv_cache_usage(), 0.0);
        prop_assert_eq!((engine.running(), engine.waiting(), engine.unfinished()), (0, 0, 0));
        prop_assert!(events.windows(2).all(|pair| pair[0].at <= pair[1].at), "in order of time");
        let counters = engine.counters();
        prop_assert!(counters.prefix_cache_hits <= counters.prefix_cache_queries);
    }

    #[test]
    fn time_may_be_cut_in_any_way(spec in spec(), arrivals in prop::collection::vec(arrival(), 1..15), cut in 0.001..0.1f64) {
        let (whole, events, _) = play(&spec, &arrivals, None);
        let (parts, cut_events, _) = play(&spec, &arrivals, Some(cut));
        prop_assert_eq!(whole.counters(), parts.counters());
        prop_assert_eq!(events.len(), cut_events.len());
        for (a, b) in events.iter().zip(&cut_events) {
            prop_assert!(a.request == b.request && a.what == b.what && (a.at - b.at).abs() < 1e-6, "{:?} {:?}", a, b);
        }
    }

    #[test]
    fn telling_every_token_changes_nothing_else(spec in spec(), arrivals in prop::collection::vec(arrival(), 1..15)) {
        let (_, few, _) = play(&Spec { token_events: false, ..spec.clone() }, &arrivals, None);
        let (_, all, _) = play(&Spec { token_events: true, ..spec }, &arrivals, None);
        let all: Vec<_> = all.into_iter().filter(|event| event.what != What::Token).collect();
        prop_assert_eq!(few.len(), all.len());
        for (a, b) in few.iter().zip(&all) {
            prop_assert!(a.request == b.request && a.what == b.what && (a.at - b.at).abs() < 1e-6, "{:?} {:?}", a, b);
        }
    }
}
