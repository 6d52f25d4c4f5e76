//! Leaving: announce, drain, cut.

use std::io::Write;
use std::time::Duration;

use futures_util::FutureExt;
use warmroute::app::Ended;
use warmroute::config::{Config, Mode};
use warmroute::lifecycle::Phase;
use warmroute::metrics::Outcome;
use warmroute::testing::{FakeEngine, Gate, Step, TestRouter, Wire, until};

const HOUR: Duration = Duration::from_secs(3600);

async fn router(engine: &FakeEngine, announce: Duration, deadline: Duration) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    config.drain.announce = announce;
    config.drain.deadline = deadline;
    TestRouter::start(config).await
}

async fn begin_stream(router: &TestRouter) -> Wire {
    let mut client = router.client().await;
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    client.head().await.expect("a response");
    client
}

/// Everything until the connection ends.
async fn rest(client: &mut Wire) -> String {
    let mut rest = Vec::new();
    loop {
        let piece = client.piece().await;
        if piece.is_empty() {
            return String::from_utf8_lossy(&rest).into_owned();
        }
        rest.extend(piece);
    }
}

#[tokio::test]
async fn streams_run_to_their_end_and_new_work_is_served_while_it_is_announced() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, HOUR, 2 * HOUR).await;
    let gate = Gate::default();
    engine.next(Step::stream_held_by(&gate));
    let mut client = begin_stream(&router).await;
    router.stop.request();
    until("readiness to go", async || router.admin("/readyz").await == "not ready: shutting down\n").await;
    assert_eq!(router.client().await.get("/v1/models").await.status(), 200);
    gate.open();
    let mut got = Vec::new();
    while !got.ends_with(b"0\r\n\r\n") {
        got.extend(client.piece().await);
    }
    assert!(String::from_utf8_lossy(&got).contains("data: [DONE]"));
    let last = client.get("/v1/models").await;
    assert_eq!(
        (last.status(), last.head.get("connection")),
        (200, Some("close")),
        "served, and sent elsewhere"
    );
    client.ended().await;
}

#[tokio::test]
async fn after_the_announcement_running_requests_end_and_connections_close() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, HOUR).await;
    let gate = Gate::default();
    let mut idle = router.client().await;
    assert_eq!(idle.get("/v1/models").await.status(), 200);
    engine.next(Step::stream_held_by(&gate));
    let mut client = begin_stream(&router).await;
    let _ = engine.saw(2).await;
    router.stop.request();
    idle.ended().await;
    until("connections to be refused", async || {
        tokio::net::TcpStream::connect(router.clients).await.is_err()
    })
    .await;
    assert_eq!(router.admin("/healthz").await, "ok\n", "the operator still sees in");
    gate.open();
    assert!(rest(&mut client).await.ends_with("0\r\n\r\n"));
    assert_eq!(router.ended().await, Ended::Drained);
}

/// Whoever has asked is answered, whether its request was read yet or not, or its connection taken.
#[tokio::test]
async fn what_was_asked_before_no_more_is_taken_is_answered() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, HOUR).await;
    let ask = |address| {
        let mut client = std::net::TcpStream::connect(address).expect("the proxy takes connections");
        client.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").expect("an open connection");
        client
    };
    let mut kept = router.client().await;
    assert_eq!(kept.get("/v1/models").await.status(), 200);
    let mut opened = router.client().await;
    router.metric_is("warmroute_client_connections", 2.0).await;
    // This runtime has one thread: until it is given back, nothing of all this is read or taken.
    router.proxy.drain.advance(Phase::Draining);
    let queued: Vec<_> = (0..3).map(|_| ask(router.clients)).collect();
    for client in [&mut kept, &mut opened] {
        client
            .try_send("GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
            .now_or_never()
            .expect("room")
            .expect("open");
    }
    for client in [&mut kept, &mut opened] {
        let answer = client.answer("GET").await.expect("an answer");
        assert_eq!((answer.status(), answer.head.get("connection")), (200, Some("close")));
        client.ended().await;
    }
    for client in queued {
        client.set_nonblocking(true).expect("an option of the socket");
        let mut client = Wire::of(tokio::net::TcpStream::from_std(client).expect("a socket"));
        assert_eq!(client.answer("GET").await.expect("an answer").status(), 200);
    }
    router.stop.request();
    assert_eq!(router.ended().await, Ended::Drained);
}

/// With something unread, the system would take back what the client has still to read.
#[tokio::test]
async fn a_client_that_has_sent_more_than_is_wanted_gets_its_whole_answer() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, HOUR).await;
    // As much as the system takes of it at once, whether the client reads or not.
    let body = "x".repeat(1 << 20);
    engine.next(vec![Step::json("200 OK", &body)]);
    let mut client = router.client().await;
    client.send("GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
    // More than is read ahead of the one that is answered.
    client.send("GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n".repeat(6_000)).await;
    router.metric_is(r#"warmroute_requests_total{mode="kv",outcome="ok",route="other"}"#, 1.0).await;
    let answer = client.answer("GET").await.expect("an answer");
    assert!(answer.complete && answer.body.len() == body.len(), "{} bytes", answer.body.len());
}

/// A router whose deadline is reached as soon as it is stopped, once it has so many requests.
async fn cut_short(engine: &FakeEngine, change: impl FnOnce(&mut Config)) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    config.drain.announce = Duration::ZERO;
    config.drain.deadline = Duration::from_millis(50);
    change(&mut config);
    TestRouter::start(config).await
}

