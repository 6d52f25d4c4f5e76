//! The work a worker has been given: prompts without a first token yet (its prefill queue), open requests, and a fading tally
//! of what it was given lately. Work is counted in tokens and seconds, not in requests: one request can be a thousand times
//! another.
//!
//! The engine prefills first come, first served. Where answers are streamed the first token says when a prefill is over; where
//! they are not, the prefill is taken to be over when the worker's speed says so.

use std::collections::VecDeque;

use crate::core::ids::Time;
use crate::core::speed::{Line, Pace, Verdict};

/// Names one booking within a worker.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Prefill {
    ticket: Ticket,
    /// Uncached prompt tokens.
    tokens: f64,
    streams: bool,
    since: Time,
    /// Tokens of the whole prompt.
    prompt: f64,
}

/// Seconds over which work given to a worker is remembered; 180 s as in Preble (ICLR'25), where it was found to even out
/// which worker becomes the home of how many long conversations.
pub const RECENT_SECONDS: f64 = 180.0;

/// How many times its expected time a prefill may take before it is taken to have not begun, and a prefill so short that
/// its fixed part hides the rest.
const OVERDUE: f64 = 1.25;
const SHORT_TOKENS: f64 = 64.0;

/// What a price is made of: small, so that it can be published whole after each change and read by others without waiting.
#[derive(Copy, Clone, Debug, Default)]
pub struct Snapshot {
    requests: u64,
    open: usize,
    /// Tokens of all prefills.
    queued: f64,
    /// When the engine is taken to have begun with the first of them.
    serving_since: Time,
    first: Option<First>,
    recent: f64,
    recent_at: Time,
    foreign: f64,
    foreign_until: Time,
    pace: Verdict,
}

/// The oldest prefill.
#[derive(Copy, Clone, Debug)]
struct First {
    tokens: f64,
    streams: bool,
}

impl Snapshot {
    /// Requests given to the worker since it joined.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Requests sent and not ended.
    pub fn open(&self) -> usize {
        self.open
    }

    /// The worker's prefill speed, see [`Verdict::speed`].
    pub fn speed(&self, typical: f64) -> Option<f64> {
        self.pace.speed(typical)
    }

    /// Whether a prefill has passed whose end nobody will report: then [`Load::pass`] comes before [`Snapshot::queue`].
    pub fn is_stale(&self, now: Time, tokens_per_s: f64) -> bool {
        self.first
            .is_some_and(|first| !first.streams && self.serving_since + first.tokens / tokens_per_s <= now)
    }

    /// Uncached prompt tokens given to the worker and not prefilled by `now`.
    pub fn queue(&self, now: Time, tokens_per_s: f64) -> f64 {
        let served = self.first.map_or(0.0, |first| {
            let could = (now - self.serving_since).max(0.0) * tokens_per_s;
            // Long overdue, it waits for memory or for others and has not begun.
            if could > OVERDUE * first.tokens + SHORT_TOKENS { 0.0 } else { could.min(first.tokens) }
        });
        (self.queued - served).max(0.0)
    }

    /// Tokens that others have queued there, as far as is known at `now`.
    pub fn foreign(&self, now: Time) -> f64 {
        if now <= self.foreign_until { self.foreign } else { 0.0 }
    }

    /// Seconds of work given in the last [`RECENT_SECONDS`], as a share of that time (fading, so it has no edge).
    pub fn recent(&self, now: Time) -> f64 {
        self.recent * fade(now - self.recent_at)
    }
}

#[derive(Debug, Default)]
pub struct Load {
    now: Snapshot,
    prefills: VecDeque<Prefill>,
    pace: Pace,
    /// Tokens of all prompts sent there, and what was believed cached of them.
    asked: f64,
    expected: f64,
    answered: u64,
}

impl Load {
    /// Of a worker whose prefill speed the config tells, or not.
    pub fn told(tokens_per_s: Option<f64>) -> Load {
        let mut load = Load::default();
        load.tell_speed(tokens_per_s);
        load
    }

    pub fn snapshot(&self) -> Snapshot {
        self.now
    }

    /// See [`Pace::tell`].
    pub fn tell_speed(&mut self, tokens_per_s: Option<f64>) {
        self.pace.tell(tokens_per_s);
        self.now.pace = self.pace.verdict();
    }

    /// See [`Pace::learn`].
    pub fn learn_speed(&mut self, line: &Line, tokens: f64, seconds: f64) {
        self.pace.learn(line, tokens, seconds);
        self.now.pace = self.pace.verdict();
    }

