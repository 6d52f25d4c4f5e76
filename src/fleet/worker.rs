//! One vLLM server, as the proxy knows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::activity::Activity;
use super::connection::Pool;
use super::health::{Event, Health, Reason, Standing};
use super::listing::Listed;
use super::models::Models;
use super::scrape::Engine;
use super::stream::Secure;
use crate::config::{self, Origin};
use crate::core::ids::{Time, WorkerId};
use crate::metrics::{Basis, Metrics, WorkerMetrics, WorkerState};

/// A worker in the fleet. Dropped when it has left and its last request has ended, and with it its connections and series.
pub struct Worker {
    pub id: WorkerId,
    pub url: Origin,
    /// As the config has it now: all but the address can be edited.
    config: Mutex<config::Worker>,
    /// What it is called by requests to it: its `Host`.
    pub authority: HeaderValue,
    pub pool: Pool,
    pub metrics: WorkerMetrics,
    pub activity: Activity,
    /// Requests that have a place here.
    pub open: Arc<AtomicUsize>,
    /// Whether connections to it fail: what it still owes will hardly come.
    unreachable: watch::Sender<bool>,
    /// What it says of itself.
    pub(super) engine: Mutex<Engine>,
    /// Which models it serves.
    pub(super) listed: Mutex<Listed>,
    /// Told when its models are to be asked for at once.
    pub(super) relist: Notify,
    health: Mutex<Health>,
    /// Copies of what readers of `health` ask for most.
    eligible: AtomicBool,
    calm: AtomicBool,
}

impl Worker {
    pub(super) fn new(
        id: WorkerId,
        config: config::Worker,
        probed: bool,
        secure: Secure,
        metrics: &Metrics,
    ) -> Worker {
        let authority = config.url.authority();
        let metrics = metrics.worker(config.url.label());
        let health = Health::new(probed);
        metrics.set_state(shown(&health));
        Worker {
            id,
            authority: HeaderValue::try_from(&authority).expect("a host and port that a URI took"),
            pool: Pool::new(config.url.clone(), secure, metrics.connections.clone()),
            eligible: AtomicBool::new(health.is_eligible()),
            calm: AtomicBool::new(health.is_calm()),
            engine: Mutex::default(),
            listed: Mutex::default(),
            relist: Notify::new(),
            health: Mutex::new(health),
            activity: Activity::default(),
            open: Arc::default(),
            unreachable: watch::Sender::new(false),
            metrics,
            url: config.url.clone(),
            config: Mutex::new(config),
        }
    }

    /// Size of its KV cache by the config.
    pub(super) fn configured_capacity(&self) -> Option<u64> {
        self.config.lock().capacity_tokens
    }

    /// Takes an edit of its settings; answers what they were.
    pub(super) fn reconfigure(&self, config: config::Worker) -> config::Worker {
        std::mem::replace(&mut *self.config.lock(), config)
    }

    /// The models that it serves, if that is known.
    pub fn models(&self) -> Option<Arc<Models>> {
        self.listed.lock().models.clone()
    }

    /// It has answered that there is no such model, or whatever else was asked for: its list may be out of date, if `model` is on it.
    pub fn relist_if_listed(&self, model: &str) {
        if self.models().is_some_and(|models| models.has(model)) {
            self.relist.notify_one();
        }
    }

    /// Has fewer requests than `limit`.
    pub fn has_room(&self, limit: usize) -> bool {
        self.open.load(Ordering::Acquire) < limit
    }

    /// May be given a request.
    pub fn is_eligible(&self) -> bool {
        self.eligible.load(Ordering::Relaxed)
    }

    /// Out or on trial, but perhaps of use.
    pub fn is_doubtful(&self) -> bool {
        let health = self.health.lock();
        match health.standing() {
            _ if health.is_draining() => false,
            Standing::Out(reason) => !matches!(reason, Reason::Unreachable | Reason::Insecure),
            Standing::Trial => true,
            Standing::Starting | Standing::Up => false,
        }
    }

    /// Up, and nothing has failed lately.
    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub fn standing(&self) -> Standing {
        self.health.lock().standing()
    }

    /// An operator has it take nothing new.
    pub fn is_draining(&self) -> bool {
        self.health.lock().is_draining()
    }

    /// Its state as operators see it.
    pub fn state(&self) -> WorkerState {
        shown(&self.health.lock())
    }

    /// Its state if no operator had said anything.
    pub fn health(&self) -> WorkerState {
        by_health(self.standing())
    }

    /// What the belief about it stands on, once that has been looked at.
    pub fn basis(&self) -> Option<Basis> {
        self.engine.lock().basis
    }

    /// Has it take nothing new, or again; answers whether that is a change.
    pub(super) fn set_draining(&self, draining: bool) -> bool {
        let mut health = self.health.lock();
        let changes = health.is_draining() != draining;
        health.set_draining(draining);
        self.eligible.store(health.is_eligible(), Ordering::Relaxed);
        self.metrics.set_state(shown(&health));
        changes
    }

    pub(super) fn show_age(&self, now: Time) {
        if let Some(age) = self.scrape_age(now) {
            self.metrics.set_age(age);
        }
    }

    /// Seconds since its metrics page was last read.
    pub fn scrape_age(&self, now: Time) -> Option<f64> {
        self.engine.lock().read_at.map(|at| now - at)
    }

    pub fn is_unreachable(&self) -> bool {
        *self.unreachable.borrow()
    }

    /// Waits until connections to the worker fail.
    pub async fn unreachable(&self) {
        let mut unreachable = self.unreachable.subscribe();
        // The sender is ourselves, so it cannot be gone.
        let _ = unreachable.wait_for(|unreachable| *unreachable).await;
    }

    /// Tells the worker's health; answers whether it stands elsewhere, or may be picked otherwise, than before.
    pub(super) fn record(&self, event: Event, now: Time, settings: &config::Health) -> Option<Standing> {
        let mut health = self.health.lock();
        let was = (health.standing(), health.is_eligible());
        health.record(event, now, settings);
        let is = (health.standing(), health.is_eligible());
        self.calm.store(health.is_calm(), Ordering::Relaxed);
        if was == is {
            return None;
        }
        self.eligible.store(is.1, Ordering::Relaxed);
        self.unreachable.send_replace(is.0 == Standing::Out(Reason::Unreachable));
        self.metrics.set_state(shown(&health));
        Some(is.0)
    }
}

fn shown(health: &Health) -> WorkerState {
    if health.is_draining() { WorkerState::Draining } else { by_health(health.standing()) }
}

fn by_health(standing: Standing) -> WorkerState {
    match standing {
        Standing::Starting => WorkerState::Starting,
        Standing::Up => WorkerState::Up,
        Standing::Out(Reason::Unreachable) => WorkerState::Unreachable,
        Standing::Out(Reason::Insecure) => WorkerState::Insecure,
        Standing::Out(Reason::Unhealthy) => WorkerState::Unhealthy,
        Standing::Out(Reason::Broke) => WorkerState::Broken,
        Standing::Out(Reason::Stalled) => WorkerState::Stalled,
        Standing::Out(Reason::Erring) => WorkerState::Erring,
        Standing::Trial => WorkerState::Trial,
    }
}
