//! What to run: a workload on a fleet with a seed, judged by several policies on exactly the same requests; and running many
//! such jobs on all cores.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use serde::Serialize;

use super::fleet::FleetSpec;
use super::policy::{PlannerSetup, PolicyName};
use super::run::run;
use super::stats::Figures;
use crate::experiment::workload::Workload;
use crate::experiment::workload::chats::Chats;
use crate::experiment::workload::popularity::Popularity;
use crate::experiment::workload::replay::{Trace, TraceDir, TraceName};
use crate::experiment::workload::shared::{Groups, Hot, Service, Shape};

/// A workload by kind and parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    Service(Service),
    Hot(Hot),
    Groups(Groups),
    /// Conversations that begin as often as makes the prefill work without any cache `load` of the capacity.
    Chats {
        chats: Chats,
        load: f64,
    },
    /// A prefix for each client of a production model, asked for as often as that client asks, else like `Hot`.
    Tenants {
        model: &'static str,
        load: f64,
        requests: usize,
    },
    /// The file that the library has.
    File {
        load: f64,
        spread: bool,
    },
    /// `spread`: arrivals on a recorded 3-second grid are spread over it.
    Trace {
        name: TraceName,
        load: f64,
        spread: bool,
    },
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recipe::Service(Service { shape, prefixes, clients, popularity, .. }) => {
                write!(f, "service {shape} p={prefixes} c={clients}")?;
                let uniform = popularity == &Popularity::Uniform;
                if uniform { Ok(()) } else { write!(f, " {popularity}") }
            }
            Recipe::Hot(Hot { shape, prefixes, popularity, .. }) => {
                write!(f, "hot {shape} p={prefixes} {popularity}")
            }
            Recipe::Groups(Groups { global, group, clients, .. }) => {
                write!(f, "groups {global}+{group} c={clients}")
            }
            Recipe::Chats { chats, .. } => write!(f, "{chats}"),
            Recipe::Tenants { model, .. } => write!(f, "tenants {model}"),
            Recipe::File { .. } => write!(f, "file"),
            Recipe::Trace { name, spread, .. } => {
                write!(f, "{}", name.as_str())?;
                if *spread { write!(f, " spread") } else { Ok(()) }
            }
        }
    }
}

/// One workload on one fleet with one seed, and who is judged on it.
#[derive(Clone, Debug)]
pub struct Job {
    pub recipe: Recipe,
    pub fleet: FleetSpec,
    pub seed: u64,
    pub contestants: Vec<Contestant>,
}

/// A policy and what its planner is told; `label` names what is unusual about the latter.
#[derive(Clone, Debug)]
pub struct Contestant {
    pub policy: PolicyName,
    pub setup: PlannerSetup,
    pub label: &'static str,
}

impl From<PolicyName> for Contestant {
    fn from(policy: PolicyName) -> Contestant {
        Contestant { policy, setup: PlannerSetup::default(), label: "" }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = if self.label.is_empty() { "" } else { " " };
        write!(f, "{}{space}{}", self.policy, self.label)
    }
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub workload: String,
    pub policy: String,
    pub workers: usize,
    pub capacity_tokens: u64,
    /// Prefill work without any cache over capacity; absent for closed loops.
    pub load: Option<f64>,
    pub seed: u64,
    #[serde(flatten)]
    pub figures: Figures,
}

/// The traces that some jobs need, read once.
#[derive(Debug, Default)]
pub struct Library {
    traces: HashMap<TraceName, Trace>,
    /// What [`Recipe::File`] replays.
    pub file: Option<Trace>,
    /// Request rates of the clients of each production model.
    rates: HashMap<String, Vec<f64>>,
}

impl Library {
    /// Reads what `jobs` ask for from `directory`.
    pub fn load(jobs: &[Job], directory: &TraceDir) -> anyhow::Result<Library> {
        let mut library = Library::default();
        for job in jobs {
            match job.recipe {
                Recipe::Trace { name, .. } if !library.traces.contains_key(&name) => {
                    library.traces.insert(name, directory.load(name)?);
                }
                Recipe::Tenants { .. } if library.rates.is_empty() => {
                    library.rates = directory.client_rates()?;
                }
                _ => {}
            }
        }
        Ok(library)
    }
}

impl Job {
    pub fn workload(&self, library: &Library) -> anyhow::Result<Workload> {
        let capacity = self.fleet.prefill_capacity();
        match &self.recipe {
            Recipe::Service(service) => Ok(service.make(self.seed)),
            Recipe::Hot(hot) => Ok(hot.make(capacity, self.seed)),
            Recipe::Groups(groups) => Ok(groups.make(self.seed)),
            Recipe::Chats { chats, load } => {
                let starts_per_s = capacity * load / chats.mean_tokens();
                Ok(Workload { load: Some(*load), ..chats.make(starts_per_s, self.seed) })
            }
            Recipe::Tenants { model, load, requests } => {
                let rates =
                    library.rates.get(*model).with_context(|| format!("no client rates of {model}"))?;
                let (prefixes, popularity) =
                    (rates.len() as u32, Popularity::Weights((*model).to_owned(), rates.clone()));
                let (load, requests) = (*load, *requests);
                let hot = Hot { shape: Shape::SERVICE, prefixes, popularity, load, requests };
                Ok(hot.make(capacity, self.seed))
            }
            Recipe::File { load, spread } => {
                let trace = library.file.as_ref().context("the file was not loaded")?;
                Ok(trace.replay(self.fleet.workers, capacity, *load, *spread, self.seed))
            }
            Recipe::Trace { name, load, spread } => {
                let trace = library.traces.get(name).context("the trace was not loaded")?;
                Ok(trace.replay(self.fleet.workers, capacity, *load, *spread, self.seed))
            }
        }
    }

    fn run(&self, library: &Library, served: &dyn Fn(u64)) -> anyhow::Result<Vec<Row>> {
        let workload = self.workload(library)?;
        let ceiling = workload.ceiling();
        let mut rows = Vec::with_capacity(self.contestants.len());
        for contestant in &self.contestants {
            let outcome = run(&workload, &self.fleet, contestant.policy, &contestant.setup, self.seed)?;
            served(workload.requests.len() as u64);
            rows.push(Row {
                workload: self.recipe.to_string(),
                policy: contestant.to_string(),
                workers: self.fleet.workers,
                capacity_tokens: self.fleet.capacity_tokens,
                load: workload.load,
                seed: self.seed,
                figures: outcome.figures(ceiling),
            });
        }
        Ok(rows)
    }
}

/// Runs all jobs on `threads` threads; rows come in the order of the jobs. `served` hears of the requests of every run.
pub fn run_all(
    jobs: &[Job],
    library: &Library,
    threads: usize,
    served: &(dyn Fn(u64) + Sync),
) -> anyhow::Result<Vec<Row>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<anyhow::Result<Vec<Row>>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some((i, job)) = take(&next, jobs) {
                    let rows = job.run(library, served).with_context(|| job.recipe.to_string());
                    let mut done = done.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    done[i] = Some(rows);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut rows = Vec::new();
    for result in done.into_iter().flatten() {
        rows.extend(result?);
    }
    Ok(rows)
}

fn take<'a>(next: &AtomicUsize, jobs: &'a [Job]) -> Option<(usize, &'a Job)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(i).map(|job| (i, job))
}
