//! The one option that changes bytes, over real sockets: workers are asked for usage on behalf of clients that did not ask, and
//! no client sees it.

use std::net::SocketAddr;

use warmroute::config::{Config, Mode};
use warmroute::engine::http::Running;
use warmroute::testing::{FakeEngine, Step, TestRouter, Wire, simulated};

async fn worker() -> (Running, SocketAddr) {
    let fleet = simulated(1, "m", 100.0).await;
    let address = fleet.addresses()[0];
    (fleet, address)
}

fn before(worker: SocketAddr, ask_for_usage: bool) -> Config {
    let mut config = TestRouter::config_at(Mode::Kv, &[worker]);
    config.feedback.ask_for_usage = ask_for_usage;
    config
}

async fn asking(engine: &FakeEngine) -> TestRouter {
    TestRouter::start(before(engine.address(), true)).await
}

/// The answer without the second in which it was made.
fn timeless(text: &str) -> String {
    let parts = text.split("\"created\":").enumerate();
    parts
        .map(|(at, part)| if at == 0 { part } else { part.trim_start_matches(|c: char| c.is_ascii_digit()) })
        .collect()
}

const BODIES: [(&str, &str); 12] = [
    ("chat", r#""messages":[{"role":"user","content":"Tell me of the sea."}],"max_tokens":8,"stream":true"#),
    (
        "chat",
        r#""messages":[{"role":"user","content":"Tell me of the sea."}],"max_tokens":1,"stream":true,"stream_options":null"#,
    ),
    (
        "chat",
        r#""messages":[{"role":"user","content":"x"}],"max_tokens":3,"stream":true,"stream_options":{}"#,
    ),
    (
        "chat",
        r#""messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":false,"continuous_usage_stats":true}"#,
    ),
    (
        "chat",
        r#""messages":[{"role":"user","content":"x"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}"#,
    ),
    (
        "chat",
        r#""messages":[{"role":"user","content":"x"}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
    ),
    ("chat", r#""messages":[{"role":"user","content":"x"}],"max_tokens":3,"n":2,"stream":true"#),
    ("chat", r#""messages":[{"role":"user","content":"x"}],"max_tokens":3"#),
    ("chat", r#""messages":[],"stream":true"#),
    ("chat", r#""messages":[{"role":"user","content":"x"}],"max_tokens":-1,"stream":true"#),
    ("", r#""prompt":"Tell me of the sea.","max_tokens":5,"stream":true"#),
    ("", r#""prompt":["one","two"],"max_tokens":5,"stream":true"#),
];

#[tokio::test]
async fn clients_get_the_bytes_that_they_would_get_without_the_option() {
    let (_engine, address) = worker().await;
    let with = TestRouter::start(before(address, true)).await;
    let without = TestRouter::start(before(address, false)).await;
    let mut usages = 0;
    for (n, (kind, members)) in BODIES.iter().enumerate() {
        let path = if *kind == "chat" { "/v1/chat/completions" } else { "/v1/completions" };
        let body = format!(r#"{{"model":"m","request_id":"same","cache_salt":"{n}",{members}}}"#);
        // Once before, so that both find the same in the cache.
        without.client().await.post(path, &body).await;
        let (one, two) =
            (with.client().await.post(path, &body).await, without.client().await.post(path, &body).await);
        assert_eq!(one.status(), two.status(), "{members}");
        assert_eq!(timeless(&one.text()), timeless(&two.text()), "{members}");
        assert!(one.complete && two.complete);
        usages += usize::from(one.text().contains("\"usage\":{"));
    }
    assert_eq!(usages, 3, "those that asked, or were not streamed");
    let confirmed =
        format!(r#"warmroute_worker_prompt_tokens_total{{source="confirmed",worker="{address}"}}"#);
    assert!(with.metric(&confirmed).await > 2.0 * 5.0, "what the clients did not see was learned from");
}

const EVENTS: [&str; 4] = [
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"sea\"},\"finish_reason\":null}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2000,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":16}},\"system_fingerprint\":\"v1\"}\n\n",
    "data: [DONE]\n\n",
];
const SHOWN: &str = concat!(
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"sea\"},\"finish_reason\":null}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"system_fingerprint\":\"v1\"}\n\n",
    "data: [DONE]\n\n",
);
const BODY: &str = r#"{ "messages":[{"role":"user","content":"\u00e9 "}] , "stream":true}"#;
const CHANGED: &str = r#"{"stream_options":{"include_usage":true}, "messages":[{"role":"user","content":"\u00e9 "}] , "stream":true}"#;

#[tokio::test]
async fn the_worker_gets_the_body_with_the_option_and_its_length() {
    let engine = FakeEngine::start().await;
    let router = asking(&engine).await;
    let mut client = router.client().await;
    client.post("/v1/chat/completions", BODY).await;
    let chunked = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{BODY}\r\n0\r\n\r\n",
        BODY.len()
    );
    client.send(chunked).await;
    assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    for path in ["/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/completions"] {
        client.post(path, BODY).await;
    }
    let broken = &BODY[..BODY.len() - 1];
    client.post("/v1/chat/completions", broken).await;
    let seen = engine.seen();
    for message in &seen[..2] {
        assert_eq!(String::from_utf8_lossy(&message.body), CHANGED);
        assert_eq!(message.head.all("content-length"), [CHANGED.len().to_string()]);
        assert_eq!(message.head.get("transfer-encoding"), None);
    }
    for message in &seen[2..6] {
        assert_eq!(String::from_utf8_lossy(&message.body), BODY);
    }
    assert_eq!(String::from_utf8_lossy(&seen[6].body), broken);
}

#[tokio::test]
async fn the_usage_is_taken_out_however_the_stream_is_cut_and_counted_all_the_same() {
    let whole = EVENTS.concat();
    let chunks = |size: usize| whole.as_bytes().chunks(size).map(Step::chunk).collect::<Vec<_>>();
    let mut cases = vec![chunks(1), chunks(7), chunks(100), chunks(whole.len())];
    cases.push(vec![
        Step::chunk([EVENTS[0], EVENTS[1]].concat()),
        Step::chunk([EVENTS[2], EVENTS[3]].concat()),
    ]);
    let count = cases.len();
    let engine = FakeEngine::start().await;
    let router = asking(&engine).await;
    let mut client = router.client().await;
    for mut case in cases {
        case.insert(0, Step::stream_head());
        case.push(Step::last_chunk());
        engine.next(case);
        let answer = client.post("/v1/chat/completions", BODY).await;
        assert_eq!(answer.text(), SHOWN);
        assert!(answer.complete);
    }
    let length = whole.len();
    engine.next(vec![Step::send(format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n{whole}"
    ))]);
    let answer = client.post("/v1/chat/completions", BODY).await;
    assert_eq!((answer.text().as_str(), answer.head.get("content-length")), (SHOWN, None));
    let series = format!(
        r#"warmroute_worker_prompt_tokens_total{{source="confirmed",worker="{}"}}"#,
        engine.address()
    );
    router.metric_is(&series, 2_000.0 * (count as f64 + 1.0)).await;
}

#[tokio::test]
async fn other_line_ends_trailers_and_missing_ends_come_through() {
    let engine = FakeEngine::start().await;
    let router = asking(&engine).await;
    let mut client = router.client().await;
    let returns = |text: &str| text.replace('\n', "\r\n");
    engine.next(vec![
        Step::stream_head(),
        Step::chunk(returns(&EVENTS.concat())),
        Step::send("0\r\nx-after: 1\r\n\r\n"),
    ]);
    let answer = client.post("/v1/chat/completions", BODY).await;
    assert_eq!(answer.text(), returns(SHOWN));
    // An answer that ends with the event which is held, or within one.
    for tail in ["", "data: {\"cho"] {
        let sent = [EVENTS[0], EVENTS[1], tail].concat();
        engine.next(vec![Step::stream_head(), Step::chunk(&sent), Step::last_chunk()]);
        assert_eq!(client.post("/v1/chat/completions", BODY).await.text(), sent);
    }
}

#[tokio::test]
async fn errors_and_what_cannot_be_read_pass_untouched() {
    let engine = FakeEngine::start().await;
    let router = asking(&engine).await;
    let mut client = router.client().await;
    let refused = r#"{"error":{"message":"no"},"choices":[],"usage":{"prompt_tokens":1}}"#;
    for status in ["400 Bad Request", "404 Not Found", "503 Service Unavailable"] {
        engine.next(vec![Step::json(status, refused)]);
        assert_eq!(client.post("/v1/chat/completions", BODY).await.text(), refused);
    }
    // An error in the stream, and one that the proxy adds where the stream breaks off.
    let error = "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"code\": 500}}\n\n";
    engine.next(vec![
        Step::stream_head(),
        Step::chunk([EVENTS[0], error, EVENTS[3]].concat()),
        Step::last_chunk(),
    ]);
    assert_eq!(
        client.post("/v1/chat/completions", BODY).await.text(),
        [EVENTS[0], error, EVENTS[3]].concat()
    );
    engine.next(vec![Step::stream_head(), Step::chunk([EVENTS[0], EVENTS[1]].concat()), Step::Close]);
    let broken = client.post("/v1/chat/completions", BODY).await.text();
    assert!(broken.starts_with(&[EVENTS[0], EVENTS[1], "data: {\"error\":{"].concat()), "{broken}");
    // A coding that nobody asked for hides what is inside.
    let zipped = EVENTS.concat();
    let mut client = Wire::connect(router.clients).await;
    engine.next(vec![
        Step::send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: br\r\ntransfer-encoding: chunked\r\n\r\n"),
        Step::chunk(&zipped),
        Step::last_chunk(),
    ]);
    assert_eq!(client.post("/v1/chat/completions", BODY).await.text(), zipped);
}

#[tokio::test]
async fn an_edit_of_the_config_switches_it() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::start(before(engine.address(), false)).await;
    let mut client = router.client().await;
    client.post("/v1/chat/completions", BODY).await;
    router.proxy.reconfigure(before(engine.address(), true), None);
    client.post("/v1/chat/completions", BODY).await;
    let bodies: Vec<_> = engine.seen().into_iter().map(|message| message.body).collect();
    assert_eq!(bodies, [BODY.as_bytes(), CHANGED.as_bytes()]);
}
