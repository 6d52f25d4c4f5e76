//! Whether a worker may be given requests: one small state machine per worker, without a clock of its own.
//!
//! ```text
//!  Starting --probe passed, or an answer--> Up
//!  Starting --probes are switched off--> Trial
//!  Starting --Insecure--> Out
//!  Up    --failed so many times in a row--> Out, for a reason:
//!           Unreachable   no connection could be opened
//!           Insecure      TLS failed on one that was: the certificate is not accepted, or there is none
//!           Unhealthy     its health page failed
//!           Broke         it took requests and lost them
//!           Stalled       it has requests and brings nothing for any of them
//!           Erring        most of what it has answered of late are errors of its own
//!  Out   --probe passed, if Unreachable, Insecure or Unhealthy--> Up
//!  Out   --an answer, if Unhealthy, Broke or Stalled--> Up
//!  Out   --more of an answer from before, if Unhealthy or Stalled--> Up
//!  Out   --its time is over, if a probe cannot or may not clear it--> Trial
//!  Trial --an answer--> Up        Trial --a failure--> Out, for twice as long
//! ```
//!
//! Connections that fail are counted until one is opened: what comes on those that are open says nothing of it. A worker that is
//! told to end refuses new ones and brings its streams to their end, or not.
//!
//! An operator can have a worker take nothing new ([`Health::set_draining`]); its health goes on beneath.
//!
//! A trial is for one request. A slow one is no bad sign: after a second, or with a passed probe, the worker may be given
//! another.
//!
//! An answer of any status but an error of the worker's own (5xx without 501 and 503) shows that the worker lives: 4xx, 429 and
//! 503 never count against it. A passed probe does not redeem a worker that breaks, stalls or errs: engines were seen that freeze
//! or die behind a healthy page. Errors are counted by their share, since a request may be at fault itself, and remembered for a
//! while after the worker is back: one that errs again waits for longer each time.

use crate::config;
use crate::core::ids::Time;

/// What can happen to a worker.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Event {
    ProbePassed,
    /// The health page could be reached, and was bad or late.
    ProbeFailed,
    /// A connection could not be opened, for a probe or a request.
    Unreachable,
    /// A connection was opened, but TLS failed on it.
    Insecure,
    /// A connection was opened, for a request.
    Opened,
    /// A request was answered: its first token, or its whole head where nothing is streamed.
    Answered,
    /// More came of an answer that had begun before.
    Moved,
    /// A request was answered with an error of the worker's own.
    Erred,
    /// The worker took a request and lost it.
    Broke,
    /// It said that it is going down.
    Dying,
    /// It has had requests for too long and has brought nothing.
    Stalled,
    /// A request was placed on it.
    Picked,
    /// The request that tried the worker ended without showing anything (its client left).
    Unproven,
    /// Time has passed.
    Tick,
}

impl Event {
    /// Changes nothing for a worker that is [`calm`](Health::is_calm).
    pub fn is_good(self) -> bool {
        matches!(self, Event::Opened | Event::Answered | Event::Moved)
    }
}

/// The state by name.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    Starting,
    Up,
    Out(Reason),
    Trial,
}

/// Why a worker is out.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    Unreachable,
    Insecure,
    Unhealthy,
    Broke,
    Stalled,
    Erring,
}

#[derive(Clone, PartialEq, Debug)]
enum State {
    Starting,
    Up(Failures),
    Out {
        reason: Reason,
        until: Time,
        times: u32,
    },
    /// `taken`: when it was last given a request, if it is not to be given another one yet.
    Trial {
        taken: Option<Time>,
        times: u32,
    },
}

/// Failures by kind, each since what shows that it is over.
#[derive(Clone, PartialEq, Debug, Default)]
struct Failures {
    probes: usize,
    connects: usize,
    requests: usize,
}

/// What a worker has answered of late, since its first error: each answer counts less as time goes by.
#[derive(Clone, PartialEq, Debug, Default)]
struct Answers {
    good: f64,
    errors: f64,
    at: Time,
    /// How often it was out for them.
    times: u32,
}

/// The health of one worker.
#[derive(Clone, Debug)]
pub struct Health {
    state: State,
    answers: Answers,
    /// An operator has it take nothing new.
    draining: bool,
}

/// A worker stays out for at most this many times `health.retry_after`.
const LONGEST_WAIT: f64 = 30.0;
/// Seconds that a worker on trial is given for one request before it is given another.
const TRIAL_ALONE: f64 = 1.0;
/// Seconds after which an answer counts for 1/e.
const MEMORY: f64 = 30.0;
/// Errors that take a worker out, if they are more than so many for each good answer: as they come from one that errs every five
/// seconds.
const FEWEST_ERRORS: f64 = 5.0;
const ERRORS_PER_GOOD: f64 = 2.0;
/// With fewer left of them, they are forgotten.
const FORGOTTEN: f64 = 0.5;

impl Health {
    /// A worker that is probed starts when its first probe has passed; without probes it is taken to be up.
    pub fn new(probed: bool) -> Health {
        let state = if probed { State::Starting } else { up() };
        Health { state, answers: Answers::default(), draining: false }
    }

    pub fn standing(&self) -> Standing {
        match self.state {
            State::Starting => Standing::Starting,
            State::Up(_) => Standing::Up,
            State::Out { reason, .. } => Standing::Out(reason),
            State::Trial { .. } => Standing::Trial,
        }
    }

    /// May be given a request. A worker on trial takes one, one that is drained none.
    pub fn is_eligible(&self) -> bool {
        !self.draining && matches!(self.state, State::Up(_) | State::Trial { taken: None, .. })
    }

