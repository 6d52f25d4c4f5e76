//! The metrics page: the names that dashboards rely on, and that no client can make it grow.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use warmroute::config::{Mode, Origin, Worker, Workers};
use warmroute::metrics::Predicted;
use warmroute::metrics::catalogue::{self, SECTIONS};
use warmroute::testing::{FakeEngine, Gate, PLAIN_ANSWER, Step, TestRouter, Wire, until};

/// Every family with its labels. Dashboards and alerts rely on them: what is taken away or renamed here breaks somebody's.
const STABLE: &[&str] = &[
    "warmroute_access_log_lost_total{}",
    "warmroute_belief_bytes{}",
    "warmroute_believed_blocks{}",
    "warmroute_build_info{version}",
    "warmroute_client_connections{}",
    "warmroute_config_reloads_total{result}",
    "warmroute_confirmed_cached_tokens_total{model,mode}",
    "warmroute_confirmed_prompt_tokens_total{model,mode}",
    "warmroute_decision_seconds{mode}",
    "warmroute_decisions_total{reason}",
    "warmroute_discovery_failures_total{source,reason}",
    "warmroute_discovery_synced{source}",
    "warmroute_discovery_updates_total{source}",
    "warmroute_discovery_workers{source}",
    "warmroute_fallbacks_total{reason}",
    "warmroute_mode{mode}",
    "warmroute_output_tokens_total{model,mode}",
    "warmroute_overhead_seconds{mode}",
    "warmroute_phase{phase}",
    "warmroute_predicted_cached_tokens_total{model,mode}",
    "warmroute_prompt_tokens_total{model,mode}",
    "warmroute_request_body_bytes{}",
    "warmroute_request_duration_seconds{model,predicted,mode}",
    "warmroute_requests_in_flight{}",
    "warmroute_requests_queued{}",
    "warmroute_requests_total{route,outcome,mode}",
    "warmroute_retries_denied_total{}",
    "warmroute_retries_total{cause}",
    "warmroute_shadow_cached_tokens_total{mode,policy}",
    "warmroute_shadow_one_in{}",
    "warmroute_shadow_prompt_tokens_total{mode,policy}",
    "warmroute_sharing_bytes_total{way}",
    "warmroute_sharing_connected{}",
    "warmroute_sharing_dropped_total{reason}",
    "warmroute_sharing_lag_seconds{}",
    "warmroute_sharing_news_total{way}",
    "warmroute_sharing_peers{}",
    "warmroute_sharing_unknown_workers{}",
    "warmroute_time_per_output_token_seconds{model,predicted,mode}",
    "warmroute_time_to_first_token_seconds{model,predicted,mode}",
    "warmroute_traces_lost_total{}",
    "warmroute_worker_basis{worker,basis,reason}",
    "warmroute_worker_beliefs_forgotten_total{worker,reason}",
    "warmroute_worker_believed_blocks{worker}",
    "warmroute_worker_believed_tokens{worker}",
    "warmroute_worker_cached_tokens_total{worker,source}",
    "warmroute_worker_capacity_tokens{worker,kind}",
    "warmroute_worker_connections{worker}",
    "warmroute_worker_credit_ratio{worker}",
    "warmroute_worker_evicted_blocks_total{worker}",
    "warmroute_worker_failures_total{worker,cause}",
    "warmroute_worker_foreign_ratio{worker}",
    "warmroute_worker_foreign_requests{worker}",
    "warmroute_worker_in_flight{worker}",
    "warmroute_worker_models{worker}",
    "warmroute_worker_prefill_tokens_per_second{worker}",
    "warmroute_worker_prompt_tokens_total{worker,source}",
    "warmroute_worker_queue_tokens{worker}",
    "warmroute_worker_requests_total{worker}",
    "warmroute_worker_scrape_age_seconds{worker}",
    "warmroute_worker_scrapes_total{worker,outcome}",
    "warmroute_worker_state{worker,state}",
];

#[test]
fn names_and_labels_are_stable() {
    let families = SECTIONS.iter().flat_map(|section| section.families);
    let mut named: Vec<String> = families
        .map(|family| {
            let labels: Vec<&str> = family.labels.iter().map(|label| label.name).collect();
            format!("{}{{{}}}", family.name, labels.join(","))
        })
        .collect();
    named.sort();
    assert_eq!(named, STABLE);
}

/// `docs/metrics.md` is generated. With `WARMROUTE_WRITE_DOCS=1` it is written, else held equal.
#[test]
fn the_page_of_the_documentation_is_the_catalogue() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let generated = catalogue::documentation();
    if std::env::var_os("WARMROUTE_WRITE_DOCS").is_some() {
        std::fs::write(&path, &generated).expect("docs can be written");
    }
    let page = std::fs::read_to_string(&path).expect("docs/metrics.md");
    assert!(page == generated, "docs/metrics.md is out of date: run with WARMROUTE_WRITE_DOCS=1");
}

