//! Whether a worker gets anywhere with what it has been given. A frozen engine keeps its health page up and takes requests
//! for ever; what shows it is that *none* of them moves.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::core::ids::Time;

/// Requests begun without any sign of life before a worker can count as stalled. One or two may simply be long.
const FEW: u64 = 3;

/// Counts of one worker, compared from tick to tick.
#[derive(Debug, Default)]
pub struct Activity {
    begun: AtomicU64,
    progress: AtomicU64,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    progress: u64,
    /// `begun` when there was last any progress.
    begun: u64,
    /// Since when there are requests and no progress.
    quiet_since: Option<Time>,
}

/// What a tick has found.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// Something came since the last tick.
    Progress,
    Nothing,
    /// Several requests were begun and nothing has come for any request for the given time.
    Stall,
}

impl Activity {
    /// A request was placed on the worker.
    pub fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// Something of an answer came.
    pub fn progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Grows with every sign of life.
    pub fn signs_of_life(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Looks at what has happened since the last tick.
    pub fn tick(&self, now: Time, stalled_after: Option<f64>) -> Found {
        let (begun, progress) = (self.begun.load(Ordering::Relaxed), self.signs_of_life());
        let mut last = self.last.lock();
        if progress != last.progress {
            *last = Last { progress, begun, quiet_since: None };
            return Found::Progress;
        }
        let waiting = begun - last.begun;
        if waiting == 0 {
            return Found::Nothing;
        }
        let since = *last.quiet_since.get_or_insert(now);
        match stalled_after {
            Some(limit) if waiting >= FEW && now - since >= limit => {
                // Told once: those requests must not count again when the worker is tried later.
                *last = Last { progress, begun, quiet_since: None };
                Found::Stall
            }
            _ => Found::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_requests_without_any_sign_of_life_are_a_stall() {
        let activity = Activity::default();
        let tick = |second: f64| activity.tick(Time(second), Some(30.0));
        assert_eq!(tick(0.0), Found::Nothing);
        activity.begin();
        activity.begin();
        assert_eq!(tick(1.0), Found::Nothing);
        assert_eq!(tick(500.0), Found::Nothing, "two requests may be long");
        activity.begin();
        assert_eq!(tick(501.0), Found::Stall);
        activity.progress();
        assert_eq!(tick(502.0), Found::Progress);
        assert_eq!(tick(600.0), Found::Nothing, "what was begun before the last sign of life does not count");
    }

    #[test]
    fn a_stall_is_told_once_and_again_only_for_new_requests() {
        let activity = Activity::default();
        let tick = |second: f64| activity.tick(Time(second), Some(30.0));
        (0..3).for_each(|_| activity.begin());
        assert_eq!(
            [tick(0.0), tick(30.0), tick(30.1), tick(900.0)],
            [Found::Nothing, Found::Stall, Found::Nothing, Found::Nothing]
        );
        (0..3).for_each(|_| activity.begin());
        assert_eq!([tick(901.0), tick(931.0)], [Found::Nothing, Found::Stall]);
    }

    #[test]
    fn any_request_that_moves_speaks_for_all() {
        let activity = Activity::default();
        for second in 0..1000 {
            activity.begin();
            if second % 20 == 0 {
                activity.progress();
            }
            assert_ne!(activity.tick(Time(f64::from(second)), Some(30.0)), Found::Stall);
        }
    }

    #[test]
    fn it_can_be_switched_off() {
        let activity = Activity::default();
        (0..9).for_each(|_| activity.begin());
        activity.tick(Time(0.0), None);
        assert_eq!(activity.tick(Time(1e6), None), Found::Nothing);
    }
}
