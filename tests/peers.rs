//! Several routers over a real redis-server: what one places is warm for the others, and nothing depends on the store.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says why it is left out"
)]

mod certificates;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use certificates::{Authority, Issued};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use warmroute::config::{Config, Mode, Secret, Sharing, StoreKind, StoreUrl};
use warmroute::core::blocks::HashKey;
use warmroute::engine::http::{EngineConfig, Fleet, Running};
use warmroute::engine::model::Spec;
use warmroute::testing::{FakeEngine, Gate, Step, TestRouter, Wire, until};

/// A redis-server of the test's own, that keeps nothing and wants a password.
struct Redis {
    directory: tempfile::TempDir,
    port: u16,
    child: Option<Child>,
}

impl Redis {
    /// `None` where there is none to be had.
    async fn start() -> Option<Redis> {
        let mut redis = Redis::new()?;
        redis.begin().await;
        Some(redis)
    }

    fn new() -> Option<Redis> {
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("left out: redis-server is not installed");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Some(Redis { directory: tempfile::tempdir().unwrap(), port, child: None })
    }

    async fn begin(&mut self) {
        let port = self.port.to_string();
        self.begin_with(&["--port", &port, "--save", "", "--appendonly", "no", "--requirepass", PASSWORD])
            .await;
    }

    async fn begin_with(&mut self, options: &[&str]) {
        let mut command = Command::new("redis-server");
        command.args(options).args(["--bind", "127.0.0.1"]).arg("--dir").arg(self.directory.path());
        self.child = Some(command.stdout(Stdio::null()).stdin(Stdio::null()).spawn().unwrap());
        let port = self.port;
        let listens = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
        until("the store to listen", listens).await;
    }

