//! Several models on one fleet: what each worker lists decides what it is asked for, over real sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use warmroute::config::{Config, Draw, Mode};
use warmroute::testing::{FakeEngine, PLAIN_ANSWER, Step, TestRouter, until};

const BOTH: [Mode; 2] = [Mode::Kv, Mode::Random];
const UNKNOWN: &str = r#"{"error":{"message":"The model does not exist.","code":404}}"#;

fn config(mode: Mode, engines: &[FakeEngine]) -> Config {
    let mut config = TestRouter::config(mode, &engines.iter().collect::<Vec<_>>());
    config.scrape.models_interval = Some(Duration::from_millis(20));
    config.scrape.timeout = Duration::from_secs(20);
    config.random.draw = Draw::Request;
    config
}

/// A worker that serves `names` and refuses all else as vLLM does.
async fn serving(names: &'static [&'static str]) -> FakeEngine {
    let engine = FakeEngine::with(move |message| {
        let body: serde_json::Value = serde_json::from_slice(&message.body).unwrap_or_default();
        let served = body["model"].as_str().is_none_or(|model| names.contains(&model));
        vec![if served { Step::json("200 OK", PLAIN_ANSWER) } else { Step::json("404 Not Found", UNKNOWN) }]
    })
    .await;
    engine.set_models(names);
    engine
}

/// The lists as the operator sees them, in the order of the workers; `None` is not known.
async fn listed(router: &TestRouter) -> Vec<Option<Vec<String>>> {
    let fleet: serde_json::Value = serde_json::from_str(&router.admin("/fleet").await).unwrap_or_default();
    let workers = fleet["workers"].as_array().cloned().unwrap_or_default();
    let names = |worker: &serde_json::Value| {
        let names = worker["models"].as_array()?;
        Some(names.iter().map(|name| name.as_str().unwrap_or_default().to_owned()).collect())
    };
    workers.iter().map(names).collect()
}

async fn all_listed(router: &TestRouter) {
    until("all lists to be read", async || listed(router).await.iter().all(Option::is_some)).await;
}

fn chat(model: &str, n: usize) -> String {
    format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"{n} {}"}}]}}"#, "x".repeat(600))
}

fn counts(engines: &[FakeEngine]) -> Vec<usize> {
    engines.iter().map(|engine| engine.seen().len()).collect()
}

