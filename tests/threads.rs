//! Clients served by several threads, each with a runtime of its own, as on a machine with several CPUs.

#![expect(clippy::unwrap_used, reason = "a test that gets no threads should fail on the spot")]

use std::time::Duration;

use warmroute::app::Ended;
use warmroute::config::{Config, Mode};
use warmroute::metrics::Outcome;
use warmroute::testing::{FakeEngine, Gate, Step, TestRouter, Wire};
use warmroute::threads::Threads;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;

async fn on_two_threads(engine: &FakeEngine, change: impl FnOnce(&mut Config)) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    config.drain.announce = Duration::ZERO;
    change(&mut config);
    TestRouter::start_on(Threads::start(2).unwrap(), config).await
}

/// So many clients, half of them on each thread.
async fn clients(router: &TestRouter, count: usize) -> Vec<Wire> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(router.client().await);
        // Each has been given to a thread before the next one comes.
        assert_eq!(clients.last_mut().expect("one").get("/v1/models").await.status(), 200);
    }
    clients
}

async fn send(client: &mut Wire) {
    client
        .send(format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{BODY}", BODY.len()))
        .await;
}

#[tokio::test]
async fn a_thread_keeps_the_connections_that_it_has_opened() {
    let engine = FakeEngine::start().await;
    let router = on_two_threads(&engine, |_| {}).await;
    let mut clients = clients(&router, 4).await;
    for _ in 0..5 {
        for client in &mut clients {
            assert_eq!(client.post(CHAT, BODY).await.status(), 200);
        }
    }
    assert_eq!(engine.connections(), 2, "one for each thread, as one request at a time was asked");
}

#[tokio::test]
async fn a_place_that_is_freed_on_one_thread_is_taken_on_the_other() {
    let engine = FakeEngine::start().await;
    let router = on_two_threads(&engine, |config| config.limits.in_flight_per_worker = Some(1)).await;
    let mut clients = clients(&router, 2).await;
    let gate = Gate::default();
    engine.forget_seen();
    engine.next(vec![Step::Await(gate.clone()), Step::json("200 OK", "{}")]);
    send(&mut clients[0]).await;
    engine.saw(1).await;
    send(&mut clients[1]).await;
    router.metric_is("warmroute_requests_queued", 1.0).await;
    gate.open();
    for client in &mut clients {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
    router.metric_is("warmroute_requests_queued", 0.0).await;
}

#[tokio::test]
async fn streams_on_all_threads_end_before_the_process_does() {
    let engine = FakeEngine::start().await;
    let router = on_two_threads(&engine, |_| {}).await;
    let gate = Gate::default();
    let mut clients = clients(&router, 4).await;
    for client in &mut clients {
        engine.next(Step::stream_held_by(&gate));
        send(client).await;
        client.head().await.expect("a response");
    }
    router.stop.request();
    gate.open();
    for client in &mut clients {
        let rest = client.rest().await.expect("a whole answer");
        assert!(rest.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "{}", String::from_utf8_lossy(&rest));
    }
    assert_eq!(router.ended().await, Ended::Drained);
}

#[tokio::test]
async fn what_is_cut_on_any_thread_is_told_so_and_counted() {
    let engine = FakeEngine::start().await;
    let router = on_two_threads(&engine, |config| config.drain.deadline = Duration::from_millis(50)).await;
    let mut clients = clients(&router, 4).await;
    for client in &mut clients {
        engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
        send(client).await;
        client.head().await.expect("a response");
    }
    router.stop.request();
    for client in &mut clients {
        let rest = client.rest().await.expect("the connection is closed in order");
        assert!(
            String::from_utf8_lossy(&rest).contains("shutting_down"),
            "{}",
            String::from_utf8_lossy(&rest)
        );
    }
    let proxy = router.proxy.clone();
    assert_eq!(router.ended().await, Ended::Cut);
    assert_eq!(proxy.metrics.requests.total(Outcome::Cut), 4);
}
