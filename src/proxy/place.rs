//! Chooses the worker for one request: reads the prompt, asks the planner under the mode in force, and books.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::admission::{Freed, Slot};
use super::arms;
use super::decisions::Decided;
use super::error::ProxyError;
use super::{Client, Proxy};
use crate::config::{Draw, Mode};
use crate::core::blocks::Chain;
use crate::core::ids::WorkerId;
use crate::core::planner::{Ask, Decision, Policy, Reason};
use crate::core::prompt::{self, Endpoint, Opaque, Reading};
use crate::core::shadow::{Followed, Shadow, Share};
use crate::fleet::Snapshot;
use crate::fleet::feedback::Estimate;
use crate::fleet::health::Event;
use crate::fleet::models;
use crate::fleet::worker::Worker;
use crate::metrics::{Fallback, Played, Predicted};
use crate::peers::claim::Claim;

/// What was read of a request's body.
pub struct Asked {
    pub ask: Ask,
    /// Empty if unknown.
    pub model: String,
    /// Canonical bytes of the prompt; zero if they tell nothing of its tokens.
    pub prompt_bytes: u64,
    /// It came to an endpoint that generates from a prompt.
    pub generates: bool,
    /// How long the reading took.
    pub reading: Duration,
    /// The part of it that was done apart from the task that serves the request.
    pub apart: Duration,
}

/// A request's place on a worker. Dropped, it gives the place back. Boxed by who makes it, as it is handed on often.
pub struct Placed {
    pub worker: Arc<Worker>,
    /// `None` once it has been told the end.
    pub booking: Option<Claim>,
    /// The request in the shadow's models, if there is a shadow.
    pub followed: Option<Followed>,
    prompt_tokens: f64,
    pub predicted_cached_tokens: f64,
    /// By which it was placed.
    pub mode: Mode,
    /// Why it is there.
    pub reason: Reason,
    /// Whether the worker has shown that it lives.
    proven: bool,
    proxy: Arc<Proxy>,
    _slots: (Slot, Slot),
    /// Fields are dropped in their order: the places first, then the word that they are free.
    _freed: Freed,
}

impl Placed {
    pub fn predicted(&self) -> Predicted {
        if self.predicted_cached_tokens > 0.0 { Predicted::Hit } else { Predicted::Miss }
    }

    /// The worker has taken the request and computes it.
    pub fn commit(&mut self) {
        let now = self.proxy.clock.now();
        if let Some(booking) = &mut self.booking {
            booking.commit(now);
        }
        let Some(followed) = &mut self.followed else { return };
        followed.commit(now);
        let own = Share { prompt: self.prompt_tokens, cached: self.predicted_cached_tokens };
        let shadow = &self.proxy.metrics.shadow;
        shadow.add(self.mode, self.mode.into(), own);
        shadow.add(self.mode, self.mode.other().into(), followed.other);
        shadow.add(self.mode, Played::Ideal, followed.ideal);
    }

    /// Where the answer comes from and why, for its client.
    pub fn in_words(&self) -> String {
        let (mode, reason) = (self.mode.as_str(), self.reason.as_str());
        let worker = self.worker.authority.to_str().unwrap_or_default();
        let (cached, prompt) = (self.predicted_cached_tokens.round(), self.prompt_tokens.round());
        format!("worker={worker}; mode={mode}; reason={reason}; cached={cached}; prompt={prompt}")
    }

    /// Tells the fleet what this request has shown of its worker.
    pub fn report(&mut self, event: Event) {
        self.proven = true;
        self.proxy.fleet.report(&self.worker, event);
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.worker.metrics.in_flight.dec();
        if !self.proven {
            self.proxy.fleet.report(&self.worker, Event::Unproven);
        }
    }
}

