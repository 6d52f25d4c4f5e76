//! How far a measurement is and how long it still takes: a bar on a terminal, elsewhere a line on standard error now and
//! then.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;

/// Without a terminal, a line so often.
const LINE_EVERY: Duration = Duration::from_secs(30);
/// Nothing is said of the time left before so much of the work is done.
const TELLING_SHARE: f64 = 0.02;

/// Told of every piece of work that is done, in units of equal time: clones tell the same one.
#[derive(Clone, Debug)]
pub struct Progress {
    bar: ProgressBar,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    total: u64,
    done: u64,
    /// Of those, done before this process began.
    skipped: u64,
    began: Instant,
    told: Instant,
    what: String,
}

impl State {
    /// By the mean pace so far; `None` while too little is done to tell.
    fn left(&self, now: Instant) -> Option<Duration> {
        let here = self.done.saturating_sub(self.skipped) as f64;
        let all = self.total.saturating_sub(self.skipped) as f64;
        if here < TELLING_SHARE * all || here < 1.0 {
            return None;
        }
        Some((now - self.began).mul_f64(((all - here) / here).max(0.0)))
    }

    fn share(&self) -> u64 {
        100 * self.done.min(self.total) / self.total.max(1)
    }
}

/// To the grain in which one would say it.
fn words(left: Option<Duration>) -> String {
    let Some(left) = left else { return "? left".to_owned() };
    let seconds = left.as_secs_f64().round() as u64;
    match seconds {
        0..100 => format!("{seconds} s left"),
        100..5400 => format!("{} min left", (seconds + 30) / 60),
        _ => format!("{} h {} min left", seconds / 3600, seconds % 3600 / 60),
    }
}

impl Progress {
    /// Of work that is `total` units in all.
    pub fn new(total: u64) -> Progress {
        let bar = ProgressBar::new(total);
        let bar = match ProgressStyle::with_template("{bar:30} {percent:>3} %, {prefix}  {msg}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        Progress::on(bar, total)
    }

    /// That nobody sees.
    pub fn hidden() -> Progress {
        Progress::on(ProgressBar::hidden(), u64::MAX)
    }

    fn on(bar: ProgressBar, total: u64) -> Progress {
        let now = Instant::now();
        let state = State { total, done: 0, skipped: 0, began: now, told: now, what: String::new() };
        Progress { bar, state: Arc::new(Mutex::new(state)) }
    }

    /// Says what is being done.
    pub fn set_message(&self, what: String) {
        self.bar.set_message(what.clone());
        self.state.lock().what = what;
    }

    /// So many units were done before.
    pub fn skip(&self, units: u64) {
        let mut state = self.state.lock();
        state.skipped += units;
        state.done += units;
        self.bar.inc(units);
    }

    /// So many units more are done.
    pub fn inc(&self, units: u64) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.done += units;
        self.bar.inc(units);
        let since = now - state.told;
        if self.bar.is_hidden() {
            if since >= LINE_EVERY && state.total < u64::MAX {
                state.told = now;
                let (share, left, what) = (state.share(), words(state.left(now)), state.what.clone());
                drop(state);
                // Nobody may read it: that is no reason to stop measuring.
                let _ = writeln!(io::stderr(), "{}", format!("{share} %, {left}  {what}").trim_end());
            }
        } else if since >= Duration::from_millis(250) {
            state.told = now;
            let left = words(state.left(now));
            drop(state);
            self.bar.set_prefix(left);
        }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_the_work_done_here() {
        let now = Instant::now();
        let began = now.checked_sub(Duration::from_secs(10)).unwrap();
        let state =
            |done, skipped| State { total: 1000, done, skipped, began, told: now, what: String::new() };
        assert_eq!(state(10, 0).left(now), None, "one in a hundred tells nothing");
        assert_eq!(state(200, 0).left(now), Some(Duration::from_secs(40)));
        assert_eq!(
            state(600, 500).left(now),
            Some(Duration::from_secs(40)),
            "what an earlier run did was free"
        );
        assert_eq!((state(1000, 0).left(now), state(1000, 0).share()), (Some(Duration::ZERO), 100));
    }

    #[test]
    fn times_are_told_as_one_would_say_them() {
        let told = |seconds| words(Some(Duration::from_secs(seconds)));
        assert_eq!([told(7), told(130), told(5_400)], ["7 s left", "2 min left", "1 h 30 min left"]);
        assert_eq!(words(None), "? left");
    }
}
