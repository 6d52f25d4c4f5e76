//! Several routers before one fleet, each with beliefs of its own: every request comes to one of them by chance, as a Service in front of
//! them has it. What one has placed the others hear after a delay and take for their own, or never.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::fleet::Worker;
use crate::core::elsewhere::{self, Copy, News, Open, Tell};
use crate::core::ids::{Time, WorkerId, mix};
use crate::core::planner::{Ask, Decision, Planner, Policy};
use crate::core::shadow::{Followed, Shadow};

/// How many routers, and what they know of each other.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Routers {
    pub count: usize,
    /// Seconds until the others hear of what one does; nothing is shared if absent.
    pub delay: Option<f64>,
}

impl Default for Routers {
    fn default() -> Routers {
        Routers { count: 1, delay: None }
    }
}

/// Between two looks at the workers' pages; and prompt tokens from which on shares of them say something.
const SCRAPE_SECONDS: f64 = 1.0;
const FEW_TOKENS: f64 = 20_000.0;

/// Requests between two times that the shadows hear of the workers; the proxy does so by time.
const SYNC_EVERY: u32 = 64;

/// The routers at work.
pub struct Group {
    planners: Vec<Arc<Planner>>,
    /// One of each, or none.
    shadows: Vec<Shadow>,
    /// Requests until the shadows hear what has become known of the workers.
    sync_in: u32,
    board: Option<Rc<RefCell<Board>>>,
    /// What each has heard of the others.
    heard: Vec<Open>,
    scraped: Option<Time>,
}

/// What has been said and not been heard by all.
struct Board {
    delay: f64,
    said: VecDeque<Said>,
    next: u64,
}

struct Said {
    at: Time,
    by: usize,
    request: u64,
    news: News<WorkerId>,
}

/// Has a router speak to the others.
pub struct Voice {
    by: usize,
    board: Rc<RefCell<Board>>,
}

impl Tell for Voice {
    type Worker = WorkerId;

    fn tell(&self, at: Time, request: u64, news: News<WorkerId>) {
        self.board.borrow_mut().said.push_back(Said { at, by: self.by, request, news });
    }
}

pub type Claim = elsewhere::Claim<Voice>;

impl Group {
    pub fn new(
        routers: Routers,
        planner: impl Fn() -> Arc<Planner>,
        shadow: impl Fn(&Planner) -> Option<Shadow>,
    ) -> Group {
        let board = |delay| Rc::new(RefCell::new(Board { delay, said: VecDeque::new(), next: 0 }));
        let planners: Vec<_> = (0..routers.count.max(1)).map(|_| planner()).collect();
        Group {
            heard: planners.iter().map(|_| Open::default()).collect(),
            shadows: planners.iter().filter_map(|planner| shadow(planner)).collect(),
            planners,
            sync_in: 0,
            board: routers.delay.filter(|_| routers.count > 1).map(board),
            scraped: None,
        }
    }

    pub fn planners(&self) -> &[Arc<Planner>] {
        &self.planners
    }

    /// Each router reads of the workers' pages what others send them, as the proxy does.
    pub fn scrape(&mut self, now: Time, ids: &[WorkerId], fleet: &[Worker]) {
        let due = self.scraped.is_none_or(|last| now - last >= SCRAPE_SECONDS);
        if self.planners.len() == 1 || !due {
            return;
        }
        self.scraped = Some(now);
        for planner in &self.planners {
            for (id, worker) in ids.iter().zip(fleet) {
                let own = planner.given(*id).unwrap_or_default();
                let each =
                    if own.requests > 0 { (own.asked - own.expected) / own.requests as f64 } else { 0.0 };
                let waiting = (f64::from(worker.waiting) - own.prefills as f64).max(0.0);
                planner.set_foreign_queue(*id, waiting * each.max(0.0), now + 2.0 * SCRAPE_SECONDS);
                let asked = worker.asked_tokens as f64;
                let share = if asked > FEW_TOKENS { (1.0 - own.asked / asked).max(0.0) } else { 0.0 };
                planner.set_foreign_share(*id, share);
            }
        }
    }

    /// The shadows hear at the next request what has become known of the workers.
    pub fn sync_soon(&mut self) {
        self.sync_in = 0;
    }

    fn sync(&mut self, block_tokens: f64) {
        if self.sync_in == 0 {
            self.sync_in = SYNC_EVERY;
            let shadows = self.planners.iter().zip(&self.shadows);
            shadows.for_each(|(planner, shadow)| shadow.sync(planner, block_tokens));
        }
        self.sync_in -= 1;
    }

    /// Router `by` places a request; and what its shadow, if it has one, makes of it.
    pub fn plan(
        &mut self,
        by: usize,
        ask: &Ask,
        eligible: &[WorkerId],
        policy: Policy,
        now: Time,
        random: u64,
    ) -> Option<(Decision, Claim, Option<Followed>)> {
        self.sync(ask.block_tokens);
        self.hear(eligible, policy, now);
        let (decision, booking) = self.planners[by].plan(ask, eligible, policy, now, random)?;
        let shadow = self.shadows.get(by);
        let followed = shadow.and_then(|shadow| shadow.follow(ask, eligible, policy, now, mix(random)));
        let Some(board) = &self.board else { return Some((decision, Claim::silent(booking), followed)) };
        let request = {
            let mut board = board.borrow_mut();
            board.next += 1;
            board.next
        };
        let voice = Voice { by, board: board.clone() };
        let claim = Claim::told(booking, voice, request, ask, decision.worker, now);
        Some((decision, claim, followed))
    }

    /// All hear what was said at least the delay ago.
    fn hear(&mut self, eligible: &[WorkerId], policy: Policy, now: Time) {
        let Some(board) = &self.board else { return };
        let mut board = board.borrow_mut();
        let delay = board.delay;
        while board.said.front().is_some_and(|said| said.at + delay <= now) {
            let Some(Said { at, by, request, news }) = board.said.pop_front() else { break };
            let others = self.planners.iter().zip(&mut self.heard).enumerate();
            for (other, (planner, open)) in others.filter(|(other, _)| *other != by) {
                let shadow = self.shadows.get(other);
                open.take(at, request, news.clone(), |ask, worker| {
                    let drawn = mix(request ^ ((other as u64) << 48));
                    let followed = shadow.and_then(|shadow| shadow.follow(ask, eligible, policy, at, drawn));
                    Copy::of(planner, ask, worker, at, followed)
                });
            }
        }
    }
}
