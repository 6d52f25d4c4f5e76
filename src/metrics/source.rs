//! The series of one source of workers: how it goes with finding them. A source takes its handles once, and they vanish with it.

use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::catalogue as c;
use super::{Label, Trouble};

/// Families with a `source` label of this kind.
pub(super) struct SourceFamilies {
    synced: IntGaugeVec,
    workers: IntGaugeVec,
    updates: IntCounterVec,
    failures: IntCounterVec,
}

impl SourceFamilies {
    pub(super) fn register(r: &Registry) -> Arc<SourceFamilies> {
        Arc::new(SourceFamilies {
            synced: c::DISCOVERY_SYNCED.gauges(r),
            workers: c::DISCOVERY_WORKERS.gauges(r),
            updates: c::DISCOVERY_UPDATES.counters(r),
            failures: c::DISCOVERY_FAILURES.counters(r),
        })
    }
}

/// The handles of one source. Dropping them removes its series.
pub struct SourceMetrics {
    families: Arc<SourceFamilies>,
    source: String,
    pub synced: IntGauge,
    pub workers: IntGauge,
    pub updates: IntCounter,
}

impl SourceMetrics {
    pub(super) fn new(families: &Arc<SourceFamilies>, source: &str) -> SourceMetrics {
        SourceMetrics {
            synced: families.synced.with_label_values(&[source]),
            workers: families.workers.with_label_values(&[source]),
            updates: families.updates.with_label_values(&[source]),
            families: families.clone(),
            source: source.to_owned(),
        }
    }

    pub fn failed(&self, trouble: Trouble) {
        self.families.failures.with_label_values(&[self.source.as_str(), trouble.as_str()]).inc();
    }
}

impl Drop for SourceMetrics {
    fn drop(&mut self) {
        let (source, f) = (self.source.as_str(), &self.families);
        // A series that was never touched is not there to be removed.
        let _ = f.synced.remove_label_values(&[source]);
        let _ = f.workers.remove_label_values(&[source]);
        let _ = f.updates.remove_label_values(&[source]);
        for trouble in Trouble::VALUES {
            let _ = f.failures.remove_label_values(&[source, *trouble]);
        }
    }
}
