//! One vLLM server, as the proxy knows it.

use std::sync::atomic::{AtomicBool, Ordering};

use http::HeaderValue;
use parking_lot::Mutex;

use super::connection::Pool;
use super::health::{Change, Event, Health, Standing};
use crate::config;
use crate::core::ids::{Time, WorkerId};
use crate::metrics::{Metrics, WorkerMetrics, WorkerState};

/// A worker in the fleet. Dropped when it has left and its last request has ended, and with it its connections and series.
pub struct Worker {
    pub id: WorkerId,
    pub config: config::Worker,
    /// What it is called by requests to it: its `Host`.
    pub authority: HeaderValue,
    pub pool: Pool,
    pub metrics: WorkerMetrics,
    health: Mutex<Health>,
    /// Copies of what readers of `health` ask for most.
    eligible: AtomicBool,
    calm: AtomicBool,
}

impl Worker {
    pub(super) fn new(id: WorkerId, config: config::Worker, probed: bool, metrics: &Metrics) -> Worker {
        let authority = config.url.authority();
        let metrics = metrics.worker(authority.clone());
        let health = Health::new(probed);
        metrics.set_state(label(health.standing()));
        Worker {
            id,
            authority: HeaderValue::try_from(&authority).expect("a host and port that a URI took"),
            pool: Pool::new(config.url.clone(), metrics.connections.clone()),
            eligible: AtomicBool::new(health.is_eligible()),
            calm: AtomicBool::new(health.is_calm()),
            health: Mutex::new(health),
            metrics,
            config,
        }
    }

    /// May be given a request.
    pub fn is_eligible(&self) -> bool {
        self.eligible.load(Ordering::Relaxed)
    }

    /// Up, and nothing has failed lately.
    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub fn standing(&self) -> Standing {
        self.health.lock().standing()
    }

    pub(super) fn record(&self, event: Event, now: Time, settings: &config::Health) -> Option<Change> {
        let mut health = self.health.lock();
        let was = (health.standing(), health.is_eligible());
        health.record(event, now, settings);
        let is = (health.standing(), health.is_eligible());
        self.calm.store(health.is_calm(), Ordering::Relaxed);
        if was == is {
            return None;
        }
        self.eligible.store(is.1, Ordering::Relaxed);
        self.metrics.set_state(label(is.0));
        Some(Change { from: was.0, to: is.0 })
    }
}

fn label(standing: Standing) -> WorkerState {
    match standing {
        Standing::Starting => WorkerState::Starting,
        Standing::Up => WorkerState::Up,
        Standing::Out => WorkerState::Out,
        Standing::Trial => WorkerState::Trial,
    }
}