#[tokio::test]
async fn each_model_goes_to_the_workers_that_list_it() {
    for mode in BOTH {
        let engines = [serving(&["a"]).await, serving(&["a", "b"]).await, serving(&["b", "b-lora"]).await];
        let router = TestRouter::start(config(mode, &engines)).await;
        all_listed(&router).await;
        assert_eq!(listed(&router).await[2].as_deref().unwrap_or_default(), ["b", "b-lora"]);
        let mut client = router.client().await;
        let mut ask = async |path: &'static str, body: String| client.post(path, body).await.status();
        let mut before = counts(&engines);
        for (model, servers) in [("a", [0, 1].as_slice()), ("b", &[1, 2]), ("b-lora", &[2])] {
            for n in 0..24 {
                assert_eq!(ask("/v1/chat/completions", chat(model, n)).await, 200, "{model}");
                // Endpoints whose prompts are not read have models too.
                assert_eq!(ask("/v1/embeddings", format!(r#"{{"model":"{model}","input":"x"}}"#)).await, 200);
            }
            let after = counts(&engines);
            let used: Vec<usize> = (0..3).filter(|at| after[*at] > before[*at]).collect();
            assert_eq!(used, servers, "{model} {mode:?}");
            before = after;
        }
        // A request that names no model may go to any.
        for n in 0..24 {
            assert_eq!(ask("/v1/chat/completions", chat("a", n).replace(r#""model":"a","#, "")).await, 200);
        }
        let others = counts(&engines).iter().zip(&before).filter(|(after, before)| after > before).count();
        assert!(others > 1, "{mode:?}: {others}");
        let series = format!(r#"warmroute_worker_models{{worker="{}"}}"#, engines[1].address());
        assert_eq!(router.metric(&series).await, 2.0);
    }
}

#[tokio::test]
async fn a_model_that_nobody_lists_gets_a_workers_own_word() {
    for mode in BOTH {
        for lists in [[&["a"], &["a"]], [&["a"], &["b"]]] {
            let engines = [serving(lists[0]).await, serving(lists[1]).await];
            let router = TestRouter::start(config(mode, &engines)).await;
            all_listed(&router).await;
            for n in 0..16 {
                let answer = router.client().await.post("/v1/chat/completions", chat("typo", n)).await;
                assert_eq!((answer.status(), answer.text().as_str()), (404, UNKNOWN));
            }
            assert!(counts(&engines).iter().all(|count| *count > 0));
            assert_eq!(router.metric(r#"warmroute_fallbacks_total{reason="model_unlisted"}"#).await, 16.0);
        }
    }
}

#[tokio::test]
async fn a_worker_whose_list_is_not_known_may_be_asked_for_anything() {
    type Script = Arc<dyn Fn() -> Vec<Step> + Send + Sync>;
    let many: Vec<String> = (0..5_000).map(|n| format!(r#"{{"id":"m{n}"}}"#)).collect();
    let many = format!(r#"{{"data":[{}]}}"#, many.join(","));
    let long = format!(r#"{{"data":[{{"id":"{}"}}]}}"#, "x".repeat(5 << 20));
    let cases: [(&str, Script); 8] = [
        ("garbage", Arc::new(|| vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\x7f{[")])),
        ("another object", Arc::new(|| vec![Step::json("200 OK", r#"{"object":"list"}"#)])),
        ("broken", Arc::new(|| vec![Step::json("500 Internal Server Error", "x")])),
        ("absent", Arc::new(|| vec![Step::json("404 Not Found", r#"{"detail":"Not Found"}"#)])),
        ("no key", Arc::new(|| vec![Step::json("401 Unauthorized", r#"{"error":"Unauthorized"}"#)])),
        ("too many", Arc::new(move || vec![Step::json("200 OK", &many)])),
        ("too long", Arc::new(move || vec![Step::json("200 OK", &long)])),
        ("hanging", Arc::new(|| vec![Step::AwaitClose])),
    ];
    for (case, script) in cases {
        let engines = [serving(&["a"]).await, serving(&["b"]).await];
        engines[1].set_listing(move |_| script());
        let router = TestRouter::start(config(Mode::Kv, &engines)).await;
        until("the good list", async || listed(&router).await[0].is_some()).await;
        assert_eq!(listed(&router).await[1], None, "{case}");
        let mut client = router.client().await;
        for n in 0..8 {
            assert_eq!(client.post("/v1/chat/completions", chat("b", n)).await.status(), 200, "{case}");
        }
        assert_eq!(counts(&engines), [0, 8], "only it may know that model");
        for n in 0..8 {
            client.post("/v1/chat/completions", chat("a", n)).await;
        }
        assert!(counts(&engines).iter().all(|count| *count > 0), "{case}: it may serve the other model too");
        assert_eq!(router.proxy.fleet.snapshot().eligible().len(), 2, "{case}");
    }
}

/// It would answer at once that it does not know the model, look idle for it, and draw all of its requests.
#[tokio::test]
async fn where_models_differ_a_worker_without_a_list_is_asked_only_if_nobody_else_can_serve() {
    let engines = [serving(&["a"]).await, serving(&["b"]).await, serving(&[]).await];
    engines[2].set_listing(|_| vec![Step::json("401 Unauthorized", r#"{"error":"Unauthorized"}"#)]);
    let router = TestRouter::start(config(Mode::Kv, &engines)).await;
    until("the good lists", async || listed(&router).await.iter().filter(|list| list.is_some()).count() == 2)
        .await;
    let mut client = router.client().await;
    for n in 0..8 {
        assert_eq!(client.post("/v1/chat/completions", chat("b", n)).await.status(), 200);
    }
    assert_eq!(counts(&engines), [0, 8, 0]);
}

#[tokio::test]
async fn a_list_that_stops_being_one_is_no_longer_known() {
    let engines = [serving(&["a"]).await, serving(&["b"]).await];
    let router = TestRouter::start(config(Mode::Kv, &engines)).await;
    all_listed(&router).await;
    engines[1].set_listing(|_| vec![Step::json("500 Internal Server Error", "x")]);
    until("it to be unknown", async || listed(&router).await[1].is_none()).await;
    let series = format!(r#"warmroute_worker_models{{worker="{}"}}"#, engines[1].address());
    assert_eq!(router.metric(&series).await, 0.0);
    engines[1].set_models(&["c"]);
    until("it to be known", async || listed(&router).await[1].is_some()).await;
}

#[tokio::test]
async fn an_adapter_that_is_loaded_at_run_time_is_found() {
    for mode in BOTH {
        let engines = [serving(&["a", "lora"]).await, serving(&["a", "lora"]).await];
        engines.iter().for_each(|engine| engine.set_models(&["a"]));
        let router = TestRouter::start(config(mode, &engines)).await;
        all_listed(&router).await;
        engines[1].set_models(&["a", "lora"]);
        let loaded = async || listed(&router).await[1].as_ref().is_some_and(|names| names.len() == 2);
        until("the adapter to be listed", loaded).await;
        for n in 0..16 {
            let answer = router.client().await.post("/v1/chat/completions", chat("lora", n)).await;
            assert_eq!(answer.status(), 200);
        }
        assert_eq!(counts(&engines), [0, 16]);
        engines[1].set_models(&["a"]);
        let gone = async || listed(&router).await[1].as_ref().is_some_and(|names| names.len() == 1);
        until("the adapter to be gone", gone).await;
        for n in 0..16 {
            router.client().await.post("/v1/chat/completions", chat("lora", n)).await;
        }
        assert!(engines[0].seen().len() > 1);
    }
}

#[tokio::test]
async fn another_attempt_is_made_only_where_the_model_is_served() {
    for mode in BOTH {
        let mut engines = [serving(&["a"]).await, serving(&["b"]).await, serving(&["b"]).await];
        let mut config = config(mode, &engines);
        config.health.interval = None;
        config.health.request_failures = 1_000;
        let router = TestRouter::start(config).await;
        all_listed(&router).await;
        engines[1].kill().await;
        let mut client = router.client().await;
        for n in 0..12 {
            assert_eq!(client.post("/v1/chat/completions", chat("b", n)).await.status(), 200);
        }
        engines[2].kill().await;
        // That a model has no worker left is not that it does not exist.
        assert_eq!(client.post("/v1/chat/completions", chat("b", 0)).await.status(), 502);
        assert_eq!(client.post("/v1/chat/completions", chat("a", 0)).await.status(), 200);
        assert_eq!(counts(&engines), [1, 0, 12]);
    }
}

#[tokio::test]
async fn a_model_whose_workers_are_all_out_is_unavailable_and_not_unknown() {
    let mut engines = [serving(&["a"]).await, serving(&["b"]).await];
    let mut config = config(Mode::Kv, &engines);
    config.health.interval = Some(Duration::from_millis(20));
    let router = TestRouter::start(config).await;
    all_listed(&router).await;
    engines[1].kill().await;
    until("it to be out", async || router.proxy.fleet.snapshot().eligible().len() == 1).await;
    let answer = router.client().await.post("/v1/chat/completions", chat("b", 0)).await;
    assert_eq!(answer.status(), 503);
    // Back with another list, which is asked for at once.
    engines[1].set_models(&["b", "c"]);
    engines[1].revive().await;
    let relisted = async || listed(&router).await[1].as_ref().is_some_and(|names| names.len() == 2);
    until("its new list", relisted).await;
}

#[tokio::test]
async fn a_worker_that_comes_up_is_asked_at_once_however_long_the_interval() {
    let mut engines = [serving(&["a"]).await, serving(&["b"]).await];
    let mut config = config(Mode::Kv, &engines);
    config.scrape.models_interval = Some(Duration::from_secs(86_400));
    config.health.interval = Some(Duration::from_millis(20));
    let router = TestRouter::start(config).await;
    all_listed(&router).await;
    engines[1].kill().await;
    until("it to be out", async || router.proxy.fleet.snapshot().eligible().len() == 1).await;
    engines[1].set_models(&["c"]);
    engines[1].revive().await;
    until("its new list", async || listed(&router).await[1] == Some(vec!["c".to_owned()])).await;
}

#[tokio::test]
async fn a_client_connection_keeps_its_worker_as_far_as_that_serves_the_model() {
    let engines = [serving(&["a"]).await, serving(&["a"]).await, serving(&["b"]).await];
    let mut config = config(Mode::Random, &engines);
    config.random.draw = Draw::Connection;
    let router = TestRouter::start(config).await;
    all_listed(&router).await;
    let mut client = router.client().await;
    for n in 0..16 {
        assert_eq!(client.post("/v1/chat/completions", chat("a", n)).await.status(), 200);
    }
    let mut one = counts(&engines);
    one.sort_unstable();
    assert_eq!(one, [0, 0, 16]);
    assert_eq!(client.post("/v1/chat/completions", chat("b", 0)).await.status(), 200);
    assert_eq!(engines[2].seen().len(), 1);
    assert_eq!(router.metric(r#"warmroute_fallbacks_total{reason="pinned_worker_out"}"#).await, 0.0);
}

#[tokio::test]
async fn lists_are_not_asked_for_if_switched_off() {
    let engines = [serving(&["a"]).await, serving(&["b"]).await];
    let mut settings = config(Mode::Random, &engines);
    let router = TestRouter::start(settings.clone()).await;
    all_listed(&router).await;
    settings.scrape.models_interval = None;
    router.proxy.reconfigure(settings, None);
    until("nothing to be known", async || listed(&router).await.iter().all(Option::is_none)).await;
    for n in 0..32 {
        router.client().await.post("/v1/chat/completions", chat("a", n)).await;
    }
    assert!(counts(&engines).iter().all(|count| *count > 0));
}

#[tokio::test]
async fn a_model_that_its_worker_no_longer_has_has_its_list_read_again() {
    for mode in BOTH {
        let engines = [serving(&["a", "lora"]).await, serving(&["a", "lora"]).await];
        let mut config = config(mode, &engines);
        config.scrape.models_interval = Some(Duration::from_secs(3_600));
        let router = TestRouter::start(config).await;
        all_listed(&router).await;
        // The adapter is taken off the first one, which tells nobody.
        engines[0].always(|message| {
            let gone = String::from_utf8_lossy(&message.body).contains("lora");
            vec![if gone { Step::json("404 Not Found", UNKNOWN) } else { Step::json("200 OK", PLAIN_ANSWER) }]
        });
        let lists = Arc::new(AtomicUsize::new(0));
        let count = lists.clone();
        engines[0].set_listing(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            vec![Step::json("200 OK", r#"{"data":[{"id":"a"}]}"#)]
        });
        let mut n = 0;
        until("the worker to be asked for it in vain", async || {
            n += 1;
            router.client().await.post("/v1/chat/completions", chat("lora", n)).await.status() == 404
        })
        .await;
        until("its list to be read again", async || {
            listed(&router).await[0].as_ref().is_some_and(|names| names == &["a"])
        })
        .await;
        for n in 0..24 {
            let answer = router.client().await.post("/v1/chat/completions", chat("lora", n)).await;
            assert_eq!(answer.status(), 200, "{mode:?}");
        }
        // It is not asked for its list because of models that are not on it.
        assert_eq!(lists.load(Ordering::Relaxed), 1);
    }
}
