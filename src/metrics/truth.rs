//! What the workers say of themselves, beside what is believed of them.

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry};

use super::{Label, register};

label! {
    /// How a reading of a worker's metrics page ended.
    Scraped as "outcome" {
        Ok = "ok",
        /// Nobody listens there.
        Refused = "refused",
        /// No connection could be opened otherwise.
        Connect = "connect",
        Timeout = "timeout",
        /// The status was not 200.
        Status = "status",
        /// The page is larger than `scrape.limit`.
        TooLarge = "too_large",
        /// It broke off.
        Broken = "broken",
        /// Nothing that is known was on it.
        Foreign = "not_vllm",
    }
}

label! {
    /// Why what was believed of a worker was forgotten.
    Forgot as "reason" {
        /// Its process is a new one.
        Restarted = "restarted",
        /// A counter of its engine fell.
        CounterFell = "counter_fell",
        /// Nobody listens at its address.
        Refused = "refused",
        /// Connections to it fail.
        Unreachable = "unreachable",
        /// Its engine finds nothing of what should be cached.
        HitsFlat = "hits_flat",
        /// Its answers confirm nothing of what was used just before.
        Unconfirmed = "unconfirmed",
    }
}

/// Whose count of tokens it is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Source {
    Predicted,
    Confirmed,
    Engine,
}

impl Label for Source {
    const NAME: &'static str = "source";
    const VALUES: &'static [&'static str] = &["predicted", "confirmed", "engine"];

    fn index(self) -> usize {
        self as usize
    }
}

/// What the belief about a worker stands on.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Basis {
    /// Its answers tell what was cached.
    Confirmed,
    /// The size of its cache is known, but no answer tells what was cached.
    NoUsage,
    /// Its page has not been read yet, or never could be.
    NoScrape,
    /// Its page does not tell the size of the cache.
    NoCapacity,
    /// Its page cannot be read any more.
    Stale,
    /// Its page does not change while it works.
    Frozen,
}

impl Basis {
    const ALL: [Basis; 6] =
        [Basis::Confirmed, Basis::NoUsage, Basis::NoScrape, Basis::NoCapacity, Basis::Stale, Basis::Frozen];

    /// The labels `basis` and `reason`.
    pub fn labels(self) -> [&'static str; 2] {
        match self {
            Basis::Confirmed => ["calibrated", "confirmed"],
            Basis::NoUsage => ["predicted", "no_usage"],
            Basis::NoScrape => ["blind", "no_scrape"],
            Basis::NoCapacity => ["blind", "no_capacity"],
            Basis::Stale => ["blind", "stale"],
            Basis::Frozen => ["blind", "frozen"],
        }
    }
}

/// Families with a `worker` label.
#[derive(Clone)]
pub(super) struct TruthFamilies {
    scrapes: IntCounterVec,
    age: GaugeVec,
    forgotten: IntCounterVec,
    basis: IntGaugeVec,
    cached: IntCounterVec,
    prompt: IntCounterVec,
    capacity: IntGaugeVec,
    models: IntGaugeVec,
    credit: GaugeVec,
    foreign_requests: GaugeVec,
    foreign_share: GaugeVec,
}

impl TruthFamilies {
    pub(super) fn register(registry: &Registry) -> TruthFamilies {
        let r = registry;
        let counters =
            |name, help, labels: &[&str]| register(r, IntCounterVec::new(Opts::new(name, help), labels));
        let gauges = |name, help| register(r, GaugeVec::new(Opts::new(name, help), &["worker"]));
        TruthFamilies {
            scrapes: counters(
                "warmroute_worker_scrapes_total",
                "Readings of the worker's metrics page, by how they ended.",
                &["worker", Scraped::NAME],
            ),
            age: gauges(
                "warmroute_worker_scrape_age_seconds",
                "Time since the worker's metrics page was last read; there is none before the first time.",
            ),
            forgotten: counters(
                "warmroute_worker_beliefs_forgotten_total",
                "Times that all that was believed cached on the worker was forgotten.",
                &["worker", Forgot::NAME],
            ),
            basis: register(
                r,
                IntGaugeVec::new(
                    Opts::new("warmroute_worker_basis", "1 for what the belief about the worker stands on."),
                    &["worker", "basis", "reason"],
                ),
            ),
            cached: counters(
                "warmroute_worker_cached_tokens_total",
                "Prompt tokens found cached: as predicted and as confirmed, both of answers that told, and as the \
                 engine counted.",
                &["worker", Source::NAME],
            ),
            prompt: counters(
                "warmroute_worker_prompt_tokens_total",
                "Prompt tokens that the above are a share of: of answers that told, and as the engine counted.",
                &["worker", Source::NAME],
            ),
            capacity: register(
                r,
                IntGaugeVec::new(
                    Opts::new(
                        "warmroute_worker_capacity_tokens",
                        "KV cache of the worker: as configured or told by it, and as it is believed to stay for us.",
                    ),
                    &["worker", "kind"],
                ),
            ),
            models: register(
                r,
                IntGaugeVec::new(
                    Opts::new(
                        "warmroute_worker_models",
                        "Models and adapters that the worker lists; there is none while that is not known.",
                    ),
                    &["worker"],
                ),
            ),
            credit: gauges(
                "warmroute_worker_credit_ratio",
                "Of what was believed cached on the worker, the share that was confirmed of late.",
            ),
            foreign_requests: gauges(
                "warmroute_worker_foreign_requests",
                "Requests at the worker that did not come through here; zero if unknown.",
            ),
            foreign_share: gauges(
                "warmroute_worker_foreign_ratio",
                "Share of the worker's prompt tokens that did not come through here; zero if unknown.",
            ),
        }
    }
}

