//! The way through: what a client sends is what a worker gets, what a worker answers is what the client gets, as it comes.

use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, Gate, Message, PLAIN_ANSWER, Step, TestRouter};

const BOTH: [Mode; 2] = [Mode::Kv, Mode::Random];

fn chat(text: &str) -> String {
    format!(r#"{{ "messages" : [{{"role":"user","content":"{text}"}}], "model":"m" }}"#)
}

#[tokio::test]
async fn bytes_go_through_untouched_both_ways() {
    for mode in BOTH {
        let engine = FakeEngine::start().await;
        let router = TestRouter::before(mode, &[&engine]).await;
        let odd = br#"{"b":1, "a" :"\u00e9\ud83d  ", "messages":[{"content":"x", "role":"user"}],"a":2}"#;
        let answer = router.client().await.post("/v1/chat/completions?x=%20&&y", odd).await;
        assert_eq!((answer.status(), answer.text().as_str()), (200, PLAIN_ANSWER));
        let seen = engine.seen();
        assert_eq!(seen[0].body, odd);
        assert_eq!(seen[0].head.start, "POST /v1/chat/completions?x=%20&&y HTTP/1.1");
        assert_eq!(seen[0].head.get("host"), Some(engine.address().to_string().as_str()));
        assert_eq!(seen[0].head.get("x-forwarded-host"), Some("proxy.test"));
        assert_eq!(seen[0].head.get("x-forwarded-for"), Some("127.0.0.1"));
        assert_eq!(seen[0].head.all("content-length").len(), 1);
        assert!(seen[0].head.get("transfer-encoding").is_none());
    }
}

#[tokio::test]
async fn every_path_and_method_is_forwarded() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    for (n, target) in
        ["/v1/models", "/", "/a/b?c", "/v1/embeddings", "/metrics", "/version"].iter().enumerate()
    {
        assert_eq!(client.get(target).await.status(), 200);
        assert_eq!(engine.seen()[n].head.second(), *target);
    }
    for method in ["DELETE", "PUT", "PATCH", "OPTIONS", "BREW"] {
        client.send(format!("{method} /v1/x HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!(client.answer(method).await.unwrap().status(), 200);
        assert!(engine.seen().last().unwrap().head.start.starts_with(method));
    }
    assert_eq!(engine.connections(), 1, "one connection is kept and used again");
}

#[tokio::test]
async fn events_come_through_one_by_one_as_they_are_made() {
    for mode in BOTH {
        let engine = FakeEngine::start().await;
        let gates: Vec<Gate> = (0..5).map(|_| Gate::default()).collect();
        let mut steps = vec![Step::stream_head()];
        for (n, gate) in gates.iter().enumerate() {
            steps.push(Step::Await(gate.clone()));
            steps.push(Step::chunk(format!("data: {{\"n\":{n}}}\n\n")));
        }
        steps.push(Step::last_chunk());
        engine.next(steps);
        let router = TestRouter::before(mode, &[&engine]).await;
        let mut client = router.client().await;
        let body = chat("hi");
        client
            .send(format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ))
            .await;
        // The head comes before the first event is made, each event before the next one is.
        let (head, _) = client.head().await.unwrap();
        assert_eq!(head.second(), "200");
        assert_eq!(head.get("content-type"), Some("text/event-stream; charset=utf-8"));
        for (n, gate) in gates.iter().enumerate() {
            gate.open();
            let event = format!("data: {{\"n\":{n}}}\n\n");
            let chunk = format!("{:X}\r\n{event}\r\n", event.len());
            let mut got = Vec::new();
            while got.len() < chunk.len() {
                got.extend(client.piece().await);
            }
            assert_eq!(String::from_utf8_lossy(&got[..chunk.len()]), chunk);
        }
        assert_eq!(client.get("/after").await.status(), 200, "the connection goes on");
    }
}

/// Many events in one piece, and what becomes of the answer right behind them.
#[tokio::test]
async fn events_that_come_at_once_are_whole_whatever_follows_them() {
    let events: Vec<String> = (0..400).map(|n| format!("data: {{\"n\":{n}}}\n\n")).collect();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunks: String = events.iter().map(|event| format!("{:x}\r\n{event}\r\n", event.len())).collect();
    for (end, broken) in
        [("0\r\n\r\n", false), ("0\r\nx-trailer: 1\r\n\r\n", false), ("", true), ("zz\r\n", true)]
    {
        let engine = FakeEngine::start().await;
        engine.next(vec![Step::send(format!("{head}{chunks}{end}")), Step::Close]);
        let router = TestRouter::before(Mode::Kv, &[&engine]).await;
        let mut client = router.client().await;
        let answer = client.post("/v1/chat/completions", &chat("hi")).await;
        let text = answer.text();
        let rest = text.strip_prefix(&events.concat()).unwrap_or_else(|| panic!("{end:?}: {text}"));
        assert_eq!(rest.contains("stream_broken"), broken, "{end:?}: {rest}");
        assert!(broken || rest.is_empty(), "{end:?}: {rest}");
    }
}

#[tokio::test]
async fn a_workers_own_words_for_a_status_come_through() {
    let engine = FakeEngine::start().await;
    engine.next(vec![Step::send("HTTP/1.1 418 Short and stout\r\ncontent-length: 0\r\n\r\n")]);
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let answer = router.client().await.post("/v1/chat/completions", &chat("hi")).await;
    assert_eq!(answer.head.start, "HTTP/1.1 418 Short and stout");
}

/// It is looked into, for an engine's last words.
#[tokio::test]
async fn a_500_that_breaks_off_is_not_made_to_look_whole() {
    for end in [Step::Close, Step::Reset] {
        let engine = FakeEngine::start().await;
        engine.next(vec![Step::send("HTTP/1.1 500 E\r\ncontent-length: 100\r\n\r\n{\"error\":"), end]);
        let router = TestRouter::before(Mode::Kv, &[&engine]).await;
        let answer = router.client().await.post("/v1/chat/completions", &chat("hi")).await;
        assert_eq!(answer.status(), 502, "{}", answer.text());
    }
}

#[tokio::test]
async fn the_workers_own_errors_come_back_as_they_are() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    for (status, body) in [
        (
            "400 Bad Request",
            r#"{"error":{"message":"not JSON","type":"Bad Request","param":null,"code":400}}"#,
        ),
        ("404 Not Found", r#"{"error":{"message":"The model `x` does not exist."}}"#),
        ("429 Too Many Requests", "{}"),
        ("503 Service Unavailable", "{}"),
        ("500 Internal Server Error", "{}"),
    ] {
        engine.next(vec![Step::send(format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 2\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))]);
        let answer = client.post("/v1/chat/completions", r#"{"stream":true,"model":"#).await;
        assert_eq!(format!("HTTP/1.1 {status}"), answer.head.start);
        assert_eq!(answer.text(), body);
        assert_eq!(answer.head.get("retry-after"), Some("2"));
        assert_eq!(answer.head.get("content-type"), Some("application/json"));
    }
    assert_eq!(engine.seen().len(), 5, "an answer is never asked for again");
    assert_eq!(client.post("/v1/chat/completions", chat("x")).await.status(), 200, "and is no death");
}

#[tokio::test]
async fn a_body_up_to_the_cap_passes_and_one_above_it_is_refused_by_name() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.limits.body = 1 << 20;
    let router = TestRouter::start(config).await;
    let fits = vec![b'a'; 1 << 20];
    assert_eq!(router.client().await.post("/v1/chat/completions", &fits).await.status(), 200);
    assert!(engine.seen()[0].body == fits);

    let promised = router.client().await.post("/v1/chat/completions", vec![b'a'; (1 << 20) + 1]).await;
    let mut client = router.client().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = [b"80000\r\n".as_slice(), &[b'a'; 0x80000], b"\r\n"].concat();
    client.send([head.as_bytes(), &chunk, &chunk, &chunk, b"0\r\n\r\n"].concat()).await;
    let chunked = client.answer("POST").await.unwrap();
    for refused in [promised, chunked] {
        assert_eq!(refused.status(), 413);
        assert_eq!(refused.head.get("content-type"), Some("application/json"));
        let error: serde_json::Value = serde_json::from_slice(&refused.body).unwrap();
        assert_eq!(error["error"]["code"], "request_too_large");
        assert!(error["error"]["message"].as_str().unwrap().contains("1048576 bytes (limits.body)"));
    }
    assert_eq!(engine.seen().len(), 1);
    let refused = r#"warmroute_requests_total{mode="kv",outcome="refused",route="chat"}"#;
    router.metric_is(refused, 2.0).await;
}

