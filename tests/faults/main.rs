//! The fault run: random faults of workers, clients and operators over random traffic through the whole proxy, and a checker
//! of what must hold whatever happens:
//!
//! - every request has one outcome, in time: its answer byte for byte, a part of it that shows that it is one, or an error with
//!   a reason;
//! - what workers get is byte for byte what clients sent;
//! - no worker is asked again once an answer has begun, nor where that may do harm, nor the same one twice without reason;
//! - in the end nothing is left: every count is back at zero, and with all workers well, every request is answered.
//!
//! `make faults SEED=1 SECONDS=600` runs it for long; a short run is among the tests. What is asked and what befalls it follows
//! from the seed and the request's number; the interleaving does not.

mod client;
mod ledger;
mod traffic;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ledger::Ledger;
use rand::RngExt;
use warmroute::config::{Config, Draw, Mode};
use warmroute::testing::{FakeEngine, TestRouter, until};

const ENGINES: usize = 4;
const CLIENTS: usize = 32;

/// Everything small or short, so that each limit is met.
fn config(engines: &[&FakeEngine]) -> Config {
    let millis = Duration::from_millis;
    let mut config = TestRouter::config(Mode::Kv, engines);
    config.random.draw = Draw::Request;
    config.health.interval = Some(millis(50));
    config.health.timeout = millis(200);
    config.health.retry_after = millis(50);
    config.health.stalled_after = Some(millis(500));
    config.health.unreachable_silence = Some(millis(200));
    config.scrape.interval = Some(millis(200));
    config.limits.in_flight_per_worker = Some(8);
    config.limits.queue = 16;
    config.limits.body = 1 << 20;
    config.limits.bodies = 1 << 20;
    config.timeouts.queue = millis(300);
    config.timeouts.client_body = Some(millis(200));
    config.timeouts.silence = Some(millis(400));
    config.retries.ratio = 1.0;
    config
}

/// What befalls workers and the config, until told to end; then all is well again.
async fn chaos(engines: &mut [FakeEngine], router: &TestRouter, ledger: &Ledger, over: &AtomicBool) {
    let random = &mut traffic::random(ledger.seed, 0, 9);
    let all = config(&engines.iter().collect::<Vec<_>>());
    while !over.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(random.random_range(20..200))).await;
        let at = random.random_range(0..engines.len());
        match random.random_range(0..8) {
            0 | 1 => {
                ledger.trouble(at);
                engines[at].kill().await;
                tokio::time::sleep(Duration::from_millis(random.random_range(0..400))).await;
                engines[at].revive().await;
                ledger.trouble(at);
            }
            2 => {
                ledger.trouble(at);
                engines[at].stop_listening().await;
                tokio::time::sleep(Duration::from_millis(random.random_range(0..400))).await;
                engines[at].kill().await;
                engines[at].revive().await;
                ledger.trouble(at);
            }
            3 => engines[at].set_health(None),
            4 => engines[at].set_health(Some("503 Service Unavailable")),
            5 => router.proxy.set_mode(if random.random_bool(0.5) { Mode::Kv } else { Mode::Random }),
            6 => {
                let mut fewer = all.clone();
                fewer.workers.fixed.remove(at);
                router.proxy.reconfigure(fewer, None);
                (0..ENGINES).for_each(|at| ledger.probed_anew(at));
                tokio::time::sleep(Duration::from_millis(random.random_range(0..200))).await;
                router.proxy.reconfigure(all.clone(), None);
                (0..ENGINES).for_each(|at| ledger.probed_anew(at));
            }
            _ => engines.iter().for_each(|engine| engine.set_health(Some("200 OK"))),
        }
        engines.iter().for_each(FakeEngine::forget_seen);
    }
    router.proxy.reconfigure(all, Some(Mode::Kv));
    engines.iter().for_each(|engine| engine.set_health(Some("200 OK")));
}

