//! Files of requests: which of the known schemas one has, told by the keys of its first row, and reading it into a [`Trace`].
//!
//! A bad row is handed to whoever reads: a replay stops at it, a check goes on and counts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::value::RawValue;
use smallvec::smallvec;

use super::bodies::{Body, BodyRow};
use super::replay::Trace;
use super::{Blocks, Content, Request, Run, chain_ids, mix};
use crate::core::blocks::Widths;
use crate::core::ids::BlockHash;
use crate::experiment::trace::{
    self, AccessRow, BlockRow, Row, Rows, SessionRow, SizeRow, TextRow, TraceError,
};

/// Tokens of a block of the big traces.
const BIG_BLOCK: u32 = trace::MOONCAKE_BLOCK_TOKENS;
/// Characters of text that count as one 64-token block, and the tokens of one.
const TEXT_BLOCK_CHARS: usize = 256;
pub const TEXT_BLOCK_TOKENS: u32 = 64;
const CHARS_PER_TOKEN: usize = 4;
/// A longer pause between answer and next request is cut to this, in seconds: beyond it a fleet would idle.
const THINK_LIMIT: f64 = 60.0;

/// The kinds of files that can be read.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Schema {
    /// `mooncake_*`: times, sizes, and ids of blocks of 512 tokens.
    Blocks,
    /// `claude_code_sessions_*`: sessions with think times, and ids of blocks of 64 tokens.
    Sessions,
    /// `lmcache_*_text`: sessions with their prompts as text.
    Texts,
    /// `azure2023_*`: times and sizes.
    Sizes,
    /// warmroute's own access log.
    Access,
    /// Requests in OpenAI's format, one body a line, or `{"body": .., "timestamp": ..}`.
    Bodies,
}

impl Schema {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Schema::Blocks => "times, sizes and block ids (Mooncake)",
            Schema::Sessions => "sessions with block ids (Claude Code)",
            Schema::Texts => "sessions with prompts as text (LMCache)",
            Schema::Sizes => "times and sizes (Azure)",
            Schema::Access => "access log with block hashes (warmroute)",
            Schema::Bodies => "request bodies (OpenAI)",
        }
    }

    /// What the first row that is a JSON object looks like.
    ///
    /// # Errors
    /// If there is none, or it looks like nothing that can be replayed.
    pub fn of(path: &Path) -> Result<Schema, TraceError> {
        let mut rows = Rows::<AnyRow>::open(path)?;
        let first = loop {
            match rows.next() {
                None => return Err(TraceError::Empty { path: path.to_owned() }),
                Some(Err(error)) if error.is_fatal() => return Err(error),
                Some(Err(_)) => {}
                Some(Ok(row)) => break row,
            }
        };
        let has = |key: &str| first.0.contains_key(key);
        let what = match () {
            () if has("hash_ids") => return Ok(Schema::Blocks),
            () if has("hash_ranges") => return Ok(Schema::Sessions),
            () if has("session") && has("input") => return Ok(Schema::Texts),
            () if has("duration_ms") => return Ok(Schema::Access),
            () if has("input_length") => return Ok(Schema::Sizes),
            () if has("body") || has("messages") || has("prompt") => return Ok(Schema::Bodies),
            () if has("mean_rps") => {
                "it has rates of clients, no requests; `bench play --clients` and `simulate --suite tenants` use such a file"
            }
            () => {
                "not a known file of requests: rows need `hash_ids`, `hash_ranges`, `session` and `input`, `input_length`, \
                 or, as OpenAI's requests, `messages`, `prompt` or `body`"
            }
        };
        Err(TraceError::Schema { path: path.to_owned(), what: what.to_owned() })
    }
}

/// Any JSON object.
#[derive(Debug, serde::Deserialize)]
#[serde(transparent)]
struct AnyRow(BTreeMap<String, Box<RawValue>>);