#[tokio::test]
async fn a_body_of_images_of_fifty_megabytes_passes_whole() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut body = br#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,"#.to_vec();
    body.extend((0..50 << 20).map(|n: usize| b'A' + (n * 7 % 26) as u8));
    body.extend_from_slice(br#""}}]}]}"#);
    assert_eq!(router.client().await.post("/v1/chat/completions", &body).await.status(), 200);
    assert!(engine.seen()[0].body == body);
}

#[tokio::test]
async fn a_client_that_leaves_is_missed_though_bytes_of_its_stand_unread_behind_its_request() {
    let first = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}";
    let small = first.to_owned();
    let large = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{}",
        1 << 20,
        "x".repeat(40_000)
    );
    for behind in [&small, &large, "\r\n"] {
        for steps in [vec![Step::AwaitClose], vec![Step::stream_head(), Step::AwaitClose]] {
            let engine = FakeEngine::start().await;
            let router = TestRouter::before(Mode::Kv, &[&engine]).await;
            engine.next(steps);
            let mut client = router.client().await;
            client.send(format!("{first}{behind}")).await;
            engine.saw(1).await;
            drop(client);
            engine.abandoned(1).await;
            router.metric_is("warmroute_requests_in_flight", 0.0).await;
            assert_eq!(engine.seen().len(), 1, "what stood behind was not begun");
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_off_the_worker() {
    let stalled_head = vec![Step::AwaitClose];
    let stalled_stream = vec![Step::stream_head(), Step::AwaitClose];
    let in_stream = vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose];
    for mode in BOTH {
        for (n, (steps, pieces)) in
            [(stalled_head.clone(), 0), (stalled_stream.clone(), 1), (in_stream.clone(), 2)]
                .into_iter()
                .enumerate()
        {
            let engine = FakeEngine::start().await;
            let router = TestRouter::before(mode, &[&engine]).await;
            engine.next(steps);
            let mut client = router.client().await;
            let body = chat("hi");
            client
                .send(format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                ))
                .await;
            engine.saw(1).await;
            for _ in 0..pieces.min(1) {
                client.head().await.unwrap();
            }
            if n % 2 == 0 {
                drop(client)
            } else {
                client.reset()
            }
            engine.abandoned(1).await;
            router.metric_is("warmroute_requests_in_flight", 0.0).await;
            let gone = format!(
                r#"warmroute_requests_total{{mode="{}",outcome="client_gone",route="chat"}}"#,
                mode.as_str()
            );
            router.metric_is(&gone, 1.0).await;
            let failures = router.admin("/metrics").await;
            assert!(!failures.contains("warmroute_worker_failures_total{"), "{failures}");
            assert_eq!(router.client().await.post("/v1/chat/completions", chat("x")).await.status(), 200);
        }
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_not_made_to_look_whole() {
    let engine = FakeEngine::start().await;
    let other = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine, &other]).await;
    let cut = |_: &Message| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
        vec![Step::send(head), Step::chunk("{\"a\":"), Step::chunk("[1,"), Step::Reset]
    };
    engine.always(cut);
    other.always(cut);
    let answer = router.client().await.post("/v1/chat/completions", chat("x")).await;
    assert_eq!(answer.text(), "{\"a\":[1,", "what came before the break comes through");
    assert!(!answer.complete);
    assert_eq!(engine.seen().len() + other.seen().len(), 1, "nothing is tried again after the head");
    router
        .metric_is(r#"warmroute_requests_total{mode="kv",outcome="worker_failed",route="chat"}"#, 1.0)
        .await;
}

