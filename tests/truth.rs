//! What workers say of themselves, over real sockets: read when it can be, and in nobody's way when it cannot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use warmroute::config::{Config, Mode, Origin, Secret, Worker};
use warmroute::core::ids::Time;
use warmroute::engine::http::{EngineConfig, Fleet, Running};
use warmroute::testing::{FakeEngine, Step, TestRouter, until};

const PAGE: &str = "process_start_time_seconds 1.7e9\n\
    vllm:num_requests_running{engine=\"0\"} 0.0\n\
    vllm:num_requests_waiting{engine=\"0\"} 0.0\n\
    vllm:kv_cache_usage_perc{engine=\"0\"} 0.0\n\
    vllm:prefix_cache_queries_total{engine=\"0\"} 500.0\n\
    vllm:prefix_cache_hits_total{engine=\"0\"} 100.0\n\
    vllm:prompt_tokens_total{engine=\"0\"} 500.0\n\
    vllm:generation_tokens_total{engine=\"0\"} 50.0\n\
    vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"585\"} 1.0\n";

fn config(mode: Mode, engines: &[&FakeEngine]) -> Config {
    let mut config = TestRouter::config(mode, engines);
    config.scrape.interval = Some(Duration::from_millis(20));
    config.scrape.timeout = Duration::from_secs(20);
    config
}

fn settings(listen: SocketAddr, time_scale: f64) -> EngineConfig {
    EngineConfig {
        listen,
        model: "m".to_owned(),
        enable_prompt_tokens_details: true,
        time_scale,
        ..EngineConfig::default()
    }
}

/// Simulated engines, each a fleet of its own, so that it can be killed alone; their addresses; and a config that names them.
async fn simulated(count: usize, time_scale: f64) -> (Vec<Running>, Vec<SocketAddr>, Config) {
    let mut fleets = Vec::new();
    for _ in 0..count {
        let anywhere = settings(([127, 0, 0, 1], 0).into(), time_scale);
        fleets.push(Fleet::start(vec![anywhere]).await.expect("free ports"));
    }
    let addresses: Vec<_> = fleets.iter().map(|fleet| fleet.addresses()[0]).collect();
    let mut config = config(Mode::Kv, &[]);
    config.health.interval = Some(Duration::from_millis(50));
    let worker = |address| Worker {
        url: Origin::parse(&format!("http://{address}")).expect("an address"),
        capacity_tokens: None,
        prefill_speed: None,
    };
    config.workers.fixed = addresses.iter().map(worker).collect();
    (fleets, addresses, config)
}

