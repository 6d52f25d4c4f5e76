//! The last decisions, and what a decision was made of, for the operator: `GET /decisions`, `POST /explain`. Prompts are in
//! neither, only their hashes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use smallvec::SmallVec;

use super::place::Asked;
use super::{Proxy, arms};
use crate::config::{Mode, Origin};
use crate::core::ids::{BlockHash, WorkerId};
use crate::core::planner::{Decision, Policy};
use crate::core::price::Terms;
use crate::core::prompt::{Endpoint, Opaque};
use crate::fleet::Names;

/// Workers that an explanation of the past names: those that were nearest to being picked.
const NEAREST: usize = 16;

/// One decision with what it was made from.
pub struct Decided {
    at: SystemTime,
    mode: Mode,
    model: String,
    prompt_tokens: f64,
    blocks: usize,
    prefix: Option<BlockHash>,
    decision: Decision,
    /// Who the workers were; the workers themselves may have gone.
    names: Names,
}

impl Decided {
    pub fn new(asked: &Asked, mode: Mode, decision: Decision, names: Names) -> Decided {
        let hashes = &asked.ask.chain.hashes;
        Decided {
            at: SystemTime::now(),
            mode,
            model: asked.model.clone(),
            prompt_tokens: asked.ask.prompt_tokens,
            blocks: hashes.len(),
            prefix: hashes.last().copied(),
            decision,
            names,
        }
    }

    /// In words and numbers; of the workers, the `most` nearest to being picked.
    pub fn explain(&self, most: usize) -> Explanation {
        let name = |worker| self.names.of(worker).map(Origin::label).unwrap_or_default();
        let Decision { worker, reason, predicted_cached_tokens, candidates, runner_up, pick: _ } =
            &self.decision;
        let priced = self.mode == Mode::Kv;
        let next = runner_up.and_then(|at| candidates.get(at)).map(|candidate| candidate.worker);
        // Of several that cost the same, one was next.
        let rank = |one: WorkerId| (one != *worker, Some(one) != next);
        let mut order: Vec<_> = candidates.iter().collect();
        order.sort_by(|a, b| {
            rank(a.worker).cmp(&rank(b.worker)).then(a.terms.seconds.total_cmp(&b.terms.seconds))
        });
        Explanation {
            at_ms: self.at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64,
            mode: self.mode,
            model: self.model.clone(),
            prompt_tokens: self.prompt_tokens.round() as u64,
            blocks: self.blocks,
            prefix: self.prefix.map(|hash| format!("{:016x}", hash.0)),
            worker: name(*worker),
            reason: reason.as_str(),
            predicted_cached_tokens: predicted_cached_tokens.round() as u64,
            runner_up: next.map(name),
            workers: order
                .iter()
                .take(most)
                .map(|candidate| WorkerPrice::new(name(candidate.worker), &candidate.terms, priced))
                .collect(),
            workers_in_all: candidates.len(),
        }
    }
}

/// A decision as the operator reads it. Tokens and seconds are estimates, as the decision was made from them.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    pub mode: Mode,
    pub model: String,
    pub prompt_tokens: u64,
    /// Full blocks of the prompt; without one it goes by load.
    pub blocks: usize,
    /// Hash of the prompt up to its last full block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// As the metrics name it.
    pub worker: String,
    pub reason: &'static str,
    pub predicted_cached_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<String>,
    /// The picked one first, then by price.
    pub workers: Vec<WorkerPrice>,
    pub workers_in_all: usize,
}

/// The terms of one worker's price; see `core::price`.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerPrice {
    pub worker: String,
    /// Seconds to the first token, with what the placement costs others; absent where nothing was priced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price_s: Option<f64>,
    pub cached_tokens: f64,
    /// Of them those that are assumed, as other routers send such prompts to this worker.
    pub assumed_tokens: f64,
    pub uncached_tokens: f64,
    pub popular_tokens: f64,
    pub queue_tokens: f64,
    pub pushed_tokens: f64,
    pub pushed_once_tokens: f64,
    pub recent_tokens: f64,
    pub memory_s: f64,
    pub prefill_tokens_per_s: f64,
    pub open: usize,
}

