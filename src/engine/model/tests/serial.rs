//! The serial reference model.

use super::*;

fn spec() -> Spec {
    let timing = Serial { prefill_tokens_per_s: 1000.0, decode_tokens_per_s: 10.0 };
    Spec { timing: Timing::Serial(timing), ..Spec::default() }
}

#[test]
fn prompts_are_prefilled_one_after_another_and_decode_together() {
    let mut engine = engine(spec());
    let a = engine.submit(work(Text::new(0), 1000, 11), Time(0.0)).expect("fits");
    let b = engine.submit(work(Text::new(1), 500, 11), Time(0.0)).expect("fits");
    let events = drain(&mut engine);
    assert_eq!(when(&events, a, What::FirstToken), Time(1.0));
    assert_eq!(when(&events, b, What::FirstToken), Time(1.5));
    assert_eq!(when(&events, a, What::Finished), Time(2.0));
    assert_eq!(when(&events, b, What::Finished), Time(2.5));
    assert_eq!(events.len(), 6, "{events:?}");
}

#[test]
fn a_prompt_waits_until_prompt_and_output_fit() {
    let mut engine = engine(spec());
    let a = engine.submit(work(Text::new(0), 5000, 1001), Time(0.0)).expect("fits");
    let b = engine.submit(work(Text::new(1), 3000, 2000), Time(0.0)).expect("fits");
    let events = drain(&mut engine);
    let ends = when(&events, a, What::Finished);
    assert_eq!(ends, Time(5.0 + 100.0));
    assert_eq!(when(&events, b, What::FirstToken), ends + 3.0);
}

#[test]
fn the_second_of_two_equal_prompts_computes_its_last_block_only() {
    let mut engine = engine(spec());
    let a = engine.submit(work(Text::new(0), 1000, 1), Time(0.0)).expect("fits");
    let b = engine.submit(work(Text::new(0), 1000, 1), Time(0.0)).expect("fits");
    let events = drain(&mut engine);
    assert_eq!(cached(&events, b), 992);
    assert_eq!(when(&events, b, What::FirstToken), when(&events, a, What::FirstToken) + 0.008);
}

#[test]
fn an_abort_in_the_prefill_keeps_what_was_computed() {
    let mut engine = engine(spec());
    let id = engine.submit(work(Text::new(0), 1000, 1), Time(0.0)).expect("fits");
    engine.advance(Time(0.0), &mut Vec::new());
    assert_eq!(engine.uncached_tokens(Time(0.25)), 750);
    assert!(engine.abort(id, Time(0.25)));
    assert_eq!(engine.cached_tokens(&Text::new(0).hashes(1000, 16), 1000), 240);
    assert_eq!(engine.running(), 0);
}

#[test]
fn outputs_without_names_take_room_but_never_match() {
    let mut engine = engine(spec());
    let prompt_only = |seed, prompt| Work {
        blocks: Text::new(seed).hashes(prompt, 16),
        ..work(Text::new(seed), prompt, 4000)
    };
    let (_, now) = alone(&mut engine, prompt_only(0, 1600), Time(0.0));
    // 350 of 584 blocks hold content now, so 3,760 tokens fit beside them.
    let (_, now) = alone(&mut engine, work(Text::new(1), 3700, 1), now);
    assert_eq!(engine.cached_tokens(&Text::new(0).hashes(1601, 16), 1601), 1600);
    let (cached, now) = alone(&mut engine, work(Text::new(0), 1600 + 4000, 1), now);
    assert_eq!(cached, 1600, "the output does not match");
    alone(&mut engine, work(Text::new(2), 9000, 1), now);
    assert!(engine.cached_tokens(&Text::new(0).hashes(1601, 16), 1601) < 1600);
}

#[test]
fn every_token_is_an_event_if_asked_for() {
    let mut engine = engine(Spec { token_events: true, ..spec() });
    engine.submit(work(Text::new(0), 1000, 11), Time(0.0)).expect("fits");
    assert_eq!(drain(&mut engine).iter().filter(|event| event.what == What::Token).count(), 10);
}
