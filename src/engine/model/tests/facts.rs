//! What was measured on a real vLLM 0.32, fact by fact.

use super::*;

fn one_by_one(engine: &mut Engine, works: impl IntoIterator<Item = Work>) -> Vec<u32> {
    let mut now = Time(0.0);
    let mut hits = Vec::new();
    for work in works {
        let (cached, ended) = alone(engine, work, now);
        hits.push(cached);
        now = ended;
    }
    hits
}

#[test]
fn the_last_token_is_never_cached() {
    for n in [15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65] {
        let mut engine = engine(Spec::default());
        let again = one_by_one(&mut engine, [work(Text::new(1), n, 1), work(Text::new(1), n, 1)]);
        assert_eq!(again, [0, (n - 1) / 16 * 16], "{n} tokens");
    }
}

#[test]
fn counters_count_tokens_and_usage_is_zero_when_idle() {
    let mut engine = engine(Spec::default());
    assert_eq!(one_by_one(&mut engine, vec![work(Text::new(1), 100, 1); 2]), [0, 96]);
    let counters = engine.counters();
    assert_eq!((counters.prefix_cache_queries, counters.prefix_cache_hits), (200, 96));
    assert_eq!(engine.kv_cache_usage(), 0.0);
}

#[test]
fn generated_tokens_are_cached() {
    for n in [1, 2, 3, 18, 19, 34, 40] {
        let mut engine = engine(Spec::default());
        let hits = one_by_one(&mut engine, [work(Text::new(1), 30, n), work(Text::new(1), 30 + n + 10, 1)]);
        assert_eq!(hits[1], (30 + n - 1) / 16 * 16, "30 + {n} tokens");
    }
}

#[test]
fn heads_survive_five_prompts_in_the_room_of_four() {
    let mut engine = engine(Spec::default());
    let five = || (0..5).map(|seed| work(Text::new(seed), 2000, 1));
    assert_eq!(one_by_one(&mut engine, five()), [0; 5]);
    for _ in 0..3 {
        assert_eq!(one_by_one(&mut engine, five()), [1344; 5]);
    }
}

#[test]
fn a_hit_makes_recent() {
    let mut engine = engine(Spec::default());
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|seed| work(Text::new(seed), 2000, 1));
    one_by_one(&mut engine, [&a, &b, &c, &d, &a, &e].map(Work::clone));
    let hits = one_by_one(&mut engine, [&a, &d, &c, &b].map(Work::clone));
    assert_eq!(hits, [1984, 1984, 1984, 1296]);
}

#[test]
fn a_running_request_pins_its_blocks() {
    let mut engine = engine(Spec::default());
    let long = work(Text::new(0), 2000, 2000);
    let mut events = Vec::new();
    engine.submit(long, Time(0.0)).expect("fits");
    engine.advance(Time(1.0), &mut events);
    let mut now = Time(1.0);
    for seed in 1..6 {
        let id = engine.submit(work(Text::new(seed), 2000, 1), now).expect("fits");
        while !events.iter().any(|event| event.request == id && event.what == What::Finished) {
            now = engine.next_event().expect("runs");
            engine.advance(now, &mut events);
        }
        assert_eq!(cached(&events, id), 0);
    }
    assert_eq!(engine.running(), 1, "the long one");
    assert_eq!(engine.counters().preemptions, 0);
    let id = engine.submit(work(Text::new(0), 2000, 1), now).expect("fits");
    assert_eq!(cached(&drain(&mut engine), id), 1984);
}

#[test]
fn an_aborted_request_leaves_its_full_blocks() {
    let mut engine = engine(Spec::default());
    let mut events = Vec::new();
    let id = engine.submit(work(Text::new(0), 2000, 500), Time(0.0)).expect("fits");
    engine.advance(Time(0.5), &mut events);
    assert_eq!(engine.running(), 1);
    assert!(engine.abort(id, Time(0.5)));
    assert!(!engine.abort(id, Time(0.5)), "gone already");
    assert_eq!(engine.kv_cache_usage(), 0.0);
    assert_eq!(alone(&mut engine, work(Text::new(0), 2000, 1), Time(0.5)).0, 1984);
}