    /// Books a request: `tokens` to prefill and, for the tally, `seconds` of work in all.
    pub fn book(&mut self, tokens: f64, seconds: f64, streams: bool, now: Time) -> Ticket {
        let ticket = Ticket(self.now.requests);
        self.now.requests += 1;
        if self.prefills.is_empty() {
            self.now.serving_since = now;
        }
        self.prefills.push_back(Prefill { ticket, tokens, streams, since: now, prompt: tokens });
        self.settle(self.now.queued + tokens);
        self.now.open += 1;
        // What another router tells comes late, and what has faded by then stays so.
        let at = if self.now.recent_at > now { self.now.recent_at } else { now };
        self.now.recent = self.now.recent(at) + fade(at - now) * seconds / RECENT_SECONDS;
        self.now.recent_at = at;
        ticket
    }

    /// Adds to the tally a request of `prompt` tokens that has just been booked.
    pub fn ask(&mut self, prompt: f64, expected: f64) {
        if let Some(prefill) = self.prefills.back_mut() {
            prefill.prompt = prompt;
        }
        self.correct(prompt, expected);
    }

    /// Corrects the tally: the estimate was wrong, or the request was never begun.
    pub fn correct(&mut self, prompt: f64, expected: f64) {
        self.asked += prompt;
        self.expected += expected;
    }

    /// An answer has told how long its prompt was.
    pub fn answered(&mut self) {
        self.answered += 1;
    }

    /// What has been given to the worker since it joined.
    pub fn given(&self) -> Given {
        Given {
            requests: self.now.requests,
            answered: self.answered,
            asked: self.asked,
            expected: self.expected,
            pending: self.prefills.iter().map(|prefill| prefill.prompt).sum(),
            prefills: self.prefills.len(),
            open: self.now.open,
        }
    }

    /// Others have so many tokens to prefill queued there; believed until `until`.
    pub fn set_foreign(&mut self, tokens: f64, until: Time) {
        (self.now.foreign, self.now.foreign_until) = (tokens, until);
    }

    /// The request's first token came: what is known of the prefill that ended, for the worker's speed.
    pub fn first_token(&mut self, ticket: Ticket, now: Time) -> Option<Served> {
        let (place, prefill) = self.take(ticket)?;
        let begun =
            if self.now.serving_since > prefill.since { self.now.serving_since } else { prefill.since };
        self.now.serving_since = now;
        Some(Served { seconds: now - begun, in_order: place == 0 })
    }

    /// The request has ended, or was never begun.
    pub fn end(&mut self, ticket: Ticket, now: Time) {
        self.now.open = self.now.open.saturating_sub(1);
        if let Some((0, _)) = self.take(ticket) {
            self.now.serving_since = now;
        }
    }

    /// Takes prefills whose end nobody will report as over once their time has passed.
    pub fn pass(&mut self, now: Time, tokens_per_s: f64) {
        while let Some(first) = self.prefills.front().filter(|_| self.now.is_stale(now, tokens_per_s)) {
            let tokens = first.tokens;
            self.now.serving_since = self.now.serving_since + tokens / tokens_per_s;
            self.prefills.pop_front();
            self.settle(self.now.queued - tokens);
        }
    }

    /// Takes the request's prefill out of the queue, unless it has left it.
    fn take(&mut self, ticket: Ticket) -> Option<(usize, Prefill)> {
        let place = self.prefills.iter().position(|prefill| prefill.ticket == ticket)?;
        let prefill = self.prefills.remove(place)?;
        self.settle(self.now.queued - prefill.tokens);
        Some((place, prefill))
    }

    /// The prefills have changed, and have so many tokens in all, but for what rounding has added up.
    fn settle(&mut self, queued: f64) {
        self.now.queued = if self.prefills.is_empty() { 0.0 } else { queued };
        self.now.first =
            self.prefills.front().map(|first| First { tokens: first.tokens, streams: first.streams });
    }
}

/// What has been given to a worker since it joined. Tokens unless the name says otherwise.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Given {
    /// Requests.
    pub requests: u64,
    /// Requests whose answer told how long the prompt was.
    pub answered: u64,
    /// Of all prompts.
    pub asked: f64,
    /// Of these, believed cached.
    pub expected: f64,
    /// Of prompts without a first token.
    pub pending: f64,
    /// Requests without a first token.
    pub prefills: usize,
    /// Requests that have not ended.
    pub open: usize,
}

