//! The series of one worker: what is sent to it, what it says of itself, and what is believed of it. A worker takes its handles once,
//! and they vanish with it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::catalogue as c;
use super::{Basis, Capacity, FailureKind, Forgot, Label, Scraped, Source, WorkerState};

/// Families with a `worker` label.
pub(super) struct WorkerFamilies {
    state: IntGaugeVec,
    in_flight: IntGaugeVec,
    requests: IntCounterVec,
    failures: IntCounterVec,
    connections: IntGaugeVec,
    queue: IntGaugeVec,
    speed: GaugeVec,
    models: IntGaugeVec,
    basis: IntGaugeVec,
    cached: IntCounterVec,
    prompt: IntCounterVec,
    capacity: IntGaugeVec,
    believed_tokens: IntGaugeVec,
    believed_blocks: IntGaugeVec,
    evicted: IntCounterVec,
    credit: GaugeVec,
    foreign_requests: GaugeVec,
    foreign_share: GaugeVec,
    forgotten: IntCounterVec,
    scrapes: IntCounterVec,
    age: GaugeVec,
}

impl WorkerFamilies {
    pub(super) fn register(r: &Registry) -> Arc<WorkerFamilies> {
        Arc::new(WorkerFamilies {
            state: c::WORKER_STATE.gauges(r),
            in_flight: c::WORKER_IN_FLIGHT.gauges(r),
            requests: c::WORKER_REQUESTS.counters(r),
            failures: c::WORKER_FAILURES.counters(r),
            connections: c::WORKER_CONNECTIONS.gauges(r),
            queue: c::WORKER_QUEUE.gauges(r),
            speed: c::WORKER_SPEED.float_gauges(r),
            models: c::WORKER_MODELS.gauges(r),
            basis: c::WORKER_BASIS.gauges(r),
            cached: c::WORKER_CACHED.counters(r),
            prompt: c::WORKER_PROMPT.counters(r),
            capacity: c::WORKER_CAPACITY.gauges(r),
            believed_tokens: c::WORKER_BELIEVED_TOKENS.gauges(r),
            believed_blocks: c::WORKER_BELIEVED_BLOCKS.gauges(r),
            evicted: c::WORKER_EVICTED.counters(r),
            credit: c::WORKER_CREDIT.float_gauges(r),
            foreign_requests: c::WORKER_FOREIGN_REQUESTS.float_gauges(r),
            foreign_share: c::WORKER_FOREIGN_RATIO.float_gauges(r),
            forgotten: c::WORKER_FORGOTTEN.counters(r),
            scrapes: c::WORKER_SCRAPES.counters(r),
            age: c::WORKER_SCRAPE_AGE.float_gauges(r),
        })
    }
}

/// Who has handles. A worker may join at an address where another one is still ending its requests: they share them, and the
/// series go with the last.
#[derive(Clone, Default)]
pub(super) struct Living(Arc<Mutex<HashMap<String, Weak<WorkerMetrics>>>>);

impl Living {
    pub(super) fn handles(&self, families: &Arc<WorkerFamilies>, worker: String) -> Arc<WorkerMetrics> {
        let mut living = self.0.lock();
        if let Some(handles) = living.get(&worker).and_then(Weak::upgrade) {
            return handles;
        }
        let handles = Arc::new(WorkerMetrics::new(families, worker.clone(), self.clone()));
        living.insert(worker, Arc::downgrade(&handles));
        handles
    }
}

/// The handles of one worker. Dropping the last of them removes its series.
pub struct WorkerMetrics {
    families: Arc<WorkerFamilies>,
    living: Living,
    worker: String,
    pub in_flight: IntGauge,
    pub requests: IntCounter,
    /// Open connections to the worker, idle ones too.
    pub connections: IntGauge,
    /// Uncached tokens to be prefilled.
    pub queue_tokens: IntGauge,
    pub believed_tokens: IntGauge,
    pub believed_blocks: IntGauge,
    evicted: IntCounter,
    pub credit: Gauge,
    pub foreign_requests: Gauge,
    pub foreign_share: Gauge,
    cached: [IntCounter; Source::VALUES.len()],
    /// Of confirmed and of engine-counted ones.
    prompt: [IntCounter; 2],
}

/// What was found cached of the prompts of a worker's answers that told, in tokens, since it joined.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hits {
    pub predicted: u64,
    pub confirmed: u64,
    pub prompt: u64,
}

impl WorkerMetrics {
    fn new(families: &Arc<WorkerFamilies>, worker: String, living: Living) -> WorkerMetrics {
        let name = worker.as_str();
        let of = |source: Source| families.cached.with_label_values(&[name, source.as_str()]);
        let prompt = |source: Source| families.prompt.with_label_values(&[name, source.as_str()]);
        let metrics = WorkerMetrics {
            in_flight: families.in_flight.with_label_values(&[name]),
            requests: families.requests.with_label_values(&[name]),
            connections: families.connections.with_label_values(&[name]),
            queue_tokens: families.queue.with_label_values(&[name]),
            believed_tokens: families.believed_tokens.with_label_values(&[name]),
            believed_blocks: families.believed_blocks.with_label_values(&[name]),
            evicted: families.evicted.with_label_values(&[name]),
            credit: families.credit.with_label_values(&[name]),
            foreign_requests: families.foreign_requests.with_label_values(&[name]),
            foreign_share: families.foreign_share.with_label_values(&[name]),
            cached: [Source::Predicted, Source::Confirmed, Source::Engine].map(of),
            prompt: [Source::Confirmed, Source::Engine].map(prompt),
            families: families.clone(),
            living,
            worker,
        };
        metrics.credit.set(1.0);
        metrics
    }

