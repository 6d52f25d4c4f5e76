//! Whether the store can be reached, for reading and for writing: shown, and said in the log once when it breaks off, with what to look at,
//! and once when it is back, however often it is tried.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ErrorKind, RedisError};
use tokio::time::Instant;

use super::store::Store;
use crate::metrics::{Metrics, NewsLost};

/// Between two attempts to reach the store; the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A break within this time of the last that was told is told by itself only if it lasts, else by its number.
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

/// From a fault until both sides have worked after it: what breaks one connection is found on the other a moment later.
struct Break {
    since: Instant,
    fault: String,
    is_told: bool,
    /// Whose connection was broken off, which by itself says little: the next attempt finds why, or that the store is there.
    dropped: [bool; 2],
}

/// What the log is to say when the store works.
#[derive(PartialEq, Debug)]
enum Word {
    /// For the first time.
    There,
    Back {
        after: Duration,
        /// Short breaks before, of which nothing was said.
        untold: u32,
    },
    /// It broke the connections off, and took new ones at once.
    Cut(Duration),
    /// It works, and broke off so many times for a moment.
    Untold(u32),
}

#[derive(Default)]
struct State {
    /// Of each side whether it has worked since something failed last.
    works: [bool; 2],
    has_worked: bool,
    broken: Option<Break>,
    told_at: Option<Instant>,
    untold: u32,
    /// News that were dropped because too many waited, as far as that was told.
    dropped: u64,
    /// Kinds of faults that were told of late.
    said: Vec<String>,
}

impl State {
    fn all_works(&self) -> bool {
        self.works == [true; 2]
    }

    fn works(&mut self, side: Side, now: Instant) -> Option<Word> {
        self.works[side as usize] = true;
        if !self.all_works() {
            return None;
        }
        let is_first = !std::mem::replace(&mut self.has_worked, true);
        match self.broken.take() {
            Some(Break { is_told: true, since, .. }) => {
                Some(Word::Back { after: now - since, untold: std::mem::take(&mut self.untold) })
            }
            _ if is_first => Some(Word::There),
            Some(Break { since, .. }) if self.is_new(DROPPED) => {
                self.said.push(DROPPED.to_owned());
                self.told_at = Some(now);
                Some(Word::Cut(now - since))
            }
            Some(_) => {
                self.untold += 1;
                None
            }
            None if self.untold > 0 && self.told_at.is_none_or(|told| now - told >= SOON) => {
                self.told_at = Some(now);
                Some(Word::Untold(std::mem::take(&mut self.untold)))
            }
            None => None,
        }
    }

    fn is_new(&self, kind: &str) -> bool {
        self.said.len() < MOST_SAID && !self.said.iter().any(|said| said == kind)
    }

