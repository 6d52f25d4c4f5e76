//! Leaving: announce, drain, cut.

use std::time::Duration;

use warmroute::app::Ended;
use warmroute::config::Mode;
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

fn stream(gate: &Gate) -> Vec<Step> {
    vec![
        Step::stream_head(),
        Step::chunk("data: 1\n\n"),
        Step::Await(gate.clone()),
        Step::chunk("data: [DONE]\n\n"),
        Step::last_chunk(),
    ]
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
    engine.next(stream(&gate));
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
    assert_eq!(client.get("/v1/models").await.status(), 200, "the connection is still good");
}

#[tokio::test]
async fn after_the_announcement_running_requests_end_and_connections_close() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, HOUR).await;
    let gate = Gate::default();
    let mut idle = router.client().await;
    assert_eq!(idle.get("/v1/models").await.status(), 200);
    engine.next(stream(&gate));
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

#[tokio::test]
async fn the_deadline_cuts_what_still_runs() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, Duration::from_millis(300)).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut client = begin_stream(&router).await;
    router.stop.request();
    assert!(!rest(&mut client).await.ends_with("0\r\n\r\n"), "what is cut does not look whole");
    engine.abandoned(1).await;
    assert_eq!(router.ended().await, Ended::Cut);
}

#[tokio::test]
async fn a_second_request_to_end_is_obeyed_at_once() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, HOUR, 2 * HOUR).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut client = begin_stream(&router).await;
    router.stop.request();
    router.stop.request();
    client.ended().await;
    engine.abandoned(1).await;
    assert_eq!(router.ended().await, Ended::Cut);
}

#[tokio::test]
async fn an_old_client_whose_answer_is_cut_by_the_deadline_is_told_so() {
    let engine = FakeEngine::start().await;
    let router = router(&engine, Duration::ZERO, Duration::from_millis(50)).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut client = router.client().await;
    client.send("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}").await;
    client.head().await.expect("a response");
    router.stop.request();
    assert!(client.rest().await.is_err(), "a close would look like the end");
    assert_eq!(router.ended().await, Ended::Cut);
}
