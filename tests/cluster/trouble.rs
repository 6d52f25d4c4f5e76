//! The API server away, silent, forgetful, or without a word for what has happened.

use std::time::{Duration, Instant};

use serde_json::Value;
use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, TestRouter, until};

use crate::cases::{ask, fleet, is_gone, is_in_state};
use crate::cluster::{Cluster, RESYNC, pod};
use crate::fake::Asked;

/// What a Service of the router's own pods comes to.
#[tokio::test]
async fn a_router_does_not_take_itself_or_another_one_for_a_worker() {
    let engine = FakeEngine::start().await;
    let others = TestRouter::start(TestRouter::config(Mode::Kv, &[&engine])).await;
    let router = TestRouter::start(TestRouter::config(Mode::Kv, &[&engine])).await;
    let listed = [engine.address(), router.clients, others.clients];
    let mut config = TestRouter::config_at(Mode::Kv, &listed);
    config.health.interval = Some(Duration::from_millis(50));
    router.proxy.reconfigure(config, None);
    for probed in [&router, &others] {
        until("the probes to be answered", async || {
            let page = probed.admin("/metrics").await;
            let refused = page.lines().filter(|line| {
                line.starts_with("warmroute_requests_total") && line.contains(r#"outcome="refused""#)
            });
            refused.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() >= 2.0
        })
        .await;
    }
    for at in 0..20 {
        assert_eq!(ask(&router, &format!("where does it go {at}")).await, 200);
    }
    let states: Vec<String> = fleet(&router).await.into_iter().map(|(_, state)| state).collect();
    assert_eq!(states, ["up", "starting", "starting"]);
    assert_eq!(engine.seen().len(), 20);
}

/// The series of the one source.
fn series(cluster: &Cluster, name: &str, more: &str) -> String {
    format!(r#"warmroute_discovery_{name}{{{more}source="kubernetes:{}/vllm"}}"#, cluster.namespace)
}

async fn failed(cluster: &Cluster, router: &TestRouter, reason: &str) {
    let failures = series(cluster, "failures_total", &format!(r#"reason="{reason}","#));
    until(&format!("a failure: {reason}"), async || router.metric(&failures).await > 0.0).await;
}

#[tokio::test]
async fn while_the_api_server_is_away_the_last_known_fleet_serves() {
    let (mut cluster, base) = (Cluster::start("away").await, Cluster::network());
    let engines =
        [cluster.engine(base + 1).await, cluster.engine(base + 2).await, cluster.engine(base + 3).await];
    cluster.put("slice", &[pod(base + 1), pod(base + 2)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for host in 1..=2 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    cluster.stop_api().await;
    router.metric_is(&series(&cluster, "synced", ""), 0.0).await;
    failed(&cluster, &router, "unreachable").await;
    assert!(router.admin("/fleet").await.contains(r#""fault": "the API server cannot be heard: "#));
    for at in 0..50 {
        assert_eq!(ask(&router, &format!("{at}")).await, 200);
    }
    // One of them dies meanwhile. Nobody tells, and the router's own probes find out.
    engines[0].stop_listening().await;
    is_in_state(&router, cluster.place(base + 1), "unreachable").await;
    for at in 0..50 {
        assert_eq!(ask(&router, &format!("{at}")).await, 200);
    }
    cluster.start_api().await;
    cluster.put("slice", &[pod(base + 2), pod(base + 3)]).await;
    is_in_state(&router, cluster.place(base + 3), "up").await;
    is_gone(&router, cluster.place(base + 1)).await;
    router.metric_is(&series(&cluster, "synced", ""), 1.0).await;
    assert!(router.admin("/fleet").await.contains(r#""fault": null"#));
}

#[tokio::test]
async fn what_a_silent_watch_did_not_tell_is_made_up_for() {
    let (mut cluster, base) = (Cluster::start("silent").await, Cluster::network());
    let _engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    cluster.put("slice", &[pod(base + 1), pod(base + 2)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for host in 1..=2 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    // The connection stays open, and nothing comes over it any more.
    cluster.link.hold();
    cluster.put("slice", &[pod(base + 2)]).await;
    failed(&cluster, &router, "silent").await;
    assert_eq!(fleet(&router).await.len(), 2, "nobody has told yet");
    cluster.link.open().await;
    is_gone(&router, cluster.place(base + 1)).await;
    router.metric_is(&series(&cluster, "synced", ""), 1.0).await;
}

#[tokio::test]
async fn a_deletion_that_was_missed_is_seen_within_a_resync() {
    let (mut cluster, base) = (Cluster::start("missed").await, Cluster::network());
    let _engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    cluster.put("a", &[pod(base + 1)]).await;
    cluster.put("b", &[pod(base + 2)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for host in 1..=2 {
        is_in_state(&router, cluster.place(base + host), "up").await;
    }
    // The fake keeps the watch alive and the event to itself; of a real one the watch is cut while it happens.
    let before = Instant::now();
    match cluster.fake() {
        Some(fake) => {
            fake.mute(true);
            cluster.delete("a").await;
        }
        None => {
            cluster.link.cut().await;
            cluster.delete("a").await;
            cluster.link.open().await;
        }
    }
    is_gone(&router, cluster.place(base + 1)).await;
    println!(
        "a deletion that no watch told of is seen after {:?}, with a resync of {RESYNC:?}",
        before.elapsed()
    );
}

#[tokio::test]
async fn an_expired_watch_is_begun_anew() {
    let (mut cluster, base) = (Cluster::start("expired").await, Cluster::network());
    let Some(fake) = cluster.fake().cloned() else {
        println!("skipped: only the fake forgets on demand");
        return;
    };
    let _engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    cluster.put("slice", &[pod(base + 1)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    is_in_state(&router, cluster.place(base + 1), "up").await;
    let lists = fake.lists();
    fake.mute(true);
    cluster.put("slice", &[pod(base + 2)]).await;
    fake.mute(false);
    fake.forget();
    failed(&cluster, &router, "expired").await;
    is_in_state(&router, cluster.place(base + 2), "up").await;
    assert!(fake.lists() > lists);
    assert_eq!(router.metric(&series(&cluster, "synced", "")).await, 1.0, "it knows all there is to know");
    cluster.link.cut().await;
}

#[tokio::test]
async fn whoever_may_not_list_says_so_and_goes_on() {
    let (cluster, base) = (Cluster::start("denied").await, Cluster::network());
    let Some(fake) = cluster.fake() else {
        println!(
            "skipped: the fake takes rights away on demand; the real one shows that those in deploy/ are enough"
        );
        return;
    };
    let _engine = cluster.engine(base + 1).await;
    cluster.put("slice", &[pod(base + 1)]).await;
    fake.deny(true);
    let router = TestRouter::start_unready(cluster.config(), None).await;
    failed(&cluster, &router, "refused").await;
    assert!(router.admin("/readyz").await.contains("none of 0 workers"));
    fake.deny(false);
    is_in_state(&router, cluster.place(base + 1), "up").await;
    fake.deny(true);
    router.metric_is(&series(&cluster, "synced", ""), 0.0).await;
    assert_eq!(ask(&router, "it goes on").await, 200);
}

#[tokio::test]
async fn a_port_that_is_not_there_is_told() {
    let (cluster, base) = (Cluster::start("port").await, Cluster::network());
    cluster.put_of("vllm", "slice", &[("http", 1), ("metrics", 2)], &[pod(base + 1)]).await;
    let router = TestRouter::start_unready(cluster.config(), None).await;
    failed(&cluster, &router, "port").await;
    assert_eq!(fleet(&router).await.len(), 0);
    let _engine = cluster.engine(base + 1).await;
    cluster.put("slice", &[pod(base + 1)]).await;
    is_in_state(&router, cluster.place(base + 1), "up").await;
    router.metric_is(&series(&cluster, "synced", ""), 1.0).await;
}

#[tokio::test]
async fn a_service_without_slices_is_absent() {
    let (cluster, base) = (Cluster::start("absent").await, Cluster::network());
    let router = TestRouter::start_unready(cluster.config(), None).await;
    failed(&cluster, &router, "absent").await;
    let port = series(&cluster, "failures_total", r#"reason="port","#);
    assert!(!router.admin("/metrics").await.contains(&port));
    let _engine = cluster.engine(base + 1).await;
    cluster.put("slice", &[pod(base + 1)]).await;
    is_in_state(&router, cluster.place(base + 1), "up").await;
    router.metric_is(&series(&cluster, "synced", ""), 1.0).await;
}

async fn fault_is(router: &TestRouter, words: &str) {
    until(&format!("the fault {words}"), async || {
        let page: Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
        page["sources"][0]["fault"].as_str() == Some(words)
    })
    .await;
}

#[tokio::test]
async fn a_service_that_selects_nothing_is_a_fault_and_what_was_before_it_stays() {
    let (cluster, base) = (Cluster::start("nobody").await, Cluster::network());
    let _engines = [cluster.engine(base + 1).await, cluster.engine(base + 2).await];
    cluster.put("slice", &[]).await;
    let mut config = cluster.config();
    let following = std::mem::take(&mut config.workers.kubernetes);
    let named = format!("workers: {{static: [{{url: 'http://{}'}}]}}", cluster.place(base + 1));
    let named = warmroute::config::Config::parse(&named, std::path::Path::new("c.yaml")).expect("a worker");
    config.workers.fixed = named.workers.fixed;
    let router = TestRouter::start_unready(config.clone(), None).await;
    is_in_state(&router, cluster.place(base + 1), "up").await;

    // An edit from a list to a Service, that selects nobody.
    config.workers.fixed.clear();
    config.workers.kubernetes = following;
    router.proxy.reconfigure(config, None);
    fault_is(&router, "the Service vllm has no endpoints: does its selector match any pod?").await;
    assert_eq!(router.metric(&series(&cluster, "synced", "")).await, 0.0);
    assert_eq!(ask(&router, "it is there still").await, 200);
    cluster.put("slice", &[pod(base + 2)]).await;
    is_in_state(&router, cluster.place(base + 2), "up").await;
    is_gone(&router, cluster.place(base + 1)).await;
    router.metric_is(&series(&cluster, "synced", ""), 1.0).await;
}

#[tokio::test]
async fn what_is_no_answer_of_an_api_server_is_said_in_words_and_on_one_line() {
    let (cluster, base) = (Cluster::start("words").await, Cluster::network());
    let Some(fake) = cluster.fake() else {
        println!("skipped: a real API server says nothing else");
        return;
    };
    cluster.put("slice", &[pod(base + 1)]).await;
    let list =
        r#"{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": {}, "items": []}"#;
    let html = "<html>\n<h1>502 Bad Gateway</h1>\n</html>\n";
    let event = "{\"type\": \"NONSENSE\", \"object\": {}}\n";
    let unread = "the API server's answer cannot be read: expected value at line 1 column 1";
    let none = "the API server's answer is no event of a watch";
    let router = TestRouter::start_unready(cluster.config(), None).await;
    for (asked, status, body, words) in [
        (Asked::Watch, 200, list, none),
        (Asked::Watch, 200, event, none),
        (Asked::List, 200, html, unread),
        (Asked::List, 502, html, "the API server answers 502: <html> <h1>502 Bad Gateway</h1> </html>"),
    ] {
        fake.answer_instead(asked, (status, None, body));
        fault_is(&router, words).await;
        assert_eq!(fleet(&router).await.len(), 1);
    }
}

#[tokio::test]
async fn an_api_server_that_wants_to_be_left_alone_is() {
    let (cluster, base) = (Cluster::start("busy").await, Cluster::network());
    let Some(fake) = cluster.fake() else {
        println!("skipped: a real API server is not that busy");
        return;
    };
    cluster.put("slice", &[pod(base + 1)]).await;
    // Longer than the test lasts.
    fake.answer_instead(Asked::List, (429, Some(3600), "too many requests"));
    let busy = TestRouter::start_unready(cluster.config(), None).await;
    fault_is(&busy, "the API server answers 429: too many requests").await;
    let asked = fake.asked();
    // Another one asks as often as ever meanwhile, and so the first one could have.
    fake.answer_instead(Asked::List, (429, None, "too many requests"));
    let eager = TestRouter::start_unready(cluster.config(), None).await;
    let failures = series(&cluster, "failures_total", r#"reason="refused","#);
    until("the other to ask four times", async || eager.metric(&failures).await >= 4.0).await;
    assert_eq!(busy.metric(&failures).await, 1.0);
    assert!(fake.asked() >= asked + 4);
}

#[tokio::test]
async fn a_token_that_is_mended_is_taken_up_at_the_next_try() {
    let (cluster, base) = (Cluster::start("token").await, Cluster::network());
    let Some(fake) = cluster.fake() else {
        println!("skipped: the fake takes another token on demand");
        return;
    };
    let _engine = cluster.engine(base + 1).await;
    cluster.put("slice", &[pod(base + 1)]).await;
    fake.take_only("another token");
    let router = TestRouter::start_unready(cluster.config(), None).await;
    fault_is(&router, "the API server answers 401: Unauthorized").await;
    cluster.set_token("another token");
    is_in_state(&router, cluster.place(base + 1), "up").await;
}
