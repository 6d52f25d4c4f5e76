//! Workers that fail and clients that leave: what is tried again, what is not, and that nothing stays counted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use warmroute::config::{Config, Mode};
use warmroute::testing::{FakeEngine, Gate, Message, PLAIN_ANSWER, Step, TestRouter, Wire, until};

const CHAT: &str = "/v1/chat/completions";

/// A chat long enough to have blocks.
fn chat(group: usize) -> String {
    let text = format!("group {group} says the same thing again; ").repeat(60);
    format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

fn streamed(group: usize) -> String {
    chat(group).replacen('{', r#"{"stream":true,"#, 1)
}

async fn pair(mode: Mode) -> (FakeEngine, FakeEngine, Config) {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let config = TestRouter::config(mode, &[&one, &two]);
    (one, two, config)
}

fn request(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn a_worker_that_breaks_every_connection_is_left_out_of_the_next_try() {
    for body in [chat(1), streamed(1)] {
        let (one, two, config) = pair(Mode::Kv).await;
        let router = TestRouter::start(config).await;
        for _ in 0..3 {
            assert_eq!(router.client().await.post(CHAT, &body).await.status(), 200);
        }
        // From now on, whichever is asked first breaks every connection.
        let broken = Arc::new(OnceLock::new());
        for (name, engine) in [(1, &one), (2, &two)] {
            let broken = broken.clone();
            engine.always(move |_| match *broken.get_or_init(|| name) == name {
                true => vec![Step::Reset],
                false => vec![Step::json("200 OK", PLAIN_ANSWER)],
            });
        }
        let before = one.seen().len() + two.seen().len();
        assert_eq!(router.client().await.post(CHAT, &body).await.status(), 200);
        assert_eq!(router.metric(r#"warmroute_retries_total{cause="broken"}"#).await, 1.0);
        // One more if the first try met a kept connection, which is tried anew before anybody else is.
        let stale = router.metric(r#"warmroute_retries_total{cause="stale"}"#).await as usize;
        assert_eq!(one.seen().len() + two.seen().len(), before + 2 + stale);
        // As long as it breaks, no request is lost.
        for _ in 0..10 {
            assert_eq!(router.client().await.post(CHAT, &body).await.status(), 200);
        }
        router.metric_is("warmroute_requests_in_flight", 0.0).await;
        for engine in [&one, &two] {
            // A request is counted as ended with its last byte; its place at the worker is free a moment later.
            let gauge = format!(r#"warmroute_worker_in_flight{{worker="{}"}}"#, engine.address());
            router.metric_is(&gauge, 0.0).await;
        }
    }
}

#[tokio::test]
async fn work_that_is_not_known_to_be_repeatable_is_not_repeated() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    let broken = |_: &Message| vec![Step::Close];
    one.always(broken);
    two.always(broken);
    assert_eq!(router.client().await.post("/v1/files", "{}").await.status(), 502);
    assert_eq!(one.seen().len() + two.seen().len(), 1);
    // Reading is safe to repeat, and so is a connection that was never made.
    assert_eq!(router.client().await.get("/v1/models").await.status(), 502);
    assert_eq!(one.seen().len() + two.seen().len(), 3);
}

#[tokio::test]
async fn a_post_of_any_kind_goes_elsewhere_if_no_connection_was_made() {
    let (mut one, two, mut config) = pair(Mode::Kv).await;
    config.health.interval = None;
    config.health.request_failures = 1_000;
    let router = TestRouter::start(config).await;
    one.kill().await;
    for n in 0..100 {
        assert_eq!(router.client().await.post("/v1/files", "{}").await.status(), 200, "request {n}");
    }
    assert_eq!(two.seen().len(), 100);
}

#[tokio::test]
async fn nothing_is_tried_again_once_a_head_has_come() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    for steps in [
        vec![Step::stream_head(), Step::Reset],
        vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::Close],
        vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\""), Step::Close],
    ] {
        for engine in [&one, &two] {
            let steps = steps.clone();
            engine.always(move |_| steps.clone());
        }
        let before = one.seen().len() + two.seen().len();
        let answer = router.client().await.post(CHAT, chat(2)).await;
        assert_eq!(answer.status(), 200);
        assert!(!answer.complete || answer.text().contains("stream_broken"), "{}", answer.text());
        assert_eq!(one.seen().len() + two.seen().len(), before + 1);
    }
}

#[tokio::test]
async fn answers_of_a_busy_worker_are_answers() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    for engine in [&one, &two] {
        engine.always(|_| {
            vec![Step::send(
                "HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\n\r\n",
            )]
        });
    }
    for n in 1..=50 {
        let answer = router.client().await.post(CHAT, chat(n)).await;
        assert_eq!((answer.status(), answer.head.get("retry-after")), (503, Some("2")));
        assert_eq!(one.seen().len() + two.seen().len(), n, "one arrival for each request");
    }
    one.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    two.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    assert_eq!(
        router.client().await.post(CHAT, chat(1)).await.status(),
        200,
        "and the very next one is served"
    );
}

#[tokio::test]
async fn retries_end_with_their_budget() {
    let (mut one, mut two, mut config) = pair(Mode::Kv).await;
    config.health.interval = None;
    config.health.request_failures = 1_000;
    config.retries.ratio = 0.0;
    config.retries.reserve = 1;
    let router = TestRouter::start(config).await;
    one.kill().await;
    two.kill().await;
    for _ in 0..100 {
        assert_eq!(router.client().await.post(CHAT, chat(1)).await.status(), 502);
    }
    // One a second over ten seconds, whenever they fall.
    let made = router.metric(r#"warmroute_retries_total{cause="connect"}"#).await;
    let denied = router.metric("warmroute_retries_denied_total").await;
    assert!((1.0..=30.0).contains(&made), "{made}");
    assert_eq!(made + denied, 100.0);
}

#[tokio::test]
async fn one_attempt_means_one() {
    let (mut one, _two, mut config) = pair(Mode::Kv).await;
    config.health.interval = None;
    config.health.request_failures = 1_000;
    config.retries.attempts = 1;
    let router = TestRouter::start(config).await;
    one.kill().await;
    let mut statuses = Vec::new();
    for n in 0..40 {
        statuses.push(router.client().await.post(CHAT, chat(n)).await.status());
    }
    assert!(statuses.contains(&502) && statuses.contains(&200), "{statuses:?}");
    assert_eq!(router.metric(r#"warmroute_retries_total{cause="connect"}"#).await, 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_while_it_sends_never_reaches_a_worker() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    let mut client = router.client().await;
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{\"mess").await;
    drop(client);
    let gone = r#"warmroute_requests_total{mode="kv",outcome="client_gone",route="chat"}"#;
    router.metric_is(gone, 1.0).await;
    assert_eq!(one.seen().len() + two.seen().len(), 0);
}

#[tokio::test]
async fn a_body_that_stalls_is_given_up() {
    let (one, two, mut config) = pair(Mode::Kv).await;
    config.timeouts.client_body = Some(std::time::Duration::from_millis(50));
    let router = TestRouter::start(config).await;
    let mut client = router.client().await;
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{\"mess").await;
    let answer = client.answer("POST").await.expect("an answer");
    assert_eq!((answer.status(), answer.head.get("connection")), (408, Some("close")));
    client.ended().await;
    assert_eq!(one.seen().len() + two.seen().len(), 0);
}

#[tokio::test]
async fn many_clients_that_leave_at_once_leave_nothing_behind() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    let big = "x".repeat(64 << 10);
    for engine in [&one, &two] {
        let big = big.clone();
        engine.always(move |_| {
            let mut steps = vec![Step::stream_head()];
            steps.extend((0..80).map(|_| Step::chunk(format!("data: {big}\n\n"))));
            steps.push(Step::AwaitClose);
            steps
        });
    }
    let mut clients: Vec<Wire> = Vec::new();
    for n in 0..30 {
        let mut client = router.client().await;
        client.send(request(CHAT, &streamed(n))).await;
        let mut got = 0;
        while got < 5 << 20 {
            got += client.piece().await.len();
        }
        clients.push(client);
    }
    assert_eq!(router.metric("warmroute_requests_in_flight").await, 30.0);
    drop(clients);
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    router.metric_is("warmroute_client_connections", 0.0).await;
    let gone = r#"warmroute_requests_total{mode="kv",outcome="client_gone",route="chat"}"#;
    assert_eq!(router.metric(gone).await, 30.0);
    assert!(!router.admin("/metrics").await.contains("warmroute_worker_failures_total{"));
    assert!(router.proxy.fleet.snapshot().workers.iter().all(|worker| worker.is_calm()));
}

#[tokio::test]
async fn a_client_that_does_not_read_slows_its_worker() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    let marks = Arc::new(AtomicUsize::new(0));
    // 256 MiB: more than all buffers of all systems between.
    let megabyte = vec![b'x'; 1 << 20];
    for engine in [&one, &two] {
        let (marks, chunk) = (marks.clone(), Step::chunk(&megabyte));
        engine.always(move |request| {
            if request.head.second() != CHAT {
                return vec![Step::json("200 OK", PLAIN_ANSWER)];
            }
            let flood = (0..256).flat_map(|_| [chunk.clone(), Step::Mark(marks.clone())]);
            [Step::stream_head()].into_iter().chain(flood).chain([Step::last_chunk()]).collect()
        });
    }
    let mut slow = router.client().await;
    slow.send(request(CHAT, &streamed(1))).await;
    slow.head().await.expect("a head");
    until("the flood to begin", async || marks.load(Ordering::Relaxed) > 0).await;
    let mut others = router.client().await;
    for _ in 0..300 {
        assert_eq!(others.get("/v1/models").await.status(), 200);
    }
    assert!(marks.load(Ordering::Relaxed) < 64, "{} MiB were taken unread", marks.load(Ordering::Relaxed));
}

#[tokio::test]
async fn keep_alive_comments_pass_and_are_no_first_token() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let gate = Gate::default();
    engine.next(vec![
        Step::stream_head(),
        Step::chunk(": keep-alive\n\n"),
        Step::Await(gate.clone()),
        Step::chunk("data:{\"choices\":[]}\r\n\r\ndata: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\r\n\r\n"),
        Step::last_chunk(),
    ]);
    let mut client = router.client().await;
    client.send(request(CHAT, &streamed(1))).await;
    client.head().await.expect("a head");
    assert_eq!(client.piece().await, b"E\r\n: keep-alive\n\n\r\n");
    let first_tokens = async || {
        router
            .metric(
                r#"warmroute_time_to_first_token_seconds_count{mode="kv",model="default",predicted="miss"}"#,
            )
            .await
    };
    assert_eq!(first_tokens().await, 0.0);
    gate.open();
    let rest = client.piece().await;
    assert!(String::from_utf8_lossy(&rest).contains("data:{\"choices\":[]}\r\n\r\ndata: {"));
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    assert_eq!(first_tokens().await, 1.0);
    assert_eq!(router.metric(r#"warmroute_prompt_tokens_total{mode="kv",model="default"}"#).await, 7.0);
}

#[tokio::test]
async fn one_worker_that_never_answers_holds_up_nobody_else() {
    let (one, two, config) = pair(Mode::Kv).await;
    let router = TestRouter::start(config).await;
    let gate = Gate::default();
    let held = gate.clone();
    one.always(move |_| vec![Step::Await(held.clone()), Step::json("200 OK", PLAIN_ANSWER)]);
    let mut waiting = Vec::new();
    for n in 0..200 {
        let mut client = router.client().await;
        client.send(request(CHAT, &chat(n))).await;
        waiting.push(client);
    }
    // What was placed on the other one is answered; the first one's own wait for it.
    until("all to be placed", async || one.seen().len() + two.seen().len() == 200).await;
    router.metric_is("warmroute_requests_in_flight", one.seen().len() as f64).await;
    assert!(two.seen().len() > 50, "{}", two.seen().len());
    gate.open();
    for client in &mut waiting {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
}

#[tokio::test]
async fn idle_connections_to_a_worker_are_closed_in_time() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.timeouts.pool_idle = std::time::Duration::from_millis(300);
    config.health.interval = None;
    let router = TestRouter::start(config).await;
    router.client().await.get("/v1/models").await;
    let open = format!(r#"warmroute_worker_connections{{worker="{}"}}"#, engine.address());
    assert_eq!(engine.connections(), 1);
    router.metric_is(&open, 0.0).await;
}
