//! The API server away, silent, forgetful, or without a word for what has happened.

use std::time::Instant;

use warmroute::testing::{TestRouter, until};

use crate::cases::{ask, fleet, is_gone, is_in_state};
use crate::cluster::{Cluster, RESYNC, pod};

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