/// The handles of one worker. Dropping them removes its series.
pub struct TruthMetrics {
    families: TruthFamilies,
    worker: String,
    pub credit: Gauge,
    pub foreign_requests: Gauge,
    pub foreign_share: Gauge,
    cached: [IntCounter; 3],
}

impl TruthMetrics {
    pub(super) fn new(families: &TruthFamilies, worker: &str) -> TruthMetrics {
        let metrics = TruthMetrics {
            credit: families.credit.with_label_values(&[worker]),
            foreign_requests: families.foreign_requests.with_label_values(&[worker]),
            foreign_share: families.foreign_share.with_label_values(&[worker]),
            cached: [Source::Predicted, Source::Confirmed, Source::Engine]
                .map(|source| families.cached.with_label_values(&[worker, source.as_str()])),
            families: families.clone(),
            worker: worker.to_owned(),
        };
        metrics.credit.set(1.0);
        metrics
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
        for other in Basis::ALL {
            let [name, reason] = other.labels();
            let here = i64::from(other == basis);
            self.families.basis.with_label_values(&[self.worker.as_str(), name, reason]).set(here);
        }
    }

    /// The KV cache as told and as believed to stay; what is unknown has no series.
    pub fn set_capacity(&self, told: Option<u64>, believed: Option<u64>) {
        for (kind, tokens) in [("told", told), ("believed", believed)] {
            let labels = [self.worker.as_str(), kind];
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

    /// An answer told what was cached of its prompt.
    pub fn confirmed(&self, predicted: f64, confirmed: u32, prompt: u32) {
        self.cached[Source::Predicted.index()].inc_by(predicted.max(0.0).round() as u64);
        self.cached[Source::Confirmed.index()].inc_by(u64::from(confirmed));
        self.prompt(Source::Confirmed).inc_by(u64::from(prompt));
    }

    /// The engine counted so many more.
    pub fn engine_counted(&self, cached: f64, prompt: f64) {
        self.cached[Source::Engine.index()].inc_by(cached.max(0.0) as u64);
        self.prompt(Source::Engine).inc_by(prompt.max(0.0) as u64);
    }

    fn prompt(&self, source: Source) -> IntCounter {
        self.families.prompt.with_label_values(&[self.worker.as_str(), source.as_str()])
    }
}

impl Drop for TruthMetrics {
    fn drop(&mut self) {
        let (worker, families) = (self.worker.as_str(), &self.families);
        // A series that was never touched is not there to be removed.
        for outcome in Scraped::VALUES {
            let _ = families.scrapes.remove_label_values(&[worker, *outcome]);
        }
        for reason in Forgot::VALUES {
            let _ = families.forgotten.remove_label_values(&[worker, *reason]);
        }
        for basis in Basis::ALL {
            let [name, reason] = basis.labels();
            let _ = families.basis.remove_label_values(&[worker, name, reason]);
        }
        for source in Source::VALUES {
            let _ = families.cached.remove_label_values(&[worker, *source]);
            let _ = families.prompt.remove_label_values(&[worker, *source]);
        }
        for gauge in [&families.age, &families.credit, &families.foreign_requests, &families.foreign_share] {
            let _ = gauge.remove_label_values(&[worker]);
        }
        self.set_capacity(None, None);
        self.set_models(None);
    }
}
