//! Driving many requests: a closed loop keeps a fixed number of them in flight, each starting as soon as one before it has
//! ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use indicatif::ProgressBar;
use tokio::task::JoinSet;

use crate::experiment::exchange::{Client, Failure, Sample};
use crate::experiment::target::Target;

/// The bodies to send, by index; `None` past the last. Made when due, so that a long run needs no memory for them, and
/// before the request's clock starts.
pub type Jobs = Arc<dyn Fn(usize) -> Option<Bytes> + Send + Sync>;

/// How requests are sent.
#[derive(Clone, Debug)]
pub struct Load {
    pub target: Target,
    pub path: &'static str,
    /// Requests in flight at any time.
    pub concurrency: usize,
    /// Keep connections; otherwise each request opens its own.
    pub keep_alive: bool,
    /// After which a request counts as failed.
    pub timeout: Duration,
    /// Told of every request that has ended.
    pub progress: ProgressBar,
}

/// How one request ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its place in the order of starting.
    pub index: usize,
    pub result: Result<Sample, Failure>,
}

/// All requests of a load, in the order of starting.
#[derive(Debug)]
pub struct Finished {
    pub outcomes: Vec<Outcome>,
    /// From the first start to the last end.
    pub wall: Duration,
    /// How late timers of this process rang meanwhile, in milliseconds, sorted: a busy machine stamps times late, too.
    pub lags_ms: Vec<f64>,
}

/// How often a timer is set to see how late it rings.
const LAG_PROBE: Duration = Duration::from_millis(20);

impl Load {
    /// Sends all `jobs`, `concurrency` at a time, in order.
    pub async fn closed_loop(&self, jobs: Jobs) -> Finished {
        let started = Instant::now();
        let next = Arc::new(AtomicUsize::new(0));
        let mut loops = JoinSet::new();
        for _ in 0..self.concurrency.max(1) {
            loops.spawn(one_loop(self.clone(), Arc::clone(&jobs), Arc::clone(&next)));
        }
        let (ended, lags_ms) = with_lags(loops.join_all()).await;
        let wall = started.elapsed();
        let mut outcomes: Vec<Outcome> = ended.into_iter().flatten().collect();
        outcomes.sort_by_key(|outcome| outcome.index);
        Finished { outcomes, wall, lags_ms }
    }
}

/// Waits for `work`, and tells how late timers rang meanwhile.
async fn with_lags<T>(work: impl Future<Output = T>) -> (T, Vec<f64>) {
    let mut lags_ms = Vec::new();
    let mut work = std::pin::pin!(work);
    loop {
        let due = Instant::now() + LAG_PROBE;
        tokio::select! {
            done = &mut work => {
                lags_ms.sort_by(f64::total_cmp);
                return (done, lags_ms);
            }
            () = tokio::time::sleep_until(due.into()) => lags_ms.push(due.elapsed().as_secs_f64() * 1e3),
        }
    }
}

async fn one_loop(load: Load, jobs: Jobs, next: Arc<AtomicUsize>) -> Vec<Outcome> {
    let mut client = Client::new(load.target, load.keep_alive, load.timeout);
    let mut outcomes = Vec::new();
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(body) = jobs(index) else { return outcomes };
        let result = client.send(load.path, body).await;
        load.progress.inc(1);
        outcomes.push(Outcome { index, result });
    }
}
