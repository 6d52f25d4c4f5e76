//! What is said of a source in the log, and how often: a fault when it comes, again at a bounded pace while it lasts or keeps coming
//! back, and once that it is over.

use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::Trouble;

/// Between two lines of the same reason.
const PACE: Duration = Duration::from_secs(60);

/// What has been told of one source.
#[derive(Default)]
pub(super) struct Voice {
    /// When each reason was told last.
    told: Vec<(Trouble, Instant)>,
    lasting: Option<Lasting>,
}

/// A fault that is not over.
#[derive(Clone, Copy)]
struct Lasting {
    since: Instant,
    failures: u64,
    /// The log has a line of it.
    told: bool,
}

/// What a line tells beside the fault itself.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct So {
    /// How long it has lasted.
    pub far: Duration,
    /// How often the source has failed in that time.
    pub often: u64,
}

impl Voice {
    /// It has failed; what to tell if it is to be told now.
    pub(super) fn failed(&mut self, reason: Trouble, now: Instant) -> Option<So> {
        let lasting = self.lasting.get_or_insert(Lasting { since: now, failures: 0, told: false });
        lasting.failures += 1;
        self.told.retain(|(_, at)| now - *at < PACE);
        if self.told.iter().any(|(known, _)| *known == reason) {
            return None;
        }
        self.told.push((reason, now));
        lasting.told = true;
        Some(So { far: now - lasting.since, often: lasting.failures })
    }

    /// All is well with it; what to tell if it was told otherwise before.
    pub(super) fn well(&mut self, now: Instant) -> Option<So> {
        let over = self.lasting.take()?;
        over.told.then(|| So { far: now - over.since, often: over.failures })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn a_lasting_fault_is_told_at_once_then_at_a_pace_and_its_end_once() {
        let (mut voice, began) = (Voice::default(), Instant::now());
        let mut lines = Vec::new();
        for second in 0..150 {
            lines.extend(
                voice.failed(Trouble::Unreachable, began + seconds(second)).map(|so| (second, so.often)),
            );
        }
        assert_eq!(lines, [(0, 1), (60, 61), (120, 121)]);
        let over = voice.well(began + seconds(150));
        assert_eq!(over, Some(So { far: seconds(150), often: 150 }));
        assert_eq!(voice.well(began + seconds(151)), None);
    }

    #[test]
    fn another_reason_is_told_at_once_and_both_at_a_pace_even_in_turns() {
        let (mut voice, began) = (Voice::default(), Instant::now());
        let mut told = |at| {
            let reason = if at % 2 == 0 { Trouble::Refused } else { Trouble::Broken };
            voice.failed(reason, began + seconds(at)).is_some()
        };
        assert_eq!((0..=61).filter(|at| told(*at)).collect::<Vec<_>>(), [0, 1, 60, 61]);
    }

    #[test]
    fn one_that_comes_and_goes_all_the_time_is_told_at_the_same_pace() {
        let (mut voice, began) = (Voice::default(), Instant::now());
        let mut lines = 0;
        for second in 0..600 {
            lines += usize::from(voice.failed(Trouble::Absent, began + seconds(second)).is_some());
            lines += usize::from(voice.well(began + seconds(second)).is_some());
        }
        assert_eq!(lines, 20, "ten minutes, each with a fault and its end");
    }
}
