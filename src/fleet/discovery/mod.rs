//! Finds the workers: follows each source that the config names, and tells the fleet whom it lists. A source always tells its
//! whole list, so whatever was missed before is made up for by the next one. One that cannot be asked changes nothing: the last
//! known workers stay, the log and `warmroute_discovery_synced` say so, and the fleet's own probes see who of them is gone.

pub mod dns;
pub mod endpoints;
pub mod kubernetes;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};

use super::Fleet;
use super::roster::{Member, Source};
use crate::config;
use crate::metrics::{Label, Metrics, SourceMetrics, Trouble};

/// Between two tries, at first and at most. A cluster's API server is away for seconds or for minutes.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Follows the sources for as long as it is polled; takes up edits of them.
pub async fn run(fleet: Arc<Fleet>, metrics: Arc<Metrics>, api: config::KubernetesApi) {
    let mut sources = fleet.sources();
    // Dropped, it ends what runs in it.
    let mut tasks = JoinSet::new();
    let mut running: Vec<(Source, AbortHandle)> = Vec::new();
    loop {
        let wanted = sources.borrow_and_update().clone();
        running.retain(|(source, task)| {
            let kept = wanted.contains(source);
            if !kept {
                task.abort();
            }
            kept
        });
        // Waits for those that were ended: they take their series along, which one of the same name is about to show.
        while tasks.len() > running.len() && tasks.join_next().await.is_some() {}
        for source in wanted {
            if !running.iter().any(|(known, _)| *known == source) {
                let ear = Ear::new(source.clone(), &fleet, &metrics);
                running.push((source, tasks.spawn(follow(ear, api.clone()))));
            }
        }
        if sources.changed().await.is_err() {
            return;
        }
    }
}

async fn follow(ear: Ear, api: config::KubernetesApi) {
    match ear.source.clone() {
        Source::Kubernetes(source) => kubernetes::follow(ear, source, api).await,
        Source::Dns(source) => dns::follow(ear, source).await,
    }
}

/// Why a source could not be heard.
#[derive(Debug)]
struct Failure {
    trouble: Trouble,
    why: String,
}

impl Failure {
    fn new(trouble: Trouble, why: impl ToString) -> Failure {
        Failure { trouble, why: why.to_string() }
    }
}

/// What is heard of one source, on its way to the fleet, the metrics and the log.
struct Ear {
    source: Source,
    fleet: Arc<Fleet>,
    metrics: SourceMetrics,
    /// What was said of it last, so that a lasting fault is told once.
    said: Option<String>,
    workers: usize,
    pause: Duration,
}

impl Ear {
    fn new(source: Source, fleet: &Arc<Fleet>, metrics: &Metrics) -> Ear {
        let metrics = metrics.source(&source.to_string());
        Ear { source, fleet: fleet.clone(), metrics, said: None, workers: 0, pause: FIRST_PAUSE }
    }

    /// The source lists these, and `fault` is what is wrong with others.
    fn heard(&mut self, members: Vec<Member>, fault: Option<String>) {
        self.workers = members.len();
        self.metrics.updates.inc();
        self.metrics.workers.set(i64::try_from(members.len()).unwrap_or(i64::MAX));
        self.fleet.found(&self.source, members);
        match fault {
            Some(fault) => {
                self.tell(&Failure::new(Trouble::Port, fault), "uses what it can of what the source lists");
            }
            None => {
                self.metrics.synced.set(1);
                if self.said.take().is_some() {
                    tracing::info!(source = %self.source, workers = self.workers, "the source is heard again");
                }
            }
        }
    }

    fn failed(&mut self, failure: &Failure) {
        self.tell(failure, "goes on with the last known workers");
    }

    /// A fault, and what becomes of the workers with it.
    fn tell(&mut self, failure: &Failure, then: &str) {
        self.metrics.failed(failure.trouble);
        self.metrics.synced.set(0);
        self.fleet.told_nothing(&self.source);
        if self.said.as_deref() != Some(&failure.why) {
            let (reason, workers) = (failure.trouble.as_str(), self.workers);
            tracing::warn!(source = %self.source, reason, workers, "{then}: {}", failure.why);
            self.said = Some(failure.why.clone());
        }
    }

    /// All is well: the next fault is the first one.
    fn calm(&mut self) {
        self.pause = FIRST_PAUSE;
    }

    /// Waits for longer each time, and not as long as others that failed with it.
    async fn pause(&mut self) {
        let spread = self.pause.mul_f64(rand::random_range(0.5..1.0));
        tokio::time::sleep(spread).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}
