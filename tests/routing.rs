//! The proxy before simulated vLLM workers: nothing is changed on the way, and prefixes go where they are cached.

use std::net::SocketAddr;

use warmroute::config::Mode;
use warmroute::engine::http::Running;
use warmroute::testing::{Answer, FakeEngine, Step, TestRouter, Wire, simulated};

/// So fast that a thousand requests take seconds.
async fn workers(count: usize) -> Running {
    simulated(count, "warmroute-sim", 1000.0).await
}

async fn router(mode: Mode, fleet: &Running) -> TestRouter {
    let mut config = TestRouter::config_at(mode, fleet.addresses());
    config.workers.fixed.iter_mut().for_each(|worker| worker.capacity_tokens = Some(9_344));
    TestRouter::start(config).await
}

/// Request `n` of a mix of kinds: chat and completions in their shapes, streamed or not, good and bad.
fn mixed(n: usize) -> (&'static str, String) {
    let words = format!("prefix {} of some words that are said again. tail {n}", n % 17).repeat(1 + n % 5);
    let stream = match n % 4 {
        0 => r#","stream":true,"stream_options":{"include_usage":true}"#,
        1 => r#","stream":true"#,
        _ => "",
    };
    let limit = 1 + n % 9;
    match n % 10 {
        0..5 => (
            "/v1/chat/completions",
            format!(
                r#"{{"messages":[{{"role":"system","content":"be \u00e9"}},{{"role":"user","content":"{words}"}}],"max_tokens":{limit}{stream}}}"#
            ),
        ),
        5 => {
            ("/v1/completions", format!(r#"{{"prompt":[{},77,9{n}],"max_tokens":{limit}{stream}}}"#, n % 50))
        }
        6 => ("/v1/completions", format!(r#"{{"max_tokens":{limit},"prompt":["{words}","b"]{stream}}}"#)),
        7 => ("/v1/completions", format!(r#"{{ "prompt" : "{words}" ,"model":"no such model"{stream}}}"#)),
        8 => ("/v1/chat/completions", format!(r#"{{"messages":[{{"role":"user","content":"{words}"#)),
        _ => (
            "/v1/completions",
            format!(r#"{{"prompt":"{words} \ud83d\ude00","max_tokens":{limit}{stream}}}"#),
        ),
    }
}

/// An answer without what differs from run to run: ids, times, and how much was cached.
fn settled(answer: &Answer) -> String {
    let mut text = answer.text();
    for key in ["\"id\":\"", "\"created\":", "\"cached_tokens\":", "\"created_cache_tokens\":"] {
        let mut parts = text.split(key);
        let mut kept = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            kept.push_str(&part[part.find([',', '}']).unwrap_or(0)..]);
        }
        text = kept;
    }
    let mut headers: Vec<String> = answer
        .head
        .headers
        .iter()
        .filter(|(name, _)| !["date", "content-length", "x-request-id"].contains(&name.as_str()))
        .map(|(name, value)| format!("{name}: {value}"))
        .collect();
    headers.sort();
    format!("{}\n{headers:?}\n{text}", answer.head.start)
}

async fn ask(client: &mut Wire, (path, body): &(&str, String)) -> Answer {
    client.post(path, body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_mixed_requests_are_answered_as_they_are_directly() {
    for mode in [Mode::Kv, Mode::Random] {
        let (alone, behind) = (workers(1).await, workers(3).await);
        let router = router(mode, &behind).await;
        let mut direct = Wire::connect(alone.addresses()[0]).await;
        let mut through = router.client().await;
        for n in 0..1000 {
            let request = mixed(n);
            let right = ask(&mut direct, &request).await;
            let got = ask(&mut through, &request).await;
            assert!(right.complete && got.complete);
            assert_eq!(settled(&got), settled(&right), "request {n}: {request:?}");
        }
        router.metric_is("warmroute_requests_in_flight", 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_mixed_bodies_arrive_byte_for_byte() {
    for mode in [Mode::Kv, Mode::Random] {
        let engine = FakeEngine::with(|request| {
            let body = request.body.clone();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            vec![Step::send([head.as_bytes(), &body].concat())]
        })
        .await;
        let router = TestRouter::before(mode, &[&engine]).await;
        let mut client = router.client().await;
        for n in 0..1000 {
            let (path, body) = mixed(n);
            let echoed = client.post(path, &body).await;
            assert_eq!(echoed.text(), body);
        }
        let seen = engine.seen();
        assert_eq!(seen.len(), 1000);
        for (n, seen) in seen.iter().enumerate() {
            let (path, body) = mixed(n);
            assert_eq!((seen.head.second(), seen.body.as_slice()), (path, body.as_bytes()));
        }
    }
}

fn shared_prefix(group: usize, tail: usize) -> String {
    let prefix = format!("group {group} says the same long thing once more; ").repeat(150);
    format!(
        r#"{{"messages":[{{"role":"user","content":"{prefix}{tail}"}}],"max_tokens":4,"stream":true,"stream_options":{{"include_usage":true}}}}"#
    )
}

/// The share of prompt tokens that the workers say were cached, with eight prefixes that three workers can just hold.
async fn confirmed_share(mode: Mode) -> f64 {
    let fleet = workers(3).await;
    let router = router(mode, &fleet).await;
    for tail in 0..8 {
        for group in 0..8 {
            let answer = router.client().await.post("/v1/chat/completions", shared_prefix(group, tail)).await;
            assert_eq!(answer.status(), 200);
        }
    }
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let mode_label = mode.as_str();
    let total =
        async |name: &str| router.metric(&format!(r#"{name}{{mode="{mode_label}",model="default"}}"#)).await;
    let share = total("warmroute_confirmed_cached_tokens_total").await
        / total("warmroute_confirmed_prompt_tokens_total").await;
    if mode == Mode::Kv {
        // What was believed is what the engines say, to within a block or two of each prompt.
        let believed = total("warmroute_predicted_cached_tokens_total").await
            / total("warmroute_prompt_tokens_total").await;
        assert!((believed - share).abs() < 0.1, "believed {believed}, confirmed {share}");
        let first_tokens = async |predicted: &str| {
            let labels = format!(r#"{{mode="kv",model="default",predicted="{predicted}"}}"#);
            router.metric(&format!("warmroute_time_to_first_token_seconds_count{labels}")).await
        };
        let (hits, misses) = (first_tokens("hit").await, first_tokens("miss").await);
        assert_eq!(hits + misses, 64.0);
        assert!((8.0..=16.0).contains(&misses), "{misses}");
    }
    share
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_where_their_prefix_is_cached() {
    let kv = confirmed_share(Mode::Kv).await;
    let random = confirmed_share(Mode::Random).await;
    // Seven of eight rounds can be cached; the Service finds a prefix at home about once in three.
    assert!(kv > 0.75, "kv {kv}");
    assert!(random < kv - 0.15, "random {random}, kv {kv}");
}

#[tokio::test]
async fn an_unknown_model_and_invalid_json_get_the_workers_own_answer() {
    let fleet = workers(2).await;
    let router = router(Mode::Kv, &fleet).await;
    let mut client = router.client().await;
    let unknown = client
        .post("/v1/chat/completions", r#"{"model":"nope","messages":[{"role":"user","content":"x"}]}"#)
        .await;
    assert_eq!(unknown.status(), 404);
    assert!(unknown.text().contains("The model `nope` does not exist."), "{}", unknown.text());
    for body in ["{", "[1]", "", "{\"messages\":7}"] {
        let refused = client.post("/v1/chat/completions", body).await;
        assert_eq!(refused.status(), 400, "{body}");
        assert!(refused.text().contains("\"error\""), "{}", refused.text());
    }
    let page = router.admin("/metrics").await;
    assert!(!page.contains("nope"), "a name that no worker answers for makes no series");
    assert!(page.contains(r#"warmroute_fallbacks_total{reason="opaque_json"} 3"#), "{page}");
}

#[tokio::test]
async fn the_fleet_page_tells_what_is_believed() {
    let fleet = workers(2).await;
    let router = router(Mode::Kv, &fleet).await;
    router.client().await.post("/v1/chat/completions", shared_prefix(1, 1)).await;
    let page: serde_json::Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    assert_eq!(page["mode"], "kv");
    let workers = page["workers"].as_array().expect("a list");
    let addresses: Vec<SocketAddr> = fleet.addresses().to_vec();
    assert_eq!(workers.len(), 2);
    assert_eq!(workers[0]["url"], format!("http://{}", addresses[0]));
    assert!(
        workers
            .iter()
            .all(|worker| worker["state"] == "up" && worker["believed"]["capacity_tokens"] == 9_344)
    );
    let blocks: u64 = workers.iter().filter_map(|worker| worker["believed"]["blocks"].as_u64()).sum();
    assert!(blocks > 20, "{page}");
}

/// A worker that refuses a request has computed nothing of it: believing otherwise would push what it really holds out of
/// the picture, and count the refusal's next attempt as warm.
#[tokio::test]
async fn a_refused_request_is_not_believed_to_be_cached() {
    let fleet = workers(2).await;
    let router = router(Mode::Kv, &fleet).await;
    let mut client = router.client().await;
    let long = "All of this would fill a cache. ".repeat(4_000);
    for body in [
        format!(r#"{{"model":"nope","messages":[{{"role":"user","content":"{long}"}}]}}"#),
        format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"temperature":-1}}"#),
    ] {
        for _ in 0..3 {
            let refused = client.post("/v1/chat/completions", body.as_str()).await;
            assert!(matches!(refused.status(), 400 | 404), "{}", refused.status());
        }
    }
    let page: serde_json::Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    for worker in page["workers"].as_array().expect("a list") {
        assert_eq!(worker["believed"]["blocks"], 0, "{page}");
    }
}

#[tokio::test]
async fn after_a_restart_each_conversation_has_a_home_again_after_one_turn() {
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(FakeEngine::start().await);
    }
    let turn = |conversation: usize, turn: usize| {
        let said = format!("conversation {conversation} says the same thing again; ").repeat(40);
        let turns: Vec<String> =
            (0..=turn).map(|at| format!(r#"{{"role":"user","content":"{at} {said}"}}"#)).collect();
        format!(r#"{{"messages":[{}]}}"#, turns.join(","))
    };
    for process in 0..2 {
        let router = TestRouter::before(Mode::Kv, &engines.iter().collect::<Vec<_>>()).await;
        let mut homes = Vec::new();
        for at in 3 * process..3 * process + 3 {
            for conversation in 0..12 {
                let before: Vec<usize> = engines.iter().map(|engine| engine.seen().len()).collect();
                let answer = router.client().await.post("/v1/chat/completions", turn(conversation, at)).await;
                assert_eq!(answer.status(), 200);
                let asked = (0..4).find(|worker| engines[*worker].seen().len() > before[*worker]);
                match homes.get(conversation) {
                    None => homes.push(asked),
                    Some(home) => assert_eq!(*home, asked, "process {process}, turn {at} of {conversation}"),
                }
            }
        }
    }
}