impl Proxy {
    /// Reads what placement needs of `body`. What cannot be read is routed by load; reading never fails a request.
    pub fn read_ask(&self, endpoint: Option<Endpoint>, body: &[u8]) -> Asked {
        let began = Instant::now();
        let (mut asked, opaque) = self.read(endpoint, body);
        if let Some(opaque) = opaque {
            self.metrics.fallbacks.inc(opaque.into());
        }
        asked.generates = endpoint.is_some();
        asked.reading = began.elapsed();
        asked
    }

    /// And why the prompt cannot be read, if so.
    pub(super) fn read(&self, endpoint: Option<Endpoint>, body: &[u8]) -> (Asked, Option<Opaque>) {
        let Some(endpoint) = endpoint else {
            // No prompt that this proxy knows of: nothing is known of its work but that it is a request.
            let mixed = self.fleet.snapshot().models.is_mixed();
            let model = mixed.then(|| models::named_in(body)).flatten().unwrap_or_default();
            return (self.ask_for(model, Chain::empty(), 0, None, false), None);
        };
        let reading = prompt::read(endpoint, body, &self.hash_key, self.block_bytes);
        let Reading { model, max_tokens, stream, media, chain, .. } = reading;
        match chain {
            Ok(chain) => {
                let bytes = chain.bytes;
                let mut asked = self.ask_for(model, chain, bytes, max_tokens, stream);
                // What stands for a picture in the chain says nothing of the tokens that it becomes.
                asked.prompt_bytes = if media { 0 } else { bytes };
                (asked, None)
            }
            Err(opaque) => {
                let mut asked = self.ask_for(model, Chain::empty(), body.len() as u64, max_tokens, stream);
                asked.prompt_bytes = 0;
                (asked, Some(opaque))
            }
        }
    }

    fn ask_for(&self, model: String, chain: Chain, bytes: u64, most: Option<u64>, streams: bool) -> Asked {
        let Estimate { bytes_per_token, output_tokens } = self.feedback.estimate(&model);
        let ask = Ask {
            chain,
            block_tokens: self.block_bytes as f64 / bytes_per_token,
            prompt_tokens: bytes as f64 / bytes_per_token,
            output_tokens: most.map_or(output_tokens, |most| output_tokens.min(most as f64)),
            streams,
        };
        Asked {
            ask,
            model,
            prompt_bytes: bytes,
            generates: false,
            reading: Duration::ZERO,
            apart: Duration::ZERO,
        }
    }

    /// Leaves the worker that was drawn for the client's connection, if it can be asked.
    fn keep_pinned(&self, client: &Client, fleet: &Snapshot, tried: &[WorkerId], eligible: &mut Eligible) {
        let Some(pinned) = client.pinned() else { return };
        if !is_usable(fleet, &fleet.all.eligible, &pinned) || tried.contains(&pinned.id) {
            self.metrics.fallbacks.inc(Fallback::PinnedWorkerOut);
        } else if is_usable(fleet, eligible, &pinned) {
            *eligible = SmallVec::from_slice(&[pinned.id]);
        }
        // Else it serves other models than this one, and another is drawn.
    }