    pub fn is_draining(&self) -> bool {
        self.draining
    }

    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Up without any recent failure, so that an answer changes nothing.
    pub fn is_calm(&self) -> bool {
        matches!(&self.state, State::Up(failures) if *failures == Failures::default())
            && self.answers.errors == 0.0
    }

    pub fn record(&mut self, event: Event, now: Time, settings: &config::Health) {
        let errs = match event {
            Event::Answered => self.answers.good(now),
            Event::Erred => self.answers.error(now),
            _ => false,
        };
        let next = match &mut self.state {
            State::Starting => match event {
                Event::ProbePassed | Event::Answered => Some(up()),
                Event::Insecure => Some(out(Reason::Insecure, 1, now, settings)),
                // Nobody is left to find it ready.
                Event::Tick if settings.interval.is_none() => Some(State::Trial { taken: None, times: 0 }),
                _ => None,
            },
            State::Up(_) if errs => Some(self.answers.out(now, settings)),
            State::Up(failures) => {
                failures.count(event, settings).map(|reason| out(reason, 1, now, settings))
            }
            State::Out { reason, until, times } => match event {
                Event::Answered if reason.is_cleared_by_an_answer() => Some(up()),
                Event::Moved if matches!(reason, Reason::Unhealthy | Reason::Stalled) => Some(up()),
                Event::ProbePassed if reason.is_cleared_by_a_probe() => Some(up()),
                Event::Tick if now >= *until && !reason.waits_for_a_probe(settings) => {
                    Some(State::Trial { taken: None, times: *times })
                }
                // While it was out for something lesser, it has gone altogether.
                Event::Unreachable => {
                    *reason = Reason::Unreachable;
                    None
                }
                Event::Insecure => {
                    *reason = Reason::Insecure;
                    None
                }
                _ => None,
            },
            State::Trial { taken, times } => match event {
                Event::Answered => Some(up()),
                Event::Picked => {
                    *taken = Some(now);
                    None
                }
                Event::Unproven | Event::ProbePassed => {
                    *taken = None;
                    None
                }
                Event::Tick => {
                    taken.take_if(|since| now - *since >= TRIAL_ALONE);
                    None
                }
                Event::Unreachable => Some(out(Reason::Unreachable, *times + 1, now, settings)),
                Event::Insecure => Some(out(Reason::Insecure, *times + 1, now, settings)),
                Event::Erred => Some(out(Reason::Erring, *times + 1, now, settings)),
                Event::Broke | Event::Dying => Some(out(Reason::Broke, *times + 1, now, settings)),
                Event::Stalled => Some(out(Reason::Stalled, *times + 1, now, settings)),
                _ => None,
            },
        };
        if let Some(next) = next {
            self.state = next;
        }
    }
}

impl Failures {
    /// Counts, and says why the worker is out if it is.
    fn count(&mut self, event: Event, settings: &config::Health) -> Option<Reason> {
        match event {
            Event::ProbePassed => (self.probes, self.connects) = (0, 0),
            Event::Opened => self.connects = 0,
            Event::Answered => (self.probes, self.requests) = (0, 0),
            Event::Moved => self.probes = 0,
            Event::ProbeFailed => {
                self.probes += 1;
                return (self.probes >= settings.probe_failures).then_some(Reason::Unhealthy);
            }
            Event::Unreachable => {
                self.connects += 1;
                return (self.connects >= settings.request_failures).then_some(Reason::Unreachable);
            }
            Event::Insecure => {
                self.connects += 1;
                return (self.connects >= settings.request_failures).then_some(Reason::Insecure);
            }
            Event::Broke => {
                self.requests += 1;
                return (self.requests >= settings.request_failures).then_some(Reason::Broke);
            }
            Event::Dying => return Some(Reason::Broke),
            Event::Stalled => return Some(Reason::Stalled),
            Event::Erred | Event::Picked | Event::Unproven | Event::Tick => {}
        }
        None
    }
}

impl Answers {
    fn age(&mut self, now: Time) {
        let left = (-(now - self.at).max(0.0) / MEMORY).exp();
        self.good *= left;
        self.errors *= left;
        self.at = now;
    }

    /// Nothing follows from a good answer, whatever the others were.
    fn good(&mut self, now: Time) -> bool {
        self.age(now);
        self.good += 1.0;
        if self.errors < FORGOTTEN {
            *self = Answers::default();
        }
        false
    }

    /// Whether the worker is to be left alone for a while.
    fn error(&mut self, now: Time) -> bool {
        self.age(now);
        self.errors += 1.0;
        // As sums of what is left of them: a rounding error short of five is five.
        self.errors > FEWEST_ERRORS - 0.5 && self.errors > ERRORS_PER_GOOD * self.good
    }

    fn out(&mut self, now: Time, settings: &config::Health) -> State {
        self.times += 1;
        out(Reason::Erring, self.times, now, settings)
    }
}

impl Reason {
    fn is_cleared_by_a_probe(self) -> bool {
        matches!(self, Reason::Unreachable | Reason::Insecure | Reason::Unhealthy)
    }

    fn is_cleared_by_an_answer(self) -> bool {
        matches!(self, Reason::Unhealthy | Reason::Broke | Reason::Stalled)
    }

    /// As long as probes run, they are the ones to find such a worker well again.
    fn waits_for_a_probe(self, settings: &config::Health) -> bool {
        self.is_cleared_by_a_probe() && settings.interval.is_some()
    }
}

fn up() -> State {
    State::Up(Failures::default())
}

fn out(reason: Reason, times: u32, now: Time, settings: &config::Health) -> State {
    let factor = 2f64.powi(times.saturating_sub(1).min(16) as i32).min(LONGEST_WAIT);
    State::Out { reason, until: now + settings.retry_after.as_secs_f64() * factor, times }
}

#[cfg(test)]
mod tests;
