//! Several routers before one fleet, each with beliefs of its own: every request comes to one of them by chance, as a Service in front of
//! them has it. What one has placed the others hear after a delay and take for their own, or never.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use super::fleet::Worker;
use crate::core::booking::{Booking, Finished};
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::{Ask, Decision, Planner, Policy};

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

/// The routers at work.
pub struct Group {
    planners: Vec<Arc<Planner>>,
    board: Option<Rc<RefCell<Board>>>,
    /// What the others have placed, in the planner of each that has heard of it.
    heard: HashMap<(usize, u64), Booking>,
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
    news: News,
}

enum News {
    Placed(Ask, WorkerId),
    FirstToken,
    Finished(Finished),
    /// Its worker is gone.
    Lost,
}

impl Board {
    fn say(&mut self, at: Time, by: usize, request: u64, news: News) {
        self.said.push_back(Said { at, by, request, news });
    }
}

/// One router's claim on one worker, of which the others are told.
pub struct Claimed {
    booking: Option<Booking>,
    board: Option<Rc<RefCell<Board>>>,
    by: usize,
    request: u64,
    at: Time,
}

impl Claimed {
    fn tell(&mut self, at: Time, news: News) {
        self.at = at;
        if let Some(board) = &self.board {
            board.borrow_mut().say(at, self.by, self.request, news);
        }
    }

    pub fn commit(&mut self, now: Time) {
        self.at = now;
        if let Some(booking) = &mut self.booking {
            booking.commit(now);
        }
    }

    pub fn first_token(&mut self, now: Time) {
        self.tell(now, News::FirstToken);
        if let Some(booking) = &mut self.booking {
            booking.first_token(now);
        }
    }

    pub fn finish(mut self, finished: Finished, now: Time) {
        self.tell(now, News::Finished(finished));
        if let Some(booking) = self.booking.take() {
            booking.finish(finished, now);
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if self.booking.is_some() {
            self.tell(self.at, News::Lost);
        }
    }
}

impl Group {
    pub fn new(routers: Routers, planner: impl Fn() -> Arc<Planner>) -> Group {
        let board = |delay| Rc::new(RefCell::new(Board { delay, said: VecDeque::new(), next: 0 }));
        Group {
            planners: (0..routers.count.max(1)).map(|_| planner()).collect(),
            board: routers.delay.filter(|_| routers.count > 1).map(board),
            heard: HashMap::new(),
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

    /// Router `by` places a request.
    pub fn plan(
        &mut self,
        by: usize,
        ask: &Ask,
        eligible: &[WorkerId],
        policy: Policy,
        now: Time,
        random: u64,
    ) -> Option<(Decision, Claimed)> {
        self.hear(now);
        let (decision, booking) = self.planners[by].plan(ask, eligible, policy, now, random)?;
        let board = self.board.clone();
        let request = board.as_ref().map_or(0, |board| {
            let mut board = board.borrow_mut();
            board.next += 1;
            let request = board.next;
            board.say(now, by, request, News::Placed(ask.clone(), decision.worker));
            request
        });
        Some((decision, Claimed { booking: Some(booking), board, by, request, at: now }))
    }

    /// All hear what was said at least the delay ago.
    fn hear(&mut self, now: Time) {
        let Some(board) = &self.board else { return };
        let mut board = board.borrow_mut();
        let delay = board.delay;
        while board.said.front().is_some_and(|said| said.at + delay <= now) {
            let Some(said) = board.said.pop_front() else { break };
            for (at, planner) in self.planners.iter().enumerate().filter(|(at, _)| *at != said.by) {
                let key = (at, said.request);
                match &said.news {
                    News::Placed(ask, worker) => {
                        let planned = planner.plan(ask, &[*worker], Policy::Random, said.at, 0);
                        self.heard.extend(planned.map(|(_, mut booking)| {
                            booking.commit(said.at);
                            (key, booking)
                        }));
                    }
                    News::FirstToken => {
                        if let Some(booking) = self.heard.get_mut(&key) {
                            booking.first_token(said.at);
                        }
                    }
                    News::Finished(finished) => {
                        if let Some(booking) = self.heard.remove(&key) {
                            booking.finish(*finished, said.at);
                        }
                    }
                    News::Lost => drop(self.heard.remove(&key)),
                }
            }
        }
    }
}