impl WorkerPrice {
    fn new(worker: String, terms: &Terms, priced: bool) -> WorkerPrice {
        let tokens = |value: f64| (value * 10.0).round() / 10.0;
        WorkerPrice {
            worker,
            price_s: priced.then_some(terms.seconds),
            cached_tokens: tokens(terms.cached),
            assumed_tokens: tokens(terms.assumed),
            uncached_tokens: tokens(terms.uncached),
            popular_tokens: tokens(terms.popular),
            queue_tokens: tokens(terms.queue),
            pushed_tokens: tokens(terms.pushed),
            pushed_once_tokens: tokens(terms.pushed_once),
            recent_tokens: tokens(terms.recent),
            memory_s: terms.memory,
            prefill_tokens_per_s: terms.speed.round(),
            open: terms.open,
        }
    }
}

/// The last decisions, newest last.
pub struct Decisions {
    /// How many are kept.
    most: AtomicUsize,
    kept: Mutex<VecDeque<Decided>>,
}

impl Decisions {
    /// Keeps the last `most`.
    pub fn new(most: usize) -> Decisions {
        Decisions { most: AtomicUsize::new(most), kept: Mutex::default() }
    }

    /// Keeps the last `most` from now on, and of those that are there.
    pub fn limit(&self, most: usize) {
        let mut kept = self.kept.lock();
        self.most.store(most, Ordering::Relaxed);
        let over = kept.len().saturating_sub(most);
        kept.drain(..over);
        kept.shrink_to(most);
    }

    /// Keeps `decided`, if any are kept.
    pub fn keep(&self, decided: impl FnOnce() -> Decided) {
        if self.most.load(Ordering::Relaxed) == 0 {
            return;
        }
        let decided = decided();
        let mut kept = self.kept.lock();
        // As it is now: it may have been limited meanwhile.
        let most = self.most.load(Ordering::Relaxed);
        while kept.len() >= most.max(1) {
            kept.pop_front();
        }
        if most > 0 {
            kept.push_back(decided);
        }
    }

    /// The last `most`, newest first.
    pub fn last(&self, most: usize) -> Vec<Explanation> {
        self.kept.lock().iter().rev().take(most).map(|decided| decided.explain(NEAREST)).collect()
    }
}

/// Why a request cannot be explained.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Unexplained {
    /// Its prompt cannot be read.
    Unread(Opaque),
    /// No worker can take it.
    NoWorker,
}

impl Proxy {
    /// [`Proxy::explain`] apart from the runtime's threads, which have requests to move; waits its turn among other large readings.
    /// `None` if it panicked.
    pub async fn explain_apart(
        self: Arc<Self>,
        endpoint: Option<Endpoint>,
        body: Bytes,
        mode: Option<Mode>,
    ) -> Option<Result<Explanation, Unexplained>> {
        let proxy = self.clone();
        let _turn = self.large_reads.acquire().await.ok()?;
        // A panic there has printed where it was.
        tokio::task::spawn_blocking(move || proxy.explain(endpoint, &body, mode)).await.ok()
    }

    /// Where a request with this body would go now, and why; it goes nowhere. By `mode`, or else by that of its arm.
    ///
    /// # Errors
    /// If there is no prompt to be read, or no worker.
    fn explain(
        &self,
        endpoint: Option<Endpoint>,
        body: &[u8],
        mode: Option<Mode>,
    ) -> Result<Explanation, Unexplained> {
        let of_any_shape = [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];
        let endpoints = endpoint.as_ref().map_or(&of_any_shape[..], std::slice::from_ref);
        let mut unread = Unexplained::Unread(Opaque::Shape);
        for endpoint in endpoints {
            let asked = match self.read(Some(*endpoint), body) {
                (asked, None) => asked,
                (_, Some(opaque)) => {
                    unread = Unexplained::Unread(opaque);
                    continue;
                }
            };
            let fleet = self.fleet.snapshot();
            let config = self.config.load();
            let mode = mode.unwrap_or_else(|| arms::mode_of(&config, &asked.ask));
            let mut eligible = SmallVec::from_slice(&fleet.serving(&asked.model).0.eligible);
            arms::keep_own(&config, mode, &fleet, &mut eligible);
            let (now, policy) = (self.clock.now(), Policy::from(mode));
            let planned = self.planner.explain(&asked.ask, &eligible, policy, now, rand::random());
            let decision = planned.ok_or(Unexplained::NoWorker)?;
            return Ok(Decided::new(&asked, mode, decision, fleet.names()).explain(usize::MAX));
        }
        Err(unread)
    }
}
