//! What it costs to look at what workers send: a stream of events and its usage, whole and event by event, and a metrics page.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use warmroute::fleet::exposition;
use warmroute::proxy::sse::Events;
use warmroute::proxy::usage::UsageReader;

const EVENTS: usize = 64;

/// A stream as vLLM writes it, an event each.
fn stream() -> Vec<Vec<u8>> {
    let head =
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":["#;
    let token = |at: usize| {
        format!(
            "{head}{{\"index\":0,\"delta\":{{\"content\":\" word{at}\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        )
    };
    let usage = r#""usage":{"prompt_tokens":8000,"total_tokens":8064,"completion_tokens":64,"prompt_tokens_details":{"cached_tokens":7984}}"#;
    let ends = [format!("{head}],{usage}}}\n\n"), "data: [DONE]\n\n".to_owned()];
    (0..EVENTS).map(token).chain(ends).map(String::into_bytes).collect()
}

fn streams(criterion: &mut Criterion) {
    let events = stream();
    let whole = vec![events.concat()];
    let mut group = criterion.benchmark_group("stream");
    group.throughput(Throughput::Elements(EVENTS as u64));
    for (name, pieces) in [("64 events in one piece", &whole), ("64 events one by one", &events)] {
        group.bench_function(format!("{name}: first token and failures"), |bencher| {
            bencher.iter(|| {
                let mut reader = Events::default();
                pieces.iter().filter(|piece| reader.feed(black_box(piece)).first_token).count()
            });
        });
        group.bench_function(format!("{name}: usage"), |bencher| {
            bencher.iter(|| {
                let mut reader = UsageReader::default();
                pieces.iter().for_each(|piece| reader.feed(black_box(piece)));
                reader.found().expect("the stream ends with usage")
            });
        });
    }
    group.finish();
}

fn pages(criterion: &mut Criterion) {
    let answer = include_bytes!("../tests/fixtures/vllm/get_metrics_after_basic.resp");
    let head = memchr::memmem::find(answer, b"\r\n\r\n").expect("an answer has a head");
    let page = &answer[head + 4..];
    let mut group = criterion.benchmark_group("metrics page");
    group.throughput(Throughput::Bytes(page.len() as u64));
    group.bench_function("of a vLLM", |bencher| bencher.iter(|| exposition::read(black_box(page))));
    group.finish();
}

criterion_group!(benches, streams, pages);
criterion_main!(benches);
