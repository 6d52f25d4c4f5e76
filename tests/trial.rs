//! What lets an operator try and understand routing: the shadow beside the truth, the split, and decisions that explain themselves.

use std::collections::{HashMap, HashSet};

use serde_json::Value;
use warmroute::config::{Config, Draw, Mode, Split, SplitBy};
use warmroute::engine::http::Running;
use warmroute::testing::{FakeEngine, Gate, Step, TestRouter, Wire, chat, simulated, until};

/// A thousand times as fast as life.
async fn workers(count: usize) -> Running {
    simulated(count, "warmroute-sim", 1000.0).await
}

/// Before workers that hold four prompts of [`prompt`] each.
fn before(mode: Mode, fleet: &Running) -> Config {
    let mut config = TestRouter::config_at(mode, fleet.addresses());
    config.random.draw = Draw::Request;
    config.workers.fixed.iter_mut().for_each(|worker| worker.capacity_tokens = Some(9_344));
    config
}

/// Requests for `prefixes` prefixes, in an order without order.
async fn play(router: &TestRouter, prefixes: usize, requests: usize) {
    let mut client = router.client().await;
    for serial in 0..requests {
        let prefix = (serial * 7919 + serial / 5 * 104_729) % prefixes;
        let answer = client.post("/v1/chat/completions", chat(prefix, serial)).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
    }
}