impl Row for AnyRow {
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// What of a file is wanted.
#[derive(Copy, Clone, Debug, Default)]
pub struct Reading {
    /// The first rows only.
    pub rows: Option<usize>,
    /// Session traces in blocks of 512 tokens, as simulations of many workers want them, instead of 64.
    pub joined_sessions: bool,
    /// Sessions with equal model and tools share the head of their prompts.
    pub shared_heads: bool,
    /// Texts and bodies are kept, so that they can be sent.
    pub texts: bool,
}

/// When a trace's requests come.
#[derive(Clone, Debug)]
pub enum Times {
    /// Milliseconds, ascending.
    Recorded(Vec<f64>),
    /// Requests of a session are neighbours. Seconds to think before each; the first of a session has none.
    Think {
        think: Vec<Option<f64>>,
        /// Start of each session in milliseconds, if the trace tells.
        starts_ms: Option<Vec<f64>>,
    },
    /// The file does not say.
    Unknown,
}

/// Hears of a bad row, and says by an error that reading ends there.
pub type OnBad<'a> = &'a mut dyn FnMut(TraceError) -> Result<(), TraceError>;

/// Reads the file at `path`, up to its first bad row.
///
/// # Errors
/// If the file cannot be read, is of no known schema, or a row is bad.
pub fn load(path: &Path, reading: &Reading) -> Result<Trace, TraceError> {
    load_all(path, Schema::of(path)?, reading, &mut Err)
}

/// Reads the file at `path`; `on_bad` decides whether a bad row ends that.
///
/// # Errors
/// If the file cannot be read, has no good row, or `on_bad` says so.
pub fn load_all(
    path: &Path,
    schema: Schema,
    reading: &Reading,
    on_bad: OnBad<'_>,
) -> Result<Trace, TraceError> {
    let mut file = File { path, rows: reading.rows.unwrap_or(usize::MAX), on_bad };
    let trace = match schema {
        Schema::Blocks => blocks(&mut file)?,
        Schema::Sessions => sessions(&mut file, reading)?,
        Schema::Texts => texts(&mut file, reading)?,
        Schema::Sizes => sizes(&mut file)?,
        Schema::Access => access(&mut file)?,
        Schema::Bodies => bodies(&mut file)?,
    };
    match trace.requests.is_empty() {
        true => Err(TraceError::Empty { path: path.to_owned() }),
        false => Ok(trace),
    }
}

struct File<'a> {
    path: &'a Path,
    /// So many rows are still to be read.
    rows: usize,
    on_bad: OnBad<'a>,
}

impl File<'_> {
    /// Hands every row to `take`, which may find it bad.
    fn each<R: Row>(&mut self, mut take: impl FnMut(R) -> Result<(), String>) -> Result<(), TraceError> {
        let mut rows = Rows::<R>::open(self.path)?;
        while self.rows > 0 {
            let Some(row) = rows.next() else { break };
            let taken = row.and_then(|row| {
                let bad = |what| TraceError::Row { path: self.path.to_owned(), line: rows.line(), what };
                take(row).map_err(bad)
            });
            match taken {
                Ok(()) => self.rows -= 1,
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) => (self.on_bad)(error)?,
            }
        }
        Ok(())
    }
}

/// Requests with their times in milliseconds, in the order of time; of equal times, as they were.
fn open_loop(block_tokens: u32, timed: Vec<(f64, Request)>) -> Trace {
    let mut timed = timed;
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (times, requests): (Vec<f64>, Vec<Request>) = timed.into_iter().unzip();
    Trace { block_tokens, requests: requests.into(), times: Times::Recorded(times), key_blocks: 1 }
}

fn blocks(file: &mut File<'_>) -> Result<Trace, TraceError> {
    let mut timed = Vec::new();
    file.each(|row: BlockRow| {
        let full = (row.input_length / BIG_BLOCK) as usize;
        let hashes = chain_ids(row.hash_ids[..full].iter().copied());
        timed.push((row.timestamp, Request::new(Blocks::of(hashes), row.input_length, row.output_length)));
        Ok(())
    })?;
    Ok(open_loop(BIG_BLOCK, timed))
}

