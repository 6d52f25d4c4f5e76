//! Driving many requests. A closed loop keeps a fixed number of them in flight, each starting as soon as one before it has
//! ended; an open loop starts each at its time, whatever became of those before; sessions are closed loops with pauses. Where
//! a request is due at a time, how late it was started is measured too: a load generator must not be what is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::experiment::exchange::{Client, Failure, Sample};
use crate::experiment::progress::Progress;
use crate::experiment::target::Target;
use crate::experiment::workload::Arrivals;

/// One request to send.
#[derive(Clone, Debug)]
pub struct Job {
    pub path: &'static str,
    pub body: Bytes,
}

/// The requests to send, by index; `None` past the last. Made when due or a little before, so that a long run needs no memory
/// for them, and before the request's clock starts.
pub type Jobs = Arc<dyn Fn(usize) -> Option<Job> + Send + Sync>;

/// How requests are sent.
#[derive(Clone, Debug)]
pub struct Load {
    pub target: Target,
    /// Keep connections; otherwise each request opens its own.
    pub keep_alive: bool,
    /// After which a request counts as failed.
    pub timeout: Duration,
    /// Told of every request that has ended.
    pub progress: Progress,
}

/// How one request ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its place in the order of starting, or in the workload.
    pub index: usize,
    /// How much later than due it was started; `None` in a closed loop, where nothing is due at a time.
    pub late: Option<Duration>,
    pub result: Result<Sample, Failure>,
}

/// All requests of a load, in the order of their indices.
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
    /// Sends `jobs` as `arrivals` say; of a closed loop, without its warm-up.
    pub async fn play(&self, jobs: Jobs, arrivals: &Arrivals) -> Finished {
        match arrivals {
            Arrivals::Closed { clients, warm_up } => self.closed_loop(*clients, *warm_up, jobs).await,
            Arrivals::Open(at) => self.timed(self.open_loop(jobs, at)).await,
            Arrivals::Sessions { starts, think } => self.timed(self.sessions(jobs, starts, think)).await,
        }
    }

    /// Sends all `jobs` from the `first` on, `concurrency` at a time, in order.
    pub async fn closed_loop(&self, concurrency: usize, first: usize, jobs: Jobs) -> Finished {
        let next = Arc::new(AtomicUsize::new(first));
        let mut loops = JoinSet::new();
        for _ in 0..concurrency.max(1) {
            loops.spawn(one_loop(self.clone(), Arc::clone(&jobs), Arc::clone(&next)));
        }
        self.timed(async { loops.join_all().await.into_iter().flatten().collect() }).await
    }

    async fn timed(&self, work: impl Future<Output = Vec<Outcome>>) -> Finished {
        let started = Instant::now();
        let (mut outcomes, lags_ms) = with_lags(work).await;
        let wall = started.elapsed();
        outcomes.sort_by_key(|outcome| outcome.index);
        Finished { outcomes, wall, lags_ms }
    }

    async fn open_loop(&self, jobs: Jobs, at: &[f64]) -> Vec<Outcome> {
        let began = Instant::now();
        let idle: Arc<Mutex<Vec<Client>>> = Arc::default();
        let mut going = JoinSet::new();
        let mut outcomes = Vec::with_capacity(at.len());
        for (index, at) in at.iter().enumerate() {
            let Some(job) = jobs(index) else { break };
            let due = began + Duration::from_secs_f64(at.max(0.0));
            tokio::time::sleep_until(due.into()).await;
            let (load, idle) = (self.clone(), Arc::clone(&idle));
            going.spawn(async move {
                let client = idle.lock().pop();
                let mut client = client.unwrap_or_else(|| load.client());
                let outcome = load.one(&mut client, index, job, Some(due)).await;
                idle.lock().push(client);
                outcome
            });
            while let Some(Ok(outcome)) = going.try_join_next() {
                outcomes.push(outcome);
            }
        }
        outcomes.extend(going.join_all().await);
        outcomes
    }

    async fn sessions(&self, jobs: Jobs, starts: &[(f64, u32)], think: &[Option<f64>]) -> Vec<Outcome> {
        let began = Instant::now();
        let think: Arc<[Option<f64>]> = think.into();
        let mut going = JoinSet::new();
        for &(at, first) in starts {
            let due = began + Duration::from_secs_f64(at.max(0.0));
            going.spawn(one_session(
                self.clone(),
                Arc::clone(&jobs),
                Arc::clone(&think),
                first as usize,
                due,
            ));
        }
        going.join_all().await.into_iter().flatten().collect()
    }

    fn client(&self) -> Client {
        Client::new(self.target.clone(), self.keep_alive, self.timeout)
    }

    async fn one(&self, client: &mut Client, index: usize, job: Job, due: Option<Instant>) -> Outcome {
        let late = due.map(|due| due.elapsed());
        let result = client.send(job.path, job.body).await;
        self.progress.inc(1);
        Outcome { index, late, result }
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
    let mut client = load.client();
    let mut outcomes = Vec::new();
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs(index) else { return outcomes };
        outcomes.push(load.one(&mut client, index, job, None).await);
    }
}

/// A session from its `first` request on: each of its turns follows the answer before it, after its time to think.
async fn one_session(
    load: Load,
    jobs: Jobs,
    think: Arc<[Option<f64>]>,
    first: usize,
    start: Instant,
) -> Vec<Outcome> {
    let mut client = load.client();
    let mut outcomes = Vec::new();
    let (mut index, mut due) = (first, start);
    tokio::time::sleep_until(start.into()).await;
    while let Some(job) = jobs(index) {
        tokio::time::sleep_until(due.into()).await;
        outcomes.push(load.one(&mut client, index, job, Some(due)).await);
        index += 1;
        let Some(pause) = think.get(index).copied().flatten() else { break };
        due = Instant::now() + Duration::from_secs_f64(pause.max(0.0));
    }
    outcomes
}
