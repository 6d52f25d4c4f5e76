//! What other routers have placed, in this one's planner: their requests are booked as its own are, on the worker that they picked, and
//! ended when they say so. What a router has open is over when it leaves, when it has said nothing for a while, and when something
//! that it said is missing, since that may have been an end.

use std::collections::HashMap;
use std::sync::Arc;

use super::news::{Batch, Name, News, Said};
use crate::core::elsewhere::{Copy, Open};
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::Ask;

/// Seconds for which a router that says nothing is taken to live. It speaks each second.
pub const LEASE: f64 = 5.0;
/// Of which something is remembered: more are nobody's routers.
pub const MOST_ROUTERS: usize = 256;
/// Requests of all routers at once, as far as it is looked at: once for each batch.
const MOST_OPEN: usize = 262_144;

/// What came of a batch.
#[derive(Debug, Default, PartialEq)]
pub struct Taken {
    pub news: usize,
    /// Batches before it are missing.
    pub gap: bool,
    /// The age of the oldest of what was taken up, in seconds.
    pub age: f64,
    /// Workers whose answers have shown that all that was believed of them is gone, and how many blocks that was.
    pub emptied: Vec<(WorkerId, usize)>,
}

/// All that others have open here.
#[derive(Default)]
pub struct Heard {
    routers: HashMap<u64, Router>,
}

struct Router {
    number: u64,
    name: Option<Arc<str>>,
    /// When it spoke last.
    at: Time,
    open: Open,
}

impl Heard {
    /// Routers that live, as far as is known.
    pub fn routers(&self) -> usize {
        self.routers.len()
    }

    /// What they are called, where they have said so, and when they spoke last.
    pub fn names(&self) -> impl Iterator<Item = (Option<Arc<str>>, Time)> {
        self.routers.values().map(|router| (router.name.clone(), router.at))
    }

    /// What this one is called.
    pub fn name(&self, router: u64) -> Option<Arc<str>> {
        self.routers.get(&router)?.name.clone()
    }

    /// Requests that others have open.
    fn open(&self) -> usize {
        self.routers.values().map(|router| router.open.len()).sum()
    }

    /// Takes up what was sent at `sent`. `place` makes the copy of a request that was placed, if it can. `None` where there are too many
    /// routers to remember another one.
    pub fn take(
        &mut self,
        batch: Batch,
        sent: Time,
        mut place: impl FnMut(&Ask, Name, Time) -> Option<Copy>,
    ) -> Option<Taken> {
        let mut taken = Taken::default();
        let Batch { router: id, number, name, said } = batch;
        if self.routers.len() >= MOST_ROUTERS && !self.routers.contains_key(&id) {
            return None;
        }
        let is_full = self.open() >= MOST_OPEN;
        let router = self.routers.entry(id).or_insert_with(|| Router {
            number: number.wrapping_sub(1),
            name: None,
            at: sent,
            open: Open::default(),
        });
        if number <= router.number && number != 0 {
            return Some(taken); // Sent twice, or read again.
        }
        router.at = sent;
        if name.is_some() {
            router.name = name;
        }
        if number != router.number.wrapping_add(1) {
            taken.gap = true;
            router.open.close(sent);
        }
        router.number = number;
        for Said { age, request, news } in said {
            // Of one that was dropped only the time before is known, when something else befell it.
            let seconds = if matches!(news, News::Lost { .. }) { 0.0 } else { age as f64 / 1e3 };
            let at = sent + -seconds;
            taken.news += 1;
            taken.age = seconds.max(taken.age);
            let leaves = matches!(news, News::Left);
            taken.emptied.extend(
                router.open.take(
                    at,
                    request,
                    news,
                    |ask, name| {
                        if is_full { None } else { place(ask, name, at) }
                    },
                ),
            );
            if leaves {
                self.routers.remove(&id);
                break;
            }
        }
        Some(taken)
    }

