//! What people want to know of the other routers: how many there are, and whether they name the workers as this one does. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use super::heard::LEASE;
use crate::core::ids::Time;

/// Seconds for which there must be as many before it is told: routers that start all at once are one line, and those of an old stream that were
/// taken for alive are taken for dead by then ([`LEASE`]).
const SETTLED: f64 = LEASE + 1.0;
/// After which nobody's being there is told. Less is what others need to start.
const ALONE: f64 = 30.0;
/// Seconds for which a worker is named that is not known. Less is what lists of workers need to come here and there.
const LASTS: f64 = 30.0;
/// It is named no more.
const OVER: f64 = 60.0;
/// Until it is told again.
const AGAIN: f64 = 3600.0;
/// Of which it is remembered that they were named.
const MOST_WORKERS: usize = 1024;

/// What the log is to say.
#[derive(PartialEq, Eq, Debug)]
pub enum Word {
    /// Nobody was ever heard.
    Alone,
    /// There are so many now.
    Others(usize),
}

/// How many others there are, as it is told.
#[derive(Default)]
pub struct Count {
    /// So many, and since when.
    last: Option<(usize, Time)>,
    told: Option<usize>,
}

impl Count {
    /// To be called now and then while the store can be read.
    pub fn look(&mut self, others: usize, now: Time) -> Option<Word> {
        let (last, since) = *self.last.get_or_insert((others, now));
        if last != others {
            self.last = Some((others, now));
            return None;
        }
        let never = self.told.is_none() && others == 0;
        let stands = now - since >= if never { ALONE } else { SETTLED };
        if self.told == Some(others) || !stands {
            return None;
        }
        self.told = Some(others);
        Some(if never { Word::Alone } else { Word::Others(others) })
    }
}

/// Workers that others place on, and that are not known here.
#[derive(Default)]
pub struct Unknown {
    /// First and last time that each was named.
    workers: HashMap<u64, (Time, Time)>,
    by: Option<Arc<str>>,
    told: Option<Time>,
}

impl Unknown {
    /// The router called so has placed on the worker of that key.
    pub fn note(&mut self, worker: u64, by: Option<Arc<str>>, now: Time) {
        if self.workers.len() < MOST_WORKERS || self.workers.contains_key(&worker) {
            self.workers.entry(worker).or_insert((now, now)).1 = now;
            self.by = by.or(self.by.take());
        }
    }

    /// So many workers are named, for long, that are not known here.
    pub fn lasting(&self) -> usize {
        self.workers.values().filter(|(first, last)| *last - *first >= LASTS).count()
    }

    /// To be called now and then; answers how many are to be told of, and who named one of them last.
    pub fn look(&mut self, now: Time) -> Option<(usize, Option<Arc<str>>)> {
        self.workers.retain(|_, (_, last)| now - *last <= OVER);
        let lasting = self.lasting();
        if lasting == 0 || self.told.is_some_and(|told| now - told < AGAIN) {
            return None;
        }
        self.told = Some(now);
        Some((lasting, self.by.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_there_are_is_told_once_it_stands() {
        let mut count = Count::default();
        let mut look = |others, second| count.look(others, Time(second));
        assert_eq!(look(0, 0.0), None);
        assert_eq!((look(1, 1.0), look(2, 2.0), look(2, 7.0)), (None, None, None));
        assert_eq!(look(2, 8.0), Some(Word::Others(2)));
        assert_eq!(look(2, 500.0), None);
        // As the store breaks off for a while.
        assert_eq!((look(0, 600.0), look(2, 601.0), look(2, 700.0)), (None, None, None));
        assert_eq!((look(0, 701.0), look(0, 708.0)), (None, Some(Word::Others(0))));
    }

    #[test]
    fn that_nobody_ever_came_is_told_after_a_while() {
        let mut count = Count::default();
        let said: Vec<_> = (0..100).filter_map(|second| count.look(0, Time(f64::from(second)))).collect();
        assert_eq!(said, [Word::Alone]);
        assert_eq!(count.look(1, Time(100.0)), None);
        assert_eq!(count.look(1, Time(107.0)), Some(Word::Others(1)));
    }

    #[test]
    fn workers_that_come_to_be_known_are_nobodys_concern() {
        let mut unknown = Unknown::default();
        for second in 0..20 {
            unknown.note(1, None, Time(f64::from(second)));
            assert_eq!(unknown.look(Time(f64::from(second))), None);
        }
        assert_eq!(unknown.look(Time(100.0)), None);
        unknown.note(1, None, Time(101.0));
        assert_eq!((unknown.look(Time(101.0)), unknown.lasting()), (None, 0), "another time");
    }

    #[test]
    fn workers_that_are_called_otherwise_are_told_once_and_bounded() {
        let mut unknown = Unknown::default();
        let by: Option<Arc<str>> = Some("a:1".into());
        let mut said = Vec::new();
        for second in 0..3_700 {
            let now = Time(f64::from(second));
            (0..3).for_each(|worker| unknown.note(worker, by.clone(), now));
            said.extend(unknown.look(now));
        }
        assert_eq!(said, [(3, by.clone()), (3, by)]);
        (0..10_000).for_each(|worker| unknown.note(worker, None, Time(3_700.0)));
        assert_eq!(unknown.workers.len(), MOST_WORKERS);
        assert_eq!((unknown.look(Time(4_000.0)), unknown.lasting()), (None, 0));
    }
}
