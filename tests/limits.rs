//! Limits on what is at the workers at once, and the queue before them.

use std::time::Duration;

use warmroute::config::{Config, Mode};
use warmroute::testing::{FakeEngine, Gate, PLAIN_ANSWER, Step, TestRouter, Wire, until};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"x"}]}"#;

async fn send(router: &TestRouter) -> Wire {
    let mut client = router.client().await;
    client
        .send(format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{BODY}", BODY.len()))
        .await;
    client
}

async fn limited(engine: &FakeEngine, set: impl FnOnce(&mut Config)) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    set(&mut config);
    TestRouter::start(config).await
}

fn held(gate: &Gate) -> Vec<Step> {
    vec![Step::Await(gate.clone()), Step::json("200 OK", PLAIN_ANSWER)]
}

#[tokio::test]
async fn clients_that_leave_the_queue_take_no_place_with_them() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.limits.in_flight = Some(1)).await;
    let gate = Gate::default();
    engine.next(held(&gate));
    let mut first = send(&router).await;
    engine.saw(1).await;
    let mut queued = Vec::new();
    for _ in 0..5 {
        queued.push(send(&router).await);
    }
    router.metric_is("warmroute_requests_queued", 5.0).await;
    drop(queued);
    router.metric_is("warmroute_requests_queued", 0.0).await;
    gate.open();
    assert_eq!(first.answer("POST").await.expect("an answer").status(), 200);
    for _ in 0..3 {
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
    }
    assert_eq!(engine.seen().len(), 4, "those that left never reached the worker");
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
}

#[tokio::test]
async fn the_queue_is_served_in_order_and_bounded() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| {
        config.limits.in_flight_per_worker = Some(2);
        config.limits.queue = 3;
    })
    .await;
    let gates: Vec<Gate> = (0..5).map(|_| Gate::default()).collect();
    for gate in &gates {
        engine.next(held(gate));
    }
    let mut clients = Vec::new();
    for n in 0..5usize {
        clients.push(send(&router).await);
        let (there, queued) = (n.min(1) + 1, n.saturating_sub(1));
        engine.saw(there).await;
        router.metric_is("warmroute_requests_queued", queued as f64).await;
    }
    let refused = router.client().await.post(CHAT, BODY).await;
    assert_eq!((refused.status(), refused.head.get("retry-after")), (503, Some("1")));
    assert!(refused.text().contains(r#""code":"overloaded""#), "{}", refused.text());
    router.metric_is(r#"warmroute_requests_total{mode="kv",outcome="shed",route="chat"}"#, 1.0).await;
    // Each place that becomes free goes to the one that has waited longest.
    for (n, gate) in gates.iter().enumerate() {
        gate.open();
        assert_eq!(clients[n].answer("POST").await.expect("an answer").status(), 200);
        engine.saw((n + 3).min(5)).await;
    }
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    assert_eq!(router.metric("warmroute_requests_queued").await, 0.0);
}

#[tokio::test]
async fn a_place_is_held_to_the_end_of_the_stream() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.limits.in_flight = Some(1)).await;
    let gate = Gate::default();
    engine.next(vec![
        Step::stream_head(),
        Step::chunk("data: 1\n\n"),
        Step::Await(gate.clone()),
        Step::last_chunk(),
    ]);
    let mut streaming = send(&router).await;
    let (head, raw) = streaming.head().await.expect("a head");
    let mut next = send(&router).await;
    router.metric_is("warmroute_requests_queued", 1.0).await;
    assert_eq!(engine.seen().len(), 1);
    gate.open();
    assert!(streaming.body(head, raw, "POST").await.complete);
    assert_eq!(next.answer("POST").await.expect("an answer").status(), 200);
}

#[tokio::test]
async fn places_that_an_edit_makes_are_given_to_those_who_wait() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.limits.in_flight = Some(1)).await;
    let gate = Gate::default();
    engine.next(held(&gate));
    let mut clients = vec![send(&router).await];
    engine.saw(1).await;
    for _ in 0..3 {
        clients.push(send(&router).await);
    }
    router.metric_is("warmroute_requests_queued", 3.0).await;
    let mut edited = Config::clone(&router.proxy.config.load());
    edited.limits.in_flight = Some(10);
    router.proxy.reconfigure(edited, None);
    for client in &mut clients[1..] {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
    gate.open();
    assert_eq!(clients[0].answer("POST").await.expect("an answer").status(), 200);
}

#[tokio::test]
async fn a_wait_that_is_too_long_ends_in_a_503() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| {
        config.limits.in_flight = Some(1);
        config.timeouts.queue = Duration::from_millis(50);
    })
    .await;
    let gate = Gate::default();
    engine.next(held(&gate));
    let mut first = send(&router).await;
    engine.saw(1).await;
    assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 503);
    gate.open();
    assert_eq!(first.answer("POST").await.expect("an answer").status(), 200);
    assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
}

