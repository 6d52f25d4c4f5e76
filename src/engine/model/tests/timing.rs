//! How long things take, and that it does not matter in how many steps time is let pass.

use super::*;

fn near(time: Time, seconds: f64) {
    assert!((time.0 - seconds).abs() < 0.001, "{time:?}, expected about {seconds} s");
}

#[test]
fn a_miss_takes_108_ms_and_a_hit_40() {
    let mut engine = engine(Spec::default());
    let first = engine.submit(work(Text { seed: 0, shared_blocks: 127 }, 2371, 64), Time(0.0)).expect("fits");
    let events = drain(&mut engine);
    near(when(&events, first, What::FirstToken), 0.108);
    let start = when(&events, first, What::Finished);
    let tail = Text { seed: 1, shared_blocks: 127 };
    let second = engine.submit(work(tail, 2371, 64), start).expect("fits");
    let events = drain(&mut engine);
    assert_eq!(cached(&events, second), 2032);
    near(Time(when(&events, second, What::FirstToken) - start), 0.040);
    let decode = (when(&events, second, What::Finished) - when(&events, second, What::FirstToken)) / 63.0;
    assert!((0.008..0.012).contains(&decode), "{decode} s a token");
}

#[test]
fn a_long_prompt_is_cut_into_chunks_and_others_decode_between() {
    let timing = Chunked { max_num_batched_tokens: 512, ..Chunked::default() };
    let spec = Spec { timing: Timing::Chunked(timing), token_events: true, ..Spec::default() };
    let mut engine = engine(spec);
    let mut events = Vec::new();
    let short = engine.submit(work(Text::new(0), 16, 100), Time(0.0)).expect("fits");
    engine.advance(Time(0.1), &mut events);
    let long = engine.submit(work(Text::new(1), 2000, 1), Time(0.1)).expect("fits");
    events.extend(drain(&mut engine));
    let (start, end) = (0.1 + 0.020, when(&events, long, What::FirstToken));
    let between = |event: &&Event| event.request == short && event.at.0 > start && event.at < end;
    // 511 tokens of the long prompt a step: one is for the decoding request.
    assert!((3..=5).contains(&events.iter().filter(between).count()));
}

#[test]
fn every_token_is_an_event_if_asked_for() {
    let times = |token_events| {
        let mut engine = engine(Spec { token_events, ..Spec::default() });
        let id = engine.submit(work(Text::new(0), 100, 200), Time(0.0)).expect("fits");
        let events = drain(&mut engine);
        let tokens = events.iter().filter(|event| event.what == What::Token).count();
        (tokens, events.len(), when(&events, id, What::Finished))
    };
    let (all, few) = (times(true), times(false));
    assert_eq!((all.0, all.1), (199, 202));
    assert_eq!((few.0, few.1), (0, 3));
    near(all.2, few.2.0);
}

#[test]
fn at_most_max_num_seqs_run() {
    let mut engine = engine(Spec { max_num_seqs: 2, ..Spec::default() });
    let ids = [0, 1, 2].map(|seed| engine.submit(work(Text::new(seed), 32, 20), Time(0.0)).expect("fits"));
    engine.advance(Time(0.1), &mut Vec::new());
    assert_eq!((engine.running(), engine.waiting()), (2, 1));
    let events = drain(&mut engine);
    when(&events, ids[2], What::Finished);
}

#[test]
fn uncached_tokens_are_those_not_computed_yet() {
    let mut engine = engine(Spec { max_num_seqs: 1, ..Spec::default() });
    alone(&mut engine, work(Text::new(0), 2000, 1), Time(0.0));
    let start = Time(10.0);
    engine.submit(work(Text::new(1), 3000, 50), start).expect("fits");
    engine.submit(work(Text::new(0), 2000, 50), start).expect("fits");
    assert_eq!(engine.uncached_tokens(start), 3000 + 16);
    engine.advance(Time(10.5), &mut Vec::new());
    assert_eq!(engine.uncached_tokens(Time(10.5)), 16, "the first one decodes, the second waits");
}
