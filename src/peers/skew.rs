//! How far the store's clock is before ours. An entry that was written just now looks younger than all others, so it is no less than by any
//! entry of late. Pure.
//!
//! Clocks drift and are set, so what entries showed a while ago is forgotten: else a store whose clock is slow by one second in a day would
//! make all that is said look older each day, and in the end too old for anybody to live.

use crate::core::ids::Time;

/// Seconds that an entry counts, at least; twice as many at most. Each router writes every second.
const WINDOW: f64 = 30.0;

/// Seconds that what is said just now can be late, with slow networks and busy routers. What seems later came from a clock that was put back, or
/// stands: a stream goes on from its latest time until the clock of the server that has it by then has come so far. Less than routers are
/// given to speak, so that none is taken for dead by it.
const MOST_LATE: f64 = 2.0;

/// In seconds. The most of this window and of the one before.
#[derive(Copy, Clone, Debug)]
pub struct Skew {
    before: f64,
    now: f64,
    since: Time,
}

impl Skew {
    /// By the store's word for `now`, in milliseconds; that may be old, and so too little.
    pub fn new(ms: u64, now: Time) -> Skew {
        let ahead = ahead(ms, now);
        Skew { before: ahead, now: ahead, since: now }
    }

    /// Takes up an entry that was read at `now`, and `live` if all before it were; answers how many seconds ago it was written, never less
    /// than none.
    pub fn late(&mut self, ms: u64, now: Time, live: bool) -> f64 {
        if now - self.since > WINDOW {
            *self = Skew { before: self.now, now: f64::NEG_INFINITY, since: now };
        }
        let by_this = ahead(ms, now);
        self.now = self.now.max(by_this);
        let late = self.seconds() - by_this;
        if live && late > MOST_LATE {
            *self = Skew::new(ms, now);
            return 0.0;
        }
        late
    }

    /// What the store's clock shows at `at`, in seconds since 1970.
    pub fn stamp(&self, at: Time) -> f64 {
        at.0 + self.seconds()
    }

    fn seconds(&self) -> f64 {
        self.before.max(self.now)
    }
}

fn ahead(ms: u64, now: Time) -> f64 {
    ms as f64 / 1e3 - now.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_800_000_000_000;

    #[test]
    fn the_entry_that_came_fastest_says_what_the_clock_shows() {
        let mut skew = Skew::new(START, Time(100.0));
        // Written 1.98 s later and read 2 s later, and then one that took 15 ms more.
        assert!(skew.late(START + 1_980, Time(102.0), true).abs() < 0.021);
        let fast = skew.late(START + 3_000, Time(103.0), true);
        assert!(fast.abs() < 1e-3, "{fast}");
        let slow = skew.late(START + 3_985, Time(104.0), true);
        assert!((slow - 0.015).abs() < 1e-3, "{slow}");
        assert!((skew.stamp(Time(103.0)) - (START + 3_000) as f64 / 1e3).abs() < 1e-3);
    }

    #[test]
    fn a_slow_clock_never_makes_all_look_old() {
        let mut skew = Skew::new(START, Time(0.0));
        let mut latest = 0.0;
        // For a day, an entry each second by a clock that loses a second in an hour.
        for second in 0..86_400u64 {
            let ms = START + second * 1_000 - second * 1_000 / 3_600;
            latest = skew.late(ms, Time(second as f64), true);
            assert!(latest < 0.05, "{latest} after {second} s");
        }
        assert!(latest >= 0.0);
    }

    #[test]
    fn a_clock_that_is_put_back_is_believed_once_all_is_read() {
        let mut skew = Skew::new(START, Time(0.0));
        let late = skew.late(START - 3_600_000, Time(1.0), false);
        assert!((late - 3_601.0).abs() < 1e-3, "it was said an hour ago");
        assert_eq!(skew.late(START - 3_600_000, Time(1.0), true), 0.0);
        assert!(skew.late(START - 3_599_000, Time(2.0), true).abs() < 1e-3);
    }

    #[test]
    fn a_clock_that_stands_makes_nothing_late() {
        let mut skew = Skew::new(START, Time(0.0));
        let latest = (0..3_600).map(|second| skew.late(START, Time(f64::from(second)), true));
        assert!(latest.fold(0.0, f64::max) <= MOST_LATE);
    }
}
