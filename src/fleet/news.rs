//! What becomes of workers, for the log. Where the same becomes of many within a moment, as when a Service of hundreds is found, that is
//! one line with their number; each by itself is then told at level `debug`.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::discovery::endpoints::Intake;
use super::health::{Reason, Standing};
use super::worker::by_health;
use crate::config::Origin;
use crate::core::ids::Time;
use crate::metrics::{Forgot, Label, Scraped};

/// So many of a kind are told one by one.
const FEW: usize = 3;
/// Between two tellings of one kind, in seconds.
const PACE: f64 = 1.0;

/// What becomes of a worker.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum News {
    Joined { pod: Option<String> },
    Left,
    Edited,
    ListedOtherwise(Intake),
    Up,
    Out(Reason),
    ProbeFailed { path: String, fault: String },
    CacheSize { block_tokens: u32, usable_tokens: u64 },
    Models(Option<usize>),
    NoModels { path: &'static str, fault: String },
    PageFailed(Scraped),
    Forgotten { reason: Forgot, blocks: usize },
}

impl News {
    /// What many of it are called; those of different reasons are told apart.
    fn of_many(&self) -> (&'static str, &'static str) {
        match self {
            News::Joined { .. } => ("workers joined", ""),
            News::Left => ("workers left", ""),
            News::Edited => ("workers edited", ""),
            News::ListedOtherwise(Intake::Open) => ("workers are listed as ready", ""),
            News::ListedOtherwise(Intake::NotReady) => ("workers are listed as not ready", ""),
            News::ListedOtherwise(Intake::Terminating) => ("workers are listed as terminating", ""),
            News::Up => ("workers are up", ""),
            News::Out(reason) => ("workers are out", by_health(Standing::Out(*reason)).as_str()),
            News::ProbeFailed { .. } => ("health probes failed", ""),
            News::CacheSize { .. } => ("sizes of their KV caches are known", ""),
            News::Models(Some(_)) => ("the models that they serve are known", ""),
            News::Models(None) => ("the models that they serve are not known", ""),
            News::NoModels { .. } => ("lists of models cannot be had", ""),
            News::PageFailed(outcome) => ("metrics pages cannot be had", outcome.as_str()),
            News::Forgotten { reason, .. } => ("caches are believed empty", reason.as_str()),
        }
    }

    fn is_bad(&self) -> bool {
        match self {
            News::Out(_) | News::ProbeFailed { .. } | News::NoModels { .. } => true,
            News::PageFailed(_) | News::Forgotten { .. } => true,
            News::Joined { .. } | News::Left | News::Edited | News::ListedOtherwise(_) => false,
            News::Up | News::CacheSize { .. } | News::Models(_) => false,
        }
    }
}

/// News of a kind that were not told yet.
struct Bunch {
    waiting: Vec<(Origin, News)>,
    /// When the first of them came.
    since: Time,
    told: Option<Time>,
}

/// All that is to be told, by kind.
#[derive(Default)]
pub(super) struct Board {
    bunches: Mutex<HashMap<(&'static str, &'static str), Bunch>>,
}

impl Board {
    pub(super) fn put(&self, worker: &Origin, news: News, now: Time) {
        self.put_all(vec![(worker.clone(), news)], now);
    }

    /// What one change brings: it is not told by halves.
    pub(super) fn put_all(&self, change: Vec<(Origin, News)>, now: Time) {
        let mut bunches = self.bunches.lock();
        for (worker, news) in change {
            let new = || Bunch { waiting: Vec::new(), since: now, told: None };
            let bunch = bunches.entry(news.of_many()).or_insert_with(new);
            if bunch.waiting.is_empty() {
                bunch.since = now;
            }
            bunch.waiting.push((worker, news));
        }
    }

    /// Writes what is due into the log; all there is, where nobody is to come again.
    pub(super) fn tell(&self, now: Time, all: bool) {
        for bunch in self.due(now, all) {
            if bunch.len() > FEW {
                tell_many(&bunch);
            }
            for (worker, news) in &bunch {
                tell_one(worker, news, bunch.len() > FEW);
            }
        }
    }

    /// In the order in which they began.
    fn due(&self, now: Time, all: bool) -> Vec<Vec<(Origin, News)>> {
        let mut due = Vec::new();
        self.bunches.lock().retain(|_, bunch| {
            let over = all || bunch.told.is_none_or(|told| now - told >= PACE);
            if over && !bunch.waiting.is_empty() {
                due.push((bunch.since, std::mem::take(&mut bunch.waiting)));
                bunch.told = Some(now);
                return true;
            }
            !over
        });
        due.sort_by(|(one, _), (other, _)| one.0.total_cmp(&other.0));
        due.into_iter().map(|(_, bunch)| bunch).collect()
    }
}