    pub fn set_state(&self, state: WorkerState) {
        only(
            &self.families.state,
            &self.worker,
            WorkerState::VALUES.iter().map(|value| [*value]),
            [state.as_str()],
        );
    }

    pub fn failed(&self, kind: FailureKind) {
        self.families.failures.with_label_values(&[self.worker.as_str(), kind.as_str()]).inc();
    }

    pub fn scraped(&self, outcome: Scraped) {
        self.families.scrapes.with_label_values(&[self.worker.as_str(), outcome.as_str()]).inc();
    }

    pub fn set_age(&self, seconds: f64) {
        self.families.age.with_label_values(&[self.worker.as_str()]).set(seconds);
    }

    pub fn forgot(&self, reason: Forgot) {
        self.families.forgotten.with_label_values(&[self.worker.as_str(), reason.as_str()]).inc();
    }

    pub fn set_basis(&self, basis: Basis) {
        let labels = |basis: Basis| [basis.footing().as_str(), basis.as_str()];
        only(&self.families.basis, &self.worker, Basis::ALL.iter().copied().map(labels), labels(basis));
    }

    /// The KV cache as told and as believed to stay; what is unknown has no series.
    pub fn set_capacity(&self, told: Option<u64>, believed: Option<u64>) {
        for (kind, tokens) in [(Capacity::Told, told), (Capacity::Believed, believed)] {
            let labels = [self.worker.as_str(), kind.as_str()];
            match tokens {
                Some(tokens) => self.families.capacity.with_label_values(&labels).set(tokens as i64),
                // One that was never there is not there to be removed.
                None => drop(self.families.capacity.remove_label_values(&labels)),
            }
        }
    }

    /// How many models it lists; what is unknown has no series.
    pub fn set_models(&self, count: Option<usize>) {
        let labels = [self.worker.as_str()];
        match count {
            Some(count) => self.families.models.with_label_values(&labels).set(count as i64),
            None => drop(self.families.models.remove_label_values(&labels)),
        }
    }

    /// Prefill tokens a second; what is unknown has no series.
    pub fn set_speed(&self, tokens_per_s: Option<f64>) {
        let labels = [self.worker.as_str()];
        match tokens_per_s {
            Some(speed) => self.families.speed.with_label_values(&labels).set(speed),
            None => drop(self.families.speed.remove_label_values(&labels)),
        }
    }

    /// Blocks pushed out since it joined.
    pub fn set_evicted(&self, blocks: u64) {
        self.evicted.inc_by(blocks.saturating_sub(self.evicted.get()));
    }

    /// An answer told what was cached of its prompt.
    pub fn confirmed(&self, predicted: f64, confirmed: u32, prompt: u32) {
        self.cached[Source::Predicted.index()].inc_by(predicted.max(0.0).round() as u64);
        self.cached[Source::Confirmed.index()].inc_by(u64::from(confirmed));
        self.prompt[0].inc_by(u64::from(prompt));
    }

    /// The engine counted so many more.
    pub fn engine_counted(&self, cached: f64, prompt: f64) {
        self.cached[Source::Engine.index()].inc_by(cached.max(0.0) as u64);
        self.prompt[1].inc_by(prompt.max(0.0) as u64);
    }

    /// See [`Hits`].
    pub fn hits(&self) -> Hits {
        let [predicted, confirmed, _] = &self.cached;
        Hits { predicted: predicted.get(), confirmed: confirmed.get(), prompt: self.prompt[0].get() }
    }
}

/// Sets the series with `labels` to 1 and takes the worker's others away.
fn only<const N: usize>(
    family: &IntGaugeVec,
    worker: &str,
    all: impl Iterator<Item = [&'static str; N]>,
    labels: [&'static str; N],
) {
    let of = |labels: [&'static str; N]| [&[worker], labels.as_slice()].concat();
    for other in all.filter(|other| *other != labels) {
        // One that was never there is not there to be removed.
        let _ = family.remove_label_values(&of(other));
    }
    family.with_label_values(&of(labels)).set(1);
}

impl Drop for WorkerMetrics {
    fn drop(&mut self) {
        let (worker, f) = (self.worker.as_str(), &self.families);
        let mut living = self.living.0.lock();
        if living.get(worker).is_some_and(|handles| handles.strong_count() > 0) {
            return; // Somebody has come to this address since the last handle here was let go.
        }
        living.remove(worker);
        // A series that was never touched is not there to be removed.
        for family in
            [&f.in_flight, &f.connections, &f.queue, &f.models, &f.believed_tokens, &f.believed_blocks]
        {
            let _ = family.remove_label_values(&[worker]);
        }
        for family in [&f.requests, &f.evicted] {
            let _ = family.remove_label_values(&[worker]);
        }
        for family in [&f.speed, &f.credit, &f.foreign_requests, &f.foreign_share, &f.age] {
            let _ = family.remove_label_values(&[worker]);
        }
        for (family, values) in [
            (&f.failures, FailureKind::VALUES),
            (&f.cached, Source::VALUES),
            (&f.prompt, Source::VALUES),
            (&f.forgotten, Forgot::VALUES),
            (&f.scrapes, Scraped::VALUES),
        ] {
            for value in values {
                let _ = family.remove_label_values(&[worker, *value]);
            }
        }
        for (family, values) in [(&f.state, WorkerState::VALUES), (&f.capacity, Capacity::VALUES)] {
            for value in values {
                let _ = family.remove_label_values(&[worker, *value]);
            }
        }
        for basis in Basis::ALL.iter().copied() {
            let _ = f.basis.remove_label_values(&[worker, basis.footing().as_str(), basis.as_str()]);
        }
    }
}