#[tokio::test]
async fn many_through_a_narrow_gate_all_come_through() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = TestRouter::config(Mode::Kv, &[&one, &two]);
    config.limits.in_flight_per_worker = Some(2);
    let router = TestRouter::start(config).await;
    let mut clients = Vec::new();
    for _ in 0..200 {
        clients.push(send(&router).await);
    }
    for client in &mut clients {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
    assert_eq!(one.seen().len() + two.seen().len(), 200);
    assert!(one.connections() <= 2 && two.connections() <= 2);
    router.metric_is("warmroute_requests_queued", 0.0).await;
}

#[tokio::test]
async fn those_who_wait_for_a_full_worker_are_told_when_it_has_gone() {
    let mut engine = FakeEngine::start().await;
    let router = limited(&engine, |config| {
        config.limits.in_flight = Some(1);
        config.health.interval = Some(Duration::from_millis(50));
        config.health.unreachable_silence = Some(Duration::from_millis(50));
    })
    .await;
    engine.next(vec![Step::AwaitClose]);
    let mut first = send(&router).await;
    engine.saw(1).await;
    let mut waiting = send(&router).await;
    router.metric_is("warmroute_requests_queued", 1.0).await;
    engine.kill().await;
    for client in [&mut first, &mut waiting] {
        let status = client.answer("POST").await.expect("an answer").status();
        assert!(matches!(status, 502 | 503), "{status}");
    }
}

#[tokio::test]
async fn connections_above_their_limit_wait_for_one_to_end() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.limits.connections = 2).await;
    let mut one = router.client().await;
    let mut two = router.client().await;
    assert_eq!((one.get("/a").await.status(), two.get("/b").await.status()), (200, 200));
    let mut three = router.client().await;
    three.send("GET /c HTTP/1.1\r\nhost: a\r\n\r\n").await;
    for _ in 0..20 {
        assert_eq!(one.get("/a").await.status(), 200);
    }
    assert!(engine.seen().iter().all(|seen| seen.head.second() != "/c"));
    drop(two);
    assert_eq!(three.answer("GET").await.expect("an answer").status(), 200);
}

#[tokio::test]
async fn connections_that_bring_no_head_are_closed_in_time() {
    let engine = FakeEngine::start().await;
    let router =
        limited(&engine, |config| config.timeouts.client_head = Some(Duration::from_millis(200))).await;
    let mut silent = router.client().await;
    let mut half = router.client().await;
    half.send("GET / HTTP/1.1\r\nhost:").await;
    let mut idle = router.client().await;
    assert_eq!(idle.get("/").await.status(), 200);
    for client in [&mut silent, &mut half, &mut idle] {
        client.ended().await;
    }
    let all_closed = async || router.metric("warmroute_client_connections").await == 0.0;
    until("all to be closed", all_closed).await;
}

/// More than the system holds on the way to a client that reads nothing.
fn flood() -> Vec<Step> {
    let piece = Step::chunk(format!("data: {}\n\n", "x".repeat(1 << 20)));
    [vec![Step::stream_head()], vec![piece; 64], vec![Step::last_chunk()]].concat()
}

#[tokio::test]
async fn a_client_that_takes_nothing_of_its_answer_gives_its_place_back_in_time() {
    let engine = FakeEngine::start().await;
    let router =
        limited(&engine, |config| config.timeouts.client_read = Some(Duration::from_millis(200))).await;
    for _ in 0..2 {
        engine.next(flood());
    }
    let (_standing_still, mut reading) = (send(&router).await, send(&router).await);
    let whole = reading.answer("POST").await.expect("an answer");
    assert!(whole.complete && whole.body.len() > 64 << 20, "it took what there was");
    router.metric_is(r#"warmroute_requests_total{mode="kv",outcome="client_gone",route="chat"}"#, 1.0).await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    router.metric_is("warmroute_client_connections", 1.0).await;
}

#[tokio::test]
async fn an_answer_has_its_time_though_its_worker_is_always_ahead_of_its_client() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.timeouts.response = Some(Duration::from_millis(100))).await;
    engine.next(flood());
    let mut slow = send(&router).await;
    slow.head().await.expect("a stream");
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let late = send(&router).await.answer("POST").await.expect("an answer");
    assert!(late.complete && late.text().contains("\"gateway_timeout\""), "{}", late.text());
    // That one began later, so its time is over too.
    let mut rest = Vec::new();
    while !rest.ends_with(b"\r\n0\r\n\r\n") {
        rest.extend(slow.piece().await);
    }
    let end = String::from_utf8_lossy(&rest[rest.len().saturating_sub(400)..]);
    assert!(end.contains("\"gateway_timeout\""), "{end}");
    assert!(rest.len() < 60 << 20, "{} bytes more", rest.len());
    let page = String::from_utf8(router.proxy.metrics.render()).expect("text");
    assert!(!page.contains("warmroute_worker_failures_total{"), "nobody is blamed: {page}");
}