    /// Answers whether this fault is to be told. Of one `kind` are those that need the same cure.
    fn fails(&mut self, side: Side, kind: &str, fault: String, now: Instant) -> bool {
        self.works = [false; 2];
        if self.broken.is_none() && self.told_at.is_none_or(|told| now - told >= SOON) {
            self.said.clear();
        }
        let is_new = self.is_new(kind);
        let broken = self.broken.get_or_insert_with(|| Break {
            since: now,
            fault: String::new(),
            is_told: false,
            dropped: [false; 2],
        });
        broken.fault = fault;
        if kind == DROPPED && !std::mem::replace(&mut broken.dropped[side as usize], true) {
            return false;
        }
        // A server that goes, and comes, does so with one fault after another.
        let told_just_now = self.told_at.is_some_and(|told| now - told < LASTS);
        let tell =
            if broken.is_told { is_new && !told_just_now } else { is_new || now - broken.since >= LASTS };
        if tell {
            broken.is_told = true;
            self.told_at = Some(now);
            if is_new {
                self.said.push(kind.to_owned());
            }
        }
        tell
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

    pub fn works(&self, side: Side, store: &Store) {
        let (word, all_works, dropped) = {
            let mut state = self.state.lock();
            let word = state.works(side, Instant::now());
            let all = self.metrics.sharing.dropped.get(NewsLost::Full);
            let before = if word.is_some() { std::mem::replace(&mut state.dropped, all) } else { all };
            (word, state.all_works(), all - before)
        };
        if all_works {
            self.metrics.sharing.connected.set(1);
        }
        let (address, stream) = (store.address(), store.key());
        match word {
            Some(Word::There) => tracing::info!(stream, "the store of sharing {address} is there"),
            Some(Word::Back { after, untold }) => {
                let before =
                    if untold > 0 { format!(", and {untold} short breaks before") } else { String::new() };
                let dropped = Some(dropped).filter(|dropped| *dropped > 0);
                tracing::info!(
                    dropped,
                    "the store of sharing {address} is back after {:.1} s{before}: taking up what was said meanwhile",
                    after.as_secs_f64()
                );
            }
            Some(Word::Cut(after)) => tracing::warn!(
                "the store of sharing {address} broke the connection off, and was back after {:.1} s",
                after.as_secs_f64()
            ),
            Some(Word::Untold(breaks)) => tracing::warn!(
                breaks,
                "the store of sharing {address} broke off for a moment, again and again; it is there"
            ),
            None => {}
        }
    }

    pub fn fails(&self, side: Side, error: &RedisError, store: &Store) {
        self.metrics.sharing.connected.set(0);
        // What is no store at all may be quoted in several lines.
        let words = error.to_string().replace(['\r', '\n'], " ");
        let cure = cure(error, store.key()).map_or_else(String::new, |cure| format!(": {cure}"));
        let fault = format!("{}{cure}", words.trim_end());
        if self.state.lock().fails(side, &kind(error), fault.clone(), Instant::now()) {
            let side = if side == Side::Reading { "reading" } else { "writing" };
            let address = store.address();
            tracing::warn!(
                "the store of sharing {address} fails ({side}), going on alone until it is back: {fault}"
            );
        }
    }

    /// What is wrong, and for how long, while something is.
    pub fn fault(&self) -> Option<(Duration, String)> {
        let state = self.state.lock();
        state.broken.as_ref().map(|broken| (broken.since.elapsed(), broken.fault.clone()))
    }
}

/// The kind of those that a broken connection shows.
const DROPPED: &str = "dropped";

/// Faults of one kind have one cause.
fn kind(error: &RedisError) -> String {
    match error.code() {
        Some("ERR") => error.detail().unwrap_or_default().to_owned(),
        Some(code) => code.to_owned(),
        None if error.is_timeout() => "timeout".to_owned(),
        None if error.is_connection_refusal() => "refused".to_owned(),
        None if error.is_connection_dropped() => DROPPED.to_owned(),
        None if error.kind() == ErrorKind::Io => error.to_string(),
        None => format!("{:?}", error.kind()),
    }
}

const PASSWORD: &str = "see sharing.password_file and sharing.user, and what the store wants";
const CLUSTER: &str =
    "it is part of a cluster: sharing.kind: cluster, and some of its servers in sharing.urls";
const NO_STORE: &str =
    "what answers there is no Redis or Valkey of version 6 or later: see sharing.urls and sharing.kind";

/// What is most likely wrong, and where to look. `stream` is the key of the stream.
fn cure(error: &RedisError, stream: &str) -> Option<String> {
    let text = error.to_string();
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let known = match error.code() {
        None => of_connections(error, says),
        Some("OOM") => {
            return Some(format!(
                "it has no memory left: raise its maxmemory; or lower sharing.most, restart all routers, and delete the key {stream}"
            ));
        }
        Some("WRONGTYPE") => {
            return Some(format!(
                "something else has the key {stream}: give sharing.key_prefix another name"
            ));
        }
        Some("READONLY") => {
            Some("it is a replica: name the primary server, or its sentinels with sharing.kind: sentinel")
        }
        Some("NOAUTH" | "WRONGPASS") => Some(PASSWORD),
        Some("NOPERM") => Some(
            "sharing.user needs XADD, XREAD and XREVRANGE on keys that begin with sharing.key_prefix, SELECT if sharing.urls name a \
             database, and CLUSTER SLOTS for sharing.kind: cluster",
        ),
        Some("MOVED" | "ASK" | "CROSSSLOT") => Some(CLUSTER),
        Some("CLUSTERDOWN") => Some("it is part of a cluster, of which no server has the stream"),
        Some("MISCONF") => Some("it cannot write to its disk, and so takes nothing"),
        Some("LOADING") => Some("it still reads its data from disk"),
        Some("MASTERDOWN") => Some("it is a replica whose primary server is away"),
        Some("NOREPLICAS") => Some("too few replicas follow it: see its min-replicas-to-write"),
        Some("BUSY") => Some("a script keeps it busy"),
        Some("DENIED") => Some("it is in protected mode: give it a password, or an address to bind"),
        Some(_) if says(&["last possible ID"]) => {
            return Some(format!("somebody has written the last entry that can be: delete the key {stream}"));
        }
        Some(_) if says(&["DB index", "switch database"]) => {
            Some("see the number of the database in sharing.urls")
        }
        Some(_) if says(&["cluster support disabled"]) => Some("it is no cluster: sharing.kind: server"),
        Some(_) if says(&["max number of clients"]) => Some("raise its maxclients"),
        Some(_) if says(&["unknown command"]) => Some(NO_STORE),
        Some(_) => None,
    };
    known.map(str::to_owned)
}

/// Where the server itself has said nothing.
fn of_connections(error: &RedisError, says: impl Fn(&[&str]) -> bool) -> Option<&'static str> {
    match error.kind() {
        ErrorKind::AuthenticationFailed => return Some(PASSWORD),
        ErrorKind::MasterNameNotFoundBySentinel => {
            return Some(
                "no group of this name has a primary server now, as the sentinels say: see sharing.group",
            );
        }
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => return Some(NO_STORE),
        ErrorKind::InvalidClientConfig if says(&["sentinel"]) => {
            return Some("sharing.urls name the sentinels where sharing.kind is sentinel");
        }
        ErrorKind::ClusterConnectionNotFound => {
            return Some(
                "none of the cluster's servers could be reached, or none has the stream: see sharing.urls",
            );
        }
        _ => {}
    }
    if says(&["switch database", "DB index"]) {
        Some("see the number of the database in sharing.urls")
    } else if says(&["peer certificate"]) {
        Some("see sharing.ca, and the host in sharing.urls, which must be a name in the certificate")
    } else if says(&["CertificateRequired"]) {
        Some("it wants certificates of its clients, which routers have none of: tls-auth-clients no")
    } else if says(&["corrupt message"]) {
        Some("it does not speak TLS: redis:// in sharing.urls")
    } else if says(&["failed to lookup"]) {
        Some("see the host in sharing.urls")
    } else if error.is_connection_refusal() {
        Some("nobody listens there: see sharing.urls, and whether the store runs")
    } else if error.is_timeout() {
        Some(
            "it does not answer in time: is it stopped or overloaded, does something between drop packets, or are only one of both in TLS?",
        )
    } else if error.is_connection_dropped() {
        Some(
            "it broke the connection off, as it does when it ends, where it wants TLS (rediss://), or is told to",
        )
    } else {
        None
    }
}

