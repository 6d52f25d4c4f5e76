//! One vLLM server, as the proxy knows it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::activity::Activity;
use super::connection::Pool;
use super::discovery::endpoints::{Intake, Pod};
use super::health::{Event, Health, Reason, Standing};
use super::key_of;
use super::listing::Listed;
use super::models::Models;
use super::roster::Member;
use super::scrape::Engine;
use super::stream::Secure;
use crate::bell::Bell;
use crate::config::{self, Origin};
use crate::core::ids::{Time, WorkerId};
use crate::metrics::{Basis, Metrics, WorkerMetrics, WorkerState};

/// A worker in the fleet. Dropped when it has left and its last request has ended, and with it its connections and series.
pub struct Worker {
    pub id: WorkerId,
    pub url: Origin,
    /// Of its address: the same on all routers.
    pub key: u64,
    /// As the config has it now: all but the address can be edited.
    config: Mutex<config::Worker>,
    /// What it is called by requests to it: its `Host`.
    pub authority: HeaderValue,
    /// Which pod it is, where that is known.
    pub pod: OnceLock<Pod>,
    pub pool: Pool,
    pub metrics: Arc<WorkerMetrics>,
    pub activity: Activity,
    /// Requests that have a place here.
    pub open: Arc<AtomicUsize>,
    /// Whether connections to it fail: what it still owes will hardly come.
    unreachable: AtomicBool,
    /// Rung when they begin to.
    lost: Bell,
    /// What it says of itself.
    pub(super) engine: Mutex<Engine>,
    /// Which models it serves.
    pub(super) listed: Mutex<Listed>,
    /// Told when its models are to be asked for at once.
    pub(super) relist: Notify,
    state: Mutex<State>,
    /// Copies of what readers of `state` ask for most.
    eligible: AtomicBool,
    calm: AtomicBool,
}

/// Whether requests may go there, by those who list it and by what is seen of it.
struct State {
    health: Health,
    intake: Intake,
    zone: Option<Arc<str>>,
    /// Its address has passed to another pod: whatever it still owes will not come.
    replaced: bool,
}

impl State {
    fn is_eligible(&self) -> bool {
        self.intake == Intake::Open && self.health.is_eligible()
    }

    fn shown(&self) -> WorkerState {
        match self.intake {
            Intake::Terminating => WorkerState::Terminating,
            Intake::NotReady => WorkerState::NotReady,
            Intake::Open if self.health.is_draining() => WorkerState::Draining,
            Intake::Open => by_health(self.health.standing()),
        }
    }
}

