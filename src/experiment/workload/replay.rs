//! Workloads replayed from traces.
//!
//! In virtual time ([`Trace::replay`]), open loop (times and prompts as recorded): time is stretched so that the prefill work
//! without any cache is `load` of the fleet's capacity. Sessions (closed loop): think times are cut at 60 s, and as many
//! sessions start, at random over the same time, as keeps their number a worker: each copy of a session is a session of its
//! own. Over HTTP ([`Trace::paced`]) the trace is sent once through, at the [`Pace`] that is asked for.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::schema::{self, Reading, Times};
use super::shared::poisson;
use super::{Arrivals, Blocks, Request, Workload};
use crate::experiment::trace::{self, RateRow, TraceError};

/// Seconds over which sessions start, and the workers for which the trace's sessions are enough.
const SESSION_STARTS: f64 = 720.0;
const SESSION_WORKERS: usize = 8;
/// Requests that a text trace has at least, by copies of its sessions, for every eight workers.
const TEXT_REQUESTS: usize = 2400;
/// Requests in flight for each worker where a file has no times.
const CLIENTS_A_WORKER: usize = 2;
/// Mean seconds between starts of sessions that do not tell theirs, as in the session trace.
const SESSION_GAP: f64 = 10.0;
/// Mooncake's real trace has its times on a grid of so many milliseconds.
const GRID_MS: f64 = 3000.0;

/// The traces that can be replayed.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, clap::ValueEnum)]
pub enum TraceName {
    /// Mooncake, production chat.
    Conversation,
    /// Mooncake, made from public data sets.
    Synthetic,
    /// Coding-agent sessions that share nothing.
    Sessions,
    /// The same; sessions with equal model and tools share the head of their prompts.
    SessionsShared,
    /// mini-swe-agent runs.
    Miniswe,
    /// Magentic-style multi-agent runs.
    Magagent,
    /// Azure code completion: sizes only, nothing shared.
    AzureCode,
    /// Azure chat: sizes only, nothing shared.
    AzureChat,
}

impl TraceName {
    fn file(self) -> &'static str {
        match self {
            TraceName::Conversation => "mooncake_conversation_h1",
            TraceName::Synthetic => "mooncake_synthetic_h1",
            TraceName::Sessions | TraceName::SessionsShared => "claude_code_sessions_a",
            TraceName::Miniswe => "lmcache_miniswe_text",
            TraceName::Magagent => "lmcache_magagent_text_a",
            TraceName::AzureCode => "azure2023_code_h1",
            TraceName::AzureChat => "azure2023_conv_h1",
        }
    }

    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            TraceName::Conversation => "conversation",
            TraceName::Synthetic => "synthetic",
            TraceName::Sessions => "sessions",
            TraceName::SessionsShared => "sessions-shared",
            TraceName::Miniswe => "miniswe",
            TraceName::Magagent => "magagent",
            TraceName::AzureCode => "azure-code",
            TraceName::AzureChat => "azure-chat",
        }
    }

    /// Whether time is scaled to a load: not where the trace has sessions that say when they start.
    pub fn scales(self) -> bool {
        !matches!(self, TraceName::Sessions | TraceName::SessionsShared)
    }

    /// Blocks that tell the trace's families of prompts apart (one block is shared by all of `Conversation`).
    pub(super) fn key_blocks(self) -> usize {
        match self {
            TraceName::Conversation | TraceName::Synthetic => 3,
            TraceName::Sessions => 1,
            TraceName::SessionsShared => 32,
            TraceName::Miniswe | TraceName::Magagent => 16,
            TraceName::AzureCode | TraceName::AzureChat => 1,
        }
    }
}

/// Where the traces are.
#[derive(Clone, Debug)]
pub struct TraceDir {
    pub path: PathBuf,
    /// Only so many rows of each, if given.
    pub rows: Option<usize>,
}

impl TraceDir {
    /// All rows of the traces in the directory `path`.
    pub fn new(path: impl Into<PathBuf>) -> TraceDir {
        TraceDir { path: path.into(), rows: None }
    }

    /// `NAME.jsonl.gz`, else `NAME.jsonl`.
    fn path(&self, file: &str) -> PathBuf {
        let plain = self.path.join(format!("{file}.jsonl"));
        if plain.exists() { plain } else { self.path.join(format!("{file}.jsonl.gz")) }
    }

