//! The access log, if it is asked for: one JSON line for each request, with what was expected of it and what came true. With the
//! hashes of the prompts' blocks it can be played again (`bench play`) and looked into (`bench import`). There is nothing of
//! prompts in it, nor of keys or who asked; the hashes are keyed.
//!
//! No request waits for it: lines that a full disk or a slow reader has no room for are lost, and counted.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use http::StatusCode;
use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use tokio::time::Instant;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

use super::place::{Asked, Placed};
use crate::config::{AccessLog as Settings, LogTo, Mode};
use crate::core::booking::Finished;
use crate::core::ids::BlockHash;
use crate::metrics::{Label, Outcome, Route};

/// Lines that may wait to be written.
const WAITING: usize = 16_384;

/// Counts what cannot be written: a line is handed over whole.
struct Counting<W> {
    to: W,
    failed: Arc<AtomicU64>,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.to.write(line).inspect_err(|_| {
            self.failed.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Where the lines go.
pub struct AccessLog {
    writer: Option<NonBlocking>,
    failed: Arc<AtomicU64>,
    share: f64,
    blocks: bool,
}

impl AccessLog {
    /// The log, and what writes its last lines when it is dropped.
    ///
    /// # Errors
    /// If its file cannot be opened.
    pub fn open(settings: &Settings) -> io::Result<(AccessLog, Option<WorkerGuard>)> {
        let failed: Arc<AtomicU64> = Arc::default();
        let build = |to: Box<dyn Write + Send>| {
            let to = Counting { to, failed: failed.clone() };
            NonBlockingBuilder::default().buffered_lines_limit(WAITING).finish(to)
        };
        let (writer, guard) = match &settings.to {
            LogTo::Off => (None, None),
            LogTo::Stdout => Some(build(Box::new(io::stdout()))).unzip(),
            LogTo::File(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path)?;
                Some(build(Box::new(file))).unzip()
            }
        };
        Ok((AccessLog { writer, failed, share: settings.share, blocks: settings.blocks }, guard))
    }

    /// Begins the line of a request, if it is to have one.
    pub fn begin(&self, route: Route, mode: Mode) -> Note {
        if self.writer.is_none() || (self.share < 1.0 && rand::random::<f64>() >= self.share) {
            return Note(None);
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let known = Known {
            timestamp: (since.as_secs_f64() * 1e6).round() / 1e3,
            route: route.as_str(),
            mode: mode.as_str(),
            ..Known::default()
        };
        Note(Some(Arc::new(Mutex::new(Line { known, arrived: Instant::now(), keeps_blocks: self.blocks }))))
    }

    /// Writes the line of a request that has ended.
    pub fn end(&self, note: &Note, outcome: Outcome) {
        let (Some(line), Some(mut writer)) = (&note.0, self.writer.clone()) else { return };
        let mut line = line.lock();
        line.known.outcome = outcome.as_str();
        line.known.duration_ms = millis(line.arrived);
        if let Ok(mut text) = serde_json::to_vec(&line.known) {
            text.push(b'\n');
            // It only hands on, and never fails.
            let _ = writer.write_all(&text);
        }
    }

    /// Lines lost since the start.
    pub fn lost(&self) -> u64 {
        let dropped = |writer: &NonBlocking| writer.error_counter().dropped_lines() as u64;
        self.failed.load(Ordering::Relaxed) + self.writer.as_ref().map_or(0, dropped)
    }
}

/// A request's line while it is under way; cheap to clone.
#[derive(Clone)]
pub struct Note(Option<Arc<Mutex<Line>>>);

impl Note {
    fn with(&self, fill: impl FnOnce(&mut Line)) {
        if let Some(line) = &self.0 {
            fill(&mut line.lock());
        }
    }

    /// What was read of its body.
    pub fn asked(&self, asked: &Asked) {
        self.with(|line| {
            line.known.model.clone_from(&asked.model);
            line.known.prompt_tokens = asked.ask.prompt_tokens.round() as u64;
            if line.keeps_blocks {
                line.known.block_tokens = Some((asked.ask.block_tokens * 100.0).round() / 100.0);
                line.known.blocks = Some(asked.ask.chain.hashes.iter().copied().map(Hex).collect());
            }
        });
    }

    /// Who has answered it, with which head.
    pub fn answered(&self, placed: &Placed, status: StatusCode, request_id: Option<&str>) {
        self.with(|line| {
            line.known.worker = placed.worker.authority.to_str().ok().map(str::to_owned);
            line.known.mode = placed.mode.as_str();
            line.known.reason = Some(placed.reason.as_str());
            line.known.predicted_cached_tokens = Some(placed.predicted_cached_tokens.max(0.0).round() as u64);
            line.known.status = Some(status.as_u16());
            line.known.request_id = request_id.map(str::to_owned);
        });
    }

    pub fn first_token(&self) {
        self.with(|line| line.known.ttft_ms = Some(millis(line.arrived)));
    }

    /// What the worker says of it.
    pub fn finished(&self, finished: Finished) {
        self.with(|line| {
            line.known.prompt_tokens = finished.prompt_tokens.map_or(line.known.prompt_tokens, u64::from);
            line.known.cached_tokens = finished.cached_tokens;
            line.known.output_tokens = finished.output_tokens;
        });
    }
}

fn millis(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

struct Hex(BlockHash);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{:016x}", self.0.0))
    }
}

/// A line in the making.
struct Line {
    known: Known,
    arrived: Instant,
    keeps_blocks: bool,
}

/// What a line tells. `tokens` and `ms` say the units; what is not known is left out.
#[derive(Default, Serialize)]
struct Known {
    /// When it arrived: milliseconds since 1970.
    timestamp: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    route: &'static str,
    model: String,
    mode: &'static str,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// An estimate until the worker has told.
    prompt_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_cached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
    duration_ms: f64,
    /// Tokens of the first block: later ones are wider, as [`Widths::GROWING`](crate::core::blocks::Widths) says.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_tokens: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<Vec<Hex>>,
}