#[tokio::test]
async fn what_is_on_the_page_is_in_the_catalogue_with_its_help() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let body = r#"{"messages":[{"role":"user","content":"x"}]}"#;
    router.client().await.post("/v1/chat/completions", body).await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let worker = engine.address();
    let read = format!(r#"warmroute_worker_scrapes_total{{outcome="status",worker="{worker}"}}"#);
    router.metric_is(&read, 1.0).await;
    let basis = format!(r#"warmroute_worker_basis{{basis="blind",reason="no_scrape",worker="{worker}"}}"#);
    router.metric_is(&basis, 1.0).await;
    let page = router.admin("/metrics").await;
    let names: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() > 35, "{names:?}");
    assert!(!page.contains("warmroute_sharing_"), "who does not share says nothing of it");
    for name in names {
        assert!(STABLE.iter().any(|stable| stable.split('{').next() == Some(name)), "{name}");
        assert!(page.contains(&format!("# HELP {name} ")), "{name} says what it is");
    }
}

/// Whole answers and streams have a duration; only streams have a first token, and a time for each token after it.
#[tokio::test]
async fn latencies_are_told_apart_by_model_mode_and_prediction() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let count = async |name: &str, predicted: &str| {
        let labels = format!(r#"{{mode="kv",model="m",predicted="{predicted}"}}"#);
        router.metric(&format!("warmroute_{name}_seconds_count{labels}")).await
    };
    let prompt = "word ".repeat(400);
    let mut client = router.client().await;
    client.post("/v1/completions", format!(r#"{{"prompt":"{prompt}","model":"m"}}"#)).await;
    engine.next(vec![
        Step::stream_head(),
        Step::chunk("data: {\"choices\":[{}]}\n\n"),
        Step::chunk("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":400,\"completion_tokens\":5}}\n\n"),
        Step::last_chunk(),
    ]);
    client.post("/v1/completions", format!(r#"{{"prompt":"{prompt}","model":"m","stream":true}}"#)).await;
    client.get("/v1/models").await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let all = ["request_duration", "time_to_first_token", "time_per_output_token"];
    for (name, [misses, hits]) in all.into_iter().zip([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]) {
        assert_eq!([count(name, "miss").await, count(name, "hit").await], [misses, hits], "{name}");
    }
    assert_eq!(router.metric(r#"warmroute_overhead_seconds_count{mode="kv"}"#).await, 3.0);
    assert!(!router.admin("/metrics").await.contains(r#"_seconds_count{mode="kv",model="default""#));
}

/// What the proxy waits for is none of its own time.
#[tokio::test(start_paused = true)]
async fn waiting_for_the_worker_is_no_overhead() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    engine.next(vec![Step::Work(Duration::from_secs(3)), Step::json("200 OK", PLAIN_ANSWER)]);
    router.client().await.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    router.metric_is(r#"warmroute_overhead_seconds_count{mode="kv"}"#, 1.0).await;
    let waited = r#"warmroute_request_duration_seconds_sum{mode="kv",model="default",predicted="miss"}"#;
    assert!(router.metric(waited).await >= 3.0);
    assert!(router.metric(r#"warmroute_overhead_seconds_sum{mode="kv"}"#).await < 1.0);
}

#[tokio::test]
async fn a_queue_and_a_belief_show_while_they_last() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let worker = engine.address();
    let of = |name: &str| format!(r#"warmroute_worker_{name}{{worker="{worker}"}}"#);
    let gate = Gate::default();
    engine.next(vec![Step::stream_head(), Step::Await(gate.clone()), Step::last_chunk()]);
    let body = format!(r#"{{"prompt":"{}","stream":true}}"#, "word ".repeat(400));
    let mut client = router.client().await;
    client.send(message("/v1/completions", &body)).await;
    client.head().await.expect("a head");
    // By its speed it should be at work on it; once that is long overdue, it is taken to have not begun.
    until("the queue to show", async || router.metric(&of("queue_tokens")).await > 400.0).await;
    assert!(router.metric(&of("believed_blocks")).await >= 7.0);
    assert!(router.metric("warmroute_believed_blocks").await >= 7.0);
    assert!(router.metric("warmroute_belief_bytes").await > 100.0);
    gate.open();
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    assert_eq!(router.metric(&of("queue_tokens")).await, 0.0);
    assert_eq!(router.metric(r#"warmroute_phase{phase="serving"}"#).await, 1.0);
}

#[tokio::test]
async fn a_request_is_counted_where_it_belongs() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    client.post("/v1/completions", r#"{"prompt":"x","model":"m"}"#).await;
    client.get("/v1/models").await;
    client.post("/sleep", "").await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    for series in [
        r#"warmroute_requests_total{mode="kv",outcome="ok",route="completions"}"#,
        r#"warmroute_requests_total{mode="kv",outcome="ok",route="other"}"#,
        r#"warmroute_requests_total{mode="kv",outcome="refused",route="blocked"}"#,
        r#"warmroute_output_tokens_total{mode="kv",model="m"}"#,
        "warmroute_client_connections",
    ] {
        assert_eq!(router.metric(series).await, 1.0, "{series}");
    }
    assert_eq!(router.metric(r#"warmroute_prompt_tokens_total{mode="kv",model="m"}"#).await, 10.0);
    let worker = engine.address();
    assert_eq!(router.metric(&format!(r#"warmroute_worker_requests_total{{worker="{worker}"}}"#)).await, 2.0);
    assert_eq!(router.metric(&format!(r#"warmroute_worker_in_flight{{worker="{worker}"}}"#)).await, 0.0);
}

/// Ten thousand paths, model names and request ids, and five hundred workers that come and go.
#[tokio::test]
async fn neither_clients_nor_workers_past_make_the_page_grow() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    let odd = async |client: &mut Wire, n: usize| {
        let body = format!(r#"{{"prompt":"x","model":"m\"\n{n}"}}"#);
        let head = format!("x-request-id: {n}\r\ncontent-length: {}", body.len());
        client.send(format!("POST /v1/completions?{n} HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n{body}")).await;
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
        client.get(&format!("/path/{n}")).await;
    };
    let lines = async || router.admin("/metrics").await.lines().count();
    for n in 0..100 {
        odd(&mut client, n).await;
    }
    let before = lines().await;
    let stays = router.proxy.config.load().workers.fixed.clone();
    for n in 100..10_000 {
        if n % 1_000 == 0 {
            // Nobody listens on these ports of these addresses.
            let passing = (0..60).map(|at| Worker {
                url: Origin::parse(&format!("http://127.1.{}.{}:9", n / 1_000, at + 1)).expect("an address"),
                capacity_tokens: None,
                prefill_speed: None,
            });
            router.proxy.fleet.configure(&named(stays.iter().cloned().chain(passing).collect()));
            assert!(lines().await > before + 500);
        } else if n % 1_000 == 100 {
            router.proxy.fleet.configure(&named(stays.clone()));
        }
        odd(&mut client, n).await;
    }
    router.proxy.fleet.configure(&named(stays.clone()));
    until("the series of workers past to be gone", async || lines().await == before).await;
}

fn named(fixed: Vec<Worker>) -> Workers {
    Workers { fixed, ..Workers::default() }
}

/// For who wants to know what the largest page costs while requests pass: prints it. Best with `--release`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures, and asserts no time"]
async fn cost_of_the_largest_page_under_load() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let stays = router.proxy.config.load().workers.fixed.clone();
    let many = (0..500).map(|at: usize| Worker {
        url: Origin::parse(&format!("http://127.1.{}.{}:9", at / 250, at % 250 + 1)).expect("an address"),
        capacity_tokens: Some(100_000),
        prefill_speed: Some(10_000.0),
    });
    router.proxy.fleet.configure(&named(stays.iter().cloned().chain(many).collect()));
    for n in 0..10_000 {
        let model = router.proxy.metrics.models.of(&format!("organisation/model-{n}"));
        for mode in [Mode::Kv, Mode::Random] {
            model.tokens(mode);
            for predicted in [Predicted::Hit, Predicted::Miss] {
                model.latencies(mode, predicted).first_token.observe(0.1);
            }
        }
    }
    let mut pace = tokio::time::interval(Duration::from_millis(2));
    let clients = router.clients;
    let passing = tokio::spawn(async move {
        let mut client = Wire::connect(clients).await;
        let begun = Instant::now();
        for done in 1.. {
            pace.tick().await;
            client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
            if begun.elapsed() > Duration::from_secs(8) {
                return f64::from(done) / begun.elapsed().as_secs_f64();
            }
        }
        0.0
    });
    let mut times = Vec::new();
    let mut bytes = 0;
    while !passing.is_finished() {
        let begun = Instant::now();
        bytes = router.admin("/metrics").await.len();
        times.push(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    times.sort();
    let rate = passing.await.expect("a rate");
    let middle = times[times.len() / 2];
    println!(
        "{bytes} bytes in {middle:?} (median of {}, most {:?}) at {rate:.0} requests/s",
        times.len(),
        times[times.len() - 1]
    );
    assert!(bytes < 2_000_000);
}

fn message(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}