/// That many were cut, and nobody else is blamed for it.
async fn all_cut(router: TestRouter, engine: &FakeEngine, count: u64) {
    let proxy = router.proxy.clone();
    assert_eq!(router.ended().await, Ended::Cut);
    for outcome in Outcome::ALL {
        let expected = if *outcome == Outcome::Cut { count } else { 0 };
        assert_eq!(proxy.metrics.requests.total(*outcome), expected, "{outcome:?}");
    }
    let page = String::from_utf8(proxy.metrics.render()).expect("text");
    assert!(!page.contains("warmroute_worker_failures_total{"), "{page}");
    assert_eq!(proxy.fleet.snapshot().eligible().len(), 1, "nothing is held against {}", engine.url());
}

#[tokio::test]
async fn the_deadline_ends_streams_with_an_event_that_says_so() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |_| {}).await;
    let mut clients = Vec::new();
    // The last one has come in the middle of an event.
    for begun in ["data: 1\n\n", "data: 1\n\n", "data: {\"choi"] {
        engine.next(vec![Step::stream_head(), Step::chunk(begun), Step::AwaitClose]);
        clients.push(begin_stream(&router).await);
    }
    router.stop.request();
    for client in &mut clients {
        let rest = rest(client).await;
        assert!(rest.ends_with("\r\n0\r\n\r\n"), "{rest}");
        let event = rest.lines().find(|line| line.starts_with("data: {\"error\"")).expect("an event");
        let told: serde_json::Value = serde_json::from_str(&event["data: ".len()..]).expect("JSON");
        assert_eq!(told["error"]["code"], "shutting_down");
        assert!(!rest.contains("[DONE]"));
    }
    engine.abandoned(3).await;
    all_cut(router, &engine, 3).await;
}

#[tokio::test]
async fn the_deadline_turns_away_what_waits_for_its_answer_a_place_or_its_own_body() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |config| config.limits.in_flight = Some(1)).await;
    engine.next(vec![Step::AwaitClose]);
    let whole = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}";
    let mut clients = Vec::new();
    for sent in [whole, whole, &whole[..whole.len() - 1]] {
        let mut client = router.client().await;
        client.send(sent).await;
        clients.push(client);
        router.metric_is("warmroute_requests_in_flight", clients.len() as f64).await;
    }
    router.metric_is("warmroute_requests_queued", 1.0).await;
    router.stop.request();
    for client in &mut clients {
        let answer = client.answer("POST").await.expect("an answer");
        assert_eq!(answer.status(), 503);
        assert!(answer.text().contains("\"shutting_down\""), "{}", answer.text());
        assert_eq!(answer.head.get("connection"), Some("close"));
        assert!(answer.head.get("retry-after").is_some());
        client.ended().await;
    }
    engine.abandoned(1).await;
    all_cut(router, &engine, 3).await;
}

/// There is no way to say it in the middle of such an answer: it is left without its end.
#[tokio::test]
async fn the_deadline_cuts_other_answers_short() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |_| {}).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{\"a\"";
    let mut clients = Vec::new();
    for version in ["HTTP/1.1", "HTTP/1.0"] {
        engine.next(vec![Step::send(head), Step::AwaitClose]);
        let mut client = router.client().await;
        client.send(format!("GET /v1/models {version}\r\nhost: a\r\n\r\n")).await;
        client.head().await.expect("a response");
        clients.push(client);
    }
    router.stop.request();
    for client in &mut clients {
        assert!(!rest(client).await.ends_with('}'));
    }
    all_cut(router, &engine, 2).await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_holds_nobody_up_at_the_deadline() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |_| {}).await;
    let flood = Step::chunk("x".repeat(1 << 20));
    engine.next([vec![Step::stream_head()], vec![flood; 64], vec![Step::AwaitClose]].concat());
    let _client = begin_stream(&router).await;
    router.stop.request();
    all_cut(router, &engine, 1).await;
}

/// There is always more to read of its worker.
#[tokio::test]
async fn a_client_that_reads_slowly_is_told_at_the_deadline() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |_| {}).await;
    let flood = Step::chunk(format!("data: {}\n\n", "x".repeat(1 << 20)));
    engine.next([vec![Step::stream_head()], vec![flood; 64], vec![Step::last_chunk()]].concat());
    let mut client = begin_stream(&router).await;
    router.stop.request();
    until("the deadline", async || router.proxy.drain.phase() == Phase::Cut).await;
    let got = rest(&mut client).await;
    assert!(got[got.len().saturating_sub(400)..].contains("\"shutting_down\""));
    assert!(got.len() < 60 << 20, "{} bytes more", got.len());
    all_cut(router, &engine, 1).await;
}

#[tokio::test]
async fn a_second_request_to_end_is_obeyed_at_once() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, HOUR, 2 * HOUR).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut client = begin_stream(&router).await;
    router.stop.request();
    router.stop.request();
    assert!(rest(&mut client).await.contains("\"shutting_down\""));
    engine.abandoned(1).await;
    all_cut(router, &engine, 1).await;
}

#[tokio::test]
async fn an_old_client_whose_answer_is_cut_by_the_deadline_is_told_so() {
    let engine = FakeEngine::start().await;
    let router = cut_short(&engine, |_| {}).await;
    let kinds = ["text/event-stream", "application/json"];
    let mut clients = Vec::new();
    for kind in kinds {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n");
        engine.next(vec![Step::send(&head), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
        let mut client = router.client().await;
        client.send("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}").await;
        client.head().await.expect("a response");
        clients.push(client);
    }
    router.stop.request();
    let [stream, json] = &mut clients[..] else { panic!("two clients") };
    let said = stream.rest().await.expect("a good end");
    assert!(String::from_utf8_lossy(&said).contains("\"shutting_down\""));
    assert!(json.rest().await.is_err(), "a close would look like the end");
    all_cut(router, &engine, 2).await;
}
