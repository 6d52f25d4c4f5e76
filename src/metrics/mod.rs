//! What the proxy counts. Every family of series is declared once, in the [`catalogue`], and is a typed handle in [`Metrics`], with
//! labels from closed enums ([`label`]); values that clients or the cluster choose (model names, worker addresses) are capped
//! ([`model`]) or vanish with their worker ([`worker`]). Nothing here is global: a test has its own.
//!
//! The hot path looks nothing up by name: handles are made once for each worker and each model, and kept by who uses them.

pub mod catalogue;
pub mod family;
pub mod label;
pub mod model;
pub mod sharing;
pub mod source;
pub mod worker;

use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, OnceLock};

use prometheus::{
    Encoder, Gauge, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
    TextEncoder,
};
use serde::Serialize;

use crate::config::Mode;
use crate::core::planner::Reason;
use crate::core::shadow::Share;
use crate::lifecycle::Phase;

use catalogue as c;
use family::Family;
pub use label::{
    Basis, Capacity, FailureKind, Fallback, Footing, Forgot, Label, NewsLost, Outcome, Played, Predicted,
    Reload, Retry, Route, Scraped, Source, Trouble, Way, WorkerState,
};
pub use model::{LatencyMetrics, ModelMetrics, Models, TokenMetrics};
pub use sharing::SharingMetrics;
use source::SourceFamilies;
pub use source::SourceMetrics;
pub use worker::{Hits, WorkerMetrics};
use worker::{Living, WorkerFamilies};

/// Counters along one closed label, each found by index.
pub struct Counters<L> {
    cells: Box<[IntCounter]>,
    label: PhantomData<L>,
}

impl<L: Label> Counters<L> {
    fn register(registry: &Registry, family: &Family) -> Counters<L> {
        let family = family.counters(registry);
        let cells = L::VALUES.iter().map(|value| family.with_label_values(&[*value])).collect();
        Counters { cells, label: PhantomData }
    }

    pub fn inc(&self, label: L) {
        self.inc_by(label, 1);
    }

    pub fn get(&self, label: L) -> u64 {
        self.cells[label.index()].get()
    }

    /// Of each value of the label.
    pub fn totals(&self) -> impl Iterator<Item = (&'static str, u64)> {
        L::VALUES.iter().zip(&self.cells).map(|(value, cell)| (*value, cell.get()))
    }

    pub fn inc_by(&self, label: L, count: usize) {
        self.cells[label.index()].inc_by(count as u64);
    }
}

/// A gauge for each value of one closed label, of which one is 1.
struct OneOf<L> {
    cells: Box<[IntGauge]>,
    label: PhantomData<L>,
}

impl<L: Label> OneOf<L> {
    fn register(registry: &Registry, family: &Family) -> OneOf<L> {
        let family: IntGaugeVec = family.gauges(registry);
        let cells = L::VALUES.iter().map(|value| family.with_label_values(&[*value])).collect();
        OneOf { cells, label: PhantomData }
    }

    fn set(&self, label: L) {
        for (at, cell) in self.cells.iter().enumerate() {
            cell.set(i64::from(at == label.index()));
        }
    }
}

/// Requests by route, outcome and mode. Series appear when first counted: most combinations never occur.
pub struct Requests {
    family: IntCounterVec,
    cells: Box<[OnceLock<IntCounter>]>,
}

impl Requests {
    fn register(registry: &Registry) -> Requests {
        let cells = Route::VALUES.len() * Outcome::VALUES.len() * Mode::VALUES.len();
        Requests {
            family: c::REQUESTS.counters(registry),
            cells: (0..cells).map(|_| OnceLock::new()).collect(),
        }
    }

    fn place(route: Route, outcome: Outcome, mode: Mode) -> usize {
        (route.index() * Outcome::VALUES.len() + outcome.index()) * Mode::VALUES.len() + mode.index()
    }

    pub fn inc(&self, route: Route, outcome: Outcome, mode: Mode) {
        self.cells[Requests::place(route, outcome, mode)]
            .get_or_init(|| self.family.with_label_values(&[route.as_str(), outcome.as_str(), mode.as_str()]))
            .inc();
    }

    /// All that have ended so.
    pub fn total(&self, outcome: Outcome) -> u64 {
        let each = Outcome::VALUES.len() * Mode::VALUES.len();
        let of = |at: &usize| (at % each) / Mode::VALUES.len() == outcome.index();
        (0..self.cells.len()).filter(of).filter_map(|at| self.cells[at].get()).map(IntCounter::get).sum()
    }
}

/// What the traffic of each mode would have hit, by policy.
pub struct ShadowMetrics {
    /// Prompt and cached tokens, by mode and policy.
    cells: [[[IntCounter; 2]; Played::VALUES.len()]; Mode::VALUES.len()],
    /// One block in so many is in its models.
    pub one_in: IntGauge,
}

/// Tokens of prompts, and those of them that were or would have been cached.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlayedTotal {
    pub prompt: u64,
    pub cached: u64,
}

impl ShadowMetrics {
    fn register(registry: &Registry) -> ShadowMetrics {
        let families = [c::SHADOW_PROMPT, c::SHADOW_CACHED].map(|family| family.counters(registry));
        let cell = |mode: usize, played: usize| {
            families
                .each_ref()
                .map(|family| family.with_label_values(&[Mode::VALUES[mode], Played::VALUES[played]]))
        };
        ShadowMetrics {
            cells: std::array::from_fn(|mode| std::array::from_fn(|played| cell(mode, played))),
            one_in: c::SHADOW_ONE_IN.gauge(registry),
        }
    }

