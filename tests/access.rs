//! The access log: a line for each request, nothing of prompts in it, and what `bench import` and `bench play` read of it.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use warmroute::config::{Config, LogTo, Mode, Split};
use warmroute::engine::http::Running;
use warmroute::experiment::workload::schema::{self, Reading, Schema};
use warmroute::testing::{FakeEngine, Step, TestRouter, simulated, until};

/// A file that is gone with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> File {
        let file = std::env::temp_dir().join(format!("warmroute-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&file);
        File(file)
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }

    /// The lines, once there are so many.
    async fn lines(&self, count: usize) -> Vec<Value> {
        until("the lines are written", async || {
            self.text().ends_with('\n') && self.text().lines().count() >= count
        })
        .await;
        self.text()
            .lines()
            .map(|line| serde_json::from_str(line).expect("a line is one JSON object"))
            .collect()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A router with an access log before one simulated worker.
async fn logging(file: &File, blocks: bool) -> (TestRouter, Running) {
    let fleet = simulated(1, "m", 100.0).await;
    let mut config = TestRouter::config_at(Mode::Kv, fleet.addresses());
    config.log.access.to = LogTo::File(file.0.clone());
    config.log.access.blocks = blocks;
    (TestRouter::start(config).await, fleet)
}

fn chat(tail: &str) -> String {
    let prefix = "The quick brown fox jumps over the lazy dog. ".repeat(60);
    format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{prefix}{tail}"}}],"max_tokens":4,"stream":true,"stream_options":{{"include_usage":true}}}}"#
    )
}

#[tokio::test]
async fn each_request_has_a_line_that_can_be_played_again() {
    let file = File::new("lines.jsonl");
    let (router, _fleet) = logging(&file, true).await;
    let mut client = router.client().await;
    for body in [
        chat(&"Once more. ".repeat(50)),
        chat(&"And again. ".repeat(50)),
        r#"{"model":"m","messages":7}"#.to_owned(),
    ] {
        client.post("/v1/chat/completions", body).await;
    }
    client.post("/reset_prefix_cache", "").await;
    let lines = file.lines(4).await;
    let [first, second, bad, blocked] = &lines[..] else { panic!("four lines: {lines:?}") };

    for line in [first, second] {
        assert_eq!(
            (&line["route"], &line["model"], &line["outcome"]),
            (&"chat".into(), &"m".into(), &"ok".into())
        );
        assert_eq!((&line["status"], &line["output_tokens"]), (&200.into(), &4.into()));
        assert!(
            line["ttft_ms"].as_f64() <= line["duration_ms"].as_f64() && line["ttft_ms"].is_f64(),
            "{line}"
        );
        assert!(line["worker"].is_string() && line["request_id"].is_string(), "{line}");
    }
    assert_eq!((&first["reason"], &first["cached_tokens"]), (&"only".into(), &0.into()));
    assert!(second["cached_tokens"].as_u64() > Some(400), "{second}");
    assert!(second["predicted_cached_tokens"].as_u64() > Some(400), "{second}");
    assert_eq!((&bad["outcome"], &bad["status"]), (&"client_error".into(), &400.into()));
    assert_eq!(blocked["route"], "blocked");
    assert!(blocked.get("worker").is_none() && blocked.get("blocks").is_none(), "{blocked}");
    assert!(!file.text().contains("fox"), "nothing of prompts");

    // What has no prompt is no request to play.
    assert_eq!(Schema::of(&file.0).expect("a known schema"), Schema::Access);
    let mut bad_lines = Vec::new();
    let trace = schema::load_all(&file.0, Schema::Access, &Reading::default(), &mut |error| {
        bad_lines.push(error.to_string());
        Ok(())
    })
    .expect("good lines");
    assert_eq!((trace.requests.len(), bad_lines.len()), (3, 0), "{bad_lines:?}");
    let [a, b] = [0, 1].map(|at| trace.requests[at].blocks.chain());
    let shared = a.iter().zip(b.iter()).take_while(|(a, b)| a == b).count();
    assert!(shared >= 9 && shared < a.len(), "{shared} of {} blocks are the prefix", a.len());
}

#[tokio::test]
async fn lines_that_cannot_be_written_are_counted() {
    let file = File(PathBuf::from("/dev/full"));
    let (router, _fleet) = logging(&file, false).await;
    router.client().await.post("/v1/chat/completions", chat("Once.")).await;
    router.metric_is("warmroute_access_log_lost_total", 1.0).await;
    // Nothing of the device is to be removed.
    std::mem::forget(file);
}

#[tokio::test]
async fn without_blocks_it_is_a_log_and_no_more() {
    let file = File::new("plain.jsonl");
    let (router, _fleet) = logging(&file, false).await;
    router.client().await.post("/v1/chat/completions", chat("Once.")).await;
    assert!(file.lines(1).await[0].get("blocks").is_none());
    let refused = schema::load(&file.0, &Reading::default()).expect_err("nothing to play");
    assert!(refused.to_string().contains("log.access.blocks"), "{refused}");
}

#[tokio::test]
async fn a_client_that_leaves_has_its_line_too() {
    let file = File::new("left.jsonl");
    let (router, _fleet) = logging(&file, true).await;
    let mut client = router.client().await;
    let body = chat("Once.").replace("\"max_tokens\":4", "\"max_tokens\":2000");
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.send(head + &body).await;
    client.head().await.expect("the stream begins");
    client.reset();
    let lines = file.lines(1).await;
    assert_eq!(lines[0]["outcome"], "client_gone");
    assert!(lines[0]["worker"].is_string());
}

/// A router with an access log before these workers.
async fn before(file: &File, engines: &[&FakeEngine], change: impl FnOnce(&mut Config)) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, engines);
    config.log.access.to = LogTo::File(file.0.clone());
    change(&mut config);
    TestRouter::start(config).await
}