/// The pause before the next attempt, after so many that have failed. `chance` is from 0 to 1: routers do not come back all at once.
pub fn pause(failures: u32, chance: f64) -> Duration {
    let longest = FIRST_PAUSE.saturating_mul(1 << failures.min(10)).min(LONGEST_PAUSE);
    longest.mul_f64(0.5 + 0.5 * chance)
}

#[cfg(test)]
mod tests {
    use super::Side::{Reading, Writing};
    use super::*;
    use crate::config::{Sharing, StoreUrl};
    use crate::core::blocks::HashKey;

    #[test]
    fn the_store_is_there_while_both_sides_work() {
        let metrics = Metrics::new();
        let reach = Reach::new(metrics.clone());
        let connected = || metrics.sharing.connected.get();
        let error = RedisError::from((ErrorKind::Io, "away"));
        let urls = vec![StoreUrl::parse("redis://a:1").unwrap()];
        let store = Store::new(&Sharing { urls, ..Sharing::default() }, &HashKey([0; 32]), 256).unwrap();
        reach.works(Side::Reading, &store);
        assert_eq!(connected(), 0, "nothing was written yet");
        reach.works(Side::Writing, &store);
        assert_eq!((connected(), reach.fault()), (1, None));
        reach.fails(Side::Writing, &error, &store);
        reach.works(Side::Reading, &store);
        assert_eq!(connected(), 0);
        assert!(reach.fault().is_some_and(|(_, fault)| fault.starts_with("away")));
        reach.works(Side::Writing, &store);
        assert_eq!((connected(), reach.fault()), (1, None));
    }

    struct Log(State, Instant);

    impl Log {
        fn fails(&mut self, side: Side, kind: &str, second: u64) -> bool {
            self.0.fails(side, kind, String::new(), self.1 + Duration::from_secs(second))
        }

        fn works(&mut self, side: Side, second: u64) -> Option<Word> {
            self.0.works(side, self.1 + Duration::from_secs(second))
        }

        fn both_work(&mut self, second: u64) -> Option<Word> {
            assert_eq!(self.works(Side::Reading, second), None);
            self.works(Side::Writing, second)
        }
    }

    fn back(after: u64, untold: u32) -> Option<Word> {
        Some(Word::Back { after: Duration::from_secs(after), untold })
    }

    fn cut(after: u64) -> Option<Word> {
        Some(Word::Cut(Duration::from_secs(after)))
    }