    /// What the requests of all modes would have found under `played`.
    pub fn total(&self, played: Played) -> PlayedTotal {
        self.cells.iter().fold(PlayedTotal::default(), |sum, cells| {
            let [prompt, cached] = &cells[played.index()];
            PlayedTotal { prompt: sum.prompt + prompt.get(), cached: sum.cached + cached.get() }
        })
    }

    /// A request that went by `mode` and under `played` would have found so much.
    pub fn add(&self, mode: Mode, played: Played, share: Share) {
        let [prompt, cached] = &self.cells[mode.index()][played.index()];
        prompt.inc_by(share.prompt.max(0.0).round() as u64);
        cached.inc_by(share.cached.max(0.0).round() as u64);
    }
}

/// Every metric of the process.
pub struct Metrics {
    registry: Registry,
    pub requests: Requests,
    pub in_flight: IntGauge,
    /// Requests that wait for a place at a worker.
    pub queued: IntGauge,
    pub body_bytes: IntGauge,
    pub client_connections: IntGauge,
    overhead: [Histogram; Mode::VALUES.len()],
    decision: [Histogram; Mode::VALUES.len()],
    pub reasons: Counters<Reason>,
    pub fallbacks: Counters<Fallback>,
    pub retries: Counters<Retry>,
    pub retries_denied: IntCounter,
    pub reloads: Counters<Reload>,
    /// Lines of the access log that nobody took in time.
    pub access_lost: IntCounter,
    /// Spans that nobody took in time.
    pub traces_lost: IntCounter,
    /// There from their first use on: who does not share has no such series, and zeros mean something.
    pub sharing: LazyLock<SharingMetrics, Box<dyn FnOnce() -> SharingMetrics + Send>>,
    pub models: Models,
    pub shadow: ShadowMetrics,
    pub believed_blocks: IntGauge,
    pub belief_bytes: Gauge,
    mode: OneOf<Mode>,
    phase: OneOf<Phase>,
    workers: Arc<WorkerFamilies>,
    living: Living,
    sources: Arc<SourceFamilies>,
}

impl Metrics {
    pub fn new() -> Arc<Metrics> {
        let registry = Registry::new();
        let r = &registry;
        c::BUILD_INFO.gauges(r).with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let by_mode =
            |family: &HistogramVec| std::array::from_fn(|at| family.with_label_values(&[Mode::VALUES[at]]));
        Arc::new(Metrics {
            requests: Requests::register(r),
            in_flight: c::IN_FLIGHT.gauge(r),
            queued: c::QUEUED.gauge(r),
            body_bytes: c::BODY_BYTES.gauge(r),
            client_connections: c::CLIENT_CONNECTIONS.gauge(r),
            overhead: by_mode(&c::OVERHEAD.histograms(r)),
            decision: by_mode(&c::DECISION.histograms(r)),
            reasons: Counters::register(r, &c::DECISIONS),
            fallbacks: Counters::register(r, &c::FALLBACKS),
            retries: Counters::register(r, &c::RETRIES),
            retries_denied: c::RETRIES_DENIED.counter(r),
            reloads: Counters::register(r, &c::RELOADS),
            access_lost: c::ACCESS_LOST.counter(r),
            traces_lost: c::TRACES_LOST.counter(r),
            sharing: LazyLock::new({
                let registry = registry.clone();
                Box::new(move || SharingMetrics::register(&registry))
            }),
            models: Models::register(r),
            shadow: ShadowMetrics::register(r),
            believed_blocks: c::BELIEVED_BLOCKS.gauge(r),
            belief_bytes: c::BELIEF_BYTES.float_gauge(r),
            mode: OneOf::register(r, &c::MODE),
            phase: OneOf::register(r, &c::PHASE),
            workers: WorkerFamilies::register(r),
            living: Living::default(),
            sources: SourceFamilies::register(r),
            registry,
        })
    }

    pub fn set_mode(&self, mode: Mode) {
        self.mode.set(mode);
    }

    pub fn set_phase(&self, phase: Phase) {
        self.phase.set(phase);
    }

    /// Seconds that the proxy itself worked on a request.
    pub fn overhead(&self, mode: Mode) -> &Histogram {
        &self.overhead[mode.index()]
    }

    /// Seconds spent reading a prompt and picking by this mode.
    pub fn decision(&self, mode: Mode) -> &Histogram {
        &self.decision[mode.index()]
    }

    /// The handles of the worker shown as `worker`: the same ones for all who have them at once.
    pub fn worker(&self, worker: String) -> Arc<WorkerMetrics> {
        self.living.handles(&self.workers, worker)
    }

    /// The handles of a source of workers.
    pub fn source(&self, name: &str) -> SourceMetrics {
        SourceMetrics::new(&self.sources, name)
    }

    /// The page for Prometheus, text format 0.0.4.
    pub fn render(&self) -> Vec<u8> {
        let mut page = Vec::new();
        // Writing to memory cannot fail, and families without series are left out by the registry.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut page);
        page
    }
}

#[cfg(test)]
mod tests;