fn prompt(text: &str) -> String {
    format!(r#"{{"model":"m","prompt":"{}"}}"#, text.repeat(2_000))
}

/// A series with one label besides the worker, which comes last in the order of the page.
fn series(name: &str, label: &str, engine: &FakeEngine) -> String {
    format!(r#"warmroute_worker_{name}{{{label}worker="{}"}}"#, engine.address())
}

async fn at_least(router: &TestRouter, series: &str, value: f64) {
    until(series, async || router.metric(series).await >= value).await;
}

fn blocks(router: &TestRouter, at: usize) -> usize {
    let worker = router.proxy.fleet.snapshot().workers[at].id;
    router.proxy.planner.belief(worker, Time(0.0)).map_or(0, |belief| belief.blocks)
}

#[tokio::test]
async fn pages_that_fail_in_any_way_hold_up_no_request() {
    type Script = Arc<dyn Fn() -> Vec<Step> + Send + Sync>;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n";
    let huge = format!("{PAGE}vllm:x{{a=\"{}\"}} 1\n", "y".repeat(200 << 10)).repeat(30);
    let cases: [(&str, &str, Script); 8] = [
        ("frozen", "ok", Arc::new(|| vec![Step::page(PAGE)])),
        ("absent", "status", Arc::new(|| vec![Step::json("404 Not Found", "{}")])),
        ("broken", "status", Arc::new(|| vec![Step::json("500 Internal Server Error", "x")])),
        ("hanging", "", Arc::new(|| vec![Step::AwaitClose])),
        (
            "hanging in the middle",
            "",
            Arc::new(move || {
                vec![Step::send(format!("{head}content-length: 9999\r\n\r\n{PAGE}")), Step::AwaitClose]
            }),
        ),
        (
            "cut",
            "broken",
            Arc::new(move || {
                vec![Step::send(format!("{head}content-length: 9999\r\n\r\n{PAGE}")), Step::Close]
            }),
        ),
        ("six megabytes", "ok", Arc::new(move || vec![Step::page(&huge)])),
        (
            "NaN",
            "ok",
            Arc::new(|| {
                vec![Step::page(
                    &PAGE.replace(" 0.0", " NaN").replace(" 500.0", " +Inf").replace("100.0", "-1"),
                )]
            }),
        ),
    ];
    for (case, outcome, script) in cases {
        for broken in [1, 2] {
            let engines = [FakeEngine::start().await, FakeEngine::start().await];
            for engine in &engines {
                engine.set_page(PAGE);
            }
            for engine in &engines[..broken] {
                let script = script.clone();
                engine.set_metrics(move |_| script());
            }
            let router = TestRouter::start(config(Mode::Kv, &[&engines[0], &engines[1]])).await;
            if !outcome.is_empty() {
                let label = format!(r#"outcome="{outcome}","#);
                at_least(&router, &series("scrapes_total", &label, &engines[0]), 2.0).await;
            }
            if broken == 1 {
                at_least(&router, &series("scrapes_total", r#"outcome="ok","#, &engines[1]), 1.0).await;
            }
            let mut client = router.client().await;
            for n in 0..20 {
                let answer = client.post("/v1/completions", prompt(&format!("{case} {n} "))).await;
                assert_eq!(answer.status(), 200, "{case}");
            }
            assert_eq!(router.proxy.fleet.snapshot().eligible().len(), 2, "{case}");
            let served = engines.each_ref().map(|engine| engine.seen().len());
            assert!(served.iter().all(|count| *count >= 5), "{case}: {served:?}");
        }
    }
}

#[tokio::test]
async fn the_size_of_the_cache_is_read_and_the_config_counts_more() {
    let engines = [FakeEngine::start().await, FakeEngine::start().await];
    engines.iter().for_each(|engine| engine.set_page(PAGE));
    let mut config = config(Mode::Kv, &[&engines[0], &engines[1]]);
    config.workers.fixed[1].capacity_tokens = Some(5_000);
    let router = TestRouter::start(config).await;
    router.metric_is(&series("capacity_tokens", r#"kind="believed","#, &engines[0]), 9_344.0).await;
    router.metric_is(&series("capacity_tokens", r#"kind="believed","#, &engines[1]), 5_000.0).await;
    // Another process, with another size.
    engines[0].set_page(PAGE.replace("585", "101").replace("1.7e9", "1.8e9"));
    router.metric_is(&series("capacity_tokens", r#"kind="told","#, &engines[0]), 1_600.0).await;
    router.metric_is(&series("capacity_tokens", r#"kind="believed","#, &engines[0]), 1_600.0).await;
}

#[tokio::test]
async fn a_new_process_at_the_same_address_is_believed_empty() {
    let engine = FakeEngine::start().await;
    engine.set_page(PAGE);
    let router = TestRouter::start(config(Mode::Kv, &[&engine])).await;
    at_least(&router, &series("scrapes_total", r#"outcome="ok","#, &engine), 1.0).await;
    router.client().await.post("/v1/completions", prompt("warm ")).await;
    assert!(blocks(&router, 0) > 0);
    engine.set_page(PAGE.replace("1.7e9", "1.8e9"));
    router.metric_is(&series("beliefs_forgotten_total", r#"reason="restarted","#, &engine), 1.0).await;
    assert_eq!(blocks(&router, 0), 0);
}

#[tokio::test]
async fn load_of_others_is_seen_and_avoided() {
    let engines = [FakeEngine::start().await, FakeEngine::start().await];
    engines[0].set_page(PAGE.replace("waiting{engine=\"0\"} 0.0", "waiting{engine=\"0\"} 50.0"));
    engines[1].set_page(PAGE);
    let router = TestRouter::start(config(Mode::Kv, &[&engines[0], &engines[1]])).await;
    router.metric_is(&series("foreign_requests", "", &engines[0]), 50.0).await;
    let mut client = router.client().await;
    for n in 0..8 {
        client.post("/v1/completions", prompt(&format!("new {n} "))).await;
    }
    assert_eq!(engines.each_ref().map(|engine| engine.seen().len()), [0, 8]);
}

#[tokio::test]
async fn what_a_belief_stands_on_is_told() {
    let engine = FakeEngine::start().await;
    let mut config = config(Mode::Kv, &[&engine]);
    config.scrape.timeout = Duration::from_millis(100);
    let router = TestRouter::start(config).await;
    let basis = |basis: &str, reason: &str| {
        format!(
            r#"warmroute_worker_basis{{basis="{basis}",reason="{reason}",worker="{}"}}"#,
            engine.address()
        )
    };
    router.metric_is(&basis("blind", "no_scrape"), 1.0).await;
    engine.set_page("vllm:num_requests_running 0\n");
    router.metric_is(&basis("blind", "no_capacity"), 1.0).await;
    engine.set_page(PAGE);
    router.metric_is(&basis("predicted", "no_usage"), 1.0).await;
    engine.set_metrics(|_| vec![Step::AwaitClose]);
    router.metric_is(&basis("blind", "stale"), 1.0).await;
    engine.next(vec![Step::json(
        "200 OK",
        r#"{"usage":{"prompt_tokens":2500,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}"#,
    )]);
    router.client().await.post("/v1/completions", prompt("told ")).await;
    router.metric_is(&basis("calibrated", "confirmed"), 1.0).await;
    router.metric_is(&basis("blind", "stale"), 0.0).await;
    let prompt = series("prompt_tokens_total", r#"source="confirmed","#, &engine);
    router.metric_is(&prompt, 2_500.0).await;
}

#[tokio::test]
async fn readings_ask_for_plain_text_with_the_key_on_connections_of_their_own() {
    let engine = FakeEngine::start().await;
    let good = Arc::new(AtomicUsize::new(0));
    let counted = good.clone();
    engine.set_metrics(move |message| {
        let head = &message.head;
        let fits = head.get("authorization") == Some("Bearer secret")
            && head.get("accept-encoding") == Some("identity")
            && head.get("connection") == Some("close")
            && head.start == "GET /metrics HTTP/1.1";
        counted.fetch_add(usize::from(fits), Ordering::Relaxed);
        vec![Step::page(PAGE), Step::Close]
    });
    let mut config = config(Mode::Random, &[&engine]);
    config.workers.api_key = Some(Secret("secret".to_owned()));
    let router = TestRouter::start(config).await;
    at_least(&router, &series("scrapes_total", r#"outcome="ok","#, &engine), 3.0).await;
    assert!(good.load(Ordering::Relaxed) >= 3);
    assert_eq!(engine.connections(), 0, "none that requests use");
}

#[tokio::test]
async fn a_worker_that_is_killed_and_started_again_under_load_is_believed_empty_at_once() {
    let (mut fleets, addresses, config) = simulated(2, 20.0).await;
    let router = TestRouter::start(config).await;
    let told = format!(r#"warmroute_worker_capacity_tokens{{kind="told",worker="{}"}}"#, addresses[0]);
    router.metric_is(&told, 9_344.0).await;

    let mut client = router.client().await;
    for n in 0..8 {
        let body = prompt(&format!("prefix {n} "));
        assert_eq!(client.post("/v1/completions", body).await.status(), 200);
    }
    assert!(blocks(&router, 0) > 0 && blocks(&router, 1) > 0);

    drop(fleets.remove(0));
    until("its belief to be empty", async || blocks(&router, 0) == 0).await;
    for n in 0..8 {
        let answer = client.post("/v1/completions", prompt(&format!("prefix {n} "))).await;
        assert_eq!(answer.status(), 200, "no request is lost that no worker had begun on");
    }
    let page = router.admin("/metrics").await;
    let forgotten = page.lines().find(|line| {
        line.starts_with("warmroute_worker_beliefs_forgotten_total")
            && line.contains(&addresses[0].to_string())
    });
    assert!(forgotten.is_some_and(|line| line.contains("refused")), "{forgotten:?}");

    let again = Fleet::start(vec![settings(addresses[0], 20.0)]).await.expect("the port that was its own");
    until("it to be used again", async || router.proxy.fleet.snapshot().eligible().len() == 2).await;
    let mut counted = 0.0;
    until("its own count of what it was sent", async || {
        client.post("/v1/completions", prompt("again and again ")).await;
        client.post("/v1/completions", prompt(&format!("again {counted} "))).await;
        counted += 1.0;
        blocks(&router, 0) > 0
    })
    .await;
    drop(again);
}

#[tokio::test]
async fn one_refused_connection_is_enough_to_believe_a_worker_empty() {
    let mut engines = [FakeEngine::start().await, FakeEngine::start().await];
    let mut config = config(Mode::Kv, &[&engines[0], &engines[1]]);
    // Nothing but the request itself can find out.
    config.health.interval = None;
    config.scrape.interval = None;
    config.scrape.models_interval = None;
    let router = TestRouter::start(config).await;
    let mut client = router.client().await;
    client.post("/v1/completions", prompt("warm ")).await;
    let holder = usize::from(blocks(&router, 0) == 0);
    assert!(blocks(&router, holder) > 0);
    engines[holder].kill().await;
    assert_eq!(client.post("/v1/completions", prompt("warm ")).await.status(), 200);
    assert_eq!(blocks(&router, holder), 0);
    let refused = series("beliefs_forgotten_total", r#"reason="refused","#, &engines[holder]);
    assert_eq!(router.metric(&refused).await, 1.0);
    let failed = series("failures_total", r#"cause="connect","#, &engines[holder]);
    assert_eq!(router.metric(&failed).await, 1.0);
}

#[tokio::test]
async fn one_reading_of_a_new_process_is_enough_to_believe_it_empty() {
    let engine = FakeEngine::start().await;
    engine.set_page(PAGE);
    let router = TestRouter::start(config(Mode::Kv, &[&engine])).await;
    at_least(&router, &series("scrapes_total", r#"outcome="ok","#, &engine), 1.0).await;
    router.client().await.post("/v1/completions", prompt("warm ")).await;
    assert!(blocks(&router, 0) > 0);
    // One page of the new process; after it there is none.
    let read = AtomicBool::new(false);
    engine.set_metrics(move |_| match read.swap(true, Ordering::Relaxed) {
        false => vec![Step::page(&PAGE.replace("1.7e9", "1.8e9"))],
        true => vec![Step::AwaitClose],
    });
    router.metric_is(&series("beliefs_forgotten_total", r#"reason="restarted","#, &engine), 1.0).await;
    assert_eq!(blocks(&router, 0), 0);
}

/// One client that asks, streamed and not, until it is told to stop; counts its answers and says what went wrong.
async fn ask_on(
    clients: std::net::SocketAddr,
    name: usize,
    answered: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) {
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        // Every fourth has a prefix that nobody has met, which goes to whoever has the least to do.
        let prefix = if n % 4 == 0 { 1_000 * name + n } else { (name + n) % 7 };
        let text = format!("prefix {prefix} ").repeat(400);
        let streams = n % 2 == 0;
        let body =
            format!(r#"{{"model":"m","prompt":"{text} {name} {n}","max_tokens":8,"stream":{streams}}}"#);
        let answer = warmroute::testing::Wire::connect(clients).await.post("/v1/completions", body).await;
        let text = answer.text();
        assert_eq!(answer.status(), 200, "{text}");
        assert!(answer.complete, "{text}");
        // A stream that had begun cannot be begun again elsewhere, and ends as its worker did.
        assert!(streams || text.contains(r#""usage":{"#), "{text}");
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn nothing_is_lost_that_had_not_begun_when_a_worker_is_killed_and_started_again_under_load() {
    let (mut fleets, addresses, mut config) = simulated(3, 10.0).await;
    // The budget is another test's matter.
    config.retries.reserve = 1_000;
    let router = TestRouter::start(config).await;
    let (answered, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let clients =
        (0..12).map(|name| tokio::spawn(ask_on(router.clients, name, answered.clone(), stop.clone())));
    let clients: Vec<_> = clients.collect();
    let more = async |count: usize| {
        let goal = answered.load(Ordering::Relaxed) + count;
        until("answers", async || answered.load(Ordering::Relaxed) >= goal).await;
    };
    more(60).await;
    let held = blocks(&router, 0);
    assert!(held > 0);
    drop(fleets.remove(0));
    until("its belief to be empty", async || blocks(&router, 0) == 0).await;
    more(60).await;
    let again = Fleet::start(vec![settings(addresses[0], 10.0)]).await.expect("the port that was its own");
    until("it to be used again", async || blocks(&router, 0) > 0).await;
    more(60).await;
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no request is lost");
    }
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    drop(again);
}
