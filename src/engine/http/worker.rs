//! The task that owns one worker's model: it sleeps until the model's next event or the next command, lets model time catch
//! up with real time, and hands every event to the answer that it belongs to.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::answer::{Answer, Label};
use super::config::EngineConfig;
use super::metrics::{Gauges, Metrics, Timeline};
use super::request::Generation;
use super::tokenizer::Tokenizer;
use super::words;
use crate::core::ids::Time;
use crate::engine::model::{BadSpec, Engine, Event, RequestId, Spec, What, Work};

/// Room for event texts that is allocated at once.
const ARENA: usize = 64 * 1024;

/// What the connections of one worker share.
pub(super) struct Shared {
    pub config: EngineConfig,
    pub tokenizer: Tokenizer,
    pub commands: mpsc::UnboundedSender<Command>,
    /// Generations that were taken and whose responses have not ended (`/load`).
    pub in_flight: AtomicUsize,
    pub rejected: AtomicU64,
    pub tickets: AtomicU64,
    pub ids: AtomicU64,
    /// Seconds since 1970.
    pub started: f64,
}

impl Shared {
    pub fn new(config: EngineConfig) -> (Arc<Shared>, mpsc::UnboundedReceiver<Command>) {
        let (commands, inbox) = mpsc::unbounded_channel();
        let shared = Shared {
            tokenizer: Tokenizer::new(config.vocab_size),
            config,
            commands,
            in_flight: AtomicUsize::new(0),
            rejected: AtomicU64::new(0),
            tickets: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            started: unix_now(),
        };
        (Arc::new(shared), inbox)
    }
}

pub(super) fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// What connections ask of the worker.
pub(super) enum Command {
    Generate(Box<Order>),
    /// Ends the generation with this ticket number, if it is still there.
    Abort(u64),
    Gauges(oneshot::Sender<String>),
    ResetPrefixCache(oneshot::Sender<bool>),
}

/// A generation to start.
pub(super) struct Order {
    pub ticket: u64,
    pub id: String,
    pub generation: Generation,
    pub out: mpsc::UnboundedSender<Bytes>,
}

/// A generation in the model.
struct Job {
    ticket: u64,
    answer: Answer,
    /// The model's requests, one for each choice, until they finish.
    requests: Vec<Option<RequestId>>,
}

/// Whose request it is that has a slot of the model.
#[derive(Clone)]
struct Owner {
    job: usize,
    choice: usize,
    timeline: Timeline,
}

pub(super) struct Worker {
    settings: Settings,
    model: Engine,
    jobs: Vec<Option<Job>>,
    vacant: Vec<usize>,
    by_ticket: HashMap<u64, usize>,
    owners: Vec<Option<Owner>>,
    metrics: Metrics,
    events: Vec<Event>,
    arena: BytesMut,
    origin: Instant,
    /// Model time that has passed.
    now: Time,
}

/// What the worker needs of its settings. Not [`Shared`]: the worker ends when the last sender of commands is gone, so it must
/// not hold one.
struct Settings {
    config: EngineConfig,
    word_ids: HashMap<&'static str, u32>,
    started: f64,
}

impl Worker {
    pub fn new(shared: &Shared) -> Result<Worker, BadSpec> {
        let config = shared.config.clone();
        let model = Engine::new(Spec { token_events: true, ..config.engine.clone() })?;
        let word_ids = words::all().iter().map(|word| (*word, shared.tokenizer.id(word))).collect();
        Ok(Worker {
            metrics: Metrics::new(&config, shared.started),
            settings: Settings { config, word_ids, started: shared.started },
            model,
            jobs: Vec::new(),
            vacant: Vec::new(),
            by_ticket: HashMap::new(),
            owners: Vec::new(),
            events: Vec::new(),
            arena: BytesMut::with_capacity(ARENA),
            origin: Instant::now(),
            now: Time(0.0),
        })
    }