    /// Reads one trace.
    pub fn load(&self, name: TraceName) -> Result<Trace, TraceError> {
        let reading = Reading {
            rows: self.rows,
            joined_sessions: true,
            shared_heads: name == TraceName::SessionsShared,
            texts: false,
        };
        let trace = schema::load(&self.path(name.file()), &reading)?;
        Ok(Trace { key_blocks: name.key_blocks(), ..trace })
    }

    /// The request rates of each production model's clients.
    pub fn client_rates(&self) -> Result<HashMap<String, Vec<f64>>, TraceError> {
        client_rates(&self.path("servegen_client_rates"))
    }
}

/// The request rates of the clients of each model of the table at `path`, highest first.
pub fn client_rates(path: &Path) -> Result<HashMap<String, Vec<f64>>, TraceError> {
    let mut models: HashMap<String, Vec<f64>> = HashMap::new();
    for row in trace::read::<RateRow>(path)? {
        models.entry(row.model).or_default().push(row.mean_rps);
    }
    models.values_mut().for_each(|rates| rates.sort_by(|a, b| b.total_cmp(a)));
    Ok(models)
}

/// A trace in memory, ready to be replayed on fleets of any size.
#[derive(Clone, Debug)]
pub struct Trace {
    pub block_tokens: u32,
    pub requests: Arc<[Request]>,
    pub times: Times,
    /// Blocks that tell the trace's families of prompts apart.
    pub key_blocks: usize,
}

/// How fast a trace is sent.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Pace {
    /// So many times as fast as recorded, think times included.
    Speed(f64),
    /// Recorded times, stretched so that the prompts' prefill without any cache is `load` of what `prompt_tokens_per_s` can do.
    Load { load: f64, prompt_tokens_per_s: f64 },
    /// Poisson arrivals, so many requests a second, whatever was recorded.
    Rate(f64),
    /// So many requests in flight, whatever was recorded.
    Closed(usize),
}

impl Trace {
    fn workload(&self, requests: Arc<[Request]>, arrivals: Arrivals, load: Option<f64>) -> Workload {
        let (block_tokens, key_blocks) = (self.block_tokens, self.key_blocks);
        Workload { block_tokens, requests, arrivals, uncounted: 0, key_blocks, load }
    }

    /// The trace once through at `pace`; `seed` draws Poisson arrivals, and starts of sessions where none are recorded.
    ///
    /// # Errors
    /// In words, if the trace does not have what `pace` needs.
    pub fn paced(&self, pace: Pace, seed: u64) -> Result<Workload, String> {
        let mut random = StdRng::seed_from_u64(seed);
        let made = |arrivals, load| Ok(self.workload(self.requests.clone(), arrivals, load));
        let all = self.requests.len();
        match (&self.times, pace) {
            (Times::Recorded(times), Pace::Speed(_) | Pace::Load { .. }) => {
                let span = (times[all - 1] - times[0]) / 1e3;
                let (scale, load) = match pace {
                    Pace::Load { load, prompt_tokens_per_s } => {
                        (self.seconds_of_work(prompt_tokens_per_s * load) / span.max(1e-3), Some(load))
                    }
                    Pace::Speed(speed) => (1.0 / speed, None),
                    Pace::Rate(_) | Pace::Closed(_) => (1.0, None),
                };
                made(Arrivals::Open(times.iter().map(|at| (at - times[0]) / 1e3 * scale).collect()), load)
            }
            (Times::Think { think, starts_ms }, Pace::Speed(speed)) => {
                let firsts: Vec<u32> = (0..all as u32).filter(|&i| think[i as usize].is_none()).collect();
                let at = match starts_ms {
                    Some(starts) => starts.iter().map(|at| at / 1e3).collect(),
                    None => poisson(firsts.len(), SESSION_GAP, &mut random),
                };
                let first = at.iter().copied().fold(f64::INFINITY, f64::min);
                let mut starts: Vec<(f64, u32)> =
                    at.iter().map(|at| (at - first) / speed).zip(firsts).collect();
                starts.sort_by(|a, b| a.0.total_cmp(&b.0));
                let think = think.iter().map(|pause| pause.map(|pause| pause / speed)).collect();
                made(Arrivals::Sessions { starts, think }, None)
            }
            (Times::Think { .. }, _) => Err(
                "sessions go at their own pace, each turn after the answer before it: only --speed applies"
                    .into(),
            ),
            (_, Pace::Rate(rate)) => made(Arrivals::Open(poisson(all, 1.0 / rate, &mut random)), None),
            (_, Pace::Closed(clients)) => made(Arrivals::Closed { clients, warm_up: 0 }, None),
            (Times::Unknown, _) => Err("the file has no times: give a --rate, or a --concurrency".into()),
        }
    }

