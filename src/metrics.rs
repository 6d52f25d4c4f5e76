//! What the proxy counts. Every family is a typed handle in [`Metrics`], with labels from closed enums; values that clients
//! or the cluster choose (model names, worker addresses) are capped or vanish with their worker. Nothing here is global: a
//! test has its own.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use crate::config::Mode;
use crate::core::planner::Reason;

/// A label with a closed set of values.
pub trait Label: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    const VALUES: &'static [&'static str];

    fn index(self) -> usize;

    fn as_str(self) -> &'static str {
        Self::VALUES[self.index()]
    }
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident as $label:literal { $($(#[$case_doc:meta])* $case:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Copy, Clone, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$case_doc])* $case,)+ }

        impl Label for $name {
            const NAME: &'static str = $label;
            const VALUES: &'static [&'static str] = &[$($text,)+];

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

mod truth;

pub use truth::{Basis, Forgot, Scraped, Source, TruthMetrics};

use truth::TruthFamilies;

label! {
    /// What kind of request it was.
    Route as "route" {
        Chat = "chat",
        Completions = "completions",
        Responses = "responses",
        Messages = "messages",
        /// Forwarded by load, without a cache key.
        Other = "other",
        /// A control path of the engine.
        Blocked = "blocked",
    }
}

label! {
    /// How a request ended, as its client saw it.
    Outcome as "outcome" {
        /// The worker's answer, complete, below status 400.
        Ok = "ok",
        /// The worker's own 4xx, complete.
        ClientError = "client_error",
        /// The worker's own 5xx, complete.
        WorkerError = "worker_error",
        /// The answer broke off, or none came.
        WorkerFailed = "worker_failed",
        /// The client left before the end.
        ClientGone = "client_gone",
        /// Refused by the proxy: too large, malformed, or a blocked path.
        Refused = "refused",
        /// Too many were there already.
        Shed = "shed",
        /// No worker could take it.
        Unavailable = "unavailable",
        /// A fault of the proxy itself.
        Internal = "internal",
    }
}

label! {
    /// Whether the worker was believed to hold any of the prompt.
    Predicted as "predicted" {
        Hit = "hit",
        Miss = "miss",
    }
}

label! {
    /// Why a request was routed without what the policy wants.
    Fallback as "reason" {
        /// The body is not JSON, or not an object.
        OpaqueJson = "opaque_json",
        /// The JSON is nested too deep to follow.
        OpaqueDepth = "opaque_depth",
        /// No prompt of a known shape.
        OpaqueShape = "opaque_shape",
        /// The prompt goes on from something that only a worker has.
        OpaqueStored = "opaque_stored",
        /// No worker is known to be well, so those that may be were asked.
        NoHealthyWorker = "no_healthy_worker",
        /// The worker drawn for the client connection is out, so another was drawn.
        PinnedWorkerOut = "pinned_worker_out",
        /// No worker lists the model, so any was asked.
        ModelUnlisted = "model_unlisted",
    }
}

label! {
    /// Why an attempt was made again.
    Retry as "cause" {
        /// The worker closed a kept connection just as it was used again.
        Stale = "stale",
        /// No connection could be opened.
        Connect = "connect",
        /// The worker broke off before any answer.
        Broken = "broken",
    }
}

label! {
    /// Why a worker failed a request.
    FailureKind as "cause" {
        Connect = "connect",
        BeforeHead = "before_head",
        InBody = "in_body",
        /// The worker's own word, in the middle of a stream, that it has failed.
        InStream = "in_stream",
        /// Given up after too long a silence.
        Silent = "silent",
    }
}

label! {
    /// State of a worker; see `fleet::health`.
    WorkerState as "state" {
        Starting = "starting",
        Up = "up",
        Unreachable = "unreachable",
        Insecure = "insecure",
        Unhealthy = "unhealthy",
        Broken = "broken",
        Stalled = "stalled",
        Erring = "erring",
        Trial = "trial",
    }
}

label! {
    /// How a reload of the config ended.
    Reload as "result" {
        Applied = "applied",
        Unchanged = "unchanged",
        Refused = "refused",
    }
}

impl Label for Reason {
    const NAME: &'static str = "reason";
    const VALUES: &'static [&'static str] = &["random", "only", "warm", "spill", "cold", "load"];

    fn index(self) -> usize {
        self as usize
    }
}

impl Label for Mode {
    const NAME: &'static str = "mode";
    const VALUES: &'static [&'static str] = &["kv", "random"];

    fn index(self) -> usize {
        self as usize
    }
}

/// Counters along one closed label, each found by index.
pub struct Counters<L> {
    cells: Box<[IntCounter]>,
    label: PhantomData<L>,
}

impl<L: Label> Counters<L> {
    fn register(registry: &Registry, name: &str, help: &str) -> Counters<L> {
        let family = register(registry, IntCounterVec::new(Opts::new(name, help), &[L::NAME]));
        let cells = L::VALUES.iter().map(|value| family.with_label_values(&[*value])).collect();
        Counters { cells, label: PhantomData }
    }

    pub fn inc(&self, label: L) {
        self.cells[label.index()].inc();
    }
}

/// Requests by route, outcome and mode. Series appear when first counted: most combinations never occur.
pub struct Requests {
    family: IntCounterVec,
    cells: Box<[OnceLock<IntCounter>]>,
}

impl Requests {
    pub fn inc(&self, route: Route, outcome: Outcome, mode: Mode) {
        let place =
            (route.index() * Outcome::VALUES.len() + outcome.index()) * Mode::VALUES.len() + mode.index();
        self.cells[place]
            .get_or_init(|| self.family.with_label_values(&[route.as_str(), outcome.as_str(), mode.as_str()]))
            .inc();
    }
}

/// Token counts of one model.
#[derive(Clone)]
pub struct ModelMetrics {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: IntCounter,
    /// Prompt tokens that the planner believed to be cached.
    pub predicted_cached: IntCounter,
    /// Prompt tokens that the worker said were cached.
    pub confirmed_cached: IntCounter,
    /// `usage.prompt_tokens` of those answers that told `cached_tokens`: what `confirmed_cached` is a share of.
    pub confirmed_prompt: IntCounter,
    /// Generated tokens.
    pub output_tokens: IntCounter,
}

/// Model names that get series of their own; the rest are counted under `other`, since clients choose the names.
const MODEL_SERIES: usize = 64;
/// Longest model name that gets a series of its own.
const MODEL_NAME_BYTES: usize = 256;

/// Token counts by model, bounded.
pub struct Models {
    families: [IntCounterVec; 5],
    known: RwLock<HashMap<Box<str>, ModelMetrics>>,
}

impl Models {
    fn register(registry: &Registry) -> Models {
        let family = |name, help| register(registry, IntCounterVec::new(Opts::new(name, help), &["model"]));
        Models {
            families: [
                family("warmroute_prompt_tokens_total", "Prompt tokens, as the workers counted them."),
                family(
                    "warmroute_predicted_cached_tokens_total",
                    "Prompt tokens believed cached when placed.",
                ),
                family(
                    "warmroute_confirmed_cached_tokens_total",
                    "Prompt tokens that the workers said were cached.",
                ),
                family(
                    "warmroute_confirmed_prompt_tokens_total",
                    "Prompt tokens of the answers that said how many were cached.",
                ),
                family("warmroute_output_tokens_total", "Generated tokens, as the workers counted them."),
            ],
            known: RwLock::default(),
        }
    }

    /// The counters of `model`. To be asked only of models that a worker has answered for.
    pub fn of(&self, model: &str) -> ModelMetrics {
        if let Some(metrics) = self.known.read().get(model) {
            return metrics.clone();
        }
        let mut known = self.known.write();
        let name = match model {
            "" => "default",
            model if known.len() < MODEL_SERIES && model.len() <= MODEL_NAME_BYTES => model,
            _ => "other",
        };
        let [prompt_tokens, predicted_cached, confirmed_cached, confirmed_prompt, output_tokens] =
            self.families.each_ref().map(|family| family.with_label_values(&[name]));
        let metrics = ModelMetrics {
            prompt_tokens,
            predicted_cached,
            confirmed_cached,
            confirmed_prompt,
            output_tokens,
        };
        if name != "other" {
            known.insert(model.into(), metrics.clone());
        }
        metrics
    }
}

/// Families with a `worker` label; a worker takes its handles once and they vanish with it.
#[derive(Clone)]
struct WorkerFamilies {
    in_flight: IntGaugeVec,
    requests: IntCounterVec,
    state: IntGaugeVec,
    failures: IntCounterVec,
    connections: IntGaugeVec,
    truth: TruthFamilies,
}

/// The handles of one worker. Dropping them removes its series.
pub struct WorkerMetrics {
    families: WorkerFamilies,
    worker: String,
    pub in_flight: IntGauge,
    pub requests: IntCounter,
    /// Open connections to the worker, idle ones too.
    pub connections: IntGauge,
    /// What the worker says of itself.
    pub truth: TruthMetrics,
}

impl WorkerMetrics {
    pub fn set_state(&self, state: WorkerState) {
        for value in WorkerState::VALUES {
            let here = i64::from(*value == state.as_str());
            self.families.state.with_label_values(&[self.worker.as_str(), *value]).set(here);
        }
    }

    pub fn failed(&self, kind: FailureKind) {
        self.families.failures.with_label_values(&[self.worker.as_str(), kind.as_str()]).inc();
    }
}

impl Drop for WorkerMetrics {
    fn drop(&mut self) {
        let worker = self.worker.as_str();
        // A series that was never touched is not there to be removed.
        let _ = self.families.in_flight.remove_label_values(&[worker]);
        let _ = self.families.requests.remove_label_values(&[worker]);
        let _ = self.families.connections.remove_label_values(&[worker]);
        for state in WorkerState::VALUES {
            let _ = self.families.state.remove_label_values(&[worker, *state]);
        }
        for kind in FailureKind::VALUES {
            let _ = self.families.failures.remove_label_values(&[worker, *kind]);
        }
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
    /// Seconds from the request's arrival to the first data of a streamed answer.
    ttft: [Histogram; 2],
    /// Seconds spent reading the prompt and picking.
    pub decision: Histogram,
    pub reasons: Counters<Reason>,
    pub fallbacks: Counters<Fallback>,
    pub retries: Counters<Retry>,
    pub retries_denied: IntCounter,
    pub reloads: Counters<Reload>,
    /// Lines of the access log that nobody took in time.
    pub access_lost: IntCounter,
    pub models: Models,
    mode: IntGaugeVec,
    workers: WorkerFamilies,
}

/// Seconds; a cached prompt answers in tens of milliseconds, a long cold one under load in a minute.
const TTFT_BUCKETS: &[f64] = &[
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0,
    60.0,
];
/// Seconds; from a few microseconds for a short prompt to milliseconds for a body of megabytes.
const DECISION_BUCKETS: &[f64] =
    &[2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2];

/// A name or shape that the registry refuses is a mistake in this file, and every test would show it.
fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: prometheus::Result<C>) -> C {
    let collector = collector.expect("names and buckets in this file are valid");
    registry.register(Box::new(collector.clone())).expect("names in this file are distinct");
    collector
}

impl Metrics {
    pub fn new() -> Arc<Metrics> {
        let registry = Registry::new();
        let r = &registry;
        let counter = |name, help| register(r, IntCounter::new(name, help));
        let gauge = |name, help| register(r, IntGauge::new(name, help));
        let gauges =
            |name, help, labels: &[&str]| register(r, IntGaugeVec::new(Opts::new(name, help), labels));
        let counters =
            |name, help, labels: &[&str]| register(r, IntCounterVec::new(Opts::new(name, help), labels));
        let histogram = |name, help, buckets: &[f64]| {
            register(r, Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
        };
        let ttft = register(
            r,
            HistogramVec::new(
                HistogramOpts::new(
                    "warmroute_time_to_first_token_seconds",
                    "From a request's arrival to the first data of its streamed answer.",
                )
                .buckets(TTFT_BUCKETS.to_vec()),
                &[Predicted::NAME],
            ),
        );
        let labels = [Route::NAME, Outcome::NAME, Mode::NAME];
        let requests = Requests {
            family: counters("warmroute_requests_total", "Requests that have ended.", &labels),
            cells: (0..Route::VALUES.len() * Outcome::VALUES.len() * Mode::VALUES.len())
                .map(|_| OnceLock::new())
                .collect(),
        };
        let version = gauges("warmroute_build_info", "Always 1; the version is in the label.", &["version"]);
        version.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let worker = ["worker"];
        let workers = WorkerFamilies {
            in_flight: gauges(
                "warmroute_worker_in_flight",
                "Requests placed on the worker, not ended.",
                &worker,
            ),
            requests: counters("warmroute_worker_requests_total", "Requests placed on the worker.", &worker),
            state: gauges(
                "warmroute_worker_state",
                "1 for the state the worker is in.",
                &["worker", "state"],
            ),
            failures: counters(
                "warmroute_worker_failures_total",
                "Requests that the worker failed.",
                &["worker", "cause"],
            ),
            connections: gauges("warmroute_worker_connections", "Open connections to the worker.", &worker),
            truth: TruthFamilies::register(r),
        };
        Arc::new(Metrics {
            requests,
            in_flight: gauge("warmroute_requests_in_flight", "Requests that have come and not ended."),
            queued: gauge("warmroute_requests_queued", "Requests that wait for a place at a worker."),
            body_bytes: gauge("warmroute_request_body_bytes", "Bytes of request bodies that are held."),
            client_connections: gauge("warmroute_client_connections", "Open client connections."),
            ttft: [Predicted::Hit, Predicted::Miss].map(|label| ttft.with_label_values(&[label.as_str()])),
            decision: histogram(
                "warmroute_decision_seconds",
                "Time spent reading a prompt and picking its worker.",
                DECISION_BUCKETS,
            ),
            reasons: Counters::register(
                r,
                "warmroute_decisions_total",
                "Placements, by why the worker was picked.",
            ),
            fallbacks: Counters::register(
                r,
                "warmroute_fallbacks_total",
                "Requests routed without what the policy wants.",
            ),
            retries: Counters::register(
                r,
                "warmroute_retries_total",
                "Attempts made again, by what befell the one before.",
            ),
            retries_denied: counter(
                "warmroute_retries_denied_total",
                "Retries not made because their budget was spent.",
            ),
            reloads: Counters::register(r, "warmroute_config_reloads_total", "Reloads of the config file."),
            access_lost: counter(
                "warmroute_access_log_lost_total",
                "Lines of the access log that were lost.",
            ),
            models: Models::register(r),
            mode: gauges("warmroute_mode", "1 for the mode in force.", &[Mode::NAME]),
            workers,
            registry,
        })
    }

    pub fn set_mode(&self, mode: Mode) {
        for value in Mode::VALUES {
            self.mode.with_label_values(&[*value]).set(i64::from(*value == mode.as_str()));
        }
    }

    pub fn ttft(&self, predicted: Predicted) -> &Histogram {
        &self.ttft[predicted.index()]
    }

    /// The handles of the worker shown as `worker`, which must not be in use for another one.
    pub fn worker(&self, worker: String) -> WorkerMetrics {
        WorkerMetrics {
            in_flight: self.workers.in_flight.with_label_values(&[worker.as_str()]),
            requests: self.workers.requests.with_label_values(&[worker.as_str()]),
            connections: self.workers.connections.with_label_values(&[worker.as_str()]),
            truth: TruthMetrics::new(&self.workers.truth, &worker),
            families: self.workers.clone(),
            worker,
        }
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
mod tests {
    use super::*;

    fn page(metrics: &Metrics) -> String {
        String::from_utf8(metrics.render()).unwrap()
    }

    #[test]
    fn a_worker_takes_its_series_with_it() {
        let metrics = Metrics::new();
        let worker = metrics.worker("10.0.0.7:8000".to_owned());
        worker.set_state(WorkerState::Up);
        worker.failed(FailureKind::Connect);
        worker.requests.inc();
        assert!(page(&metrics).contains(r#"warmroute_worker_state{state="up",worker="10.0.0.7:8000"} 1"#));
        drop(worker);
        assert!(!page(&metrics).contains("10.0.0.7"));
    }

    #[test]
    fn model_names_are_bounded_and_odd_ones_escaped() {
        let metrics = Metrics::new();
        for n in 0..10_000 {
            metrics.models.of(&format!("model \"{n}\"\n\\")).prompt_tokens.inc();
        }
        metrics.models.of(&"x".repeat(1_000)).prompt_tokens.inc();
        let page = page(&metrics);
        let lines: Vec<_> =
            page.lines().filter(|line| line.starts_with("warmroute_prompt_tokens_total")).collect();
        assert_eq!(lines.len(), MODEL_SERIES + 1);
        assert!(lines.iter().any(|line| line.contains(r#"model="other"} 9937"#)), "{lines:?}");
        assert!(page.contains(r#"model="model \"0\"\n\\""#), "{page}");
    }

    #[test]
    fn labels_of_other_modules_are_in_the_order_of_their_cases() {
        for reason in Reason::ALL {
            assert_eq!(Label::as_str(reason), reason.as_str());
        }
        for mode in [Mode::Kv, Mode::Random] {
            assert_eq!(Label::as_str(mode), mode.as_str());
        }
    }

    #[test]
    fn every_outcome_lands_in_its_own_series() {
        let metrics = Metrics::new();
        metrics.requests.inc(Route::Chat, Outcome::Ok, Mode::Random);
        metrics.requests.inc(Route::Blocked, Outcome::Internal, Mode::Random);
        let page = page(&metrics);
        assert!(
            page.contains(r#"warmroute_requests_total{mode="random",outcome="ok",route="chat"} 1"#),
            "{page}"
        );
        assert!(page.contains(r#"{mode="random",outcome="internal",route="blocked"} 1"#), "{page}");
    }
}