    /// Works until nobody can send commands any more.
    pub async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        loop {
            let next = self.model.next_event().map(|at| self.instant(at));
            let sleep = tokio::time::sleep_until(next.unwrap_or(self.origin));
            tokio::select! {
                biased;
                command = inbox.recv() => {
                    let Some(command) = command else { return };
                    self.let_time_pass();
                    self.obey(command);
                    while let Ok(command) = inbox.try_recv() {
                        self.obey(command);
                    }
                }
                () = sleep, if next.is_some() => {}
            }
            self.let_time_pass();
        }
    }

    fn instant(&self, at: Time) -> Instant {
        let seconds = at.0 / self.settings.config.time_scale;
        self.origin + Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX / 4)
    }

    fn let_time_pass(&mut self) {
        let passed = self.origin.elapsed().as_secs_f64() * self.settings.config.time_scale;
        self.now = Time(passed.max(self.now.0));
        let mut events = std::mem::take(&mut self.events);
        self.model.advance(self.now, &mut events);
        for event in events.drain(..) {
            self.happened(event);
        }
        self.events = events;
    }

    fn happened(&mut self, event: Event) {
        let slot = event.request.slot();
        let Some(Some(owner)) = self.owners.get_mut(slot) else { return };
        let Some(Some(job)) = self.jobs.get_mut(owner.job) else { return };
        self.metrics.happened(&mut owner.timeline, event.what, event.at);
        match event.what {
            What::Admitted { cached_tokens } => job.answer.admitted(owner.choice, cached_tokens),
            What::FirstToken | What::Token => job.answer.token(owner.choice, &mut self.arena),
            What::Preempted => {}
            What::Finished => {
                job.requests[owner.choice] = None;
                let (index, ticket) = (owner.job, job.ticket);
                self.metrics.finished(&owner.timeline, event.at, job.answer.finish_reason());
                self.owners[slot] = None;
                if job.answer.finished(&mut self.arena) {
                    self.by_ticket.remove(&ticket);
                    self.jobs[index] = None;
                    self.vacant.push(index);
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Generate(order) => self.generate(*order),
            Command::Abort(ticket) => self.abort(ticket),
            Command::Gauges(reply) => {
                let _ = reply.send(self.metrics_page());
            }
            Command::ResetPrefixCache(reply) => {
                let _ = reply.send(self.model.reset_prefix_cache());
            }
        }
    }

    fn generate(&mut self, order: Order) {
        let Order { ticket, id, generation, out } = order;
        let config = &self.settings.config;
        let label = Label {
            id: &id,
            created: (self.settings.started + self.origin.elapsed().as_secs_f64()) as u64,
            details: config.enable_prompt_tokens_details,
            block_size: config.engine.block_size,
        };
        let answer = Answer::new(&generation, &label, out);
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() - 1
        });
        let mut requests = Vec::with_capacity(answer.choices.len());
        for (choice, wanted) in answer.choices.iter().enumerate() {
            let prompt = &generation.prompts[wanted.prompt];
            let mut chain = prompt.chain.clone();
            for number in 0..wanted.tokens {
                chain.push(self.settings.word_ids[words::word(wanted.seed, number)]);
            }
            let work = Work {
                blocks: chain.blocks.into(),
                prompt_tokens: prompt.tokens,
                output_tokens: wanted.tokens,
            };
            // The context length, which was checked, is at most what the cache holds.
            let Ok(id) = self.model.submit(work, self.now) else {
                debug_assert!(false, "a checked request was refused");
                break;
            };
            requests.push(Some(id));
            self.owners.resize(self.owners.len().max(id.slot() + 1), None);
            let timeline = Timeline::new(self.now, prompt.tokens, wanted.tokens);
            self.owners[id.slot()] = Some(Owner { job: index, choice, timeline });
        }
        let all = requests.len() == answer.choices.len();
        self.metrics.asked(generation.n, generation.max_tokens, answer.choices.len());
        self.by_ticket.insert(ticket, index);
        self.jobs[index] = Some(Job { ticket, answer, requests });
        if !all {
            self.abort(ticket);
        }
    }

    fn abort(&mut self, ticket: u64) {
        let Some(index) = self.by_ticket.remove(&ticket) else { return };
        let Some(job) = self.jobs[index].take() else { return };
        self.vacant.push(index);
        for id in job.requests.into_iter().flatten() {
            self.model.abort(id, self.now);
            self.owners[id.slot()] = None;
        }
    }

    fn metrics_page(&self) -> String {
        self.metrics.page(&Gauges {
            running: self.model.running(),
            waiting: self.model.waiting(),
            kv_cache_usage: self.model.kv_cache_usage(),
            counters: self.model.counters(),
        })
    }
}
