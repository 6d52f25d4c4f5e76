//! Whether the store can be reached, for reading and for writing: shown, and said in the log once for each change.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::RedisError;

use crate::metrics::Metrics;

/// Between two attempts to reach the store; the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// What the store is asked for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Side {
    Reading,
    Writing,
}

/// Of each side whether it works, if it was tried; and whether it was said that the store is away.
#[derive(Default)]
struct State {
    works: [Option<bool>; 2],
    away: bool,
}

pub struct Reach {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

impl Reach {
    pub fn new(metrics: Arc<Metrics>) -> Reach {
        Reach { state: Mutex::default(), metrics }
    }

    pub fn works(&self, side: Side) {
        let mut state = self.state.lock();
        state.works[side as usize] = Some(true);
        if state.works != [Some(true); 2] {
            return;
        }
        self.metrics.sharing.connected.set(1);
        if std::mem::take(&mut state.away) {
            tracing::info!("the store of sharing is back: taking up what was said meanwhile");
        }
    }

    pub fn fails(&self, side: Side, error: &RedisError) {
        let mut state = self.state.lock();
        state.works[side as usize] = Some(false);
        self.metrics.sharing.connected.set(0);
        if !std::mem::replace(&mut state.away, true) {
            let side = if side == Side::Reading { "reading" } else { "writing" };
            tracing::warn!("the store of sharing fails ({side}), going on alone until it is back: {error}");
        }
    }
}

/// The pause before the next attempt, after so many that have failed. `chance` is from 0 to 1: routers do not come back all at once.
pub fn pause(failures: u32, chance: f64) -> Duration {
    let longest = FIRST_PAUSE.saturating_mul(1 << failures.min(10)).min(LONGEST_PAUSE);
    longest.mul_f64(0.5 + 0.5 * chance)
}

#[cfg(test)]
mod tests {
    use redis::ErrorKind;

    use super::*;

    #[test]
    fn the_store_is_there_while_both_sides_work() {
        let metrics = Metrics::new();
        let reach = Reach::new(metrics.clone());
        let connected = || metrics.sharing.connected.get();
        let error = RedisError::from((ErrorKind::Io, "away"));
        reach.works(Side::Reading);
        assert_eq!(connected(), 0, "nothing was written yet");
        reach.works(Side::Writing);
        assert_eq!(connected(), 1);
        reach.fails(Side::Writing, &error);
        reach.works(Side::Reading);
        assert_eq!(connected(), 0);
        reach.works(Side::Writing);
        assert_eq!(connected(), 1);
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        assert_eq!(pause(0, 1.0), FIRST_PAUSE);
        assert_eq!(pause(2, 0.0), 2 * FIRST_PAUSE);
        assert_eq!(pause(u32::MAX, 1.0), LONGEST_PAUSE);
    }
}