#[test]
fn equal_new_prompts_share_inside_one_step() {
    let mut engine = engine(Spec::default());
    let ids = [(); 4].map(|()| engine.submit(work(Text::new(0), 2000, 1), Time(0.0)).expect("fits"));
    let events = drain(&mut engine);
    assert_eq!(ids.map(|id| cached(&events, id)), [0, 1984, 1984, 1984]);
    assert_eq!(when(&events, ids[0], What::FirstToken), when(&events, ids[1], What::FirstToken));
}

#[test]
fn overcommitted_requests_are_preempted_and_all_finish() {
    let mut engine = engine(Spec::default());
    let ids: Vec<RequestId> = (0..4)
        .map(|seed| engine.submit(work(Text::new(seed), 1000, 2500), Time(0.0)).expect("fits"))
        .collect();
    let events = drain(&mut engine);
    for &id in &ids {
        when(&events, id, What::Finished);
        assert_eq!(
            events.iter().filter(|event| event.request == id && event.what == What::FirstToken).count(),
            1
        );
    }
    // As measured: two preemptions, whose second prefill the counters do not show.
    assert_eq!(
        engine.counters(),
        Counters { prefix_cache_queries: 4000, prefix_cache_hits: 0, preemptions: 2 }
    );
}

#[test]
fn twelve_chats_with_a_shared_system_text() {
    let mut engine = engine(Spec::default());
    let chats = [682, 690, 696, 701].map(|tokens| Work {
        blocks: Text { seed: tokens.into(), shared_blocks: 42 }.hashes(tokens, 16),
        prompt_tokens: tokens,
        output_tokens: 1,
    });
    assert_eq!(one_by_one(&mut engine, chats), [0, 672, 672, 672]);
}

#[test]
fn waiting_for_memory_is_counted_once_or_at_every_attempt() {
    let queries = |count_lookups| {
        let mut engine = engine(Spec { count_lookups, ..Spec::default() });
        for seed in 0..5 {
            engine.submit(work(Text::new(seed), 2350, 50), Time(0.0)).expect("fits");
        }
        drain(&mut engine);
        assert_eq!(engine.counters().preemptions, 0);
        engine.counters().prefix_cache_queries
    };
    assert_eq!(queries(CountLookups::AtAdmission), 5 * 2350);
    assert!(queries(CountLookups::EveryAttempt) > 2 * 5 * 2350);
}

#[test]
fn reset_needs_an_idle_worker() {
    let mut engine = engine(Spec::default());
    let id = engine.submit(work(Text::new(0), 100, 10), Time(0.0)).expect("fits");
    engine.advance(Time(0.05), &mut Vec::new());
    assert!(!engine.reset_prefix_cache());
    engine.abort(id, Time(0.05));
    assert_eq!(engine.cached_tokens(&Text::new(0).hashes(100, 16), 100), 96);
    assert!(engine.reset_prefix_cache());
    assert_eq!(engine.cached_tokens(&Text::new(0).hashes(100, 16), 100), 0);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut engine = engine(Spec::default());
    let refused =
        |engine: &mut Engine, prompt, output| engine.submit(work(Text::new(0), prompt, output), Time(0.0));
    assert_eq!(refused(&mut engine, 0, 1), Err(Refused::EmptyPrompt));
    assert_eq!(refused(&mut engine, 1, 0), Err(Refused::NoOutput));
    assert_eq!(refused(&mut engine, 9344, 2), Err(Refused::TooLarge { needed: 585, usable: 584 }));
    assert!(refused(&mut engine, u32::MAX, u32::MAX).is_err());
    assert!(refused(&mut engine, 9344, 1).is_ok());
    assert!(drain(&mut engine).iter().any(|event| event.what == What::Finished));
}