    #[test]
    fn a_break_is_told_once_and_so_is_its_end_whichever_side_finds_it() {
        let mut log = Log(State::default(), Instant::now());
        assert_eq!(log.both_work(0), Some(Word::There));
        assert!(!log.fails(Reading, DROPPED, 100), "which says little");
        assert!(log.fails(Reading, "refused", 100));
        assert!(!log.fails(Writing, DROPPED, 101), "the other connection");
        assert!(!log.fails(Writing, "refused", 101));
        assert!(!log.fails(Reading, "LOADING", 102), "a server that comes");
        assert!(log.fails(Reading, "LOADING", 130), "which lasts");
        assert_eq!(log.both_work(132), back(32, 0));
        assert_eq!(log.works(Writing, 133), None, "which is said once");
    }

    #[test]
    fn connections_that_are_cut_are_one_line() {
        let mut log = Log(State::default(), Instant::now());
        assert_eq!(log.both_work(0), Some(Word::There));
        assert!(!log.fails(Reading, DROPPED, 100));
        assert_eq!(log.works(Reading, 100), None, "the other connection may be broken too");
        assert!(!log.fails(Writing, DROPPED, 101), "as it is found to be");
        assert_eq!(log.both_work(101), cut(1));
        assert!(!log.fails(Reading, DROPPED, 200));
        assert!(log.fails(Reading, DROPPED, 200), "a store that takes connections and breaks them off");
        assert_eq!(log.both_work(230), back(30, 0));
    }

    #[test]
    fn breaks_that_come_one_after_another_are_counted_and_none_is_forgotten() {
        let mut log = Log(State::default(), Instant::now());
        assert_eq!(log.both_work(0), Some(Word::There));
        assert!(!log.fails(Reading, DROPPED, 1));
        assert_eq!(log.both_work(2), cut(1));
        for second in (3..60).step_by(3) {
            assert!(!log.fails(Writing, DROPPED, second));
            assert_eq!(log.both_work(second + 1), None);
        }
        assert_eq!(log.works(Writing, 61), None);
        assert_eq!(log.works(Writing, 62), Some(Word::Untold(19)));
        assert!(!log.fails(Reading, DROPPED, 63));
        assert_eq!(log.both_work(64), None);
        assert!(!log.fails(Reading, DROPPED, 70));
        assert!(log.fails(Reading, DROPPED, 80), "it lasts");
        assert_eq!(log.both_work(90), back(20, 1));
        assert!(log.fails(Writing, "refused", 200), "after a while it is told again");
    }

    #[test]
    fn one_that_is_away_from_the_start_is_back_and_not_just_there() {
        let mut log = Log(State::default(), Instant::now());
        assert!(log.fails(Reading, "refused", 0));
        assert_eq!(log.both_work(9), back(9, 0));
    }

    #[test]
    fn a_store_that_says_ever_other_things_does_not_fill_the_log() {
        let mut log = Log(State::default(), Instant::now());
        assert_eq!((0..1_000).filter(|number| log.fails(Writing, &format!("E{number}"), 0)).count(), 1);
        let said = (0..1_000).filter(|number| log.fails(Writing, &format!("E{number}"), 10 * number)).count();
        assert_eq!(said, MOST_SAID - 1);
    }

    #[test]
    fn faults_are_told_with_what_to_look_at() {
        use std::io;
        let io = |kind: io::ErrorKind| RedisError::from(io::Error::from(kind));
        let said = |error: RedisError| cure(&error, "w:news:1").unwrap_or_default();
        assert!(said(io(io::ErrorKind::ConnectionRefused)).contains("nobody listens"));
        assert!(said(io(io::ErrorKind::TimedOut)).contains("in time"));
        assert!(said(io(io::ErrorKind::BrokenPipe)).contains("rediss://"));
        let other = |text: &str| RedisError::from(io::Error::other(text.to_owned()));
        assert!(said(other("invalid peer certificate: UnknownIssuer")).contains("sharing.ca"));
        assert!(said(other("received corrupt message of type InvalidContentType")).contains("redis://"));
        assert!(said(other("received fatal alert: CertificateRequired")).contains("tls-auth-clients"));
        let sentinel = RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "not found"));
        assert!(said(sentinel).contains("sharing.group"));
        assert_ne!(kind(&io(io::ErrorKind::ConnectionRefused)), kind(&io(io::ErrorKind::BrokenPipe)));
        assert_eq!(kind(&io(io::ErrorKind::ConnectionReset)), kind(&io(io::ErrorKind::BrokenPipe)));
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        assert_eq!(pause(0, 1.0), FIRST_PAUSE);
        assert_eq!(pause(2, 0.0), 2 * FIRST_PAUSE);
        assert_eq!(pause(u32::MAX, 1.0), LONGEST_PAUSE);
    }
}
