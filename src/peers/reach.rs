//! Whether the store can be reached, for reading and for writing: shown, and said in the log once for each change and each new fault, however
//! often it is tried.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ErrorKind, RedisError};
use tokio::time::Instant;

use crate::metrics::Metrics;

/// Between two attempts to reach the store; the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A fault that was said and comes again within this time is said only if it lasts.
const SOON: Duration = Duration::from_secs(60);
const LASTS: Duration = Duration::from_secs(10);
/// Faults that are told apart: the store may say whatever it likes.
const MOST_SAID: usize = 8;

/// What the store is asked for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Side {
    Reading,
    Writing,
}

#[derive(Default)]
struct State {
    /// Of each side whether it works, if it was tried.
    works: [Option<bool>; 2],
    /// Since when something fails, and since when nothing does.
    away: Option<Instant>,
    back: Option<Instant>,
    /// It was said that the store is away.
    is_said: bool,
    said: Vec<(Side, String)>,
}

impl State {
    fn all_works(&self) -> bool {
        self.works == [Some(true); 2]
    }

    /// Answers whether it is to be said that the store is back.
    fn works(&mut self, side: Side, now: Instant) -> bool {
        self.works[side as usize] = Some(true);
        if !self.all_works() || self.back.is_some() {
            return false;
        }
        (self.away, self.back) = (None, Some(now));
        std::mem::take(&mut self.is_said)
    }

    /// Answers whether this fault is to be said.
    fn fails(&mut self, side: Side, fault: String, now: Instant) -> bool {
        self.works[side as usize] = Some(false);
        if self.back.take().is_some_and(|back| now - back >= SOON) {
            self.said.clear();
        }
        let lasts = now - *self.away.get_or_insert(now) >= LASTS;
        let fault = (side, fault);
        let is_new = self.said.len() < MOST_SAID && !self.said.contains(&fault);
        if is_new {
            self.said.push(fault);
        }
        let say = is_new || (lasts && !self.is_said);
        self.is_said |= say;
        say
    }
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
        let say = state.works(side, Instant::now());
        if state.all_works() {
            self.metrics.sharing.connected.set(1);
        }
        if say {
            tracing::info!("the store of sharing is back: taking up what was said meanwhile");
        }
    }

    pub fn fails(&self, side: Side, error: &RedisError) {
        self.metrics.sharing.connected.set(0);
        let fault = error.code().map_or_else(|| format!("{:?}", error.kind()), str::to_owned);
        let hint = hint(error).map_or_else(String::new, |hint| format!(" ({hint})"));
        if self.state.lock().fails(side, fault, Instant::now()) {
            let side = if side == Side::Reading { "reading" } else { "writing" };
            // What is no store at all may be quoted in several lines.
            let error = error.to_string().replace(['\r', '\n'], " ");
            tracing::warn!(
                "the store of sharing fails ({side}), going on alone until it is back: {error}{hint}"
            );
        }
    }
}

/// What is most likely wrong, and where to look.
fn hint(error: &RedisError) -> Option<&'static str> {
    if error.kind() == ErrorKind::AuthenticationFailed {
        return Some("see sharing.password_file and sharing.user");
    }
    Some(match error.code()? {
        "OOM" => "it has no memory left: raise its maxmemory, or lower sharing.most",
        "READONLY" => {
            "it is a replica: name the primary server, or its sentinels with sharing.kind: sentinel"
        }
        "NOAUTH" | "WRONGPASS" => "see sharing.password_file and sharing.user",
        "NOPERM" => {
            "sharing.user needs XADD, XREAD and XREVRANGE on keys that begin with sharing.key_prefix, SELECT if sharing.urls name a \
             database, and CLUSTER SLOTS for sharing.kind: cluster"
        }
        "WRONGTYPE" => {
            "something else has a key where the stream would be: give sharing.key_prefix another name"
        }
        "MOVED" | "ASK" | "CROSSSLOT" => {
            "it is part of a cluster: sharing.kind: cluster, and some of its servers in sharing.urls"
        }
        "CLUSTERDOWN" => "it is part of a cluster, of which no server has the stream",
        "MISCONF" => "it cannot write to its disk, and so takes nothing",
        "LOADING" => "it still reads its data from disk",
        _ => return None,
    })
}

/// The pause before the next attempt, after so many that have failed. `chance` is from 0 to 1: routers do not come back all at once.
pub fn pause(failures: u32, chance: f64) -> Duration {
    let longest = FIRST_PAUSE.saturating_mul(1 << failures.min(10)).min(LONGEST_PAUSE);
    longest.mul_f64(0.5 + 0.5 * chance)
}

#[cfg(test)]
mod tests {
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
    fn each_fault_is_said_once_however_often_it_comes_and_goes() {
        use Side::{Reading, Writing};
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut state = State::default();
        let fault = |name: &str| name.to_owned();
        assert!(state.fails(Reading, fault("Io"), at(0)));
        assert!(!state.fails(Reading, fault("Io"), at(1)));
        assert!(state.fails(Reading, fault("OOM"), at(2)), "another one");
        assert!(state.fails(Writing, fault("Io"), at(2)), "the other side");
        assert!(!state.works(Reading, at(3)));
        assert!(state.works(Writing, at(3)), "all is well again");
        assert!(!state.works(Reading, at(4)), "which is said once");
        // A store that comes and goes: nothing more, neither of its going nor of its coming.
        for second in 4..60 {
            assert!(!state.fails(Writing, fault("Io"), at(second)));
            assert!(!state.works(Writing, at(second)));
        }
        assert!(!state.fails(Writing, fault("Io"), at(61)));
        assert!(state.fails(Writing, fault("Io"), at(71)), "it lasts");
        assert!(!state.fails(Writing, fault("Io"), at(200)));
        assert!(state.works(Writing, at(201)));
        assert!(state.fails(Writing, fault("Io"), at(262)), "it was well for a minute");
    }

    #[test]
    fn a_store_that_says_ever_other_things_does_not_fill_the_log() {
        let mut state = State::default();
        let said = (0..1_000)
            .filter(|number| state.fails(Side::Reading, format!("E{number}"), Instant::now()))
            .count();
        assert_eq!(said, MOST_SAID);
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        assert_eq!(pause(0, 1.0), FIRST_PAUSE);
        assert_eq!(pause(2, 0.0), 2 * FIRST_PAUSE);
        assert_eq!(pause(u32::MAX, 1.0), LONGEST_PAUSE);
    }
}
