//! What pods do.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::Value;
use warmroute::testing::{FakeEngine, Gate, PLAIN_ANSWER, Step, TestRouter, Wire, until};

use crate::cluster::{Cluster, pod};

/// No question is asked twice: it would go where it was asked before.
static QUESTIONS: AtomicUsize = AtomicUsize::new(0);

const CHAT: &str = "/v1/chat/completions";

pub async fn ask(router: &TestRouter, text: &str) -> u16 {
    let mut client = router.client().await;
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    client.send(post(&body)).await;
    client.answer("POST").await.expect("an answer").status()
}

fn post(body: &str) -> String {
    format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// State of each worker of the fleet page, by address.
pub async fn fleet(router: &TestRouter) -> Vec<(String, String)> {
    let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().trim_start_matches("http://").to_owned();
    page["workers"]
        .as_array()
        .expect("workers")
        .iter()
        .map(|w| (text(&w["url"]), text(&w["state"])))
        .collect()
}

pub async fn is_in_state(router: &TestRouter, address: std::net::SocketAddr, state: &str) {
    until(&format!("{address} to be {state}"), async || {
        fleet(router).await.contains(&(address.to_string(), state.to_owned()))
    })
    .await;
}

pub async fn is_gone(router: &TestRouter, address: std::net::SocketAddr) {
    until(&format!("{address} to be gone"), async || {
        !fleet(router).await.iter().any(|(known, _)| *known == address.to_string())
    })
    .await;
}

/// Asks many times, each time about something else, and tells which engines were asked.
async fn asked(router: &TestRouter, engines: &[&FakeEngine]) -> BTreeSet<usize> {
    engines.iter().for_each(|engine| engine.forget_seen());
    for _ in 0..40 {
        let question = QUESTIONS.fetch_add(1, Ordering::Relaxed);
        assert_eq!(ask(router, &format!("question {question} ").repeat(100)).await, 200);
    }
    (0..engines.len()).filter(|at| !engines[*at].seen().is_empty()).collect()
}

#[tokio::test]
async fn pods_come_and_go() {
    let (cluster, base) = (Cluster::start("scale").await, Cluster::network());
    let engines =
        [cluster.engine(base + 1).await, cluster.engine(base + 2).await, cluster.engine(base + 3).await];
    let engines: Vec<&FakeEngine> = engines.iter().collect();
    cluster.put("one", &[pod(base + 1), pod(base + 2)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for host in 1..=2 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    assert_eq!(asked(&router, &engines).await, BTreeSet::from([0, 1]));
    let source = format!(r#"{{source="kubernetes:{}/vllm"}}"#, cluster.namespace);
    assert_eq!(router.metric(&format!("warmroute_discovery_synced{source}")).await, 1.0);
    assert_eq!(router.metric(&format!("warmroute_discovery_workers{source}")).await, 2.0);

    let before = Instant::now();
    cluster.put("two", &[pod(base + 3)]).await;
    is_in_state(&router, cluster.place(base + 3), "up").await;
    println!("a new pod is up {:?} after it was listed", before.elapsed());
    assert_eq!(asked(&router, &engines).await, BTreeSet::from([0, 1, 2]));

    let before = Instant::now();
    cluster.put("one", &[pod(base + 2)]).await;
    is_gone(&router, cluster.place(base + 1)).await;
    println!("a pod is gone {:?} after it was listed no more", before.elapsed());
    assert_eq!(asked(&router, &engines).await, BTreeSet::from([1, 2]));
    cluster.delete("one").await;
    is_gone(&router, cluster.place(base + 2)).await;
    assert_eq!(asked(&router, &engines).await, BTreeSet::from([2]));
}

#[tokio::test]
async fn a_pod_that_is_not_ready_is_asked_nothing_and_forgets_nothing() {
    let (cluster, base) = (Cluster::start("flips").await, Cluster::network());
    let engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    let engines: Vec<&FakeEngine> = engines.iter().collect();
    let (one, two) = (pod(base + 1), pod(base + 2));
    cluster.put("slice", &[one, two]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for host in 1..=2 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    assert_eq!(asked(&router, &engines).await, BTreeSet::from([0, 1]));
    let believed = |page: &str| -> Vec<u64> {
        let page: Value = serde_json::from_str(page).expect("JSON");
        let workers = page["workers"].as_array().expect("workers").clone();
        workers.iter().filter_map(|worker| worker["believed"]["blocks"].as_u64()).collect()
    };
    let before = believed(&router.admin("/fleet").await);
    assert!(before.iter().all(|blocks| *blocks > 0), "{before:?}");
    for _ in 0..5 {
        cluster.put("slice", &[one.not_ready(), two]).await;
        is_in_state(&router, cluster.place(base + 1), "not_ready").await;
        assert_eq!(asked(&router, &engines).await, BTreeSet::from([1]));
        cluster.put("slice", &[one, two]).await;
        is_in_state(&router, cluster.place(base + 1), "up").await;
    }
    let after = believed(&router.admin("/fleet").await);
    assert!(after[0] >= before[0], "what the pod had cached is still there: {before:?} {after:?}");
    cluster.put("slice", &[one.not_ready(), two.not_ready()]).await;
    is_in_state(&router, cluster.place(base + 2), "not_ready").await;
    assert_eq!(ask(&router, "nobody is there").await, 503);
    assert!(router.admin("/readyz").await.contains("none of 2 workers usable"));
}

fn stream(gate: &Gate) -> Vec<Step> {
    vec![
        Step::stream_head(),
        Step::chunk("data: {\"a\":1}\n\n"),
        Step::Await(gate.clone()),
        Step::chunk("data: [DONE]\n\n"),
        Step::last_chunk(),
    ]
}

async fn begin_stream(router: &TestRouter) -> Wire {
    let mut client = router.client().await;
    client.send(post(r#"{"stream":true,"messages":[{"role":"user","content":"a"}]}"#)).await;
    client.head().await.expect("a head");
    client
}

/// All that comes until the end of the stream.
async fn rest(client: &mut Wire) -> String {
    let mut text = String::new();
    while !text.ends_with("\r\n0\r\n\r\n") {
        let piece = client.piece().await;
        assert!(!piece.is_empty(), "cut: {text}");
        text += std::str::from_utf8(&piece).expect("text");
    }
    text
}

#[tokio::test]
async fn a_pod_that_terminates_finishes_its_streams_and_is_asked_nothing_more() {
    let (cluster, base) = (Cluster::start("terminates").await, Cluster::network());
    let engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    let (one, two) = (pod(base + 1), pod(base + 2));
    cluster.put("slice", &[one]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    is_in_state(&router, cluster.place(base + 1), "up").await;
    let gate = Gate::default();
    engines[0].next(stream(&gate));
    let mut client = begin_stream(&router).await;

    cluster.put("slice", &[one.leaving(), two]).await;
    is_in_state(&router, cluster.place(base + 1), "terminating").await;
    is_in_state(&router, cluster.place(base + 2), "up").await;
    let refs: Vec<&FakeEngine> = engines.iter().collect();
    assert_eq!(asked(&router, &refs).await, BTreeSet::from([1]));
    // Even once it is listed no more, as long as it still answers.
    cluster.put("slice", &[two]).await;
    is_gone(&router, cluster.place(base + 1)).await;
    gate.open();
    assert!(rest(&mut client).await.contains("[DONE]"));
    let place = cluster.place(base + 1).to_string();
    until("its series to be gone with it", async || !router.admin("/metrics").await.contains(&place)).await;

    // The last ones, while they still serve.
    cluster.put("slice", &[two.leaving()]).await;
    until("the change to be seen", async || {
        let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
        page["workers"][0]["usable"] == true
    })
    .await;
    assert_eq!(ask(&router, "is anybody there").await, 200);
}

#[tokio::test]
async fn a_reused_address_is_a_new_worker() {
    let (cluster, base) = (Cluster::start("reuse").await, Cluster::network());
    let place = cluster.place(base + 1);
    let old = cluster.engine(base + 1).await;
    cluster.put("slice", &[pod(base + 1).with_uid(1)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    is_in_state(&router, place, "up").await;
    assert_eq!(ask(&router, &"something to remember ".repeat(100)).await, 200);
    old.next(stream(&Gate::default()));
    let mut client = begin_stream(&router).await;
    let blocks = |page: &str| -> u64 {
        let page: Value = serde_json::from_str(page).expect("JSON");
        page["workers"][0]["believed"]["blocks"].as_u64().expect("a number")
    };
    assert!(blocks(&router.admin("/fleet").await) > 0);

    // The old pod's machine is gone without a word, and its address is a new pod's at once.
    old.terminate().await;
    let new = cluster.engine(base + 1).await;
    new.always(|_| vec![Step::json("200 OK", PLAIN_ANSWER)]);
    cluster.put("slice", &[pod(base + 1).with_uid(2)]).await;
    until("the new pod to be known", async || router.admin("/fleet").await.contains("pod-2")).await;
    assert_eq!(blocks(&router.admin("/fleet").await), 0, "nothing is believed of the new one");
    is_in_state(&router, place, "up").await;
    assert_eq!(ask(&router, "hello").await, 200);
    assert_eq!(new.seen().len(), 1);
    let said = rest(&mut client).await;
    assert!(said.contains("stream_broken"), "what the old one owed is given up: {said}");
    let series = format!(r#"warmroute_worker_requests_total{{worker="{place}"}}"#);
    assert_eq!(router.metric(&series).await, 3.0, "the series go on");
}

#[tokio::test]
async fn several_services_are_one_fleet() {
    let (cluster, base) = (Cluster::start("several").await, Cluster::network());
    let engines =
        [cluster.engine(base + 1).await, cluster.engine(base + 2).await, cluster.engine(base + 3).await];
    for (engine, model) in engines.iter().zip(["llama", "qwen", "qwen"]) {
        engine.set_models(&[model]);
    }
    let port = cluster.port();
    cluster.put_of("llama", "a", &[("http", port)], &[pod(base + 1)]).await;
    cluster.put_of("qwen", "b", &[("metrics", 1), ("api", port)], &[pod(base + 2), pod(base + 3)]).await;
    let entries =
        format!("{{service: llama, NAMESPACE, port: {port}}}, {{service: qwen, NAMESPACE, port: api}}");
    let router = TestRouter::start_unready(cluster.config_of(&entries), None).await;
    for host in 1..=3 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    until("the lists to be known", async || router.admin("/fleet").await.matches("qwen").count() >= 2).await;
    for (model, at) in [("llama", vec![0]), ("qwen", vec![1, 2])] {
        engines.iter().for_each(FakeEngine::forget_seen);
        for number in 0..20 {
            let mut client = router.client().await;
            client.send(post(&format!(r#"{{"model":"{model}","prompt":"{number}"}}"#))).await;
            assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
        }
        let seen: Vec<usize> = (0..3).filter(|at| !engines[*at].seen().is_empty()).collect();
        assert!(seen.iter().all(|engine| at.contains(engine)), "{model} went to {seen:?}");
    }

    // An edit of the config, while running: one Service more, another one less. The fleet is never empty in between.
    let edited = cluster.config_of("{service: qwen, NAMESPACE, port: api}");
    router.proxy.reconfigure(edited, None);
    is_gone(&router, cluster.place(base + 1)).await;
    assert_eq!(fleet(&router).await.len(), 2);
    let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    assert_eq!(
        (page["sources"][0]["workers"].as_u64(), page["kept"].as_array().map(Vec::len)),
        (Some(2), Some(0))
    );
    let source =
        format!(r#"warmroute_discovery_synced{{source="kubernetes:{}/llama:{port}"}}"#, cluster.namespace);
    assert!(!router.admin("/metrics").await.contains(&source));
    assert_eq!(ask(&router, "who is left").await, 200);

    // One that is misspelt comes in the place of the last: nobody goes until it is put right, and that is said.
    router.proxy.reconfigure(cluster.config_of("{service: qwem, NAMESPACE, port: api}"), None);
    until("the fault to be told", async || router.admin("/fleet").await.contains("service-name=qwem")).await;
    let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    assert_eq!(page["kept"][0]["workers"].as_array().map(Vec::len), Some(2), "{page}");
    assert!(page["kept"][0]["until_heard"][0].as_str().is_some_and(|source| source.contains("qwem")));
    assert_eq!(ask(&router, "who is there still").await, 200);
    router.proxy.reconfigure(cluster.config_of("{service: llama, NAMESPACE}"), None);
    is_in_state(&router, cluster.place(base + 1), "up").await;
    for host in 2..=3 {
        is_gone(&router, cluster.place(base + host)).await;
    }
    assert!(router.admin("/fleet").await.contains(r#""kept": []"#));
}

#[tokio::test]
async fn of_pods_that_are_as_good_one_of_the_routers_own_zone_is_taken() {
    let (cluster, base) = (Cluster::start("zones").await, Cluster::network());
    let engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    cluster.put("slice", &[pod(base + 1), pod(base + 2)]).await;
    for zone in ["zone-1", "zone-0"] {
        engines.iter().for_each(FakeEngine::forget_seen);
        let mut config = cluster.config();
        config.workers.zone = Some(zone.to_owned());
        let router = TestRouter::start_unready(config, None).await;
        for host in 1..=2 {
            is_in_state(&router, cluster.place(base + host), "up").await;
        }
        assert_eq!(ask(&router, "where am I").await, 200);
        let at = usize::from(zone == "zone-0");
        assert_eq!((engines[at].seen().len(), engines[1 - at].seen().len()), (1, 0), "{zone}");
        assert!(router.admin("/fleet").await.contains(&format!(r#""zone": "{zone}""#)));
    }
}
