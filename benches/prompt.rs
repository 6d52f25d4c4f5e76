//! What it costs to read a request body down to its block hashes, by size and by kind of body.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use warmroute::core::blocks::{ChainBuilder, DEFAULT_BLOCK_BYTES, HashKey};
use warmroute::core::prompt::{Endpoint, read};

const KEY: HashKey = HashKey([7; 32]);

/// English of about `bytes` bytes, a line end (escaped, as in JSON) every `line` bytes.
fn text(bytes: usize, line: usize) -> String {
    let words = [
        "the", "worker", "that", "holds", "a", "prefix", "answers", "sooner", "than", "one", "which", "must",
        "compute",
    ];
    let mut text = String::new();
    let mut since = 0;
    for at in 0.. {
        if text.len() >= bytes {
            break;
        }
        let word = words[at * 7 % words.len()];
        text.push_str(word);
        since += word.len() + 1;
        text.push_str(if since >= line { "\\n" } else { " " });
        since %= line;
    }
    text
}

fn chat(system: &str, user: &str) -> Vec<u8> {
    format!(
        r#"{{"model":"Qwen/Qwen3-8B","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}],"stream":true,"stream_options":{{"include_usage":true}},"max_tokens":64,"temperature":0.0}}"#
    )
    .into_bytes()
}

/// Tools as an agent sends them, with a space after each comma and colon, as Python's `json.dumps` writes.
fn tools(bytes: usize) -> Vec<u8> {
    let mut tools = String::new();
    for at in 0.. {
        if tools.len() >= bytes {
            break;
        }
        let about = text(300, 80);
        tools.push_str(if at == 0 { "" } else { ", " });
        tools.push_str(&format!(
            r#"{{"type": "function", "function": {{"name": "tool_{at}", "description": "{about}", "parameters": {{"type": "object", "properties": {{"path": {{"type": "string", "description": "Where the file is."}}, "limit": {{"type": "integer", "description": "How many lines to give.", "default": 100}}, "mode": {{"type": "string", "enum": ["read", "write", "append"]}}}}, "required": ["path", "limit"], "additionalProperties": false}}}}}}"#
        ));
    }
    format!(r#"{{"model": "m", "tools": [{tools}], "messages": [{{"role": "user", "content": "hello"}}]}}"#)
        .into_bytes()
}

fn bodies() -> Vec<(&'static str, Endpoint, Vec<u8>)> {
    let sized = |bytes: usize| chat(&text(bytes * 7 / 8, usize::MAX), &text(bytes / 8, usize::MAX));
    let chinese: String = (0..5461u32).map(|at| format!("\\u{:04x}", 0x4e00 + at)).collect();
    let ids: Vec<String> = (0..128_000u32).map(|at| (at * 7919 % 150_000).to_string()).collect();
    let picture = format!("data:image/png;base64,{}", "iVBORw0KGgoAAAANSUhEUgAAB4AAAAQ4".repeat(8 << 15));
    let shown = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"What is this?"}},{{"type":"image_url","image_url":{{"url":"{picture}"}}}}]}}]}}"#
    );
    vec![
        ("chat 1 KB", Endpoint::Chat, sized(1 << 10)),
        ("chat 32 KB", Endpoint::Chat, sized(32 << 10)),
        ("chat 512 KB", Endpoint::Chat, sized(512 << 10)),
        ("chat 32 KB in lines of 40", Endpoint::Chat, chat(&text(28 << 10, 40), &text(4 << 10, 40))),
        ("chat 32 KB of Chinese in escapes", Endpoint::Chat, chat(&chinese, "hello")),
        ("chat 60 KB of tools", Endpoint::Chat, tools(60 << 10)),
        ("chat 8 MB picture", Endpoint::Chat, shown.into_bytes()),
        (
            "completions 128,000 ids",
            Endpoint::Completions,
            format!(r#"{{"prompt":[{}]}}"#, ids.join(", ")).into_bytes(),
        ),
    ]
}

fn reading(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    for (name, endpoint, body) in bodies() {
        assert!(read(endpoint, &body, &KEY, DEFAULT_BLOCK_BYTES).chain.is_ok(), "{name}");
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| read(endpoint, black_box(&body), &KEY, DEFAULT_BLOCK_BYTES))
        });
    }
    group.finish();
}

fn chaining(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("chain");
    for (name, bytes, block_bytes) in [
        ("1 KB", 1 << 10, DEFAULT_BLOCK_BYTES),
        ("32 KB", 32 << 10, DEFAULT_BLOCK_BYTES),
        ("512 KB", 512 << 10, DEFAULT_BLOCK_BYTES),
        ("32 KB in blocks of 64", 32 << 10, 64),
        ("32 KB in blocks of 1,024", 32 << 10, 1024),
        ("32 KB in blocks of 200", 32 << 10, 200),
    ] {
        let bytes = text(bytes, usize::MAX).into_bytes();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut builder = ChainBuilder::new(&KEY, block_bytes, b"model");
                builder.update(black_box(&bytes));
                builder.finish()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, reading, chaining);
criterion_main!(benches);