/// Runs until `enough` is.
async fn run(seed: u64, enough: impl Fn(&Ledger) -> bool + Send + Sync + 'static) -> Arc<Ledger> {
    let mut engines = Vec::new();
    for _ in 0..ENGINES {
        engines.push(FakeEngine::start().await);
    }
    let ledger = Arc::new(Ledger::new(seed, &engines));
    for (at, engine) in engines.iter().enumerate() {
        let ledger = ledger.clone();
        engine.always(move |message| ledger.arrived(at, message));
    }
    let router = TestRouter::start(config(&engines.iter().collect::<Vec<_>>())).await;
    let (enough, over) = (Arc::new(enough), Arc::new(AtomicBool::new(false)));
    let mut clients = tokio::task::JoinSet::new();
    for at in 0..CLIENTS {
        let (ledger, enough, to) = (ledger.clone(), enough.clone(), router.clients);
        clients.spawn(async move {
            while !enough(&ledger) {
                let proceeds = || !enough(&ledger);
                if at % 4 == 0 {
                    client::http2(&ledger, to, proceeds).await;
                } else {
                    client::http1(&ledger, to, proceeds).await;
                }
            }
        });
    }
    let all_done = async {
        while let Some(ended) = clients.join_next().await {
            if ended.is_err() {
                ledger.violation("a client has waited in vain, or could not connect".to_owned());
            }
        }
        over.store(true, Ordering::Relaxed);
    };
    tokio::join!(chaos(&mut engines, &router, &ledger, &over), all_done);
    settled(&router, &ledger).await;
    ledger
}

/// Nothing is left, and all works again.
async fn settled(router: &TestRouter, ledger: &Ledger) {
    let proxy = &router.proxy;
    let usable = async || proxy.fleet.snapshot().eligible().len() == ENGINES;
    until("all workers to be usable again", usable).await;
    let metrics = &proxy.metrics;
    let open = async || {
        let counts = [&metrics.in_flight, &metrics.queued, &metrics.body_bytes, &metrics.client_connections];
        let workers = proxy.fleet.snapshot();
        counts.iter().all(|count| count.get() == 0)
            && workers.workers.iter().all(|worker| {
                let belief = proxy.planner.belief(worker.id, proxy.clock.now());
                let given = proxy.planner.given(worker.id);
                worker.metrics.in_flight.get() == 0
                    && worker.has_room(1)
                    && belief.is_some_and(|belief| belief.queue_tokens == 0.0)
                    && given.is_some_and(|given| given.open == 0 && given.prefills == 0)
            })
    };
    until("every count to be back at zero", open).await;
    for _ in 0..20 {
        let answer = router.client().await.get("/v1/models").await;
        if answer.status() != 200 {
            ledger.violation(format!("all is well, and yet: {} {}", answer.status(), answer.text()));
        }
    }
}

fn report(ledger: &Ledger) -> String {
    let mut lines = format!("seed {}: {} requests\n", ledger.seed, ledger.asked());
    for (outcome, count) in ledger.outcomes() {
        lines += &format!("{count:>9}  {outcome}\n");
    }
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_thousand_requests_under_faults() {
    let ledger = run(7, |ledger| ledger.asked() >= 2_000).await;
    assert!(ledger.violations().is_empty(), "{}{:#?}", report(&ledger), ledger.violations());
    for outcome in ["answered", "cut", "broken by an event", "502 by the proxy", "left in the answer"] {
        let met = ledger.outcomes().iter().any(|(what, _)| what == outcome);
        assert!(met, "{outcome} was not met:\n{}", report(&ledger));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "runs for minutes: make faults SEED=1 SECONDS=600"]
async fn faults_for_as_long_as_asked() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let (seed, seconds) = (number("WARMROUTE_FAULTS_SEED", 1), number("WARMROUTE_FAULTS_SECONDS", 600));
    let begun = Instant::now();
    let ledger = run(seed, move |_| begun.elapsed() >= Duration::from_secs(seconds)).await;
    let violations = ledger.violations();
    let summary = format!("{}{} violations in {seconds} s\n", report(&ledger), violations.len());
    std::io::Write::write_all(&mut std::io::stderr(), summary.as_bytes()).expect("standard error");
    assert!(violations.is_empty(), "{violations:#?}");
}