fn sizes(file: &mut File<'_>) -> Result<Trace, TraceError> {
    let mut timed: Vec<(f64, Request)> = Vec::new();
    file.each(|row: SizeRow| {
        let run = Run { first: (timed.len() as u64) << 24, blocks: row.input_length / BIG_BLOCK };
        let blocks = Blocks::Runs(smallvec![run]);
        timed.push((row.timestamp, Request::new(blocks, row.input_length, row.output_length)));
        Ok(())
    })?;
    Ok(open_loop(BIG_BLOCK, timed))
}

/// The rows first: how long a block is, is learned while the log is written, and hardly moves.
fn access(file: &mut File<'_>) -> Result<Trace, TraceError> {
    let mut rows = Vec::new();
    file.each(|row: AccessRow| {
        let hashes: Vec<BlockHash> = row.hashes()?.into_iter().map(BlockHash).collect();
        if row.has_prompt() {
            rows.push((row, Widths::GROWING.evened(&hashes)));
        }
        Ok(())
    })?;
    let mut lengths: Vec<f64> = rows.iter().filter_map(|(row, _)| row.block_tokens).collect();
    lengths.sort_by(f64::total_cmp);
    let block_tokens =
        lengths.get(lengths.len() / 2).map_or(TEXT_BLOCK_TOKENS, |tokens| tokens.round() as u32);
    let timed = rows.into_iter().map(|(row, hashes)| {
        let full = ((row.prompt_tokens / block_tokens) as usize).min(hashes.len());
        let blocks = Blocks::of(hashes[..full].into());
        (row.timestamp, Request::new(blocks, row.prompt_tokens, row.output_tokens.unwrap_or(0)))
    });
    Ok(open_loop(block_tokens, timed.collect()))
}

fn bodies(file: &mut File<'_>) -> Result<Trace, TraceError> {
    let (mut timed, mut has_times) = (Vec::new(), None);
    file.each(|row: BodyRow| {
        let body = Body::read(row)?;
        let has_time = body.timestamp_ms.is_some();
        if *has_times.get_or_insert(has_time) != has_time {
            return Err("either all rows have a `timestamp` or none has".to_owned());
        }
        let at = body.timestamp_ms.unwrap_or(0.0);
        let body = Arc::new(body);
        let request = Request::new(Blocks::of(body.chain.clone()), body.prompt_tokens, body.output_tokens);
        timed.push((at, Request { content: Content::Body(body), ..request }));
        Ok(())
    })?;
    let trace = open_loop(TEXT_BLOCK_TOKENS, timed);
    let unknown = has_times == Some(false);
    Ok(Trace { times: if unknown { Times::Unknown } else { trace.times }, ..trace })
}

/// Sessions as they are read: rows one session after another, each session's turns in order from 0.
#[derive(Default)]
struct Turns {
    /// Session and turn of the last row, good or bad.
    last: Option<(String, u32)>,
    /// The last session of which the first turn was good.
    opened: Option<String>,
    sessions: u32,
    requests: Vec<Request>,
    think: Vec<Option<f64>>,
}

impl Turns {
    fn follow(&mut self, session: &str, turn: u32) -> Result<(), String> {
        let last = self.last.replace((session.to_owned(), turn));
        let is_same = last.as_ref().is_some_and(|(last, _)| last == session);
        let follows = match last {
            Some((_, last)) if is_same => turn == last + 1 && self.opened.as_deref() == Some(session),
            _ => turn == 0,
        };
        if !follows {
            return Err(format!("turn {turn} of session {session} does not follow the row before"));
        }
        if turn == 0 {
            self.opened = Some(session.to_owned());
            self.sessions += 1;
        }
        Ok(())
    }