    /// How long `prompt_tokens_per_s` takes for all prompts without a cache, in seconds.
    fn seconds_of_work(&self, prompt_tokens_per_s: f64) -> f64 {
        let tokens: f64 = self.requests.iter().map(|request| f64::from(request.prompt_tokens)).sum();
        tokens / prompt_tokens_per_s
    }

    /// Replays on `workers` that can prefill `capacity` tokens a second together. `spread`: arrivals on the recorded
    /// 3-second grid are spread at random over their 3 seconds.
    pub fn replay(&self, workers: usize, capacity: f64, load: f64, spread: bool, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let made = |requests, arrivals, load| self.workload(requests, arrivals, load);
        match &self.times {
            Times::Recorded(times) => {
                let mut times = times.clone();
                if spread {
                    times.iter_mut().for_each(|at| *at += random.random::<f64>() * GRID_MS);
                }
                let order = order_of(&times);
                let span = times[order[order.len() - 1]] - times[order[0]];
                let workload = made(self.requests.clone(), Arrivals::Open(Vec::new()), Some(load));
                let wanted = workload.prompt_tokens() as f64 / (capacity * load);
                let stretch = if span > 0.0 { wanted / span } else { 0.0 };
                let at = order.iter().map(|&i| (times[i] - times[order[0]]) * stretch).collect();
                let requests = order.iter().map(|&i| self.requests[i].clone()).collect();
                Workload { requests, arrivals: Arrivals::Open(at), ..workload }
            }
            Times::Unknown => {
                let clients = workers * CLIENTS_A_WORKER;
                made(self.requests.clone(), Arrivals::Closed { clients, warm_up: 0 }, None)
            }
            Times::Think { think, starts_ms } => {
                let (requests, think, firsts) = self.copies(think, workers);
                let tokens: f64 = requests.iter().map(|request| f64::from(request.prompt_tokens)).sum();
                // The session trace says how its sessions start; the text traces do not, and are scaled to the load.
                let text = starts_ms.is_none();
                let over = if text { tokens / (capacity * load) } else { SESSION_STARTS };
                let starts = session_starts(firsts, over, &mut random);
                made(requests, Arrivals::Sessions { starts, think }, text.then_some(load))
            }
        }
    }

    /// The sessions, as often as `workers` ask for: requests, think times and each session's first request.
    fn copies(&self, think: &[Option<f64>], workers: usize) -> (Arc<[Request]>, Vec<Option<f64>>, Vec<u32>) {
        let firsts = || (0..think.len()).filter(|&i| think[i].is_none());
        let sessions = firsts().count();
        let enough = match self.block_tokens {
            schema::TEXT_BLOCK_TOKENS => TEXT_REQUESTS.div_ceil(self.requests.len()) * sessions,
            _ => sessions,
        };
        let wanted = (enough * workers / SESSION_WORKERS).max(enough);
        let bounds: Vec<usize> = firsts().chain([think.len()]).collect();
        let (mut requests, mut pauses, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..wanted {
            let (copy, session) = ((number / sessions) as u64, number % sessions);
            let rows = bounds[session]..bounds[session + 1];
            starts.push(requests.len() as u32);
            pauses.extend_from_slice(&think[rows.clone()]);
            requests.extend(self.requests[rows].iter().map(|request| told_apart(request, copy, number)));
        }
        (requests.into(), pauses, starts)
    }
}

/// `request` in copy number `copy` of its session, which is the `session`-th in all.
fn told_apart(request: &Request, copy: u64, session: usize) -> Request {
    let mut request = Request { group: session as u32, ..request.clone() };
    if let Blocks::Chain { salt, .. } = &mut request.blocks {
        *salt = copy;
    }
    request
}

/// Start times, uniform over `over` seconds, for the sessions in random order.
fn session_starts(firsts: Vec<u32>, over: f64, random: &mut StdRng) -> Vec<(f64, u32)> {
    let mut firsts = firsts;
    firsts.shuffle(random);
    let mut starts: Vec<(f64, u32)> =
        firsts.into_iter().map(|first| (random.random::<f64>() * over, first)).collect();
    starts.sort_by(|a, b| a.0.total_cmp(&b.0));
    starts
}

fn order_of(times: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..times.len()).collect();
    order.sort_by(|&a, &b| times[a].total_cmp(&times[b]));
    order
}