fn tell_many(bunch: &[(Origin, News)]) {
    let Some((_, first)) = bunch.first() else { return };
    let (what, reason) = first.of_many();
    let (workers, reason) = (bunch.len(), Some(reason).filter(|reason| !reason.is_empty()));
    let named: Vec<String> = bunch.iter().take(FEW).map(|(worker, _)| worker.to_string()).collect();
    let among = named.join(", ");
    match first.is_bad() {
        true => tracing::warn!(workers, reason, among, "{what}"),
        false => tracing::info!(workers, reason, among, "{what}"),
    }
}

macro_rules! line {
    ($quiet:expr, $level:ident, $($field:tt)*) => {
        if $quiet { tracing::debug!($($field)*) } else { tracing::$level!($($field)*) }
    };
}

fn tell_one(worker: &Origin, news: &News, quiet: bool) {
    match news {
        News::Joined { pod } => line!(quiet, info, %worker, pod, "worker joined"),
        News::Left => line!(quiet, info, %worker, "worker left"),
        News::Edited => line!(quiet, info, %worker, "worker edited"),
        News::ListedOtherwise(intake) => line!(quiet, info, %worker, ?intake, "worker is listed otherwise"),
        News::Up => line!(quiet, info, %worker, "worker is up"),
        News::Out(reason) => line!(quiet, warn, %worker, ?reason, "worker is out"),
        News::ProbeFailed { path, fault } => {
            line!(quiet, warn, %worker, path, "health probe failed: {fault}")
        }
        News::CacheSize { block_tokens, usable_tokens } => {
            line!(quiet, info, %worker, block_tokens, usable_tokens, "size of its KV cache");
        }
        News::Models(models) => line!(quiet, info, %worker, models, "the models that it serves"),
        News::NoModels { path, fault } => line!(quiet, warn, %worker, path, "list of models: {fault}"),
        News::PageFailed(outcome) => line!(quiet, warn, %worker, "metrics page: {}", outcome.as_str()),
        News::Forgotten { reason, blocks } => {
            line!(quiet, warn, %worker, reason = reason.as_str(), blocks, "its cache is believed empty");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(number: usize) -> Origin {
        Origin::parse(&format!("http://w{number}:8000")).unwrap()
    }

    fn sizes(board: &Board, at: f64) -> Vec<usize> {
        board.due(Time(at), false).iter().map(Vec::len).collect()
    }

    #[test]
    fn what_becomes_of_many_in_a_moment_is_told_as_one() {
        let board = Board::default();
        for number in 0..2000 {
            board.put(&worker(number), News::Up, Time(0.01));
            board.put(&worker(number), News::Joined { pod: None }, Time(0.0));
        }
        board.put(&worker(1), News::Out(Reason::Stalled), Time(0.02));
        board.put(&worker(2), News::Out(Reason::Unreachable), Time(0.03));
        let told = board.due(Time(0.1), false);
        let shown: Vec<_> = told.iter().map(|bunch| (bunch.len(), bunch[0].1.of_many())).collect();
        let in_order = [
            (2000, ("workers joined", "")),
            (2000, ("workers are up", "")),
            (1, ("workers are out", "stalled")),
            (1, ("workers are out", "unreachable")),
        ];
        assert_eq!(shown, in_order, "each kind and each reason by itself");
        assert_eq!(sizes(&board, 0.2), [0; 0], "once");
    }

    #[test]
    fn a_kind_is_told_at_once_and_then_at_a_pace() {
        let board = Board::default();
        let mut told = Vec::new();
        for tick in 0..30 {
            let now = f64::from(tick) / 10.0;
            board.put(&worker(1), News::Up, Time(now));
            told.extend(sizes(&board, now).into_iter().map(|size| (tick, size)));
        }
        assert_eq!(told, [(0, 1), (10, 10), (20, 10)]);
        board.put(&worker(1), News::Left, Time(2.95));
        assert_eq!(sizes(&board, 2.95), [1], "others do not wait for it");
        assert_eq!(board.due(Time(2.96), true).len(), 1, "at the end all is told");
        assert_eq!(sizes(&board, 9.0), [0; 0]);
        assert!(board.bunches.lock().is_empty(), "nothing is left of it");
    }
}
