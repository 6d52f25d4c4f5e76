//! What `bench play` plays: workloads with their names, one for each point of a report.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::experiment::play::{self, PlayArgs};
use crate::experiment::workload::Workload;
use crate::experiment::workload::chats::Chats;
use crate::experiment::workload::made::Kind;
use crate::experiment::workload::popularity::Popularity;
use crate::experiment::workload::replay::{Pace, Trace, client_rates};
use crate::experiment::workload::schema::{self, Reading, Times};
use crate::experiment::workload::shared::{Groups, Hot, Service, WarmUp};

/// Requests in flight where a file has no times and nothing else is asked for.
const USUAL_CLIENTS: usize = 8;
/// Requests of an open loop, and conversations, where their number is not given.
const USUAL_REQUESTS: usize = 1000;
const USUAL_CHATS: u32 = 40;

/// One point.
#[derive(Clone, Debug)]
pub struct Scene {
    pub label: String,
    /// Shared prefixes, groups or conversations; 0 where only the trace knows.
    pub prefixes: usize,
    /// Requests in flight; 0 where they come at times of their own.
    pub concurrency: usize,
    made: How,
}

#[derive(Clone, Debug)]
enum How {
    Trace {
        trace: Trace,
        pace: Pace,
    },
    Service(Service),
    /// At so many requests a second.
    Hot {
        hot: Hot,
        rate: f64,
    },
    Groups(Groups),
    /// So many begin in a second.
    Chats {
        chats: Chats,
        rate: f64,
    },
}

impl Scene {
    /// The workload of one run.
    ///
    /// # Errors
    /// If a trace does not have what its pace needs.
    pub fn make(&self, seed: u64) -> Result<Workload> {
        match &self.made {
            How::Trace { trace, pace } => {
                trace.paced(*pace, seed).map_err(|what| anyhow::anyhow!("{}: {what}", self.label))
            }
            How::Service(service) => Ok(service.make(seed)),
            // The load of a capacity that is all used by that rate.
            How::Hot { hot, rate } => {
                Ok(Workload { load: None, ..hot.make(rate * hot.shape.mean_prompt(), seed) })
            }
            How::Groups(groups) => Ok(groups.make(seed)),
            How::Chats { chats, rate } => Ok(chats.make(*rate, seed)),
        }
    }
}

/// A file that was read, and its name.
pub struct Loaded {
    name: String,
    trace: Trace,
}

/// Reads the file of requests at `path`.
///
/// # Errors
/// With the line that is bad.
pub fn load(path: &Path, args: &PlayArgs) -> Result<Loaded> {
    let reading =
        Reading { rows: args.rows, joined_sessions: false, shared_heads: args.shared_heads, texts: true };
    let name =
        path.file_name().map_or_else(|| "trace".to_owned(), |name| name.to_string_lossy().into_owned());
    let name = name.trim_end_matches(".gz").trim_end_matches(".jsonl").to_owned();
    Ok(Loaded { name, trace: schema::load(path, &reading)? })
}

/// The file at each of its paces.
///
/// # Errors
/// If the file's requests do not go at such a pace.
pub fn of_trace(args: &PlayArgs, loaded: Loaded) -> Result<Vec<Scene>> {
    let Loaded { name, trace } = loaded;
    ensure!(
        args.capacity_ratio.is_empty(),
        "--capacity-ratio is for made workloads, a trace has its prefixes"
    );
    let paces: Vec<Pace> = match (args.load, args.prefill_speed, args.speed) {
        (Some(load), Some(prompt_tokens_per_s), _) => vec![Pace::Load { load, prompt_tokens_per_s }],
        (_, _, Some(speed)) => vec![Pace::Speed(speed)],
        _ if !args.rate.is_empty() => args.rate.iter().map(|&rate| Pace::Rate(rate)).collect(),
        _ if !args.made.concurrency.is_empty() => {
            args.made.concurrency.iter().map(|&clients| Pace::Closed(clients)).collect()
        }
        _ if matches!(trace.times, Times::Unknown) => vec![Pace::Closed(USUAL_CLIENTS)],
        _ => vec![Pace::Speed(1.0)],
    };
    let rows = trace.requests.len();
    let scene = |pace: Pace| {
        let (how, concurrency) = match pace {
            Pace::Speed(speed) => (format!("{speed} x recorded speed"), 0),
            Pace::Load { load, .. } => (format!("load {load}"), 0),
            Pace::Rate(rate) => (format!("{rate} requests/s"), 0),
            Pace::Closed(clients) => (format!("{clients} in flight"), clients),
        };
        let label = format!("{name}, {rows} rows, {how}");
        Scene { label, prefixes: 0, concurrency, made: How::Trace { trace: trace.clone(), pace } }
    };
    Ok(paces.into_iter().map(scene).collect())
}