/// Whatever ends a request before its answer begins: the line says where it was, why, and by which id.
#[tokio::test]
async fn a_request_that_ends_before_its_answer_has_a_whole_line() {
    let file = File::new("early.jsonl");
    let engine = FakeEngine::start().await;
    let router = before(&file, &[&engine], |config| {
        config.drain.announce = Duration::ZERO;
        config.drain.deadline = Duration::ZERO;
    })
    .await;
    let ask = |id: &str| {
        let body = r#"{"model":"m","prompt":"x"}"#;
        let length = body.len();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-request-id: {id}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    };
    // The worker breaks off.
    engine.next(vec![Step::Reset]);
    let mut client = router.client().await;
    client.send(ask("one")).await;
    let answer = client.answer("POST").await.expect("an answer");
    assert_eq!((answer.status(), answer.head.get("x-request-id")), (502, Some("one")));
    // The client leaves.
    engine.next(vec![Step::AwaitClose]);
    client.send(ask("two")).await;
    engine.saw(2).await;
    client.reset();
    file.lines(2).await;
    // The process ends.
    engine.next(vec![Step::AwaitClose]);
    let mut client = router.client().await;
    client.send(ask("three")).await;
    engine.saw(3).await;
    router.stop.request();
    assert_eq!(client.answer("POST").await.expect("an answer").status(), 503);
    router.ended().await;
    let lines = file.lines(3).await;
    let told = lines.iter().map(|line| (&line["request_id"], &line["outcome"], &line["status"]));
    assert_eq!(
        told.collect::<Vec<_>>(),
        [
            (&"one".into(), &"worker_failed".into(), &502.into()),
            (&"two".into(), &"client_gone".into(), &Value::Null),
            (&"three".into(), &"cut".into(), &503.into()),
        ]
    );
    for line in &lines {
        assert_eq!(line["worker"], engine.address().to_string(), "{line}");
        assert_eq!((&line["reason"], &line["model"]), (&"only".into(), &"m".into()), "{line}");
        assert!(line["predicted_cached_tokens"].is_u64(), "{line}");
    }
}

/// What never came as far as a worker says so by naming none; the id is its client's, if it had one.
#[tokio::test]
async fn a_request_that_is_refused_has_its_status_and_its_id() {
    let file = File::new("refused.jsonl");
    let engine = FakeEngine::start().await;
    let router = before(&file, &[&engine], |config| config.limits.body = 10).await;
    let mut client = router.client().await;
    client.send("POST /sleep HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\ncontent-length: 0\r\n\r\n").await;
    let blocked = client.answer("POST").await.expect("an answer");
    assert_eq!((blocked.status(), blocked.head.get("x-request-id")), (403, Some("mine")));
    let large = client.post("/v1/completions", "x".repeat(11)).await;
    assert_eq!(large.status(), 413);
    let lines = file.lines(2).await;
    assert_eq!((&lines[0]["status"], &lines[0]["request_id"]), (&403.into(), &"mine".into()));
    assert_eq!(lines[1]["status"], 413);
    assert!(lines[1]["request_id"].is_string(), "one was made for it");
    assert_eq!(lines[1]["request_id"].as_str(), large.head.get("x-request-id"), "and told");
    assert!(lines.iter().all(|line| line["outcome"] == "refused" && line.get("worker").is_none()));
}

/// Which arm of a split a failure belongs to.
#[tokio::test]
async fn a_request_that_fails_counts_for_the_mode_that_it_was_placed_by() {
    let file = File::new("arms.jsonl");
    let engine = FakeEngine::start().await;
    let router =
        before(&file, &[&engine], |config| config.split = Split { share: 1.0, ..Split::default() }).await;
    engine.next(vec![Step::Reset]);
    let status = router.client().await.post("/v1/chat/completions", chat("Once.")).await.status();
    assert_eq!(status, 502);
    assert_eq!(file.lines(1).await[0]["mode"], "random");
    let failed = r#"warmroute_requests_total{mode="random",outcome="worker_failed",route="chat"}"#;
    assert_eq!(router.metric(failed).await, 1.0);
}
