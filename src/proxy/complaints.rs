//! Log lines about what may go wrong for each of very many requests: the first of a kind is told at once, the next ones are
//! counted and told as one line every few seconds.

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The time between two lines of one kind.
const INTERVAL: Duration = Duration::from_secs(5);

/// What is wrong, and with which worker, if it is one's fault.
type Kind = (&'static str, String);

/// What was said of one kind.
struct Said {
    at: Instant,
    /// How often it has happened since.
    again: u64,
    last: String,
}

/// The one place for warnings that come by the request. There is one entry for each kind that was met in the last seconds.
#[derive(Default)]
pub struct Complaints {
    said: Mutex<HashMap<Kind, Said>>,
}

impl Complaints {
    pub fn warn(&self, what: &'static str, worker: &str, message: &dyn Display) {
        if self.is_new((what, worker.to_owned()), message, Instant::now()) {
            tracing::warn!("{message}");
        }
    }

    /// To be called now and then: tells what was counted since.
    pub fn tell(&self) {
        for Said { again, last, .. } in self.due(Instant::now()) {
            tracing::warn!(again, "{last}");
        }
    }

    fn is_new(&self, kind: Kind, message: &dyn Display, now: Instant) -> bool {
        let mut said = self.said.lock();
        match said.get_mut(&kind) {
            None => {
                said.insert(kind, Said { at: now, again: 0, last: String::new() });
                true
            }
            Some(known) => {
                known.again += 1;
                known.last = message.to_string();
                false
            }
        }
    }

    /// Takes out what is to be told; forgets what has not happened again.
    fn due(&self, now: Instant) -> Vec<Said> {
        let mut due = Vec::new();
        self.said.lock().retain(|_, said| {
            let over = now.duration_since(said.at) >= INTERVAL;
            let again = said.again > 0;
            if over && again {
                due.push(std::mem::replace(said, Said { at: now, again: 0, last: String::new() }));
            }
            !over || again
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_and_the_rest_as_one() {
        let complaints = Complaints::default();
        let begin = Instant::now();
        let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
        let told = |worker: &str, message: &str, seconds: f64| {
            complaints.is_new(("down", worker.to_owned()), &message, at(seconds))
        };
        let due = |seconds: f64| -> Vec<(u64, String)> {
            complaints.due(at(seconds)).into_iter().map(|said| (said.again, said.last)).collect()
        };
        assert!(told("a", "first", 0.0));
        assert!(told("b", "another worker is another kind", 0.0));
        for _ in 0..999 {
            assert!(!told("a", "more", 1.0));
        }
        assert!(!told("a", "the last", 4.0));
        assert!(due(4.9).is_empty());
        assert_eq!(due(5.0), [(1000, "the last".to_owned())]);
        assert!(!told("a", "still", 9.0), "at most one line in the interval");
        assert_eq!(due(10.0), [(1, "still".to_owned())]);
        assert!(due(15.0).is_empty());
        assert!(complaints.said.lock().is_empty(), "what is over takes no room");
        assert!(told("a", "again", 15.0));
    }
}