    fn add(&mut self, request: Request, pause: Option<f64>) {
        self.requests.push(request);
        self.think.push(pause.map(|pause| pause.min(THINK_LIMIT)));
    }

    fn trace(self, block_tokens: u32, starts_ms: Option<Vec<f64>>) -> Trace {
        let times = Times::Think { think: self.think, starts_ms };
        Trace { block_tokens, requests: self.requests.into(), times, key_blocks: 1 }
    }
}

fn sessions(file: &mut File<'_>, reading: &Reading) -> Result<Trace, TraceError> {
    let joined = if reading.joined_sessions { BIG_BLOCK / trace::SESSION_BLOCK_TOKENS } else { 1 };
    let block = joined * trace::SESSION_BLOCK_TOKENS;
    let (mut turns, mut starts) = (Turns::default(), Vec::new());
    let mut head = Head::default();
    file.each(|row: SessionRow| {
        turns.follow(&row.session, row.turn)?;
        if let Some(start) = row.start_ms {
            starts.push(start);
            head = Head::of(&row, reading.shared_heads.then_some(block));
        }
        let hashes = session_chain(&row, turns.sessions, &head, joined as usize, block);
        let blocks = Blocks::Chain { hashes, shared: head.blocks, salt: 0 };
        let request = Request::new(blocks, row.input_length, row.output_length);
        turns.add(Request { group: turns.sessions, ..request }, (row.turn > 0).then_some(row.think_s));
        Ok(())
    })?;
    Ok(turns.trace(block, Some(starts)))
}

/// What sessions with one model and one set of tools begin with alike.
#[derive(Default)]
struct Head {
    blocks: u32,
    identity: u64,
}

impl Head {
    /// `block`: tokens of one, if heads are shared.
    fn of(first: &SessionRow, block: Option<u32>) -> Head {
        let tools = first.tool_tokens.unwrap_or(0);
        let name = first.model.bytes().chain(tools.to_le_bytes());
        let identity = name.fold(1, |hash, byte| mix(hash ^ u64::from(byte)));
        Head { blocks: block.map_or(0, |block| tools / block), identity }
    }
}

/// The chain of a session's turn, each block made of `joined` ids.
fn session_chain(row: &SessionRow, session: u32, head: &Head, joined: usize, block: u32) -> Arc<[BlockHash]> {
    let blocks = (row.input_length / block) as usize;
    let ids: Vec<u64> = row.ids().take(blocks * joined).collect();
    let one = |(i, ids): (usize, &[u64])| match i < head.blocks as usize {
        true => mix(head.identity ^ i as u64),
        false => ids.iter().fold(u64::from(session), |hash, id| mix(hash ^ mix(*id))),
    };
    chain_ids(ids.chunks_exact(joined).enumerate().map(one))
}

fn texts(file: &mut File<'_>, reading: &Reading) -> Result<Trace, TraceError> {
    let mut turns = Turns::default();
    let (mut sent, mut answer) = (0.0, 0.0);
    file.each(|row: TextRow| {
        turns.follow(&row.session, row.turn)?;
        let output_tokens = (row.output_chars as usize / CHARS_PER_TOKEN).max(1) as u32;
        // The trace has no think times: what is left of the gap between two requests after the answer's generation.
        let pause = (row.turn > 0).then_some(((row.t_ms - sent) / 1e3 - answer).max(0.0));
        (sent, answer) = (row.t_ms, f64::from(output_tokens) / 40.0);
        let prompt_tokens = (row.input.chars().count() / CHARS_PER_TOKEN) as u32;
        let request = Request::new(Blocks::of(text_chain(&row.input)), prompt_tokens, output_tokens);
        let content = if reading.texts { Content::Text(row.input.into()) } else { Content::Made };
        turns.add(Request { group: turns.sessions, content, ..request }, pause);
        Ok(())
    })?;
    Ok(turns.trace(TEXT_BLOCK_TOKENS, None))
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