#[tokio::test]
async fn a_refused_worker_is_passed_over_and_leaves_rotation() {
    let mut dead = FakeEngine::start().await;
    let alive = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&dead, &alive]);
    config.health.interval = None;
    let router = TestRouter::start(config).await;
    dead.kill().await;
    for n in 0..50 {
        let answer = router.client().await.post("/v1/chat/completions", chat(&n.to_string())).await;
        assert_eq!(answer.status(), 200);
    }
    assert_eq!(alive.seen().len(), 50);
    let state = format!(r#"warmroute_worker_state{{state="unreachable",worker="{}"}}"#, dead.address());
    router.metric_is(&state, 1.0).await;
}

#[tokio::test]
async fn with_all_workers_down_the_answer_is_a_503_and_readiness_is_off() {
    let mut engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    assert!(router.admin("/readyz").await.starts_with("ready"));
    engine.kill().await;
    // The first ones find out; then nobody is asked any more.
    for _ in 0..3 {
        assert_eq!(router.client().await.post("/v1/chat/completions", chat("x")).await.status(), 502);
    }
    let answer = router.client().await.post("/v1/chat/completions", chat("x")).await;
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.head.get("retry-after"), Some("1"));
    let error: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert!(!answer.text().contains("127.0.0.1"));
    assert!(router.admin("/readyz").await.starts_with("not ready: none of 1 workers"));
    assert_eq!(router.admin("/healthz").await, "ok\n");
    engine.revive().await;
    warmroute::testing::until("the worker to be back", async || {
        router.admin("/readyz").await.starts_with("ready")
    })
    .await;
    assert_eq!(router.client().await.post("/v1/chat/completions", chat("x")).await.status(), 200);
}

