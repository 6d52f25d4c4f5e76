//! A rollout: every worker of a fleet is told to end and replaced, one after the other, while clients go on asking. Workers end as
//! vLLM does: they refuse new connections and let what runs hang, without a byte or a FIN, until everybody has left.

mod run;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use run::{CLIENTS, Run, WORKERS};
use warmroute::config::{Config, Mode, Origin, Worker};
use warmroute::testing::{FakeEngine, TestRouter, until};

fn config(engines: &[FakeEngine]) -> Config {
    let mut config = TestRouter::config(Mode::Kv, &engines.iter().collect::<Vec<_>>());
    config.health.interval = Some(Duration::from_millis(50));
    config.health.unreachable_silence = Some(Duration::from_millis(200));
    config
}

/// The requests that run on the worker at `address`, by the metrics page.
fn in_flight(page: &str, address: SocketAddr) -> f64 {
    let series = format!(r#"warmroute_worker_in_flight{{worker="{address}"}} "#);
    let value = page.lines().find_map(|line| line.strip_prefix(&series));
    value.map_or(0.0, |value| value.parse().expect("a number"))
}

/// Of the workers of this life that are `left`, the busiest: which worker serves whom is the router's affair, and it may well leave one
/// idle, but of the whole fleet some must be at work.
async fn next(left: &mut Vec<usize>, engines: &[FakeEngine], router: &TestRouter) -> usize {
    let page = router.admin("/metrics").await;
    let load = |at: usize| in_flight(&page, engines[at].address());
    let busiest = (0..left.len()).max_by(|&a, &b| load(left[a]).total_cmp(&load(left[b])));
    left.swap_remove(busiest.expect("one is left"))
}

/// Replaces each worker: every other one comes back at its address, as a StatefulSet's pod does behind its name; the others are
/// taken off the list as they are told to end, and a new one is put on it, as a Deployment's pods are.
async fn roll(run: &Run, engines: &mut [FakeEngine], lives: &mut [usize], router: &TestRouter) {
    let mut left: Vec<usize> = (0..WORKERS).collect();
    until("the fleet to be at work", async || {
        router.metric("warmroute_requests_in_flight").await >= WORKERS as f64
    })
    .await;
    while !left.is_empty() {
        let at = next(&mut left, engines, router).await;
        run.ended.lock().insert(lives[at]);
        if at % 2 == 0 {
            engines[at].terminate().await;
            engines[at].ended().await;
            lives[at] = run.begin(&engines[at]);
            engines[at].revive().await;
        } else {
            let new = FakeEngine::start().await;
            lives[at] = run.begin(&new);
            let mut list = router.proxy.config.load().as_ref().clone();
            list.workers.fixed[at] = Worker {
                url: Origin::parse(&new.url()).expect("an engine's own address"),
                capacity_tokens: None,
                prefill_speed: None,
            };
            router.proxy.reconfigure(list, None);
            let mut old = std::mem::replace(&mut engines[at], new);
            old.terminate().await;
            old.ended().await;
        }
        let up = format!(r#"warmroute_worker_state{{state="up",worker="{}"}}"#, engines[at].address());
        router.metric_is(&up, 1.0).await;
        run.outlast().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_is_rolled_worker_by_worker_and_nothing_is_lost_that_can_be_saved() {
    let run = Arc::new(Run::default());
    let (mut engines, mut lives) = (Vec::new(), Vec::new());
    for _ in 0..WORKERS {
        let engine = FakeEngine::start().await;
        lives.push(run.begin(&engine));
        engines.push(engine);
    }
    let router = Arc::new(TestRouter::start(config(&engines)).await);
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let (run, router) = (run.clone(), router.clone());
        clients.spawn(async move { run.client(client, &router).await });
    }
    roll(&run, &mut engines, &mut lives, &router).await;
    run.over.store(true, Ordering::Relaxed);
    // A client that was let down has panicked.
    while let Some(ended) = clients.join_next().await {
        ended.expect("every client gets what it is due");
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let (answered, streamed, broken) = (count(&run.answered), count(&run.streamed), count(&run.broken));
    let resent = router.metric(r#"warmroute_retries_total{cause="broken"}"#).await;
    println!(
        "{WORKERS} workers rolled: {answered} answers, {streamed} streams, {broken} streams ended by an event after {:?} of \
         silence at most, {resent} requests asked for elsewhere after their worker had taken them",
        *run.longest_silence.lock()
    );
    assert!(answered > 0 && streamed > 0 && broken > 0 && resent > 0.0);
    assert_eq!(answered + streamed + broken, count(&run.asked), "each has one outcome");
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let page = router.admin("/metrics").await;
    let workers: HashSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("warmroute_worker_in_flight{worker=\"")?.split_once('"'))
        .map(|(address, _)| address)
        .collect();
    let there: HashSet<String> = engines.iter().map(|engine| engine.address().to_string()).collect();
    assert_eq!(
        workers,
        there.iter().map(String::as_str).collect(),
        "those that left have taken their series along"
    );
}
