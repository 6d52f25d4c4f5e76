//! One run in virtual time: requests come, a policy places them, engines serve them, and what happened is written down. One
//! thread, no sockets, no clock; the same seed gives the same run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::fleet::{Change, FleetSpec, Incoming, Worker};
use super::policy::{Placed, PlannerSetup, PolicyName, Router};
use super::stats::{Outcome, Served};
use crate::core::booking::Finished;
use crate::core::ids::Time;
use crate::engine::model::{BadSpec, Event, What, Work};
use crate::experiment::workload::{Arrivals, Request, Workload};

/// Serves `workload` on `fleet` by `policy`; ties and draws come from `seed`.
pub fn run(
    workload: &Workload,
    fleet: &FleetSpec,
    policy: PolicyName,
    setup: &PlannerSetup,
    seed: u64,
) -> Result<Outcome, BadSpec> {
    let mut run = Run::new(workload, fleet, Router::new(policy, setup, fleet, workload.block_tokens), seed)?;
    run.start();
    while let Some(Reverse(next)) = run.queue.pop() {
        let now = Time(next.at);
        match next.what {
            Happening::Engine(worker) if run.wake[worker] == Some(next.at) => run.advance(worker, now),
            Happening::Engine(_) => {}
            Happening::Change(change) => run.change(change, now)?,
            Happening::Back(worker) => run.workers[worker].up = true,
            Happening::Arrival(request) => {
                run.expect(request as usize + 1);
                run.arrive(request, now, now);
            }
        }
    }
    Ok(run.outcome)
}

/// What is due, in the order in which things at one time are done: engines first, so that an arrival sees their news.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Engine(usize),
    Back(usize),
    Change(usize),
    Arrival(u32),
}

#[derive(Copy, Clone, Debug)]
struct Due {
    at: f64,
    what: Happening,
    /// Things of one kind at one time happen in the order in which they were scheduled.
    order: u64,
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        let kind = |what: &Happening| match what {
            Happening::Engine(_) => 0,
            Happening::Back(_) | Happening::Change(_) => 1,
            Happening::Arrival(_) => 2,
        };
        let key = |due: &Due| (kind(&due.what), due.order);
        self.at.total_cmp(&other.at).then_with(|| key(self).cmp(&key(other)))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

/// A request at a worker.
struct Live {
    request: u32,
    /// When the client sent it (before any retry).
    arrived: Time,
    placed: Placed,
    cached_tokens: u32,
    first_token: Option<Time>,
}

struct Run<'a> {
    workload: &'a Workload,
    fleet: &'a FleetSpec,
    router: Router,
    random: StdRng,
    workers: Vec<Worker>,
    /// Requests of each worker, by the slot of the engine's id.
    live: Vec<Vec<Option<Live>>>,
    /// When each engine is to be advanced next.
    wake: Vec<Option<f64>>,
    queue: BinaryHeap<Reverse<Due>>,
    scheduled: u64,
    /// The next request of a closed loop's list.
    next: usize,
    events: Vec<Event>,
    outcome: Outcome,
}