#[tokio::test]
async fn a_kept_connection_that_the_worker_closed_costs_no_request() {
    for mode in BOTH {
        let engine = FakeEngine::start().await;
        // Closes after each answer without saying so, as a server does whose patience ends just then.
        engine.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER), Step::Close]);
        let router = TestRouter::before(mode, &[&engine]).await;
        let mut client = router.client().await;
        for _ in 0..50 {
            assert_eq!(client.post("/v1/completions", r#"{"prompt":"x"}"#).await.status(), 200);
        }
        assert_eq!(engine.seen().len(), 50);
    }
}

#[tokio::test]
async fn a_new_connection_that_breaks_before_the_head_is_a_502() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    for steps in [
        vec![Step::Reset],
        vec![Step::Close],
        vec![Step::send("HTTP/1.1 2"), Step::Close],
        vec![Step::send("nonsense\r\n\r\n")],
    ] {
        engine.next(steps);
        let answer = router.client().await.post("/v1/chat/completions", chat("x")).await;
        assert_eq!(answer.status(), 502);
        assert!(answer.complete);
        // An answer has the worker forgiven, so that it stays in; its connection is not kept.
        engine.next(vec![
            Step::send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
            Step::Close,
        ]);
        assert_eq!(router.client().await.post("/v1/chat/completions", chat("x")).await.status(), 200);
    }
    assert_eq!(engine.seen().len(), 8, "a worker that had the request is not given it again");
}

#[tokio::test]
async fn control_paths_never_reach_a_worker() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Random, &[&engine]).await;
    let mut client = router.client().await;
    for path in [
        "/sleep",
        "/%73leep",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "//sleep",
        "/sleep;x",
        "/SLEEP",
        "/reset_prefix_cache",
    ] {
        let answer = client.post(path, "").await;
        assert_eq!(answer.status(), 403, "{path}");
        assert!(answer.text().contains("path_not_allowed"));
    }
    assert_eq!(engine.seen(), []);
}
