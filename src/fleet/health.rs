//! Whether a worker may be given requests: one small state machine per worker, without a clock of its own.
//!
//! ```text
//!  Starting --probe passed, or an answer--> Up
//!  Up       --probes or requests failed, so many in a row--> Out
//!  Out      --probe passed (if it is not requests that broke)--> Up
//!  Out      --its time is over (if it is requests that broke, or nobody probes)--> Trial
//!  Trial    --an answer--> Up        Trial --a failure--> Out, for twice as long
//! ```
//!
//! An answer of any status shows that the worker lives: 4xx, 429 and 503 never count against it. A passed probe does not
//! redeem a worker whose requests broke: engines were seen that freeze or die behind a healthy page.

use crate::config;
use crate::core::ids::Time;

/// What can happen to a worker.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Event {
    ProbePassed,
    ProbeFailed,
    /// A response head came, whatever its status.
    Answered,
    /// A connection could not be opened.
    ConnectFailed,
    /// The worker took a request and broke off before it had answered.
    Broke,
    /// A request was placed on it.
    Picked,
    /// The request that tried the worker ended without showing anything (its client left).
    Unproven,
    /// Time has passed.
    Tick,
}

/// The state by name.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    Starting,
    Up,
    Out,
    Trial,
}

/// A change of state.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub from: Standing,
    pub to: Standing,
}

/// What lets a worker back in.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Proof {
    /// A passed probe.
    Probe,
    /// An answered request.
    Answer,
}

#[derive(Clone, PartialEq, Debug)]
enum State {
    Starting,
    Up { probe_failures: usize, request_failures: usize },
    Out { until: Time, times: u32, proof: Proof },
    Trial { taken: bool, times: u32 },
}

/// The health of one worker.
#[derive(Clone, Debug)]
pub struct Health {
    state: State,
}

/// A worker stays out for at most this many times `health.retry_after`.
const LONGEST_WAIT: f64 = 30.0;

impl Health {
    /// A worker that is probed starts when its first probe has passed; without probes it is taken to be up.
    pub fn new(probed: bool) -> Health {
        let state =
            if probed { State::Starting } else { State::Up { probe_failures: 0, request_failures: 0 } };
        Health { state }
    }

    pub fn standing(&self) -> Standing {
        match self.state {
            State::Starting => Standing::Starting,
            State::Up { .. } => Standing::Up,
            State::Out { .. } => Standing::Out,
            State::Trial { .. } => Standing::Trial,
        }
    }

    /// May be given a request. A worker on trial takes one.
    pub fn is_eligible(&self) -> bool {
        matches!(self.state, State::Up { .. } | State::Trial { taken: false, .. })
    }

    /// Up without any recent failure, so that an answer changes nothing.
    pub fn is_calm(&self) -> bool {
        matches!(self.state, State::Up { request_failures: 0, .. })
    }

    pub fn record(&mut self, event: Event, now: Time, settings: &config::Health) {
        use Event::*;
        let up = State::Up { probe_failures: 0, request_failures: 0 };
        let next = match (&mut self.state, event) {
            (State::Starting, ProbePassed | Answered) => Some(up),
            (State::Up { probe_failures, .. }, ProbePassed) => {
                *probe_failures = 0;
                None
            }
            (State::Up { request_failures, .. }, Answered) => {
                *request_failures = 0;
                None
            }
            (State::Up { probe_failures, .. }, ProbeFailed) => {
                *probe_failures += 1;
                (*probe_failures >= settings.probe_failures).then(|| out(1, Proof::Probe, now, settings))
            }
            (State::Up { request_failures, .. }, ConnectFailed | Broke) => {
                *request_failures += 1;
                let proof = proof_after(event, settings);
                (*request_failures >= settings.request_failures).then(|| out(1, proof, now, settings))
            }
            (State::Out { proof: Proof::Probe, .. }, ProbePassed) => Some(up),
            (State::Out { .. } | State::Trial { .. }, Answered) => Some(up),
            (State::Out { until, times, proof: Proof::Answer }, Tick) if now >= *until => {
                Some(State::Trial { taken: false, times: *times })
            }
            (State::Trial { taken, .. }, Picked) => {
                *taken = true;
                None
            }
            (State::Trial { taken, .. }, Unproven) => {
                *taken = false;
                None
            }
            (State::Trial { times, .. }, ConnectFailed | Broke) => {
                Some(out(*times + 1, proof_after(event, settings), now, settings))
            }
            _ => None,
        };
        if let Some(next) = next {
            self.state = next;
        }
    }
}

