//! `GET /series`: the recent past for the charts of the status page. Counts are since the start, so any two samples make an interval.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::Mode;
use crate::metrics::model::TokenTotals;
use crate::metrics::{Outcome, Played, PlayedTotal, Predicted};
use crate::proxy::Proxy;

/// Time between samples.
pub(super) const EVERY: Duration = Duration::from_secs(5);
/// Samples that are kept: sixteen minutes, one more than the page shows.
const KEPT: usize = 16 * 12;

/// What is kept of the past.
pub(super) struct Series {
    samples: Mutex<Samples>,
}

#[derive(Default)]
struct Samples {
    /// Oldest first.
    kept: VecDeque<Sample>,
    taken: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    /// From 1 on.
    seq: u64,
    /// Milliseconds since 1970.
    at: u64,
    mode: Mode,
    /// Requests that have ended, and those of them that were not served and not at fault.
    requests: u64,
    failed: u64,
    tokens: Arms<TokenTotals>,
    /// What would have been found cached.
    shadow: Shadow,
    /// First tokens up to each of the bounds, and all.
    first_tokens: ByPrediction<Vec<u64>>,
}

#[derive(Clone, Debug, Serialize)]
struct Arms<T> {
    kv: T,
    random: T,
}

#[derive(Clone, Debug, Serialize)]
struct Shadow {
    kv: PlayedTotal,
    random: PlayedTotal,
    ideal: PlayedTotal,
}

#[derive(Clone, Debug, Serialize)]
struct ByPrediction<T> {
    hit: T,
    miss: T,
}

/// Ends that are somebody's fault but the client's.
const FAILED: [Outcome; 6] = [
    Outcome::WorkerError,
    Outcome::WorkerFailed,
    Outcome::Shed,
    Outcome::Unavailable,
    Outcome::Cut,
    Outcome::Internal,
];

impl Series {
    pub(super) fn new() -> Series {
        Series { samples: Mutex::default() }
    }

    /// Takes a sample.
    pub(super) fn take(&self, proxy: &Proxy) {
        let metrics = &proxy.metrics;
        let total = |outcome: &Outcome| metrics.requests.total(*outcome);
        let first = |predicted| metrics.models.first_tokens(predicted);
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let sample = Sample {
            seq: 0,
            at: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            mode: proxy.config.load().mode,
            requests: Outcome::ALL.iter().map(total).sum(),
            failed: FAILED.iter().map(total).sum(),
            tokens: Arms {
                kv: metrics.models.token_totals(Mode::Kv),
                random: metrics.models.token_totals(Mode::Random),
            },
            shadow: Shadow {
                kv: metrics.shadow.total(Played::Kv),
                random: metrics.shadow.total(Played::Random),
                ideal: metrics.shadow.total(Played::Ideal),
            },
            first_tokens: ByPrediction { hit: first(Predicted::Hit), miss: first(Predicted::Miss) },
        };
        let mut samples = self.samples.lock();
        samples.taken += 1;
        let seq = samples.taken;
        samples.kept.push_back(Sample { seq, ..sample });
        if samples.kept.len() > KEPT {
            samples.kept.pop_front();
        }
    }

    /// What was taken after the sample `since`, and what is the case now.
    pub(super) fn tell(&self, proxy: &Proxy, since: u64) -> Value {
        let samples = self.samples.lock();
        let told: Vec<&Sample> = samples.kept.iter().filter(|sample| sample.seq > since).collect();
        json!({
            "every_s": EVERY.as_secs(),
            "next": samples.taken + 1,
            "bounds": proxy.metrics.models.first_token_bounds(),
            "in_flight": proxy.metrics.in_flight.get(),
            "queued": proxy.metrics.queued.get(),
            "samples": told,
        })
    }
}
