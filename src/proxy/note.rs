//! What is recorded of one request from its arrival to its last byte. It ends as a line of the [`access`](super::access) log, as a span
//! of a [trace](super::traces), or as neither: then nothing is recorded but the mode that it goes by.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderValue, StatusCode};
use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use tokio::time::Instant;

use super::access::AccessLog;
use super::complaints::Complaints;
use super::headers::{REQUEST_ID, UpstreamHead};
use super::place::{Asked, Placed};
use super::traces::{Span, Traces};
use crate::config::Mode;
use crate::core::booking::Finished;
use crate::core::ids::BlockHash;
use crate::metrics::{Label, Metrics, Outcome, Route};

/// What is kept of requests once they have ended.
pub struct Records {
    pub access: AccessLog,
    pub traces: Traces,
    /// As it was when it was last looked at.
    crowded: [AtomicU64; 2],
}

/// Of lines or spans, how many were lost since the start.
#[derive(Copy, Clone, Default)]
pub struct Lost {
    /// They could not be written or sent, of which the log was told.
    pub failed: u64,
    /// Too many were waiting before them.
    pub crowded: u64,
}

impl Records {
    pub fn new(access: AccessLog, traces: Traces) -> Records {
        Records { access, traces, crowded: Default::default() }
    }

    /// Counts what was lost, and tells the log where nobody has. To be called now and then.
    pub fn count_lost(&self, metrics: &Metrics, complaints: &Complaints) {
        let lost = [self.access.lost(), self.traces.lost()];
        let counters = [&metrics.access_lost, &metrics.traces_lost];
        let words = [
            "log.access: lines are lost: they come faster than they can be written",
            "log.traces: spans are lost: they come faster than the collector takes them",
        ];
        for at in 0..lost.len() {
            let Lost { failed, crowded } = lost[at];
            counters[at].inc_by((failed + crowded).saturating_sub(counters[at].get()));
            if self.crowded[at].swap(crowded, Ordering::Relaxed) < crowded {
                complaints.warn(words[at], "", &words[at]);
            }
        }
    }

    /// Begins to note what becomes of a request.
    pub fn begin(&self, route: Route, mode: Mode, headers: &HeaderMap) -> Note {
        let (logged, span) = (self.access.draws(), self.traces.begin(headers));
        let wanted = logged || span.is_some();
        let line = wanted.then(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let known = Known {
                timestamp: (since.as_secs_f64() * 1e6).round() / 1e3,
                route: route.as_str(),
                ..Known::default()
            };
            let keeps_blocks = logged && self.access.keeps_blocks();
            Box::new(Mutex::new(Line { known, arrived: Instant::now(), keeps_blocks, logged, span }))
        });
        let id = headers.get(REQUEST_ID).cloned().map(OnceLock::from).unwrap_or_default();
        Note(Arc::new(Noted { random: AtomicBool::new(mode == Mode::Random), id, line }))
    }

    /// The request has ended.
    pub fn end(&self, note: &Note, outcome: Outcome) {
        note.with(|line| {
            line.known.mode = note.mode().as_str();
            line.known.request_id = text(note.id());
            line.known.outcome = outcome.as_str();
            line.known.duration_ms = millis(line.arrived);
            if let Some(span) = line.span.take() {
                self.traces.end(span, &line.known, outcome);
            }
            if line.logged {
                self.access.write(&line.known);
            }
        });
    }
}

/// What is known of a request while it is under way; cheap to clone.
#[derive(Clone)]
pub struct Note(Arc<Noted>);

struct Noted {
    /// Goes by [`Mode::Random`].
    random: AtomicBool,
    /// The client's own, or else the one that was made for it, once it was.
    id: OnceLock<HeaderValue>,
    /// `None` if nobody wants to know more.
    line: Option<Box<Mutex<Line>>>,
}

impl Note {
    fn with(&self, fill: impl FnOnce(&mut Line)) {
        if let Some(line) = &self.0.line {
            fill(&mut line.lock());
        }
    }

    /// The mode that the request goes by: the one in force when it came, until it is placed by one.
    pub fn mode(&self) -> Mode {
        if self.0.random.load(Ordering::Relaxed) { Mode::Random } else { Mode::Kv }
    }

    /// Has the worker's own spans follow the one of the request, if it has one.
    pub fn pass_on(&self, headers: &mut HeaderMap) {
        self.with(|line| {
            if let Some(span) = &line.span {
                span.write(headers);
            }
        });
    }

    /// By which id its worker knows it.
    pub fn identified(&self, head: &UpstreamHead) {
        if let Some(id) = head.request_id() {
            // One that the client has sent is known already.
            let _ = self.0.id.set(id.clone());
        }
    }

    /// Its id, if it has one yet.
    pub fn id(&self) -> Option<&HeaderValue> {
        self.0.id.get()
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

    /// Where it is sent now, and why.
    pub fn placed(&self, placed: &Placed) {
        self.0.random.store(placed.mode == Mode::Random, Ordering::Relaxed);
        self.with(|line| {
            line.known.worker = text(Some(&placed.worker.authority));
            line.known.reason = Some(placed.reason.as_str());
            line.known.predicted_cached_tokens = Some(placed.predicted_cached_tokens.max(0.0).round() as u64);
        });
    }

    /// The client gets this: a worker's answer, or an error of the proxy's own.
    pub fn answered(&self, status: StatusCode) {
        self.with(|line| line.known.status = Some(status.as_u16()));
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

fn text(value: Option<&HeaderValue>) -> Option<String> {
    value.and_then(|value| value.to_str().ok()).map(str::to_owned)
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
    logged: bool,
    span: Option<Span>,
}

/// What a line and a span tell. `tokens` and `ms` say the units; what is not known is left out.
#[derive(Default, Serialize)]
pub(super) struct Known {
    /// When it arrived: milliseconds since 1970.
    pub(super) timestamp: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request_id: Option<String>,
    pub(super) route: &'static str,
    pub(super) model: String,
    pub(super) mode: &'static str,
    pub(super) outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<&'static str>,
    /// An estimate until the worker has told.
    pub(super) prompt_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) predicted_cached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cached_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) output_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ttft_ms: Option<f64>,
    pub(super) duration_ms: f64,
    /// Tokens of the first block: later ones are wider, as [`Widths::GROWING`](crate::core::blocks::Widths) says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) block_tokens: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<Vec<Hex>>,
}
