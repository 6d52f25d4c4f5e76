//! Finds the workers: follows each source that the config names, and tells the fleet whom it lists. A source always tells its
//! whole list, so whatever was missed before is made up for by the next one. One that cannot be asked changes nothing: the last
//! known workers stay, the log and `warmroute_discovery_synced` say so, and the fleet's own probes see who of them is gone.

pub mod dns;
pub mod endpoints;
pub mod kubernetes;
mod voice;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::Fleet;
use super::roster::{Member, Source};
use crate::config;
use crate::metrics::{Label, Metrics, SourceMetrics, Trouble};

/// Between two tries, at first and at most. A cluster's API server is away for seconds or for minutes.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Whether all sources can be asked, as far as files and environment tell: at the start, and when an edit brings others.
///
/// # Errors
/// Says what is missing, and for which key.
pub fn check(workers: &config::Workers) -> Result<(), String> {
    kubernetes::check(workers).map_err(|why| format!("workers.kubernetes: {why}"))
}

/// Follows the sources for as long as it is polled; takes up edits of them.
pub async fn run(fleet: Arc<Fleet>, metrics: Arc<Metrics>) {
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
                running.push((source, tasks.spawn(follow(ear))));
            }
        }
        if sources.changed().await.is_err() {
            return;
        }
    }
}

async fn follow(ear: Ear) {
    match ear.source.clone() {
        Source::Kubernetes(source, api) => kubernetes::follow(ear, source, api).await,
        Source::Dns(source) => dns::follow(ear, source).await,
    }
}

/// Why a source could not be heard.
#[derive(Debug)]
struct Failure {
    trouble: Trouble,
    /// On one line, whatever others' words in it had.
    why: String,
    /// What was answered, in numbers, where an answer came.
    status: Option<u16>,
}

impl Failure {
    fn new(trouble: Trouble, why: impl ToString) -> Failure {
        let why = why.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        Failure { trouble, why, status: None }
    }
}

/// What is heard of one source, on its way to the fleet, the metrics and the log.
struct Ear {
    source: Source,
    fleet: Arc<Fleet>,
    metrics: SourceMetrics,
    voice: voice::Voice,
    /// The last list had a fault.
    faulty: bool,
    /// It could not be asked, and has not been well since.
    failing: bool,
    /// How many it has told of; `None` where it has told nothing yet.
    workers: Option<usize>,
    pause: Duration,
}

impl Ear {
    fn new(source: Source, fleet: &Arc<Fleet>, metrics: &Metrics) -> Ear {
        Ear {
            metrics: metrics.source(&source.to_string()),
            source,
            fleet: fleet.clone(),
            voice: voice::Voice::default(),
            faulty: false,
            failing: false,
            workers: None,
            pause: FIRST_PAUSE,
        }
    }

    /// The source lists these, and `fault` is what is wrong with others.
    fn heard(&mut self, members: Vec<Member>, fault: Option<Failure>) {
        self.workers = Some(members.len());
        self.metrics.updates.inc();
        self.metrics.workers.set(i64::try_from(members.len()).unwrap_or(i64::MAX));
        self.fleet.found(&self.source, members, fault.as_ref().map(|fault| &*fault.why));
        self.faulty = fault.is_some();
        match fault {
            Some(fault) => self.tell(&fault, "uses what it can of what the source lists"),
            None => self.well(),
        }
    }

    fn failed(&mut self, failure: &Failure) {
        self.failing = true;
        self.fleet.told_nothing(&self.source, &failure.why);
        self.tell(
            failure,
            match self.workers {
                Some(_) => "goes on with the last known workers",
                None => "has not told of any worker yet",
            },
        );
    }

    /// A fault, and what becomes of the workers with it.
    fn tell(&mut self, failure: &Failure, then: &str) {
        self.metrics.failed(failure.trouble);
        self.metrics.synced.set(0);
        let Some(so) = self.voice.failed(failure.trouble, Instant::now()) else { return };
        let (source, reason, workers) =
            (&self.source, failure.trouble.as_str(), self.workers.unwrap_or_default());
        if so.often == 1 {
            tracing::warn!(%source, reason, workers, "{then}: {}", failure.why);
        } else {
            let (failures, seconds) = (so.often, so.far.as_secs());
            tracing::warn!(%source, reason, workers, failures, seconds, "{then}: {}", failure.why);
        }
    }

    /// It can be asked and goes on telling, not just once: the next failure is the first one.
    fn calm(&mut self) {
        self.pause = FIRST_PAUSE;
        self.failing = false;
        self.well();
    }

    fn well(&mut self) {
        if self.faulty || self.failing {
            return;
        }
        self.metrics.synced.set(1);
        if let Some(so) = self.voice.well(Instant::now()) {
            let (failures, seconds) = (so.often, so.far.as_secs());
            let workers = self.workers.unwrap_or_default();
            tracing::info!(source = %self.source, workers, failures, seconds, "the source is heard again");
        }
    }

    /// Waits for longer each time, and not as long as others that failed with it; for as long as the source wants, in any case.
    async fn pause(&mut self, least: Duration) {
        let spread = self.pause.mul_f64(rand::random_range(0.5..1.0));
        tokio::time::sleep(least + spread).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}
