//! Workers that go down, freeze or fall silent in the middle of their work: what can be saved is saved, the rest ends
//! visibly and within a bound.

use std::time::Duration;

use warmroute::config::{Config, Draw, Mode};
use warmroute::testing::{FakeEngine, Gate, Message, PLAIN_ANSWER, Step, TestRouter, Wire, until};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"x"}]}"#;

async fn send(router: &TestRouter, path: &str) -> Wire {
    let mut client = router.client().await;
    client
        .send(format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{BODY}", BODY.len()))
        .await;
    client
}

/// Quick to notice, and with a short bound on the silence of the lost.
fn hasty(mut config: Config) -> Config {
    config.health.interval = Some(Duration::from_millis(50));
    config.health.unreachable_silence = Some(Duration::from_millis(200));
    config
}

/// The events of a stream, by a strict reading of the standard: data lines of an event joined, ended by a blank line.
fn events(text: &str) -> Vec<String> {
    let mut events = Vec::new();
    let text = text.replace("\r\n", "\n");
    let mut data: Vec<&str> = Vec::new();
    for line in text.split('\n') {
        if line.is_empty() && !data.is_empty() {
            events.push(data.join("\n"));
            data.clear();
        } else if let Some(value) = line.strip_prefix("data:") {
            data.push(value.trim_start());
        }
    }
    events
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_event_that_says_so() {
    let engine = FakeEngine::start().await;
    let other = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine, &other]).await;
    let role = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n";
    for (sent, before) in [
        (vec![], vec![]),
        (vec![role], vec![role]),
        (vec![role, "data: {\"n\":1}\n\n", "data: {\"n\":2}\n"], vec![role, "{\"n\":1}", "{\"n\":2}"]),
        (vec![role, "data: {\"choices\":[{\"del"], vec![role, "{\"choices\":[{\"del"]),
        (vec![role, "data: {}\r\n\r\n", ": keep-al"], vec![role, "{}"]),
    ] {
        for end in [Step::Reset, Step::Close] {
            let mut steps = vec![Step::stream_head()];
            steps.extend(sent.iter().map(Step::chunk));
            steps.push(end);
            for engine in [&engine, &other] {
                let steps = steps.clone();
                engine.always(move |_| steps.clone());
            }
            let asked = engine.seen().len() + other.seen().len();
            let answer = router.client().await.post(CHAT, BODY).await;
            assert!(answer.complete, "the connection is still good");
            assert!(answer.text().starts_with(&sent.concat()), "what came before is untouched");
            assert!(!answer.text().contains("[DONE]") && !answer.text().contains("finish_reason"));
            let events = events(&answer.text());
            assert_eq!(events.len(), before.len() + 1, "{}", answer.text());
            let last: serde_json::Value = serde_json::from_str(&events[before.len()]).expect("JSON");
            assert_eq!(last["error"]["code"], "stream_broken");
            assert!(!answer.text().contains("127.0.0.1"));
            assert_eq!(engine.seen().len() + other.seen().len(), asked + 1, "nobody else is asked");
        }
    }
    router
        .metric_is(r#"warmroute_requests_total{mode="kv",outcome="worker_failed",route="chat"}"#, 10.0)
        .await;
}

/// Its client has read the end and gone on; what would come behind that is no part of it.
#[tokio::test]
async fn nothing_comes_behind_the_end_that_a_stream_has_told() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let (event, done) = ("data: {\"n\":1}\n\n", "data: [DONE]\n\n");
    engine.next(vec![Step::stream_head(), Step::chunk(event), Step::chunk(done), Step::Close]);
    let answer = router.client().await.post(CHAT, BODY).await;
    assert_eq!((answer.complete, answer.text()), (false, format!("{event}{done}")));
}

