//! Workloads replayed from traces.
//!
//! Open loop (times and prompts as recorded): time is stretched so that the prefill work without any cache is `load` of the
//! fleet's capacity. Sessions (closed loop): think times are cut at 60 s, and as many sessions start, at random over the
//! same time, as keeps their number a worker: each copy of a session is a session of its own.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use smallvec::smallvec;

use super::{Arrivals, Blocks, Request, Run, Workload, chain_ids, mix};
use crate::core::ids::BlockHash;
use crate::experiment::trace::{self, BlockRow, RateRow, SessionRow, SizeRow, TextRow, TraceError};

/// Tokens of a block of the big traces.
const BIG_BLOCK: u32 = trace::MOONCAKE_BLOCK_TOKENS;
/// Ids of a session trace that make one block.
const JOINED: usize = (BIG_BLOCK / trace::SESSION_BLOCK_TOKENS) as usize;
/// A longer pause between answer and next request is cut to this, in seconds: beyond it the fleet would idle.
const THINK_LIMIT: f64 = 60.0;
/// Seconds over which sessions start, and the workers for which the trace's sessions are enough.
const SESSION_STARTS: f64 = 720.0;
const SESSION_WORKERS: usize = 8;
/// Requests that a text trace has at least, by copies of its sessions, for every eight workers.
const TEXT_REQUESTS: usize = 2400;
/// Characters of text that count as one 64-token block, and the tokens of one.
const TEXT_BLOCK_CHARS: usize = 256;
const TEXT_BLOCK_TOKENS: u32 = 64;
const CHARS_PER_TOKEN: usize = 4;
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
    fn key_blocks(self) -> usize {
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
pub struct TraceDir(pub PathBuf);

impl TraceDir {
    /// `NAME.jsonl.gz`, else `NAME.jsonl`.
    fn path(&self, file: &str) -> PathBuf {
        let plain = self.0.join(format!("{file}.jsonl"));
        if plain.exists() { plain } else { self.0.join(format!("{file}.jsonl.gz")) }
    }

    /// Reads one trace.
    pub fn load(&self, name: TraceName) -> Result<Trace, TraceError> {
        let path = self.path(name.file());
        match name {
            TraceName::Conversation | TraceName::Synthetic => Ok(blocks(name, trace::read(&path)?)),
            TraceName::Sessions | TraceName::SessionsShared => sessions(name, &path),
            TraceName::Miniswe | TraceName::Magagent => texts(name, &path),
            TraceName::AzureCode | TraceName::AzureChat => Ok(sizes(name, trace::read(&path)?)),
        }
    }

    /// The request rates of each production model's clients, highest first.
    pub fn client_rates(&self) -> Result<HashMap<String, Vec<f64>>, TraceError> {
        let mut models: HashMap<String, Vec<f64>> = HashMap::new();
        for row in trace::read::<RateRow>(&self.path("servegen_client_rates"))? {
            models.entry(row.model).or_default().push(row.mean_rps);
        }
        models.values_mut().for_each(|rates| rates.sort_by(|a, b| b.total_cmp(a)));
        Ok(models)
    }
}

/// A trace in memory, ready to be replayed on fleets of any size.
#[derive(Clone, Debug)]
pub struct Trace {
    pub name: TraceName,
    block_tokens: u32,
    requests: Arc<[Request]>,
    times: Times,
}

#[derive(Clone, Debug)]
enum Times {
    /// Milliseconds, ascending.
    Recorded(Vec<f64>),
    /// Requests of a session are neighbours; the first has no think time. In seconds.
    Think(Vec<Option<f64>>),
}

fn blocks(name: TraceName, rows: Vec<BlockRow>) -> Trace {
    let mut rows = rows;
    rows.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    let request = |row: &BlockRow| {
        let full = (row.input_length / BIG_BLOCK) as usize;
        let hashes = chain_ids(row.hash_ids[..full].iter().copied());
        Request {
            blocks: Blocks::Chain { hashes, shared: 0, salt: 0 },
            prompt_tokens: row.input_length,
            output_tokens: row.output_length.max(1),
            shared_tokens: 0,
            group: 0,
        }
    };
    Trace {
        name,
        block_tokens: BIG_BLOCK,
        requests: rows.iter().map(request).collect(),
        times: Times::Recorded(rows.iter().map(|row| row.timestamp).collect()),
    }
}

fn sizes(name: TraceName, rows: Vec<SizeRow>) -> Trace {
    let request = |(i, row): (usize, &SizeRow)| Request {
        blocks: Blocks::Runs(smallvec![Run {
            first: (i as u64) << 24,
            blocks: row.input_length / BIG_BLOCK
        }]),
        prompt_tokens: row.input_length,
        output_tokens: row.output_length.max(1),
        shared_tokens: 0,
        group: 0,
    };
    let mut rows = rows;
    rows.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    Trace {
        name,
        block_tokens: BIG_BLOCK,
        requests: rows.iter().enumerate().map(request).collect(),
        times: Times::Recorded(rows.iter().map(|row| row.timestamp).collect()),
    }
}

/// Rows of sessions one after another, each session's turns in order from 0.
fn follow(path: &Path, line: usize, last: Option<(&str, u32)>, now: (&str, u32)) -> Result<(), TraceError> {
    let follows = match last {
        Some((session, turn)) if session == now.0 => now.1 == turn + 1,
        _ => now.1 == 0,
    };
    if follows {
        return Ok(());
    }
    let what = format!("turn {} of session {} does not follow the row before", now.1, now.0);
    Err(TraceError::Row { path: path.to_owned(), line, what })
}

fn sessions(name: TraceName, path: &Path) -> Result<Trace, TraceError> {
    let rows: Vec<SessionRow> = trace::read(path)?;
    let (mut requests, mut think) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
    let (mut session, mut head) = (0, 0);
    let mut last: Option<&SessionRow> = None;
    for (i, row) in rows.iter().enumerate() {
        let before = last.map(|row| (row.session.as_str(), row.turn));
        follow(path, i + 1, before, (&row.session, row.turn))?;
        last = Some(row);
        let starts = row.turn == 0;
        if starts {
            session += 1;
            let shares = name == TraceName::SessionsShared;
            head = row.tool_tokens.filter(|_| shares).map_or(0, |tokens| tokens / BIG_BLOCK);
        }
        let hashes = joined_chain(row, session, head, &rows[i - row.turn as usize]);
        requests.push(Request {
            blocks: Blocks::Chain { hashes, shared: head, salt: 0 },
            prompt_tokens: row.input_length,
            output_tokens: row.output_length.max(1),
            shared_tokens: 0,
            group: session,
        });
        think.push((!starts).then_some(row.think_s.min(THINK_LIMIT)));
    }
    Ok(Trace { name, block_tokens: BIG_BLOCK, requests: requests.into(), times: Times::Think(think) })
}

/// The chain of a session's turn in blocks of 512 tokens, of which the first `head` are those of its model and tools.
fn joined_chain(row: &SessionRow, session: u32, head: u32, first: &SessionRow) -> Arc<[BlockHash]> {
    let blocks = (row.input_length / BIG_BLOCK) as usize;
    let ids: Vec<u64> = row.ids().take(blocks * JOINED).collect();
    let name: Vec<u8> = first.model.bytes().chain(first.tool_tokens.unwrap_or(0).to_le_bytes()).collect();
    let tools = name.iter().fold(1, |hash, byte| mix(hash ^ u64::from(*byte)));
    let block = |(i, ids): (usize, &[u64])| match i < head as usize {
        true => mix(tools ^ i as u64),
        false => ids.iter().fold(u64::from(session), |hash, id| mix(hash ^ mix(*id))),
    };
    chain_ids(ids.chunks_exact(JOINED).enumerate().map(block))
}

fn texts(name: TraceName, path: &Path) -> Result<Trace, TraceError> {
    let (mut requests, mut think) = (Vec::new(), Vec::new());
    let mut last: Option<(String, u32, f64, f64)> = None;
    let mut session = 0;
    for (i, row) in trace::Rows::<TextRow>::open(path)?.enumerate() {
        let row = row?;
        let before = last.as_ref().map(|(session, turn, ..)| (session.as_str(), *turn));
        follow(path, i + 1, before, (&row.session, row.turn))?;
        let output_tokens = (row.output_chars as usize / CHARS_PER_TOKEN).max(1) as u32;
        // The trace has no think times: what is left of the gap between two requests after the answer's generation.
        let gap = |sent: f64, answer: f64| ((row.t_ms - sent) / 1e3 - answer).clamp(0.0, THINK_LIMIT);
        let pause = last.as_ref().filter(|_| row.turn > 0).map(|(_, _, sent, answer)| gap(*sent, *answer));
        session += u32::from(row.turn == 0);
        requests.push(Request {
            blocks: Blocks::Chain { hashes: text_chain(&row.input), shared: 0, salt: 0 },
            prompt_tokens: (row.input.chars().count() / CHARS_PER_TOKEN).max(1) as u32,
            output_tokens,
            shared_tokens: 0,
            group: session,
        });
        think.push(pause);
        last = Some((row.session, row.turn, row.t_ms, f64::from(output_tokens) / 40.0));
    }
    if requests.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    Ok(Trace { name, block_tokens: TEXT_BLOCK_TOKENS, requests: requests.into(), times: Times::Think(think) })
}

/// One hash for every full block of 256 characters, of all text up to its end.
fn text_chain(text: &str) -> Arc<[BlockHash]> {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    let (mut hasher, mut hashes, mut from) = (blake3::Hasher::new(), Vec::new(), 0);
    for to in ends.skip(TEXT_BLOCK_CHARS - 1).step_by(TEXT_BLOCK_CHARS) {
        hasher.update(&text.as_bytes()[from..to]);
        let mut low = [0; 8];
        low.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        hashes.push(BlockHash(u64::from_le_bytes(low)));
        from = to;
    }
    hashes.into()
}

impl Trace {
    /// The trace once through as it is: what its ceiling is computed from.
    pub fn requests(&self) -> &Arc<[Request]> {
        &self.requests
    }

    /// Replays on `workers` that can prefill `capacity` tokens a second together. `spread`: arrivals on the recorded
    /// 3-second grid are spread at random over their 3 seconds.
    pub fn replay(&self, workers: usize, capacity: f64, load: f64, spread: bool, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let made = |requests, arrivals, load| Workload {
            block_tokens: self.block_tokens,
            requests,
            arrivals,
            uncounted: 0,
            key_blocks: self.name.key_blocks(),
            load,
        };
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
            Times::Think(think) => {
                let (requests, think, firsts) = self.copies(think, workers);
                let tokens: f64 = requests.iter().map(|request| f64::from(request.prompt_tokens)).sum();
                // The session trace says how its sessions start; the text traces do not, and are scaled to the load.
                let text = self.name.scales();
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
            TEXT_BLOCK_TOKENS => TEXT_REQUESTS.div_ceil(self.requests.len()) * sessions,
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