impl<'a> Run<'a> {
    fn new(
        workload: &'a Workload,
        fleet: &'a FleetSpec,
        router: Router,
        seed: u64,
    ) -> Result<Run<'a>, BadSpec> {
        let mut workers = Vec::with_capacity(fleet.workers);
        for worker in 0..fleet.workers {
            workers.push(Worker::new(fleet.engine(worker, workload.block_tokens)?));
        }
        Ok(Run {
            workload,
            fleet,
            router,
            random: StdRng::seed_from_u64(seed ^ 0x726f_7574),
            live: workers.iter().map(|_| Vec::new()).collect(),
            wake: vec![None; workers.len()],
            queue: BinaryHeap::new(),
            scheduled: 0,
            next: 0,
            events: Vec::new(),
            outcome: Outcome::new(workers.len()),
            workers,
        })
    }

    fn schedule(&mut self, at: f64, what: Happening) {
        self.scheduled += 1;
        self.queue.push(Reverse(Due { at, what, order: self.scheduled }));
    }

    fn start(&mut self) {
        for (i, change) in self.fleet.changes.iter().enumerate() {
            self.schedule(change.at(), Happening::Change(i));
        }
        match &self.workload.arrivals {
            Arrivals::Open(_) => self.expect(0),
            Arrivals::Closed { clients, warm_up } => {
                let at_once = if *warm_up > 0 { 1 } else { *clients };
                (0..at_once).for_each(|_| self.send_next(Time(0.0)));
            }
            Arrivals::Sessions { starts, .. } => {
                starts.iter().for_each(|(at, first)| self.schedule(*at, Happening::Arrival(*first)));
            }
        }
    }

    /// Schedules that request of an open loop, each when the one before it comes: of ten million in one queue, each step would pay.
    fn expect(&mut self, request: usize) {
        let Arrivals::Open(arrivals) = &self.workload.arrivals else { return };
        if let Some(at) = arrivals.get(request) {
            self.schedule(*at, Happening::Arrival(request as u32));
        }
    }

    /// The next request of a closed loop's list, if there is one.
    fn send_next(&mut self, now: Time) {
        if self.next < self.workload.requests.len() {
            self.next += 1;
            self.schedule(now.0, Happening::Arrival(self.next as u32 - 1));
        }
    }

    /// The client of `request` has its answer, or an error: what it does then.
    fn client_goes_on(&mut self, request: u32, now: Time) {
        match &self.workload.arrivals {
            Arrivals::Open(_) => {}
            Arrivals::Closed { clients, warm_up } => {
                let warm_up_ends = *warm_up > 0 && self.next == *warm_up && request as usize + 1 == *warm_up;
                let at_once = if warm_up_ends { *clients } else { 1 };
                (0..at_once).for_each(|_| self.send_next(now));
            }
            Arrivals::Sessions { think, .. } => {
                let next = request as usize + 1;
                if let Some(think) = think.get(next).copied().flatten() {
                    self.schedule(now.0 + think, Happening::Arrival(next as u32));
                }
            }
        }
    }

    fn of(&self, request: u32) -> &'a Request {
        &self.workload.requests[request as usize]
    }

    fn measured(&self, request: u32) -> bool {
        request as usize >= self.workload.uncounted
    }

    /// `arrived` is when the client sent it: earlier than `now` for one that lost its worker.
    fn arrive(&mut self, number: u32, arrived: Time, now: Time) {
        let request = self.of(number);
        let chain = request.blocks.chain();
        let asked = Incoming {
            chain: &chain,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            group: request.group,
            block_tokens: self.workload.block_tokens,
            key_blocks: self.workload.key_blocks,
            now,
        };
        let placed = self.router.place(&asked, &self.workers, &mut self.random);
        let Some(mut placed) = placed else { return self.fail(number, now) };
        let worker = placed.worker;
        let work = Work {
            blocks: chain,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
        };
        let Ok(id) = self.workers[worker].engine.submit(work, now) else { return self.fail(number, now) };
        if let Some(booking) = &mut placed.booking {
            booking.commit(now);
        }
        if let Some(followed) = &mut placed.followed {
            followed.commit(now);
        }
        let engine = &mut self.workers[worker];
        engine.open += 1;
        engine.waiting += 1;
        engine.waiting_tokens += u64::from(request.prompt_tokens);
        engine.asked_tokens += u64::from(request.prompt_tokens);
        let live = Live { request: number, arrived, placed, cached_tokens: 0, first_token: None };
        let slots = &mut self.live[worker];
        if slots.len() <= id.slot() {
            slots.resize_with(id.slot() + 1, || None);
        }
        slots[id.slot()] = Some(live);
        self.wake_engine(worker);
    }

    fn fail(&mut self, request: u32, now: Time) {
        if self.measured(request) {
            self.outcome.failed += 1;
        }
        self.client_goes_on(request, now);
    }

    fn wake_engine(&mut self, worker: usize) {
        let next = self.workers[worker].engine.next_event().map(|at| at.0);
        if let Some(at) = next
            && self.wake[worker] != next
        {
            self.schedule(at, Happening::Engine(worker));
        }
        self.wake[worker] = next;
    }

    fn advance(&mut self, worker: usize, now: Time) {
        let mut events = std::mem::take(&mut self.events);
        self.workers[worker].engine.advance(now, &mut events);
        for event in events.drain(..) {
            self.heard(worker, event);
        }
        self.events = events;
        self.wake_engine(worker);
    }

    fn heard(&mut self, worker: usize, event: Event) {
        let slot = &mut self.live[worker][event.request.slot()];
        match event.what {
            What::Admitted { cached_tokens } => {
                if let Some(live) = slot {
                    live.cached_tokens = cached_tokens;
                }
            }
            What::FirstToken => {
                let Some(live) = slot else { return };
                live.first_token = Some(event.at);
                if let Some(booking) = &mut live.placed.booking {
                    booking.first_token(event.at);
                }
                let prompt = self.workload.requests[live.request as usize].prompt_tokens;
                self.workers[worker].waiting -= 1;
                self.workers[worker].waiting_tokens -= u64::from(prompt);
            }
            What::Finished => {
                if let Some(live) = slot.take() {
                    self.finished(worker, live, event.at);
                }
            }
            What::Token | What::Preempted => {}
        }
    }

    fn finished(&mut self, worker: usize, live: Live, now: Time) {
        let request = self.of(live.request);
        self.workers[worker].open -= 1;
        if let Some(booking) = live.placed.booking {
            let finished = Finished {
                prompt_tokens: Some(request.prompt_tokens),
                cached_tokens: Some(live.cached_tokens),
                output_tokens: Some(request.output_tokens),
            };
            booking.finish(finished, now);
        }
        let shadow = live.placed.followed.map(|followed| {
            let shares = [followed.other, followed.ideal];
            followed.finish(Some(request.output_tokens), now);
            shares
        });
        if self.measured(live.request) {
            self.outcome.add(Served {
                shadow,
                worker,
                group: request.group,
                arrived: live.arrived.0,
                first_token: live.first_token.unwrap_or(now).0,
                ended: now.0,
                prompt_tokens: request.prompt_tokens,
                shared_tokens: request.shared_tokens,
                cached_tokens: live.cached_tokens,
                predicted: live.placed.predicted,
            });
        }
        self.client_goes_on(live.request, now);
    }

    fn change(&mut self, change: usize, now: Time) -> Result<(), BadSpec> {
        match self.fleet.changes[change] {
            Change::Join { .. } => {
                let worker = self.workers.len();
                self.workers.push(Worker::new(self.fleet.engine(worker, self.workload.block_tokens)?));
                self.live.push(Vec::new());
                self.wake.push(None);
                self.outcome.join();
                self.router.joined(worker, self.fleet);
            }
            Change::Restart { worker, down, .. } if worker < self.workers.len() => {
                self.workers[worker] = Worker::new(self.fleet.engine(worker, self.workload.block_tokens)?);
                self.workers[worker].up = false;
                self.wake[worker] = None;
                self.router.restarted(worker);
                self.schedule(now.0 + down, Happening::Back(worker));
                let lost: Vec<Live> = self.live[worker].drain(..).flatten().collect();
                lost.into_iter().for_each(|live| self.lost(live, now));
            }
            Change::Restart { .. } => {}
        }
        Ok(())
    }

    /// Its worker is gone. Without a first token it is sent again; a broken stream cannot be.
    fn lost(&mut self, live: Live, now: Time) {
        drop(live.placed);
        match live.first_token {
            Some(_) => self.fail(live.request, now),
            None => {
                self.outcome.retried += 1;
                self.arrive(live.request, live.arrived, now);
            }
        }
    }
}