impl Worker {
    pub(super) fn new(
        id: WorkerId,
        member: &Member,
        probed: bool,
        secure: Secure,
        lost: Bell,
        metrics: &Metrics,
    ) -> Worker {
        let config = member.worker.clone();
        let authority = config.url.authority();
        let metrics = metrics.worker(config.url.label());
        let state = State {
            health: Health::new(probed),
            intake: member.intake,
            zone: member.zone.clone(),
            replaced: false,
        };
        metrics.set_state(state.shown());
        Worker {
            id,
            authority: HeaderValue::try_from(&authority).expect("a host and port that a URI took"),
            pool: Pool::new(config.url.clone(), secure, metrics.connections.clone()),
            pod: member.pod.clone().map_or_else(OnceLock::new, OnceLock::from),
            eligible: AtomicBool::new(state.is_eligible()),
            calm: AtomicBool::new(state.health.is_calm()),
            engine: Mutex::default(),
            listed: Mutex::default(),
            relist: Notify::new(),
            state: Mutex::new(state),
            activity: Activity::default(),
            open: Arc::default(),
            unreachable: AtomicBool::new(false),
            lost,
            metrics,
            key: key_of(&config.url.to_string()),
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
        let state = self.state.lock();
        if state.intake != Intake::Open || state.health.is_draining() {
            return false;
        }
        match state.health.standing() {
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
        self.state.lock().health.standing()
    }

    pub fn zone(&self) -> Option<Arc<str>> {
        self.state.lock().zone.clone()
    }

    /// Another pod than the one that this worker is known to be.
    pub(super) fn is_other_than(&self, pod: Option<&Pod>) -> bool {
        matches!((self.pod.get(), pod), (Some(known), Some(pod)) if known.uid != pod.uid)
    }

    /// Takes what those who list it say of it now; answers whether it may be picked otherwise than before.
    pub(super) fn list(&self, member: &Member) -> bool {
        if let Some(pod) = &member.pod {
            let _ = self.pod.set(pod.clone());
        }
        let mut state = self.state.lock();
        state.zone.clone_from(&member.zone);
        let was = std::mem::replace(&mut state.intake, member.intake);
        self.show(&state);
        was != member.intake
    }

    /// Its address is another pod's now, so what is heard there says nothing of this one.
    pub(super) fn replace(&self) {
        self.state.lock().replaced = true;
        self.set_unreachable(true);
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.state.lock().replaced
    }

    fn show(&self, state: &State) {
        self.eligible.store(state.is_eligible(), Ordering::Relaxed);
        // The series at this address are the successor's.
        if !state.replaced {
            self.metrics.set_state(state.shown());
        }
    }

    /// An operator has it take nothing new.
    pub fn is_draining(&self) -> bool {
        self.state.lock().health.is_draining()
    }

    /// Its state as operators see it.
    pub fn state(&self) -> WorkerState {
        self.state.lock().shown()
    }

    /// Its state if nobody had said anything of it.
    pub fn health(&self) -> WorkerState {
        by_health(self.standing())
    }

    /// What the belief about it stands on, once that has been looked at.
    pub fn basis(&self) -> Option<Basis> {
        self.engine.lock().basis
    }

    /// Has it take nothing new, or again; answers whether that is a change.
    pub(super) fn set_draining(&self, draining: bool) -> bool {
        let mut state = self.state.lock();
        let changes = state.health.is_draining() != draining;
        state.health.set_draining(draining);
        self.show(&state);
        changes
    }

    pub(super) fn show_age(&self, now: Time) {
        if let Some(age) = self.scrape_age(now) {
            self.metrics.set_age(age);
        }
    }

    /// When its process began by its own clock, in seconds since 1970, where its page has said so.
    pub fn process_started(&self) -> Option<f64> {
        self.engine.lock().process_started()
    }

    /// Seconds since its metrics page was last read.
    pub fn scrape_age(&self, now: Time) -> Option<f64> {
        self.engine.lock().read_at.map(|at| now - at)
    }

    pub fn is_unreachable(&self) -> bool {
        self.unreachable.load(Ordering::Acquire)
    }

    /// Waits until connections to the worker fail.
    pub async fn unreachable(&self) {
        self.lost.until(|| self.is_unreachable()).await;
    }

    /// Tells the worker's health; answers whether it stands elsewhere, or may be picked otherwise, than before.
    pub(super) fn record(&self, event: Event, now: Time, settings: &config::Health) -> Option<Standing> {
        let mut state = self.state.lock();
        let was = (state.health.standing(), state.health.is_eligible());
        state.health.record(event, now, settings);
        let is = (state.health.standing(), state.health.is_eligible());
        self.calm.store(state.health.is_calm(), Ordering::Relaxed);
        if was == is {
            return None;
        }
        self.show(&state);
        let gone = state.replaced || is.0 == Standing::Out(Reason::Unreachable);
        self.set_unreachable(gone);
        Some(is.0)
    }

    fn set_unreachable(&self, unreachable: bool) {
        if !self.unreachable.swap(unreachable, Ordering::AcqRel) && unreachable {
            self.lost.ring();
        }
    }
}

pub(super) fn by_health(standing: Standing) -> WorkerState {
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