/// The made workloads that the arguments ask for; `worker_tokens` is the KV cache of a worker, if known.
///
/// # Errors
/// With the flag that is missing.
pub fn made(args: &PlayArgs, worker_tokens: Option<u64>) -> Result<Vec<Scene>> {
    let kind = play::kind(args)?;
    ensure!(
        args.speed.is_none(),
        "--speed is for traces; --rate and --concurrency set the pace of made workloads"
    );
    let (made, shape) = (&args.made, args.made.shape());
    let (prefixes, popularity) = match &args.clients {
        Some(clients) => clients_of(clients)?,
        None => (prefixes(args, worker_tokens)?, made.popularity.clone()),
    };
    match kind {
        Kind::Service => {
            ensure!(
                args.rate.is_empty() && args.load.is_none(),
                "service is a closed loop: --concurrency; hot takes a --rate"
            );
            let scene = |(count, ratio): Prefixes, clients: usize| {
                let service = Service {
                    shape,
                    prefixes: count,
                    clients,
                    requests: made.requests.unwrap_or((20 * count as usize).max(200)),
                    warm_up: WarmUp::EachPrefix,
                    popularity: popularity.clone(),
                };
                let label = format!("service {shape} {popularity}{}", told(ratio));
                Scene { label, prefixes: count as usize, concurrency: clients, made: How::Service(service) }
            };
            Ok(each(&prefixes, made.concurrencies(), scene))
        }
        Kind::Hot => {
            let rates = rates(args, shape.mean_prompt())?;
            let scene = |(count, ratio): Prefixes, rate: f64| {
                let hot = Hot {
                    shape,
                    prefixes: count,
                    popularity: popularity.clone(),
                    load: 1.0,
                    requests: made.requests.unwrap_or(USUAL_REQUESTS),
                };
                let label = format!("hot {shape} {popularity}{}, {rate} requests/s", told(ratio));
                Scene { label, prefixes: count as usize, concurrency: 0, made: How::Hot { hot, rate } }
            };
            Ok(each(&prefixes, &rates, scene))
        }
        Kind::Chats => {
            let chats = made.chats(USUAL_CHATS);
            let scene = |rate: f64| Scene {
                label: format!("{chats}, {rate} begin a second"),
                prefixes: chats.conversations as usize,
                concurrency: 0,
                made: How::Chats { chats, rate },
            };
            Ok(rates(args, chats.mean_tokens())?.into_iter().map(scene).collect())
        }
        Kind::Groups { global, group } => {
            let scene = |&clients: &usize| {
                let groups = Groups { global, group, groups: 16, requests_each: 20, clients };
                let label = format!("groups {global}+{group}");
                Scene { label, prefixes: 16, concurrency: clients, made: How::Groups(groups) }
            };
            Ok(made.concurrencies().iter().map(scene).collect())
        }
        Kind::Trace(_) => Ok(Vec::new()),
    }
}

/// How many prefixes, and the ratio that asked for them.
type Prefixes = (u32, Option<f64>);

fn prefixes(args: &PlayArgs, worker_tokens: Option<u64>) -> Result<Vec<Prefixes>> {
    if args.capacity_ratio.is_empty() {
        return Ok(args.made.prefixes.iter().map(|&count| (count, None)).collect());
    }
    let holds = worker_tokens
        .context("--capacity-ratio needs to know the KV cache of a worker: name the engines by --metrics")?;
    let prefix = args.made.prefix_tokens.max(1);
    let count = |ratio: f64| ((ratio * holds as f64 / f64::from(prefix)).round() as u32).max(1);
    Ok(args.capacity_ratio.iter().map(|&ratio| (count(ratio), Some(ratio))).collect())
}

/// As many prefixes as a model has clients, and how often each is asked for.
fn clients_of(clients: &str) -> Result<(Vec<Prefixes>, Popularity)> {
    let (file, model) =
        clients.rsplit_once(':').with_context(|| format!("--clients {clients}: FILE:MODEL is needed"))?;
    let mut models = client_rates(Path::new(file))?;
    let mut names: Vec<&str> = models.keys().map(String::as_str).collect();
    names.sort_unstable();
    let names = names.join(", ");
    let rates =
        models.remove(model).with_context(|| format!("{file} has no model `{model}`, but {names}"))?;
    Ok((vec![(rates.len() as u32, None)], Popularity::Weights(format!("clients of {model}"), rates)))
}

/// Of an open loop, in units of `tokens` prompt tokens.
fn rates(args: &PlayArgs, tokens: f64) -> Result<Vec<f64>> {
    match (args.load, args.prefill_speed) {
        (Some(load), Some(speed)) => Ok(vec![load * speed / tokens]),
        _ => {
            ensure!(!args.rate.is_empty(), "an open loop needs a --rate, or a --load with --prefill-speed");
            Ok(args.rate.clone())
        }
    }
}

fn told(ratio: Option<f64>) -> String {
    ratio.map_or_else(String::new, |ratio| format!(", {ratio} x a worker's cache"))
}

fn each<A: Copy, B: Copy>(a: &[A], b: &[B], scene: impl Fn(A, B) -> Scene) -> Vec<Scene> {
    b.iter().flat_map(|&b| a.iter().map(move |&a| (a, b))).map(|(a, b)| scene(a, b)).collect()
}