/// Its first bytes are left where they lie until it is clear what it speaks, and behind them nobody sees a plain end.
#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_first_word_is_gone() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| config.timeouts.client_head = None).await;
    let mut client = router.client().await;
    client.send("P").await;
    router.metric_is("warmroute_client_connections", 1.0).await;
    drop(client);
    router.metric_is("warmroute_client_connections", 0.0).await;
}

#[tokio::test]
async fn bodies_together_have_a_bound_and_give_their_room_back() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |config| {
        (config.limits.body, config.limits.bodies) = (1 << 20, 1 << 20);
    })
    .await;
    let large = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(700_000));
    let gate = Gate::default();
    engine.next(held(&gate));
    let mut first = router.client().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", large.len());
    first.send([head.as_bytes(), large.as_bytes()].concat()).await;
    engine.saw(1).await;
    router.metric_is("warmroute_request_body_bytes", large.len() as f64).await;
    // One that is refused is told while it sends, and whatever its length was promised to be.
    let mut chunked = router.client().await;
    chunked.send(format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")).await;
    chunked.send(format!("{:x}\r\n{large}\r\n", large.len())).await;
    for refused in
        [router.client().await.post(CHAT, &large).await, chunked.answer("POST").await.expect("one")]
    {
        assert_eq!((refused.status(), refused.head.get("retry-after")), (503, Some("1")));
        assert!(refused.text().contains(r#""code":"overloaded""#), "{}", refused.text());
    }
    assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200, "a small one has room");
    // A promise takes none.
    let mut promises = Vec::new();
    for _ in 0..10 {
        let mut client = router.client().await;
        client.send(format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n{{")).await;
        promises.push(client);
    }
    assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
    drop((promises, chunked));
    gate.open();
    assert_eq!(first.answer("POST").await.expect("an answer").status(), 200);
    router.metric_is("warmroute_request_body_bytes", 0.0).await;
    assert_eq!(router.client().await.post(CHAT, &large).await.status(), 200);
    assert!(engine.seen().last().expect("a request").body == large.as_bytes());
}

#[tokio::test]
async fn large_prompts_are_read_apart_from_the_others() {
    let engine = FakeEngine::start().await;
    let router = limited(&engine, |_| {}).await;
    let large = format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "x".repeat(8 << 20));
    let mut sent = router.client().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", large.len());
    sent.send([head.as_bytes(), large.as_bytes()].concat()).await;
    // This runtime has one thread: were the prompt read on it, nothing else would move between its last byte and its worker.
    let mut between = router.client().await;
    let placed = router.proxy.fleet.snapshot().workers[0].metrics.requests.clone();
    let (mut small, mut meanwhile) = (0, 0);
    while placed.get() == small {
        assert_eq!(between.post(CHAT, BODY).await.status(), 200);
        small += 1;
        let whole = router.proxy.metrics.body_bytes.get() >= large.len() as i64;
        meanwhile += u64::from(whole && placed.get() == small);
    }
    assert!(meanwhile > 0, "nothing moved while it was read");
    assert_eq!(sent.answer("POST").await.expect("an answer").status(), 200);
    let last = engine.seen();
    assert!(last.iter().any(|seen| seen.body == large.as_bytes()));
    assert!(router.proxy.planner.believed_blocks() > 8 << 10, "its prefix is known all the same");
}

#[tokio::test]
async fn the_operators_pages_answer_while_all_workers_hang_and_every_queue_is_full() {
    const STREAMS: usize = 300;
    let engines = [FakeEngine::start().await, FakeEngine::start().await];
    let mut config = TestRouter::config(Mode::Kv, &engines.iter().collect::<Vec<_>>());
    config.limits.in_flight = Some(STREAMS);
    config.limits.queue = 50;
    let router = TestRouter::start(config).await;
    for engine in &engines {
        engine.always(|_| vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    }
    let mut clients = Vec::new();
    for _ in 0..STREAMS + 50 {
        clients.push(send(&router).await);
    }
    router.metric_is("warmroute_requests_in_flight", (STREAMS + 50) as f64).await;
    router.metric_is("warmroute_requests_queued", 50.0).await;
    for engine in &engines {
        engine.set_health(None);
        engine.set_metrics(|_| vec![Step::AwaitClose]);
    }
    for _ in 0..20 {
        assert_eq!(send(&router).await.answer("POST").await.expect("an answer").status(), 503);
        for path in ["/healthz", "/readyz", "/metrics", "/fleet"] {
            assert_eq!(Wire::connect(router.admin).await.get(path).await.status(), 200, "{path}");
        }
    }
    drop(clients);
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
}