async fn share(router: &TestRouter, mode: &str, policy: &str) -> f64 {
    let value = async |name: &str| {
        let series = format!(r#"warmroute_shadow_{name}_tokens_total{{mode="{mode}",policy="{policy}"}}"#);
        router.metric(&series).await
    };
    value("cached").await / value("prompt").await
}

async fn confirmed(router: &TestRouter, mode: &str) -> f64 {
    let value = async |name: &str| {
        let series =
            format!(r#"warmroute_confirmed_{name}_tokens_total{{mode="{mode}",model="warmroute-sim"}}"#);
        router.metric(&series).await
    };
    value("cached").await / value("prompt").await
}

/// What `kv` would find does not hang on where `random` has drawn the client's connection to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shadow_is_not_bound_to_the_worker_of_a_connection() {
    let fleet = workers(3).await;
    let mut config = before(Mode::Random, &fleet);
    config.random.draw = Draw::Connection;
    let router = TestRouter::start(config).await;
    router.metric_is("warmroute_shadow_one_in", 1.0).await;
    // Of ten prefixes one worker holds four, and three hold all.
    play(&router, 10, 200).await;
    let (bound, free) = (confirmed(&router, "random").await, share(&router, "random", "kv").await);
    assert!(free > bound + 0.2, "{free} in kv, {bound} on one worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shadow_says_in_each_mode_what_the_other_one_truly_finds() {
    let mut truth = HashMap::new();
    let mut said = HashMap::new();
    let mut ideal = Vec::new();
    for (mode, name, other) in [(Mode::Random, "random", "kv"), (Mode::Kv, "kv", "random")] {
        let fleet = workers(3).await;
        let router = TestRouter::start(before(mode, &fleet)).await;
        router.metric_is("warmroute_shadow_one_in", 1.0).await;
        play(&router, 10, 400).await;
        truth.insert(name, confirmed(&router, name).await);
        said.insert(other, share(&router, name, other).await);
        ideal.push(share(&router, name, "ideal").await);
        let predicted = share(&router, name, name).await;
        // Whole blocks are counted, so a prompt of two thousand tokens is predicted some points low.
        assert!((predicted - truth[name]).abs() < 0.06, "{name}: {predicted} for {}", truth[name]);
    }
    assert!(truth["kv"] > truth["random"] + 0.2, "{truth:?}");
    // Four hundred draws, twice: one standard deviation of the difference is some three points.
    for (mode, near) in [("kv", 0.05), ("random", 0.15)] {
        assert!((said[mode] - truth[mode]).abs() < near, "{mode}: {said:?} for {truth:?}");
    }
    assert!(ideal.iter().all(|ideal| *ideal > truth["kv"] - 0.06), "{ideal:?} {truth:?}");
}

#[tokio::test]
async fn without_a_shadow_nothing_is_played() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.shadow.one_in = None;
    let router = TestRouter::start(config).await;
    router.client().await.post("/v1/chat/completions", chat(1, 1)).await;
    let prompt =
        |policy: &str| format!(r#"warmroute_shadow_prompt_tokens_total{{mode="kv",policy="{policy}"}}"#);
    assert_eq!(router.metric(&prompt("random")).await, 0.0);
    assert_eq!(router.metric("warmroute_shadow_one_in").await, 0.0);
}

/// The parts of `X-Warmroute-Decision`.
fn decision(header: &str) -> HashMap<String, String> {
    let pairs = header.split("; ").filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Of each prefix: by which modes and to which workers its requests went.
async fn arms(by: SplitBy) -> Vec<HashSet<(String, String)>> {
    let fleet = workers(4).await;
    let mut config = before(Mode::Kv, &fleet);
    config.split = Split { share: 0.5, by, root_blocks: 1 };
    config.explain.header = true;
    let router = TestRouter::start(config).await;
    let mut client = router.client().await;
    let mut arms = vec![HashSet::new(); 24];
    for serial in 0..96 {
        let prefix = serial % arms.len();
        let answer = client.post("/v1/chat/completions", chat(prefix, serial)).await;
        let said = decision(answer.head.get("x-warmroute-decision").expect("the header is on"));
        let (_, told) = post(router.admin, "/explain", &chat(prefix, serial)).await;
        let told: Value = serde_json::from_str(&told).expect("JSON");
        assert_eq!(told["mode"].as_str(), Some(&*said["mode"]), "it is explained by its arm");
        let workers = if by == SplitBy::Workers { 2 } else { 4 };
        assert_eq!(told["workers_in_all"], workers, "and by its arm's workers");
        arms[prefix].insert((said["mode"].clone(), said["worker"].clone()));
    }
    for mode in ["kv", "random"] {
        let answered =
            r#"warmroute_requests_total{mode="MODE",outcome="ok",route="chat"}"#.replace("MODE", mode);
        assert!(router.metric(&answered).await > 0.0, "{mode}");
    }
    arms
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_split_keeps_what_begins_alike_in_one_arm() {
    let arms = arms(SplitBy::Prefix).await;
    let modes = |arm: &HashSet<(String, String)>| -> HashSet<String> {
        arm.iter().map(|(mode, _)| mode.clone()).collect()
    };
    assert!(arms.iter().all(|arm| modes(arm).len() == 1), "{arms:?}");
    // All twenty-four on one side: one in eight million.
    assert_eq!(arms.iter().flat_map(modes).collect::<HashSet<_>>().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_split_by_workers_gives_each_arm_its_own() {
    let arms = arms(SplitBy::Workers).await;
    let workers = |mode: &str| -> HashSet<String> {
        let of = |(by, worker): &(String, String)| (by == mode).then(|| worker.clone());
        arms.iter().flatten().filter_map(of).collect()
    };
    let (kv, random) = (workers("kv"), workers("random"));
    assert!(kv.is_disjoint(&random), "{kv:?} {random:?}");
    assert!(kv.len() <= 2 && random.len() == 2, "{kv:?} {random:?}");
}

/// An operator who looks sees that not all goes by the mode.
#[tokio::test]
async fn a_split_in_force_is_told() {
    let (one, two) = (FakeEngine::start().await, FakeEngine::start().await);
    let router = TestRouter::before(Mode::Kv, &[&one, &two]).await;
    let told = async || -> Value { serde_json::from_str(&router.admin("/fleet").await).expect("JSON") };
    let page = told().await;
    assert!(page["split"].is_null() && page["workers"][0]["arm"].is_null(), "{page}");
    until("the shadow to know the workers", async || told().await["shadow"]["one_in"].is_u64()).await;
    for (by, arms) in [
        (SplitBy::Prefix, HashSet::from([None])),
        (SplitBy::Workers, HashSet::from([Some("kv"), Some("random")])),
    ] {
        let mut edited = Config::clone(&router.proxy.config.load());
        edited.split = Split { share: 0.25, by, root_blocks: 1 };
        router.proxy.reconfigure(edited, None);
        let page = told().await;
        assert_eq!(
            (&page["split"]["share"], &page["split"]["mode"]),
            (&0.25.into(), &"random".into()),
            "{page}"
        );
        let workers = page["workers"].as_array().expect("a list");
        assert_eq!(workers.iter().map(|worker| worker["arm"].as_str()).collect::<HashSet<_>>(), arms);
    }
}

async fn post(to: std::net::SocketAddr, path: &str, body: &str) -> (u16, String) {
    let answer = Wire::connect(to).await.post(path, body).await;
    (answer.status(), answer.text())
}

#[tokio::test]
async fn explain_says_where_a_request_goes_and_sends_none() {
    let engines = [FakeEngine::start().await, FakeEngine::start().await, FakeEngine::start().await];
    let router = TestRouter::before(Mode::Kv, &engines.iter().collect::<Vec<_>>()).await;
    let explain = async |query: &str| -> Value {
        let (status, text) = post(router.admin, &format!("/explain{query}"), &chat(1, 1)).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    };
    let cold = explain("").await;
    assert_eq!(
        (&cold["reason"], &cold["mode"], &cold["workers_in_all"]),
        (&"cold".into(), &"kv".into(), &3.into())
    );
    assert!(engines.iter().all(|engine| engine.seen().is_empty()), "it goes nowhere");
    assert_eq!(explain("?path=/v1/chat/completions").await["worker"], cold["worker"], "nor is it booked");

    let answer = router.client().await.post("/v1/chat/completions", chat(1, 1)).await;
    assert!(answer.head.get("x-warmroute-decision").is_none(), "off by default");
    let took = engines.iter().position(|engine| !engine.seen().is_empty()).expect("somebody took it");
    assert_eq!(cold["worker"].as_str(), Some(&*engines[took].address().to_string()));
    let warm = explain("?mode=kv").await;
    assert_eq!((&warm["reason"], &warm["worker"]), (&"warm".into(), &cold["worker"]));
    assert!(warm["predicted_cached_tokens"].as_u64() > Some(1_000), "{warm}");
    let prices: Vec<f64> = warm["workers"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["price_s"].as_f64())
        .collect();
    assert!(prices.len() == 3 && prices.is_sorted(), "{prices:?}");
    assert_eq!(warm["runner_up"], warm["workers"][1]["worker"]);
    let random = explain("?mode=random").await;
    assert_eq!((&random["reason"], &random["workers"][0]["price_s"]), (&"random".into(), &Value::Null));

    let decisions: Value = serde_json::from_str(&router.admin("/decisions").await).expect("JSON");
    let decisions = decisions["decisions"].as_array().expect("a list");
    assert_eq!(decisions.len(), 1, "what is only explained is not decided");
    assert_eq!((&decisions[0]["worker"], &decisions[0]["reason"]), (&cold["worker"], &"cold".into()));
    let prefixes: Value = serde_json::from_str(&router.admin("/prefixes").await).expect("JSON");
    assert_eq!(prefixes["prefixes"][0]["holders"][0]["worker"], cold["worker"]);
    assert_eq!(prefixes["prefixes"][0]["requests"], 1);
    let told = router.admin("/decisions").await + &router.admin("/prefixes").await;
    assert!(!told.contains("w31x0"), "no text of a prompt");
}

#[tokio::test]
async fn what_cannot_be_explained_is_said_and_counts_for_nothing() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    for (query, body, status, words) in [
        ("", "{", 422, "not a JSON object"),
        ("", "[1]", 422, "not a JSON object"),
        ("", r#"{"model":"m"}"#, 422, "no prompt of a known shape"),
        ("?path=/v1/responses", r#"{"previous_response_id":"r","input":"x"}"#, 422, "only a worker has"),
        ("?mode=sticky", "{}", 400, "kv or random"),
        ("?path=/v1/models", "{}", 400, "/v1/chat/completions"),
        ("?path=%2Fv1%2Fmodels", "{}", 400, "/v1/chat/completions"),
        ("?path=%2Fv1%2Fchat%2Fcompletions", "{", 422, "not a JSON object"),
        ("?mod=kv", "{}", 400, "mod: unknown; there are: mode path"),
    ] {
        let (got, said) = post(router.admin, &format!("/explain{query}"), body).await;
        assert_eq!(got, status, "{body}: {said}");
        assert!(said.contains(words), "{body}: {said}");
    }
    assert_eq!(router.metric(r#"warmroute_fallbacks_total{reason="opaque_json"}"#).await, 0.0);
    assert_eq!(post(router.admin, "/decisions", "").await.0, 405);
    assert!(router.admin("/decisions?last=x").await.contains("a number"));
}

/// What is explained is held as what is asked: within the room for all bodies, and not for ever.
#[tokio::test]
async fn what_is_sent_to_be_explained_has_the_limits_of_requests() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.limits.body = 1_000;
    config.limits.bodies = 1_000;
    config.timeouts.client_body = Some(std::time::Duration::from_millis(50));
    let router = TestRouter::start(config).await;
    let (status, said) = post(router.admin, "/explain", &"x".repeat(1_001)).await;
    assert_eq!(status, 413);
    assert!(said.contains("1000 bytes"), "{said}");
    assert_eq!(post(router.admin, "/mode", &"x".repeat(2_000)).await.0, 405, "that is PUT");

    // A request holds all the room.
    let gate = Gate::default();
    engine.next(vec![Step::Await(gate.clone()), Step::json("200 OK", "{}")]);
    let asking = tokio::spawn({
        let mut client = router.client().await;
        async move { client.post("/v1/completions", "y".repeat(1_000)).await.status() }
    });
    engine.saw(1).await;
    let (status, said) = post(router.admin, "/explain", "{}").await;
    assert_eq!(status, 503, "{said}");
    gate.open();
    assert_eq!(asking.await.expect("no panic"), 200);
    assert_eq!(post(router.admin, "/explain", "{}").await.0, 422);

    // One that does not come whole.
    for head in ["POST /explain", "PUT /mode"] {
        let mut admin = Wire::connect(router.admin).await;
        admin.send(format!("{head} HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{{")).await;
        assert_eq!(admin.answer("POST").await.expect("an answer").status(), 408);
    }
    router.metric_is("warmroute_request_body_bytes", 0.0).await;
}

#[tokio::test]
async fn fewer_decisions_are_kept_as_soon_as_that_is_asked_for() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    let kept = async || -> Option<usize> {
        let told: Value = serde_json::from_str(&router.admin("/decisions").await).expect("JSON");
        told["decisions"].as_array().map(Vec::len)
    };
    for serial in 0..5 {
        client.post("/v1/chat/completions", chat(serial, serial)).await;
    }
    assert_eq!(kept().await, Some(5));
    for keep in [2, 0] {
        let mut edited = Config::clone(&router.proxy.config.load());
        edited.explain.keep = keep;
        router.proxy.reconfigure(edited, None);
        assert_eq!(kept().await, Some(keep), "at once");
        client.post("/v1/chat/completions", chat(6, 6)).await;
        assert_eq!(kept().await, Some(keep), "and from then on");
    }
}

#[tokio::test]
async fn as_many_decisions_are_kept_as_are_asked_for() {
    let engine = FakeEngine::start().await;
    for keep in [0, 3] {
        let mut config = TestRouter::config(Mode::Kv, &[&engine]);
        config.explain.keep = keep;
        let router = TestRouter::start(config).await;
        let mut client = router.client().await;
        for serial in 0..5 {
            client.post("/v1/chat/completions", chat(serial, serial)).await;
        }
        let told: Value = serde_json::from_str(&router.admin("/decisions").await).expect("JSON");
        assert_eq!(told["decisions"].as_array().map(Vec::len), Some(keep));
    }
}