/// Nothing but a request can show more than a refused connection does, unless probes run.
fn proof_after(event: Event, settings: &config::Health) -> Proof {
    match event {
        Event::ConnectFailed if settings.interval.is_some() => Proof::Probe,
        _ => Proof::Answer,
    }
}

fn out(times: u32, proof: Proof, now: Time, settings: &config::Health) -> State {
    let factor = 2f64.powi(times.saturating_sub(1).min(16) as i32).min(LONGEST_WAIT);
    State::Out { until: now + settings.retry_after.as_secs_f64() * factor, times, proof }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> config::Health {
        config::Health::default()
    }

    /// Feeds events at their seconds and tells where the worker stands after each.
    fn walk(health: &mut Health, steps: &[(f64, Event)]) -> Vec<Standing> {
        steps
            .iter()
            .map(|(second, event)| {
                health.record(*event, Time(*second), &settings());
                health.standing()
            })
            .collect()
    }

    #[test]
    fn a_probed_worker_starts_with_its_first_passed_probe() {
        let mut health = Health::new(true);
        assert!(!health.is_eligible());
        let seen = walk(&mut health, &[(0.0, Event::ProbeFailed), (2.0, Event::ProbePassed)]);
        assert_eq!(seen, [Standing::Starting, Standing::Up]);
        assert!(health.is_eligible());
    }

    #[test]
    fn a_few_failed_probes_in_a_row_take_it_out_and_one_passed_lets_it_in() {
        use Event::*;
        let mut health = Health::new(false);
        let seen = walk(
            &mut health,
            &[
                (0.0, ProbeFailed),
                (2.0, ProbeFailed),
                (4.0, ProbePassed),
                (6.0, ProbeFailed),
                (8.0, ProbeFailed),
                (10.0, ProbeFailed),
                (12.0, ProbePassed),
            ],
        );
        assert_eq!(seen[..5], [Standing::Up; 5]);
        assert_eq!(seen[5..], [Standing::Out, Standing::Up]);
    }

    #[test]
    fn a_healthy_page_does_not_redeem_a_worker_whose_requests_break() {
        use Event::*;
        let mut health = Health::new(false);
        walk(&mut health, &[(0.0, Broke), (0.1, Broke), (0.2, Broke), (0.3, ProbePassed), (1.1, Tick)]);
        assert_eq!(health.standing(), Standing::Out);
        walk(&mut health, &[(1.3, Tick)]);
        assert_eq!(health.standing(), Standing::Trial);
        assert!(health.is_eligible());
        walk(&mut health, &[(1.4, Picked)]);
        assert!(!health.is_eligible(), "one request tries it, not a herd");
        walk(&mut health, &[(1.5, Broke), (3.4, Tick)]);
        assert_eq!(health.standing(), Standing::Out, "the second wait is twice as long");
        let seen = walk(&mut health, &[(3.6, Tick), (3.7, Picked), (3.8, Answered)]);
        assert_eq!(seen, [Standing::Trial, Standing::Trial, Standing::Up]);
        assert!(health.is_calm());
    }

    #[test]
    fn a_trial_whose_client_left_can_be_taken_again() {
        use Event::*;
        let mut health = Health::new(false);
        walk(
            &mut health,
            &[(0.0, Broke), (0.0, Broke), (0.0, Broke), (2.0, Tick), (2.0, Picked), (2.1, Unproven)],
        );
        assert!(health.is_eligible());
    }

    #[test]
    fn an_answer_between_failures_forgives_them() {
        use Event::*;
        let mut health = Health::new(false);
        walk(&mut health, &[(0.0, ConnectFailed), (0.0, Broke), (0.0, Answered), (0.0, Broke), (0.0, Broke)]);
        assert_eq!(health.standing(), Standing::Up);
        assert!(!health.is_calm());
    }

    #[test]
    fn without_probes_a_refused_worker_is_tried_again() {
        let mut settings = settings();
        settings.interval = None;
        let mut health = Health::new(false);
        for _ in 0..3 {
            health.record(Event::ConnectFailed, Time(0.0), &settings);
        }
        health.record(Event::Tick, Time(1.5), &settings);
        assert_eq!(health.standing(), Standing::Trial);
    }

    #[test]
    fn the_wait_is_bounded() {
        let mut health = Health::new(false);
        health.state = State::Trial { taken: true, times: 40 };
        walk(&mut health, &[(100.0, Event::Broke), (130.5, Event::Tick)]);
        assert_eq!(health.standing(), Standing::Trial);
    }
}
