//! A Deployment's rollout, pod by pod, as its EndpointSlice shows it, while clients go on asking. The pods end as vLLM does on SIGTERM: they
//! refuse new connections and let what runs hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use warmroute::testing::{FakeEngine, TestRouter, until};

use crate::cases::{is_gone, is_in_state};
use crate::cluster::{Cluster, Pod, pod};
use crate::run::{CLIENTS, Run, WORKERS};

/// Of the pods that are still of the old ones, the busiest: which of them serves whom is the router's affair, and it may well leave one
/// idle, but of the whole fleet some must be at work.
async fn next(fleet: &[(Pod, FakeEngine, usize)], router: &TestRouter, base: u16) -> usize {
    let page = router.admin("/metrics").await;
    let load = |engine: &FakeEngine| -> f64 {
        let series = format!(r#"warmroute_worker_in_flight{{worker="{}"}} "#, engine.address());
        let value = page.lines().find_map(|line| line.strip_prefix(&series));
        value.map_or(0.0, |value| value.parse().expect("a number"))
    };
    let old = fleet.iter().enumerate().filter(|(_, (pod, _, _))| pod.host <= base + WORKERS as u16);
    let busiest = old.max_by(|(_, (_, one, _)), (_, (_, other, _))| load(one).total_cmp(&load(other)));
    busiest.expect("one is left").0
}

/// Replaces each pod. Every other one gets its signal before its endpoint says so: nothing orders the two.
async fn roll(
    run: &Run,
    cluster: &Cluster,
    base: u16,
    fleet: &mut Vec<(Pod, FakeEngine, usize)>,
    router: &TestRouter,
) {
    until("the fleet to be at work", async || {
        router.metric("warmroute_requests_in_flight").await >= WORKERS as f64
    })
    .await;
    for at in 0..WORKERS {
        let surge = pod(base + 100 + at as u16);
        let new = cluster.engine(surge.host).await;
        let life = run.begin(&new);
        let listed = |fleet: &[(Pod, FakeEngine, usize)], more: &[Pod]| -> Vec<Pod> {
            fleet.iter().map(|(pod, _, _)| *pod).chain(more.iter().copied()).collect()
        };
        cluster.put("slice", &listed(fleet, &[surge.not_ready()])).await;
        cluster.put("slice", &listed(fleet, &[surge])).await;
        is_in_state(router, cluster.place(surge.host), "up").await;

        let (old, mut engine, old_life) = fleet.remove(next(fleet, router, base).await);
        run.ended.lock().insert(old_life);
        if at % 2 == 0 {
            engine.terminate().await;
            cluster.put("slice", &listed(fleet, &[surge, old.leaving()])).await;
        } else {
            cluster.put("slice", &listed(fleet, &[surge, old.leaving()])).await;
            engine.terminate().await;
        }
        engine.ended().await;
        cluster.put("slice", &listed(fleet, &[surge])).await;
        fleet.push((surge, new, life));
        is_gone(router, cluster.place(old.host)).await;
        run.outlast().await;
    }
}

async fn begin(run: &Run, cluster: &Cluster, base: u16) -> Vec<(Pod, FakeEngine, usize)> {
    let mut fleet = Vec::new();
    for at in 1..=WORKERS as u16 {
        let engine = cluster.engine(base + at).await;
        let life = run.begin(&engine);
        fleet.push((pod(base + at), engine, life));
    }
    cluster.put("slice", &fleet.iter().map(|(pod, _, _)| *pod).collect::<Vec<_>>()).await;
    fleet
}

/// Lets clients ask while `meanwhile` runs, and tells how many answers, streams and broken streams there were. A client that was let down
/// panics, and that with it.
async fn under_load(
    run: &Arc<Run>,
    router: &Arc<TestRouter>,
    meanwhile: impl Future<Output = ()>,
) -> [usize; 3] {
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let (run, router) = (run.clone(), router.clone());
        clients.spawn(async move { run.client(client, &router).await });
    }
    meanwhile.await;
    run.over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.expect("every client gets what it is due");
    }
    let counts = [&run.answered, &run.streamed, &run.broken].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(counts.iter().sum::<usize>(), run.asked.load(Ordering::Relaxed), "each has one outcome");
    counts
}

async fn router(cluster: &Cluster, base: u16) -> Arc<TestRouter> {
    let mut config = cluster.config();
    config.health.interval = Some(Duration::from_millis(50));
    let router = TestRouter::start_unready(config, None).await;
    for at in 1..=WORKERS as u16 {
        is_in_state(&router, cluster.place(base + at), "up").await;
    }
    Arc::new(router)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_rolled_and_nothing_is_lost_that_can_be_saved() {
    let (run, cluster, base) = (Arc::new(Run::default()), Cluster::start("roll").await, Cluster::network());
    let mut fleet = begin(&run, &cluster, base).await;
    let router = router(&cluster, base).await;
    let rolling = roll(&run, &cluster, base, &mut fleet, &router);
    let [answered, streamed, broken] = under_load(&run, &router, rolling).await;
    println!(
        "{WORKERS} pods rolled: {answered} answers, none failed; {streamed} whole streams, {broken} ended by an event after {:?} of \
         silence at most",
        *run.longest_silence.lock()
    );
    assert!(answered > 0 && streamed > 0);
}

/// For three seconds, or as many as `WARMROUTE_API_AWAY` says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_because_the_api_server_is_away() {
    let (run, mut cluster, base) =
        (Arc::new(Run::default()), Cluster::start("outage").await, Cluster::network());
    let _fleet = begin(&run, &cluster, base).await;
    let router = router(&cluster, base).await;
    let seconds =
        std::env::var("WARMROUTE_API_AWAY").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(3);
    let synced = format!(r#"warmroute_discovery_synced{{source="kubernetes:{}/vllm"}}"#, cluster.namespace);
    let counted = AtomicUsize::new(0);
    let away = async {
        cluster.stop_api().await;
        router.metric_is(&synced, 0.0).await;
        let from = run.asked.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        counted.store(run.asked.load(Ordering::Relaxed) - from, Ordering::Relaxed);
        assert_eq!(router.metric(&synced).await, 0.0, "it was away all the while");
        let back = Instant::now();
        cluster.start_api().await;
        router.metric_is(&synced, 1.0).await;
        println!("heard again {:?} after the API server was told to start", back.elapsed());
    };
    let [answered, streamed, broken] = under_load(&run, &router, away).await;
    println!(
        "API server away for {seconds} s: {} requests meanwhile; of {answered} answers and {streamed} streams none failed",
        counted.load(Ordering::Relaxed)
    );
    assert_eq!(broken, 0);
}