    /// Has the server do something; answers what it said.
    async fn tell(&self, lines: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(format!("AUTH \"{PASSWORD}\"\r\n{lines}QUIT\r\n").as_bytes()).await.unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        said
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn shared(&self, config: Config) -> Config {
        sharing_at(self.port, config)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

const PASSWORD: &str = "open sesame";

fn sharing_at(port: u16, mut config: Config) -> Config {
    config.hash_key = Some(HashKey([7; 32]));
    config.scrape.interval = Some(Duration::from_millis(50));
    config.sharing = Some(Sharing {
        urls: vec![StoreUrl::parse(&format!("redis://127.0.0.1:{port}")).unwrap()],
        password: Some(Secret(PASSWORD.to_owned())),
        ..Sharing::default()
    });
    config
}

/// A thousand times as fast as life, with room for all that is asked for.
async fn workers(count: usize) -> Running {
    let engine = EngineConfig {
        enable_prompt_tokens_details: true,
        time_scale: 1000.0,
        engine: Spec { num_blocks: 20_000, ..Spec::default() },
        ..EngineConfig::default()
    };
    Fleet::start(vec![engine; count]).await.unwrap()
}

/// So many routers that share, before the same workers; each knows of all others.
async fn routers(redis: &Redis, count: usize, fleet: &Running) -> Vec<TestRouter> {
    let mut routers = Vec::new();
    for _ in 0..count {
        let config = TestRouter::config_at(Mode::Kv, fleet.addresses());
        routers.push(TestRouter::start(redis.shared(config)).await);
    }
    for router in &routers {
        router.metric_is("warmroute_sharing_connected", 1.0).await;
        router.metric_is("warmroute_sharing_peers", (count - 1) as f64).await;
    }
    routers
}

/// Some two thousand tokens of prefix, and a few of its own.
fn prompt(prefix: usize, serial: usize) -> String {
    let text = |seed: usize, words: usize| -> String {
        (0..words).map(|at| format!("w{}x{at} ", seed * 31)).collect()
    };
    let (system, user) = (text(prefix + 1, 480), text(1_000_000 + serial, 40));
    format!(
        r#"{{"model":"warmroute-sim","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}],"max_tokens":4}}"#
    )
}

/// Tokens that were cached of a prompt that a router was asked for.
async fn cached(router: &TestRouter, prefix: usize, serial: usize) -> u64 {
    let answer = router.client().await.post("/v1/chat/completions", prompt(prefix, serial)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let answer: Value = serde_json::from_str(&answer.text()).unwrap();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// What a router believes, and what was given to each worker: requests, answered, open.
fn known(router: &TestRouter) -> (usize, Vec<(u64, u64, usize)>) {
    let planner = &router.proxy.planner;
    let workers = &router.proxy.fleet.snapshot().workers;
    let given = workers.iter().filter_map(|worker| planner.given(worker.id));
    let given = given.map(|given| (given.requests, given.answered, given.open)).collect();
    (planner.believed_blocks(), given)
}

/// Waits until all routers know the same, and of nothing open.
async fn agreed(routers: &[&TestRouter]) {
    let agree = async || {
        let first = known(routers[0]);
        first.1.iter().all(|(_, _, open)| *open == 0) && routers.iter().all(|router| known(router) == first)
    };
    for _ in 0..400 {
        if agree().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!(
        "routers know different things: {:?}",
        routers.iter().map(|router| known(router)).collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_places_is_warm_for_the_others_and_is_nobodys_foreign_traffic() {
    let Some(redis) = Redis::start().await else { return };
    let fleet = workers(4).await;
    let routers = routers(&redis, 3, &fleet).await;
    let all: Vec<&TestRouter> = routers.iter().collect();
    let mut alone = TestRouter::config_at(Mode::Kv, fleet.addresses());
    alone.scrape.interval = Some(Duration::from_millis(50));
    let alone = TestRouter::start(alone).await;
    for prefix in 0..12 {
        assert_eq!(cached(&routers[prefix % 3], prefix, prefix).await, 0);
        agreed(&all).await;
    }
    for prefix in 0..12 {
        for (at, router) in all.iter().enumerate().filter(|(at, _)| *at != prefix % 3) {
            let cached = cached(router, prefix, 1_000 + 10 * prefix + at).await;
            assert!(cached > 1_000, "{cached} tokens of prefix {prefix} at router {at}");
        }
    }
    agreed(&all).await;
    // Who shares nothing takes it for what it is to him.
    let foreign = async |router: &TestRouter| {
        let page = router.admin("/metrics").await;
        let ratios = page.lines().filter(|line| line.starts_with("warmroute_worker_foreign_ratio{"));
        ratios.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).fold(0.0, f64::max)
    };
    until("a stranger to see it", async || foreign(&alone).await > 0.9).await;
    for router in &all {
        // Two thirds of what a worker gets come through the others. What an engine has counted a moment before others tell of it may
        // show for one reading.
        let foreign = foreign(router).await;
        assert!(foreign < 0.4, "{foreign}");
        let shown: Value = serde_json::from_str(&router.admin("/fleet").await).unwrap();
        assert_eq!((&shown["sharing"]["others"], &shown["sharing"]["connected"]), (&2.into(), &true.into()));
        assert!(router.metric("warmroute_sharing_news_total{way=\"received\"}").await > 20.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_go_on_without_the_store_and_catch_up_when_it_is_back() {
    let Some(mut redis) = Redis::start().await else { return };
    let fleet = workers(4).await;
    let routers = routers(&redis, 3, &fleet).await;
    let all: Vec<&TestRouter> = routers.iter().collect();
    let mut serial = 0;
    let mut ask = async |prefixes: std::ops::Range<usize>| {
        for prefix in prefixes {
            serial += 1;
            cached(&routers[serial % 3], prefix, serial).await;
        }
    };
    ask(0..6).await;
    agreed(&all).await;
    redis.kill();
    ask(0..6).await;
    for router in &all {
        router.metric_is("warmroute_sharing_connected", 0.0).await;
    }
    // New prompts, of which the others hear only when the store is back, and empty.
    ask(6..30).await;
    redis.begin().await;
    for router in &all {
        router.metric_is("warmroute_sharing_connected", 1.0).await;
    }
    agreed(&all).await;
    for prefix in 6..30 {
        for (at, router) in all.iter().enumerate() {
            assert!(
                cached(router, prefix, 1_000 + 10 * prefix + at).await > 1_000,
                "prefix {prefix} at router {at}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_starts_is_warm_when_it_is_ready() {
    let Some(redis) = Redis::start().await else { return };
    let fleet = workers(4).await;
    let mut routers = routers(&redis, 2, &fleet).await;
    for serial in 0..40 {
        cached(&routers[serial % 2], serial % 20, serial).await;
    }
    agreed(&[&routers[0], &routers[1]]).await;
    let believed = routers[0].proxy.planner.believed_blocks();
    // As a process that is killed: it says nothing any more.
    drop(routers.pop());
    let config = redis.shared(TestRouter::config_at(Mode::Kv, fleet.addresses()));
    let anew = TestRouter::start_unready(config, None).await;
    until("the new router to be ready", async || anew.admin("/readyz").await.starts_with("ready")).await;
    assert_eq!(anew.proxy.planner.believed_blocks(), believed);
    for prefix in 0..20 {
        assert!(cached(&anew, prefix, 1_000 + prefix).await > 1_000, "prefix {prefix}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_finds_no_store_is_ready_after_a_while_and_serves_before() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let fleet = workers(1).await;
    let config = sharing_at(nobody, TestRouter::config_at(Mode::Kv, fleet.addresses()));
    let router = TestRouter::start(config).await;
    assert!(router.admin("/readyz").await.contains("other routers"), "{}", router.admin("/readyz").await);
    assert_eq!(cached(&router, 0, 0).await, 0);
    assert!(cached(&router, 0, 1).await > 1_000);
    until("it to be ready", async || router.admin("/readyz").await.starts_with("ready")).await;
    assert_eq!(router.metric("warmroute_sharing_connected").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_dies_and_one_that_leaves_take_their_bookings_with_them() {
    let Some(redis) = Redis::start().await else { return };
    let gate = Gate::default();
    let engine = FakeEngine::with(move |_| vec![Step::Await(gate.clone())]).await;
    let start = async || TestRouter::start(redis.shared(TestRouter::config(Mode::Kv, &[&engine]))).await;
    let (stays, dies, leaves) = (start().await, start().await, start().await);
    stays.metric_is("warmroute_sharing_peers", 2.0).await;
    let open = || {
        let worker = stays.proxy.fleet.snapshot().workers[0].id;
        stays.proxy.planner.given(worker).map_or(0, |given| given.open)
    };
    let mut clients: Vec<Wire> = Vec::new();
    for router in [&dies, &leaves, &leaves] {
        let mut client = router.client().await;
        let body = prompt(1, 1);
        let length = body.len();
        client
            .send(format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}"
            ))
            .await;
        clients.push(client);
    }
    until("all three to be booked", async || open() == 3).await;
    drop(dies);
    until("the dead one's to be gone", async || open() == 2).await;
    leaves.stop.request();
    leaves.stop.request();
    until("all to be gone", async || open() == 0).await;
    stays.metric_is("warmroute_sharing_peers", 0.0).await;
}

/// Two routers over this store, one after the other, come to know each other.
async fn meet(sharing: impl Fn(&mut Sharing)) {
    let fleet = workers(2).await;
    let start = async || {
        let mut config = sharing_at(1, TestRouter::config_at(Mode::Kv, fleet.addresses()));
        config.sharing.iter_mut().for_each(&sharing);
        TestRouter::start(config).await
    };
    let one = start().await;
    one.metric_is("warmroute_sharing_connected", 1.0).await;
    assert_eq!(cached(&one, 1, 1).await, 0);
    let other = start().await;
    other.metric_is("warmroute_sharing_peers", 1.0).await;
    agreed(&[&one, &other]).await;
    assert!(cached(&other, 1, 2).await > 1_000);
}

fn url(scheme: &str, port: u16) -> Vec<StoreUrl> {
    vec![StoreUrl::parse(&format!("{scheme}://localhost:{port}")).unwrap()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_may_want_tls() {
    let Some(mut redis) = Redis::new() else { return };
    let authority = Authority::new();
    let Issued { certificate, key } = authority.issue(&["localhost"]);
    let shown = |path: PathBuf| path.to_str().unwrap().to_owned();
    let ca = shown(authority.file("ca.crt", authority.pem()));
    let (certificate, key) =
        (shown(authority.file("a.crt", &certificate)), shown(authority.file("a.key", &key)));
    let port = redis.port.to_string();
    let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let options = ["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no", "--requirepass", PASSWORD];
    redis.begin_with(&[&options[..], &files].concat()).await;
    let port = redis.port;
    meet(|sharing| (sharing.urls, sharing.ca) = (url("rediss", port), Some(ca.clone().into()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_may_be_a_cluster() {
    let Some(mut redis) = Redis::new() else { return };
    let port = redis.port.to_string();
    // Where the nodes of a cluster speak to each other is ten thousand further, else.
    let bus = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let cluster = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--save", ""];
    redis.begin_with(&[&["--port", &port, "--requirepass", PASSWORD][..], &cluster].concat()).await;
    redis.tell("CLUSTER ADDSLOTSRANGE 0 16383\r\n").await;
    until("the cluster to be one", async || redis.tell("CLUSTER INFO\r\n").await.contains("state:ok")).await;
    let port = redis.port;
    meet(|sharing| (sharing.urls, sharing.kind) = (url("redis", port), StoreKind::Cluster)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_may_say_where_the_store_is() {
    let Some(redis) = Redis::start().await else { return };
    let Some(mut sentinel) = Redis::new() else { return };
    let (at, from) = (redis.port, sentinel.port);
    let file = sentinel.directory.path().join("sentinel.conf");
    let lines = [
        format!("port {from}"),
        format!("requirepass \"{PASSWORD}\""),
        format!("sentinel monitor mymaster 127.0.0.1 {at} 1"),
        format!("sentinel auth-pass mymaster \"{PASSWORD}\""),
    ];
    std::fs::write(&file, lines.join("\n")).unwrap();
    sentinel.begin_with(&[file.to_str().unwrap(), "--sentinel"]).await;
    meet(|sharing| (sharing.urls, sharing.kind) = (url("redis", from), StoreKind::Sentinel)).await;
}
