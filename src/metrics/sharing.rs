//! What routers tell each other, counted.

use prometheus::{Gauge, IntGauge, Registry};

use super::label::{NewsLost, Way};
use super::{Counters, catalogue as c};

/// The handles of `sharing`.
pub struct SharingMetrics {
    pub connected: IntGauge,
    /// Other routers that are known to live.
    pub peers: IntGauge,
    /// Workers that others place on for long, and that are not known here.
    pub unknown_workers: IntGauge,
    pub news: Counters<Way>,
    pub bytes: Counters<Way>,
    pub dropped: Counters<NewsLost>,
    /// Seconds.
    pub lag: Gauge,
}

impl SharingMetrics {
    pub(super) fn register(registry: &Registry) -> SharingMetrics {
        SharingMetrics {
            connected: c::SHARING_CONNECTED.gauge(registry),
            peers: c::SHARING_PEERS.gauge(registry),
            unknown_workers: c::SHARING_UNKNOWN.gauge(registry),
            news: Counters::register(registry, &c::SHARING_NEWS),
            bytes: Counters::register(registry, &c::SHARING_BYTES),
            dropped: Counters::register(registry, &c::SHARING_DROPPED),
            lag: c::SHARING_LAG.float_gauge(registry),
        }
    }
}