#[tokio::test]
async fn each_dialect_has_its_own_word_for_it() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    for path in ["/v1/responses", "/v1/messages"] {
        engine.next(vec![Step::stream_head(), Step::chunk("event: ping\ndata: {}\n\n"), Step::Close]);
        let text = router.client().await.post(path, BODY).await.text();
        assert!(text.contains("\n\nevent: error\ndata: {") && text.contains(r#""type":"error""#), "{text}");
    }
}

#[tokio::test]
async fn an_engines_own_word_of_failure_passes_and_is_counted() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let words = "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"code\": 500}}\n\n";
    engine.next(vec![
        Step::stream_head(),
        Step::chunk(words),
        Step::chunk("data: [DONE]\n\n"),
        Step::last_chunk(),
    ]);
    let answer = router.client().await.post(CHAT, BODY).await;
    assert_eq!(answer.text(), format!("{words}data: [DONE]\n\n"));
    router
        .metric_is(r#"warmroute_requests_total{mode="kv",outcome="worker_failed",route="chat"}"#, 1.0)
        .await;
    let failures =
        format!(r#"warmroute_worker_failures_total{{cause="in_stream",worker="{}"}}"#, engine.address());
    assert_eq!(router.metric(&failures).await, 1.0);
    assert_eq!(
        router
            .metric(
                r#"warmroute_time_to_first_token_seconds_count{mode="kv",model="default",predicted="miss"}"#
            )
            .await,
        0.0
    );
}

/// One of its streams still comes, which says that it is there, and not that it will go on.
#[tokio::test]
async fn a_worker_that_takes_no_connections_is_lost_though_one_of_its_streams_goes_on() {
    let engine = FakeEngine::start().await;
    let mut config = hasty(TestRouter::config(Mode::Kv, &[&engine]));
    // The stream brings more between any two probes, and is seen to.
    config.health.interval = Some(Duration::from_millis(250));
    let router = TestRouter::start(config).await;
    let gate = Gate::default();
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut hanging = send(&router, CHAT).await;
    engine.saw(1).await;
    let (piece, pause) = (Step::chunk("data: 1\n\n"), Step::Work(Duration::from_millis(10)));
    let goes_on: Vec<Step> = (0..3_000).flat_map(|_| [piece.clone(), pause.clone()]).collect();
    engine.next([vec![Step::stream_head()], goes_on, vec![Step::Await(gate), Step::Close]].concat());
    let mut going_on = send(&router, CHAT).await;
    going_on.head().await.expect("a stream");
    engine.stop_listening().await;
    let state = format!(r#"warmroute_worker_state{{state="unreachable",worker="{}"}}"#, engine.address());
    router.metric_is(&state, 1.0).await;
    let told = hanging.answer("POST").await.expect("an answer").text();
    assert!(told.contains("\"stream_broken\""), "{told}");
    for _ in 0..5 {
        let piece = String::from_utf8(going_on.piece().await).expect("text");
        assert!(piece.starts_with("9\r\ndata: 1") && !piece.contains("error"), "it goes on: {piece}");
    }
    assert_eq!(router.metric(&state).await, 1.0);
}

#[tokio::test]
async fn a_worker_that_is_told_to_end_leaves_nobody_hanging() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = hasty(TestRouter::config(Mode::Random, &[&one, &two]));
    config.random.draw = Draw::Request;
    config.retries.reserve = 1000;
    let router = TestRouter::start(config).await;
    // As vLLM on SIGTERM: what runs hangs without a byte or a FIN, and no new connection is taken.
    let hang = |request: &Message| {
        if request.head.second().contains("stream") {
            vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]
        } else {
            vec![Step::AwaitClose]
        }
    };
    one.always(hang);
    two.always(hang);
    let mut streams = Vec::new();
    let mut plain = Vec::new();
    for n in 0..60 {
        if n % 2 == 0 {
            streams.push(send(&router, "/v1/chat/completions?stream").await);
        } else {
            plain.push(send(&router, CHAT).await);
        }
    }
    until("all to be placed", async || one.seen().len() + two.seen().len() == 60).await;
    let on_one = |engine: &FakeEngine, mark: &str| {
        engine
            .seen()
            .iter()
            .filter(|seen| seen.head.second().contains("stream") == (mark == "stream"))
            .count()
    };
    let (lost_streams, lost_plain) = (on_one(&one, "stream"), on_one(&one, "plain"));
    assert!(lost_streams > 0 && lost_plain > 0);
    two.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    one.stop_listening().await;

    // Requests of which nothing was seen are asked for again, at the other worker.
    until("the lost ones to be asked for elsewhere", async || {
        two.seen().len() == 60 - one.seen().len() + lost_plain
    })
    .await;
    // Streams end with a word.
    router
        .metric_is(
            r#"warmroute_requests_total{mode="random",outcome="worker_failed",route="chat"}"#,
            lost_streams as f64,
        )
        .await;
    router
        .metric_is(r#"warmroute_requests_total{mode="random",outcome="ok",route="chat"}"#, lost_plain as f64)
        .await;
    // Its own hang on, being on a worker that lives.
    let left = 60 - lost_streams - lost_plain;
    assert_eq!(router.metric("warmroute_requests_in_flight").await, left as f64);
    assert_eq!(router.metric(r#"warmroute_retries_total{cause="broken"}"#).await, lost_plain as f64);
}

#[tokio::test]
async fn a_stream_that_moves_is_not_cut_though_its_worker_takes_no_more() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = hasty(TestRouter::config(Mode::Random, &[&one]));
    config.workers.fixed.truncate(1);
    let router = TestRouter::start(config).await;
    drop(two);
    let gates: Vec<Gate> = (0..20).map(|_| Gate::default()).collect();
    let mut steps = vec![Step::stream_head()];
    for gate in &gates {
        steps.extend([Step::Await(gate.clone()), Step::chunk("data: 1\n\n")]);
    }
    steps.push(Step::last_chunk());
    one.next(steps);
    let mut client = send(&router, CHAT).await;
    let (head, raw) = client.head().await.expect("a head");
    one.stop_listening().await;
    until("the worker to be out", async || router.proxy.fleet.snapshot().eligible().is_empty()).await;
    // Ten times as long as the silence allowed, but never silent for long.
    let moving = async {
        for gate in &gates {
            tokio::time::sleep(Duration::from_millis(100)).await;
            gate.open();
        }
    };
    let ((), answer) = tokio::join!(moving, client.body(head, raw, "POST"));
    assert_eq!(answer.text(), "data: 1\n\n".repeat(20));
    assert!(answer.complete);
}

#[tokio::test]
async fn a_worker_that_says_it_is_going_down_is_left_alone() {
    for words in [
        r#"{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,"code":500}}"#,
        r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#,
    ] {
        let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
        let router = TestRouter::before(Mode::Kv, &[&one, &two]).await;
        one.always(|_| vec![Step::json("500 Internal Server Error", words)]);
        for n in 0..40 {
            let body =
                format!(r#"{{"messages":[{{"role":"user","content":"{n}"}}],"stream":{}}}"#, n % 2 == 0);
            assert_eq!(router.client().await.post(CHAT, body).await.status(), 200);
        }
        assert!((1..=2).contains(&one.seen().len()), "once is enough: {}", one.seen().len());
        // Alone, its words are passed on as they are.
        let alone = TestRouter::before(Mode::Kv, &[&one]).await;
        let answer = alone.client().await.post(CHAT, BODY).await;
        assert_eq!(answer.status(), 502);
    }
}

#[tokio::test]
async fn other_faults_of_a_worker_come_back_whole() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let router = TestRouter::before(Mode::Kv, &[&one, &two]).await;
    let large = format!(r#"{{"error":"{}"}}"#, "x".repeat(100_000));
    for words in ["", "{}", r#"{"error":"out of luck"}"#, &large] {
        for engine in [&one, &two] {
            let words = words.to_owned();
            engine.always(move |_| vec![Step::json("500 Internal Server Error", &words)]);
        }
        let asked = one.seen().len() + two.seen().len();
        let answer = router.client().await.post(CHAT, BODY).await;
        assert_eq!((answer.status(), answer.text().as_str()), (500, words));
        assert!(answer.complete);
        assert_eq!(one.seen().len() + two.seen().len(), asked + 1);
    }
}

#[tokio::test]
async fn a_frozen_worker_behind_a_healthy_page_is_avoided_until_it_moves() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = TestRouter::config(Mode::Kv, &[&one, &two]);
    config.health.stalled_after = Some(Duration::from_millis(300));
    config.health.retry_after = Duration::from_secs(3600);
    let router = TestRouter::start(config).await;
    let thaw = Gate::default();
    let held = thaw.clone();
    one.always(move |_| {
        vec![Step::stream_head(), Step::Await(held.clone()), Step::chunk("data: 1\n\n"), Step::last_chunk()]
    });
    let stalled = format!(r#"warmroute_worker_state{{state="stalled",worker="{}"}}"#, one.address());
    let up = format!(r#"warmroute_worker_state{{state="up",worker="{}"}}"#, one.address());
    let mut waiting = Vec::new();
    until("the frozen worker to be noticed", async || {
        waiting.push(send(&router, CHAT).await);
        router.metric(&stalled).await == 1.0
    })
    .await;
    let on_one = one.seen().len();
    for _ in 0..50 {
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
    }
    assert_eq!(one.seen().len(), on_one, "new requests go to the other one");
    assert_eq!(router.metric(&stalled).await, 1.0, "its healthy page does not redeem it");
    thaw.open();
    router.metric_is(&up, 1.0).await;
    // And nobody was cut.
    for client in &mut waiting {
        assert!(client.answer("POST").await.expect("an answer").complete);
    }
}

#[tokio::test]
async fn a_worker_that_errs_at_once_draws_no_traffic_and_comes_back_when_it_is_well() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = TestRouter::config(Mode::Kv, &[&one, &two]);
    config.health.retry_after = Duration::from_millis(100);
    let router = TestRouter::start(config).await;
    one.always(|_| vec![Step::json("500 Internal Server Error", r#"{"error":"out of luck"}"#)]);
    two.always(|_| vec![Step::Work(Duration::from_millis(20)), Step::json("200 OK", PLAIN_ANSWER)]);
    let state = |name| format!(r#"warmroute_worker_state{{state="{name}",worker="{}"}}"#, one.address());
    // Its errors come faster than the other one's answers, so that it always looks idle.
    let clients = (0..8).map(|_| async {
        let mut client = router.client().await;
        for _ in 0..25 {
            client.post(CHAT, BODY).await;
        }
    });
    futures_util::future::join_all(clients).await;
    let erred = one.seen().len();
    assert!(erred < 40, "{erred} of 200 were put before it");
    assert_eq!(two.seen().len(), 200 - erred);
    one.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    until("it to be back", async || {
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
        router.metric(&state("up")).await == 1.0
    })
    .await;
}

#[tokio::test]
async fn where_all_workers_err_their_errors_come_back() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    for status in ["500 Internal Server Error", "502 Bad Gateway", "429 Too Many Requests"] {
        engine.always(move |_| vec![Step::json(status, r#"{"error":"out of luck"}"#)]);
        for _ in 0..20 {
            let answer = router.client().await.post(CHAT, BODY).await;
            assert_eq!(
                (answer.head.second(), answer.text().as_str()),
                (&status[..3], r#"{"error":"out of luck"}"#)
            );
        }
    }
    assert_eq!(engine.seen().len(), 60);
}

#[tokio::test]
async fn a_stalled_worker_is_better_than_none() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.health.stalled_after = Some(Duration::from_millis(100));
    let router = TestRouter::start(config).await;
    let gate = Gate::default();
    let held = gate.clone();
    engine.always(move |_| vec![Step::Await(held.clone()), Step::json("200 OK", PLAIN_ANSWER)]);
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(send(&router, CHAT).await);
    }
    let stalled = format!(r#"warmroute_worker_state{{state="stalled",worker="{}"}}"#, engine.address());
    router.metric_is(&stalled, 1.0).await;
    waiting.push(send(&router, CHAT).await);
    engine.saw(5).await;
    assert!(router.admin("/readyz").await.starts_with("ready"));
    gate.open();
    for client in &mut waiting {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
}

#[tokio::test]
async fn a_worker_on_trial_takes_more_if_it_is_all_there_is() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.health.stalled_after = None;
    config.health.retry_after = Duration::from_millis(50);
    config.retries.attempts = 1;
    let router = TestRouter::start(config).await;
    engine.always(|_| vec![Step::Close]);
    let state = |name| format!(r#"warmroute_worker_state{{state="{name}",worker="{}"}}"#, engine.address());
    for _ in 0..3 {
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 502);
    }
    router.metric_is(&state("trial"), 1.0).await;
    let gate = Gate::default();
    let held = gate.clone();
    engine.always(move |_| vec![Step::Await(held.clone()), Step::json("200 OK", PLAIN_ANSWER)]);
    let mut waiting = Vec::new();
    for asked in 4..8 {
        waiting.push(send(&router, CHAT).await);
        engine.saw(asked).await;
    }
    assert_eq!(router.metric(&state("trial")).await, 1.0, "nothing has been answered");
    gate.open();
    for client in &mut waiting {
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    }
    assert_eq!(router.metric(&state("up")).await, 1.0);
}

#[tokio::test]
async fn a_late_health_page_cuts_no_stream_and_ejects_no_worker_that_answers() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let mut config = TestRouter::config(Mode::Random, &[&one, &two]);
    config.health.interval = Some(Duration::from_millis(20));
    config.health.timeout = Duration::from_millis(20);
    let router = TestRouter::start(config).await;
    let gate = Gate::default();
    let steps =
        vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::Await(gate.clone()), Step::last_chunk()];
    for engine in [&one, &two] {
        let steps = steps.clone();
        engine.always(move |_| steps.clone());
    }
    let mut client = send(&router, CHAT).await;
    let (head, raw) = client.head().await.expect("a head");
    for engine in [&one, &two] {
        engine.set_health(None);
        engine.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    }
    // Long enough for many probes to be late.
    until("both pages to be found bad", async || {
        let page = router.admin("/metrics").await;
        page.matches(r#"state="unhealthy""#).count() == 2
            && page
                .lines()
                .filter(|line| line.contains(r#"state="unhealthy""#))
                .all(|line| line.ends_with(" 1"))
    })
    .await;
    for _ in 0..20 {
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200, "it is asked all the same");
    }
    gate.open();
    assert!(client.body(head, raw, "POST").await.complete, "and its stream runs on");
}

#[tokio::test]
async fn limits_on_silence_and_on_the_whole_exist_if_they_are_set() {
    let engine = FakeEngine::start().await;
    for whole in [false, true] {
        let mut config = TestRouter::config(Mode::Kv, &[&engine]);
        let limit = Some(Duration::from_millis(200));
        (config.timeouts.silence, config.timeouts.response) =
            if whole { (None, limit) } else { (limit, None) };
        let router = TestRouter::start(config).await;
        engine.next(vec![Step::AwaitClose]);
        let answer = router.client().await.post(CHAT, BODY).await;
        assert_eq!(answer.status(), 504);
        assert!(answer.text().contains("gateway_timeout"));
        engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
        let answer = router.client().await.post(CHAT, BODY).await;
        assert!(answer.text().starts_with("data: 1\n\ndata: {\"error\""), "{}", answer.text());
        // What is no stream of events is cut.
        engine.next(vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\""), Step::AwaitClose]);
        let answer = router.client().await.post(CHAT, BODY).await;
        assert_eq!((answer.complete, answer.text().as_str()), (false, "{\"a\""));
        engine.next(vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")]);
        assert_eq!(router.client().await.post(CHAT, BODY).await.status(), 200);
    }
}
