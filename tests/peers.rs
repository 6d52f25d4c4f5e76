//! Several routers over a real redis-server: what one places is warm for the others, and nothing depends on the store.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says why it is left out"
)]

mod certificates;
mod redis;

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use certificates::{Authority, Issued};
use redis::{PASSWORD, Redis, cached, engine, workers};
use serde_json::{Value, json};
use warmroute::config::{Draw, Mode, Sharing, StoreKind, StoreUrl};
use warmroute::engine::http::{EngineConfig, Fleet, Running};
use warmroute::testing::{FakeEngine, Gate, Step, TestRouter, Wire, chat, until};

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
        let sharing = &shown["sharing"];
        assert_eq!(
            (&sharing["others"], &sharing["connected"], &sharing["fault"]),
            (&2.into(), &true.into(), &Value::Null)
        );
        assert_eq!((&sharing["dropped"], &sharing["unknown_workers"]), (&json!({}), &0.into()));
        let named = |router: &Value| router["name"].is_string() && router["spoke_s"].as_f64().unwrap() < 60.0;
        assert!(sharing["routers"].as_array().unwrap().iter().all(named), "{sharing}");
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
    let config = redis::shared(nobody, None, TestRouter::config_at(Mode::Kv, fleet.addresses()));
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
        let body = chat(1, 1);
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

/// However long it gathers what it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_leaves_says_before_what_it_had_not_said_yet() {
    let Some(redis) = Redis::start().await else { return };
    let fleet = workers(2).await;
    let start = async |delay| {
        let mut config = redis.shared(TestRouter::config_at(Mode::Kv, fleet.addresses()));
        config.sharing.iter_mut().for_each(|sharing| sharing.delay = delay);
        TestRouter::start(config).await
    };
    let (stays, leaves) = (start(Duration::from_millis(10)).await, start(Duration::from_secs(10)).await);
    stays.metric_is("warmroute_sharing_peers", 1.0).await;
    leaves.metric_is("warmroute_sharing_connected", 1.0).await;
    assert_eq!(cached(&leaves, 1, 1).await, 0);
    leaves.stop.request();
    leaves.ended().await;
    stays.metric_is("warmroute_sharing_peers", 0.0).await;
    assert!(cached(&stays, 1, 2).await > 1_000);
}

/// Two routers over this store, one after the other, come to know each other.
async fn meet(store: &Redis, sharing: impl Fn(&mut Sharing)) {
    let fleet = workers(2).await;
    let start = async || {
        let mut config = store.shared(TestRouter::config_at(Mode::Kv, fleet.addresses()));
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
    meet(&redis, |sharing| (sharing.urls, sharing.ca) = (url("rediss", port), Some(ca.clone().into()))).await;
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
    meet(&redis, |sharing| (sharing.urls, sharing.kind) = (url("redis", port), StoreKind::Cluster)).await;
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
    meet(&redis, |sharing| (sharing.urls, sharing.kind) = (url("redis", from), StoreKind::Sentinel)).await;
}

/// Each prompt comes to each router once: by its own requests alone a router would think that nothing was ever there before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shadow_follows_what_others_place_and_counts_only_its_own() {
    let Some(redis) = Redis::start().await else { return };
    let fleet = workers(3).await;
    let mut routers = Vec::new();
    for _ in 0..3 {
        let mut config = TestRouter::config_at(Mode::Random, fleet.addresses());
        config.random.draw = Draw::Request;
        config.workers.fixed.iter_mut().for_each(|worker| worker.capacity_tokens = Some(9_344));
        routers.push(TestRouter::start(redis.shared(config)).await);
    }
    for router in &routers {
        router.metric_is("warmroute_sharing_peers", 2.0).await;
        router.metric_is("warmroute_shadow_one_in", 1.0).await;
    }
    for serial in 0..120 {
        cached(&routers[serial % 3], serial / 3, serial).await;
        until("all to have heard", async || {
            let first = known(&routers[0]).1;
            first.iter().all(|(_, _, open)| *open == 0)
                && routers.iter().all(|router| known(router).1 == first)
        })
        .await;
    }
    let total = async |name: &str, policy: &str| {
        let series = format!(r#"warmroute_shadow_{name}_tokens_total{{mode="random",policy="{policy}"}}"#);
        let mut total = 0.0;
        for router in &routers {
            total += router.metric(&series).await;
        }
        total
    };
    let asked = total("prompt", "kv").await;
    let each = asked / 120.0;
    assert!((2_000.0..3_000.0).contains(&each), "counted once, by its own router: {each}");
    // Two of three find the prefix, which is nine tenths of a prompt.
    for policy in ["kv", "ideal"] {
        let share = total("cached", policy).await / asked;
        assert!((0.5..0.67).contains(&share), "{policy}: {share}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_password_of_the_store_may_change() {
    let Some(redis) = Redis::start().await else { return };
    let fleet = workers(2).await;
    let routers = routers(&redis, 2, &fleet).await;
    redis.tell("CONFIG SET requirepass other\r\nCLIENT KILL TYPE normal\r\n").await;
    for router in &routers {
        router.metric_is("warmroute_sharing_connected", 0.0).await;
    }
    assert_eq!(cached(&routers[0], 1, 1).await, 0);
    std::fs::write(redis.password_file(), "other\n").unwrap();
    for router in &routers {
        router.metric_is("warmroute_sharing_connected", 1.0).await;
    }
    agreed(&[&routers[0], &routers[1]]).await;
    assert!(cached(&routers[1], 1, 2).await > 1_000);
}

/// What others had placed on a process that has gone is not believed of the one that has its address now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_starts_leaves_out_what_was_placed_on_a_process_that_has_gone() {
    let Some(redis) = Redis::start().await else { return };
    let (stays, leaves) = (workers(1).await, workers(1).await);
    let addresses = [leaves.addresses()[0], stays.addresses()[0]];
    let config = || redis.shared(TestRouter::config_at(Mode::Kv, &addresses));
    let first = TestRouter::start(config()).await;
    let hears = TestRouter::start(config()).await;
    first.metric_is("warmroute_sharing_peers", 1.0).await;
    for prefix in 0..8 {
        cached(&first, prefix, prefix).await;
    }
    agreed(&[&first, &hears]).await;
    let used = |router: &TestRouter| -> Vec<usize> {
        let planner = &router.proxy.planner;
        let now = router.proxy.clock.now();
        let workers = &router.proxy.fleet.snapshot().workers;
        workers.iter().map(|worker| planner.belief(worker.id, now).unwrap().blocks).collect()
    };
    let before = used(&first);
    assert!(before.iter().all(|blocks| *blocks > 0), "{before:?}");
    drop((first, hears));
    leaves.stop().await;
    let _returns = Fleet::start(vec![EngineConfig { listen: addresses[0], ..engine() }]).await.unwrap();
    let anew = TestRouter::start(config()).await;
    until("it to be ready", async || anew.admin("/readyz").await.starts_with("ready")).await;
    assert_eq!(used(&anew), [0, before[1]]);
    assert!(anew.metric("warmroute_sharing_dropped_total{reason=\"restarted\"}").await > 0.0);
}
