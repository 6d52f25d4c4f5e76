//! The engine against what was measured on a real vLLM 0.32 with 585 blocks of 16 tokens, and against itself.

mod facts;
mod invariants;
mod serial;
mod timing;

use std::sync::Arc;

use super::*;

/// A prompt or a whole sequence: the first `shared_blocks` blocks are those of all such texts, the rest are the seed's own.
#[derive(Copy, Clone)]
struct Text {
    seed: u64,
    shared_blocks: u64,
}

impl Text {
    fn new(seed: u64) -> Text {
        Text { seed, shared_blocks: 0 }
    }

    fn hashes(self, tokens: u32, block_size: u32) -> Arc<[BlockHash]> {
        let hash = |i| BlockHash(if i < self.shared_blocks { i } else { ((self.seed + 1) << 32) + i });
        (0..u64::from(tokens / block_size)).map(hash).collect()
    }
}

/// A request whose prompt and answer are the first tokens of `text`.
fn work(text: Text, prompt_tokens: u32, output_tokens: u32) -> Work {
    Work {
        blocks: text.hashes(prompt_tokens.saturating_add(output_tokens).min(100_000), 16),
        prompt_tokens,
        output_tokens,
    }
}

fn engine(spec: Spec) -> Engine {
    Engine::new(spec).expect("a good spec")
}

/// Lets everything happen and returns it.
fn drain(engine: &mut Engine) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(at) = engine.next_event() {
        engine.advance(at, &mut events);
    }
    events
}

fn cached(events: &[Event], id: RequestId) -> u32 {
    let admitted = events.iter().find_map(|event| match event.what {
        What::Admitted { cached_tokens } if event.request == id => Some(cached_tokens),
        _ => None,
    });
    admitted.expect("was admitted")
}

fn when(events: &[Event], id: RequestId, what: What) -> Time {
    let found = events.iter().find(|event| event.request == id && event.what == what);
    found.unwrap_or_else(|| panic!("no {what:?}")).at
}

/// Runs one request alone from `now` to its end: its cached tokens and when it ended.
fn alone(engine: &mut Engine, work: Work, now: Time) -> (u32, Time) {
    let id = engine.submit(work, now).expect("fits");
    let events = drain(engine);
    (cached(&events, id), when(&events, id, What::Finished))
}