/// A prefill that ended: how long the worker was at it, and whether it was the oldest one (else it was served out of order
/// and says nothing of the speed).
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Served {
    pub seconds: f64,
    pub in_order: bool,
}

fn fade(seconds: f64) -> f64 {
    (-seconds.max(0.0) / RECENT_SECONDS).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(load: &mut Load, now: f64) -> f64 {
        load.pass(Time(now), 1000.0);
        load.snapshot().queue(Time(now), 1000.0)
    }

    #[test]
    fn a_streamed_prefill_leaves_the_queue_with_its_first_token() {
        let mut load = Load::default();
        let a = load.book(1000.0, 1.0, true, Time(0.0));
        let b = load.book(500.0, 1.0, true, Time(0.0));
        assert_eq!(queue(&mut load, 0.5), 1000.0, "half of the first is done");
        assert_eq!(queue(&mut load, 1.2), 500.0, "progress never goes past the prompt in service");
        assert_eq!(queue(&mut load, 9.0), 1500.0, "long overdue, it has not begun");
        assert_eq!(load.first_token(a, Time(9.0)), Some(Served { seconds: 9.0, in_order: true }));
        assert_eq!(queue(&mut load, 9.25), 250.0);
        load.end(a, Time(9.25));
        load.end(b, Time(9.25));
        assert_eq!((queue(&mut load, 9.25), load.snapshot().open()), (0.0, 0));
    }

    #[test]
    fn an_unseen_prefill_ends_when_the_speed_says_so() {
        let mut load = Load::default();
        let a = load.book(1000.0, 1.0, false, Time(0.0));
        let b = load.book(1000.0, 1.0, false, Time(0.0));
        assert_eq!(queue(&mut load, 1.5), 500.0);
        assert_eq!(queue(&mut load, 5.0), 0.0);
        assert_eq!(load.snapshot().open(), 2, "they still generate");
        load.end(a, Time(6.0));
        load.end(b, Time(6.0));
        assert_eq!(load.snapshot().open(), 0);
    }

    #[test]
    fn out_of_order_first_tokens_are_told_apart() {
        let mut load = Load::default();
        let _a = load.book(1000.0, 1.0, true, Time(0.0));
        let b = load.book(10.0, 1.0, true, Time(0.0));
        assert_eq!(load.first_token(b, Time(0.1)).map(|served| served.in_order), Some(false));
        assert_eq!(load.first_token(b, Time(0.2)), None, "only once");
    }

    #[test]
    fn what_is_told_late_fades_nothing_twice() {
        let recent = |late: f64| {
            let mut load = Load::default();
            for at in 0..1_000 {
                load.book(1.0, 1.0, true, Time(f64::from(at)));
                load.book(1.0, 1.0, true, Time(f64::from(at) - late));
            }
            load.snapshot().recent(Time(1_000.0))
        };
        let (at_once, late) = (recent(0.0), recent(2.0));
        assert!((late / at_once - 1.0).abs() < 0.02, "{late} for {at_once}");
    }

    #[test]
    fn the_load_of_others_is_believed_for_its_time_only() {
        let mut load = Load::default();
        load.set_foreign(4000.0, Time(5.0));
        assert_eq!((load.snapshot().foreign(Time(5.0)), load.snapshot().foreign(Time(5.1))), (4000.0, 0.0));
    }

    #[test]
    fn the_tally_counts_what_was_asked_and_what_is_pending() {
        let mut load = Load::default();
        let a = load.book(300.0, 1.0, true, Time(0.0));
        load.ask(2300.0, 2000.0);
        let b = load.book(2300.0, 1.0, true, Time(0.0));
        load.ask(2300.0, 0.0);
        load.first_token(a, Time(1.0));
        let pending = Given {
            requests: 2,
            answered: 0,
            asked: 4600.0,
            expected: 2000.0,
            pending: 2300.0,
            prefills: 1,
            open: 2,
        };
        assert_eq!(load.given(), pending);
        load.correct(-2300.0, 0.0);
        load.end(b, Time(1.0));
        let left = Given { asked: 2300.0, pending: 0.0, prefills: 0, open: 1, ..pending };
        assert_eq!(load.given(), left);
    }

    #[test]
    fn the_tally_fades() {
        let mut load = Load::default();
        let _ = load.book(0.0, 18.0, true, Time(0.0));
        assert!((load.snapshot().recent(Time(0.0)) - 0.1).abs() < 1e-12);
        let later = load.snapshot().recent(Time(RECENT_SECONDS));
        assert!((later - 0.1 / std::f64::consts::E).abs() < 1e-12);
    }
}