    /// Picks a worker that is not among `tried`, and books the request there.
    ///
    /// # Errors
    /// [`ProxyError::NoWorker`] if there is none, [`ProxyError::Full`] if all have as many requests as they may have.
    pub fn place(
        self: &Arc<Self>,
        asked: &Asked,
        client: &Client,
        tried: &[WorkerId],
    ) -> Result<Box<Placed>, ProxyError> {
        let began = Instant::now();
        let fleet = self.fleet.snapshot();
        let config = self.config.load();
        let slot = Slot::take(&self.open, config.limits.in_flight).ok_or(ProxyError::Full)?;
        let mode = arms::mode_of(&config, &asked.ask);
        let pins = mode == Mode::Random && config.random.draw == Draw::Connection;
        let (serving, unlisted) = fleet.serving(&asked.model);
        if unlisted {
            self.metrics.fallbacks.inc(Fallback::ModelUnlisted);
        }
        let mut eligible: Eligible = SmallVec::from_slice(&serving.eligible);
        if arms::keep_own(&config, mode, &fleet, &mut eligible) {
            self.metrics.fallbacks.inc(Fallback::ArmOut);
        }
        // By the other mode it would not have to go where its connection was drawn to.
        let unpinned = pins.then(|| eligible.clone());
        if pins {
            self.keep_pinned(client, &fleet, tried, &mut eligible);
        }
        eligible.retain(|worker| !tried.contains(worker));
        let each = config.limits.in_flight_per_worker;
        if let Some(limit) = each
            && !eligible.is_empty()
        {
            eligible.retain(|worker| fleet.worker(*worker).is_some_and(|worker| worker.has_room(limit)));
            if eligible.is_empty() {
                return Err(ProxyError::Full);
            }
        }
        let (now, policy) = (self.clock.at(began), mode.into());
        let planned = self.planner.plan(&asked.ask, &eligible, policy, now, rand::random());
        let (decision, booking) = planned.ok_or(ProxyError::NoWorker)?;
        let eligible = unpinned.as_ref().unwrap_or(&eligible);
        let follow = |shadow: &Shadow| shadow.follow(&asked.ask, eligible, policy, now, rand::random());
        let followed = self.shadow.as_ref().and_then(follow);
        if tried.is_empty() {
            self.metrics.decision(mode).observe((asked.reading + began.elapsed()).as_secs_f64());
        }
        let worker = fleet.worker(decision.worker).ok_or(ProxyError::NoWorker)?.clone();
        // Another request may have taken the last place since; the queue sorts it out.
        let worker_slot = Slot::take(&worker.open, each).ok_or(ProxyError::Full)?;
        if pins {
            client.pin(&worker);
        }
        let Decision { reason, predicted_cached_tokens, .. } = decision;
        self.metrics.reasons.inc(reason);
        if tried.is_empty() {
            self.prefixes.saw(&asked.ask.chain);
        }
        let decided = || Decided::new(asked, mode, decision, fleet.names());
        self.decisions.keep(decided);
        worker.metrics.requests.inc();
        worker.metrics.in_flight.inc();
        worker.activity.begin();
        if serving.doubtful {
            self.metrics.fallbacks.inc(Fallback::NoHealthyWorker);
        }
        if !worker.is_calm() {
            self.fleet.report(&worker, Event::Picked);
        }
        let booking = match &self.peers {
            None => Claim::silent(booking),
            Some(peers) => peers.claim(booking, &asked.ask, &worker, now),
        };
        Ok(Box::new(Placed {
            proven: worker.is_calm(),
            worker,
            booking: Some(booking),
            followed,
            prompt_tokens: asked.ask.prompt_tokens,
            predicted_cached_tokens,
            mode,
            reason,
            proxy: self.clone(),
            _slots: (slot, worker_slot),
            _freed: Freed(self.fleet.clone()),
        }))
    }
}

type Eligible = SmallVec<[WorkerId; 64]>;

/// Still the fleet's worker, and among these. A slot may have passed to another worker since.
fn is_usable(fleet: &Snapshot, eligible: &[WorkerId], worker: &Arc<Worker>) -> bool {
    fleet.worker(worker.id).is_some_and(|present| Arc::ptr_eq(present, worker))
        && eligible.binary_search(&worker.id).is_ok()
}

impl From<Mode> for Policy {
    fn from(mode: Mode) -> Policy {
        match mode {
            Mode::Kv => Policy::Kv,
            Mode::Random => Policy::Random,
        }
    }
}

impl From<Mode> for Played {
    fn from(mode: Mode) -> Played {
        match mode {
            Mode::Kv => Played::Kv,
            Mode::Random => Played::Random,
        }
    }
}

impl From<Opaque> for Fallback {
    fn from(opaque: Opaque) -> Fallback {
        match opaque {
            Opaque::Json => Fallback::OpaqueJson,
            Opaque::Depth => Fallback::OpaqueDepth,
            Opaque::Shape => Fallback::OpaqueShape,
            Opaque::Stored => Fallback::OpaqueStored,
        }
    }
}