    /// Ends what is open of those who have not spoken since [`LEASE`] seconds before `now`.
    pub fn expire(&mut self, now: Time) {
        self.routers.retain(|_, router| {
            let lives = now - router.at <= LEASE;
            if !lives {
                router.open.close(now);
            }
            lives
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::blocks::Chain;
    use crate::core::booking::Finished;
    use crate::core::ids::BlockHash;
    use crate::core::load::Given;
    use crate::core::planner::{Planner, Settings, WorkerSpec};

    const HERE: Name = Name { key: 1, pod: 0 };

    struct Table {
        planner: Arc<Planner>,
        worker: WorkerId,
        heard: Heard,
    }

    impl Table {
        fn new() -> Table {
            let planner = Planner::new(Settings::default());
            let worker = planner.add_worker(WorkerSpec {
                key: 1,
                capacity_tokens: Some(100_000),
                engine_block_tokens: 16,
                prefill_speed: Some(10_000.0),
            });
            Table { planner, worker, heard: Heard::default() }
        }

        fn hear(&mut self, router: u64, number: u64, at: f64, said: Vec<(u64, News)>) -> Taken {
            self.heard_of(router, number, at, said).unwrap()
        }

        fn heard_of(&mut self, router: u64, number: u64, at: f64, said: Vec<(u64, News)>) -> Option<Taken> {
            let said = said.into_iter().map(|(request, news)| Said { age: 10, request, news }).collect();
            let Table { planner, worker, heard } = self;
            heard.take(Batch { router, number, name: None, said }, Time(at), |ask, name, at| {
                let worker = (name.key == HERE.key).then_some(*worker)?;
                Copy::of(planner, ask, worker, at, None)
            })
        }

        fn open(&self) -> usize {
            self.given().open
        }

        fn given(&self) -> Given {
            self.planner.given(self.worker).unwrap()
        }

        fn blocks(&self) -> usize {
            self.planner.believed_blocks()
        }
    }

    fn placed(first: u64) -> News {
        let hashes: Arc<[BlockHash]> = (first..first + 10).map(BlockHash).collect();
        let chain = Chain::even(hashes, 2_560);
        News::Placed(
            Ask { chain, block_tokens: 64.0, prompt_tokens: 650.0, output_tokens: 50.0, streams: true },
            HERE,
        )
    }

    fn finished() -> News {
        News::Finished(Finished { prompt_tokens: Some(700), cached_tokens: Some(0), output_tokens: Some(40) })
    }

    #[test]
    fn what_others_place_is_booked_and_believed_as_ones_own() {
        let mut table = Table::new();
        let taken = table.hear(7, 1, 1.0, vec![(1, placed(0)), (2, placed(100))]);
        assert_eq!(taken, Taken { news: 2, age: 0.01, ..Taken::default() });
        assert_eq!((table.open(), table.blocks(), table.heard.routers()), (2, 20, 1));
        let given = table.given();
        assert_eq!((given.requests, given.prefills, given.asked, given.pending), (2, 2, 1_300.0, 1_300.0));
        table.hear(7, 2, 1.2, vec![(1, News::FirstToken)]);
        assert_eq!(table.given().prefills, 1);
        table.hear(7, 3, 1.4, vec![(1, finished()), (2, News::Lost { committed: false })]);
        let given = table.given();
        assert_eq!((given.open, given.prefills, given.answered), (0, 0, 1));
        assert_eq!(given.asked, 700.0, "as its answer told; the other was never begun");
        assert_eq!(table.blocks(), 10, "and has left nothing");
    }

    /// A request that was cut says when its first token came, which may be an hour ago.
    #[test]
    fn what_was_dropped_was_dropped_just_now() {
        let mut table = Table::new();
        table.hear(7, 1, 1.0, vec![(1, placed(0))]);
        let lost = Said { age: 3_600_000, request: 1, news: News::Lost { committed: true } };
        let batch = Batch { router: 7, number: 2, name: None, said: vec![lost] };
        let taken = table.heard.take(batch, Time(3_601.0), |_, _, _| None).unwrap();
        assert_eq!((taken.news, taken.age, table.open()), (1, 0.0, 0));
    }

    #[test]
    fn a_batch_that_comes_twice_counts_once_and_one_that_is_missing_ends_what_was_open() {
        let mut table = Table::new();
        table.hear(7, 4, 1.0, vec![(1, placed(0))]);
        table.hear(7, 4, 1.0, vec![(1, placed(0))]);
        assert_eq!(table.given().requests, 1);
        table.hear(8, 1, 1.0, vec![(1, placed(50))]);
        let taken = table.hear(7, 6, 1.1, vec![(2, placed(100))]);
        assert!(taken.gap);
        assert_eq!((table.open(), table.blocks()), (2, 30), "the other router's and the new one");
    }

    #[test]
    fn who_leaves_or_falls_silent_takes_what_is_open_along_and_leaves_what_is_cached() {
        let mut table = Table::new();
        table.hear(7, 1, 1.0, vec![(1, placed(0))]);
        table.hear(8, 1, 2.0, vec![(1, placed(100))]);
        table.hear(7, 2, 3.0, vec![(0, News::Left)]);
        assert_eq!((table.open(), table.heard.routers()), (1, 1));
        table.heard.expire(Time(2.0 + LEASE));
        assert_eq!(table.open(), 1);
        table.hear(8, 2, 6.0, Vec::new());
        table.heard.expire(Time(6.0 + LEASE));
        assert_eq!(table.open(), 1, "it has said that it lives");
        table.heard.expire(Time(6.1 + LEASE));
        assert_eq!((table.open(), table.heard.routers(), table.blocks()), (0, 0, 20));
    }

    #[test]
    fn a_router_is_called_what_it_said_last() {
        let mut table = Table::new();
        let mut hear = |number, name: Option<&str>| {
            let batch = Batch { router: 7, number, name: name.map(Arc::from), said: Vec::new() };
            table.heard.take(batch, Time(number as f64), |_, _, _| None).unwrap();
            table.heard.name(7).as_deref().map(str::to_owned)
        };
        assert_eq!(hear(1, None), None);
        assert_eq!(hear(2, Some("a:1")).as_deref(), Some("a:1"));
        assert_eq!(hear(3, None).as_deref(), Some("a:1"));
        assert_eq!(table.heard.names().next(), Some((Some(Arc::from("a:1")), Time(3.0))));
    }

    #[test]
    fn workers_that_are_not_known_and_ends_without_a_beginning_are_left_out() {
        let mut table = Table::new();
        let News::Placed(ask, _) = placed(0) else { unreachable!() };
        let elsewhere = News::Placed(ask, Name { key: 2, pod: 0 });
        let said = vec![(1, elsewhere), (1, News::FirstToken), (1, finished()), (9, finished())];
        assert_eq!(table.hear(7, 1, 1.0, said).news, 4);
        assert_eq!((table.open(), table.given().requests), (0, 0));
    }

    #[test]
    fn no_more_routers_are_remembered_than_there_can_be() {
        let mut table = Table::new();
        let said = |_| vec![(1, placed(0))];
        let heard = (0..1_000).filter(|router| table.heard_of(*router, 1, 1.0, said(())).is_some()).count();
        assert_eq!(heard, MOST_ROUTERS);
        assert_eq!((table.heard.routers(), table.open()), (MOST_ROUTERS, MOST_ROUTERS));
    }
}
