//! Picks the worker for one request and books the work there, as one step, so that a burst sees itself. The proxy,
//! `explain`, the shadow and `simulate` all call [`Planner::plan`].

use std::sync::Arc;

use crate::core::blocks::Chain;
use crate::core::ids::{Time, WorkerId};
use crate::core::price::{PriceSettings, Terms};

/// How a worker is picked.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Uniformly among the eligible workers, as a Kubernetes Service does.
    Random,
    /// The worker with the lowest price: booked and uncached prefill work.
    Kv,
}

/// What the planner is told of a worker when it joins.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Stable over restarts and equal on all replicas (a hash of the worker's address or pod name): ranks the worker for
    /// cold prefixes.
    pub key: u64,
    /// KV cache size in tokens, if known.
    pub capacity_tokens: Option<u64>,
    /// Prefill speed in tokens a second, if known; learned otherwise.
    pub prefill_speed: Option<f64>,
}

/// One request, as far as placement is concerned.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Empty when the prompt could not be read: routed by load.
    pub chain: Chain,
    /// Tokens that one block of the chain stands for.
    pub block_tokens: f64,
    /// Tokens of the whole prompt (estimated from its bytes in the proxy, exact in the simulator).
    pub prompt_tokens: f64,
    /// Tokens expected to be generated.
    pub output_tokens: f64,
    /// Whether the first token will be seen (a streamed answer) or must be guessed from elapsed time.
    pub streams: bool,
}

/// Why the worker was picked; a closed set, used as a metric label.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Policy `Random`.
    Random,
    /// The only eligible worker.
    Only,
    /// The picked worker holds more of the prompt than all others do.
    Warm,
    /// Some other worker holds more, but its queue costs more than the prefill here.
    Spill,
    /// Nobody holds more than the rest.
    Cold,
    /// The prompt has no full block or could not be read.
    Load,
}

/// One worker as the planner saw it.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub worker: WorkerId,
    pub terms: Terms,
}

/// What was decided and from what.
#[derive(Clone, Debug)]
pub struct Decision {
    pub worker: WorkerId,
    pub reason: Reason,
    /// Prompt tokens believed to be cached on the picked worker.
    pub predicted_cached_tokens: f64,
    /// The picked worker's terms, then all others' (in slot order).
    pub candidates: Vec<Candidate>,
}

/// What is known when a request has ended. Absent means the worker did not say.
#[derive(Copy, Clone, Debug, Default)]
pub struct Finished {
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
}

/// Settings of the planner; `Default` is the one place where its defaults are.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub price: PriceSettings,
}

pub struct Planner {
    settings: Settings,
}

impl Planner {
    pub fn new(settings: Settings) -> Arc<Planner> {
        Arc::new(Planner { settings })
    }
    pub fn add_worker(&self, _spec: WorkerSpec) -> WorkerId {
        WorkerId(0)
    }
    /// Forgets the worker and frees its slot; bookings on it that are still open become no-ops.
    pub fn remove_worker(&self, _worker: WorkerId) {}
    /// Empties what is believed of the worker's cache (it restarted); answers how many blocks were dropped.
    pub fn forget(&self, _worker: WorkerId) -> usize {
        0
    }
    pub fn set_capacity(&self, _worker: WorkerId, _tokens: Option<u64>) {}
    /// Picks among `eligible` and books the request there. `random` decides ties and draws. `None` if nobody is eligible.
    pub fn plan(
        self: &Arc<Self>,
        _ask: &Ask,
        _eligible: &[WorkerId],
        _policy: Policy,
        _now: Time,
        _random: u64,
    ) -> Option<(Decision, Booking)> {
        let _ = &self.settings;
        None
    }
}

/// The claim of one request on one worker: counted in the worker's queue and in its believed cache. Dropped before
/// [`Booking::commit`] it undoes both (the worker never worked on the request); dropped after, it ends the request there.
#[must_use = "a booking dropped at once counts for nothing"]
pub struct Booking {
    _planner: Arc<Planner>,
}

impl Booking {
    /// The worker has taken the request (its response head came).
    pub fn commit(&mut self, _now: Time) {}
    /// The first generated token came: the prefill is over.
    pub fn first_token(&mut self, _now: Time) {}
    /// The answer is complete.
    pub fn finish(self, _finished: Finished, _now: Time) {}
}
