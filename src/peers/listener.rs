//! Reads what is said, from where it was left, and takes it up; ends what is open of routers that say nothing any more.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::RedisError;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::company::{Count, Unknown, Word};
use super::heard::{Heard, MOST_ROUTERS, Taken};
use super::news::{self, Name, Unreadable};
use super::reach::{Side, pause};
use super::skew::Skew;
use super::store::{Place, Store};
use super::{Follow, Other, Peers, READY_WITHIN, Seen, name_of};
use crate::core::elsewhere::Copy;
use crate::core::ids::WorkerId;
use crate::core::planner::{Ask, Planner};
use crate::fleet::{Fleet, Snapshot};
use crate::lifecycle::Clock;
use crate::metrics::{Forgot, NewsLost, Way};

/// How long the workers' pages are waited for: they say since when their processes run.
const PAGES_WITHIN: Duration = Duration::from_secs(2);
/// Other routers that a line of the log names.
const NAMED: usize = 10;

pub struct Listener<'a> {
    peers: &'a Peers,
    store: &'a Store,
    fleet: Arc<Fleet>,
    planner: Arc<Planner>,
    beside: Arc<dyn Follow>,
    clock: Clock,
    heard: Heard,
    workers: Workers,
    /// Of the last batch that was read.
    last: Place,
    skew: Skew,
    /// All that was there has been read: what comes now was said just now.
    caught_up: bool,
    /// Of which it was said that it is not taken up.
    refused: Vec<NewsLost>,
    others: Count,
    unknown: Unknown,
}

impl<'a> Listener<'a> {
    pub fn new(
        peers: &'a Peers,
        store: &'a Store,
        fleet: Arc<Fleet>,
        planner: Arc<Planner>,
        beside: Arc<dyn Follow>,
        clock: Clock,
    ) -> Listener<'a> {
        let (heard, workers) = (Heard::default(), Workers::default());
        let (last, skew) = (Place::default(), Skew::new(0, clock.now()));
        let caught_up = false;
        Listener {
            peers,
            store,
            fleet,
            planner,
            beside,
            clock,
            heard,
            workers,
            last,
            skew,
            caught_up,
            refused: Vec::new(),
            others: Count::default(),
            unknown: Unknown::default(),
        }
    }

    /// Listens for as long as it is polled.
    pub async fn run(mut self) {
        self.know_workers().await;
        let mut failures = 0;
        loop {
            let before = self.last;
            let Err(error) = self.follow().await;
            failures = if self.last == before { failures + 1 } else { 0 };
            self.peers.reach.fails(Side::Reading, &error, self.store);
            self.expire();
            sleep(pause(failures, rand::random())).await;
        }
    }

    /// What is said of workers that are not known yet would be lost, and what was said of one before its process began be believed.
    async fn know_workers(&self) {
        const LOOK: Duration = Duration::from_millis(20);
        let begun = Instant::now();
        while self.fleet.awaited_sources() > 0 && begun.elapsed() < READY_WITHIN {
            sleep(LOOK).await;
        }
        let begun = Instant::now();
        while self.fleet.unread_pages() > 0 && begun.elapsed() < PAGES_WITHIN {
            sleep(LOOK).await;
        }
        self.beside.prepare();
    }

    /// Reads until the store fails.
    async fn follow(&mut self) -> Result<Infallible, RedisError> {
        let mut link = self.store.connect().await?;
        let newest = self.store.newest(&mut link).await?.unwrap_or_default();
        self.begin_anew_after(newest);
        self.skew = Skew::new(newest.ms, self.clock.now());
        self.caught_up = self.last >= newest;
        loop {
            if self.caught_up {
                self.peers.reach.works(Side::Reading, self.store);
                self.peers.ready.store(true, Ordering::Release);
                self.expire();
                self.tell();
            }
            let batches = self.store.read(&mut link, self.last).await?;
            let sound = batches.iter().all(|(_, bytes)| bytes.len() <= news::MOST_BYTES);
            if batches.is_empty() {
                // Of what was there at first, some may have been trimmed away since.
                self.caught_up = true;
                // Somebody speaks each second, ourselves if nobody else does: perhaps the stream is another one, and its clock behind.
                let newest = self.store.newest(&mut link).await?.unwrap_or_default();
                self.begin_anew_after(newest);
            }
            for (place, bytes) in batches {
                self.take(place, &bytes);
                // There may be thousands of them, and requests on this thread.
                yield_now().await;
            }
            self.caught_up |= self.last >= newest;
            if !sound {
                // The connection keeps the room that the answer took.
                link = self.store.connect().await?;
            }
        }
    }

    /// Another store, or its data is gone: whatever is there was said after what is known, or is known by its number.
    fn begin_anew_after(&mut self, newest: Place) {
        if newest < self.last {
            self.last = Place::default();
        }
    }

    fn take(&mut self, place: Place, bytes: &[u8]) {
        self.last = place;
        let peers = self.peers;
        let sharing = &peers.metrics.sharing;
        sharing.bytes.inc_by(Way::Received, bytes.len());
        let now = self.clock.now();
        let late = self.skew.late(place.ms, now, self.caught_up);
        if news::router_of(bytes) == Some(peers.id) {
            return;
        }
        let batch = match news::read(bytes) {
            Ok(batch) => batch,
            Err(Unreadable::Version) => return self.refuse(NewsLost::Version),
            Err(Unreadable::Malformed) => return self.refuse(NewsLost::Malformed),
        };
        self.workers.follow(&self.fleet);
        let by = batch.name.clone().or_else(|| self.heard.name(batch.router));
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let live = self.caught_up;
        let Listener { workers, planner, beside, fleet, skew, heard, unknown: named, .. } = &mut *self;
        let (mut unknown, mut gone) = (0, 0);
        let copy = |ask: &Ask, name: Name, at| {
            let Some(worker) = workers.find(name) else {
                unknown += 1;
                // A pod whose address another one has is no matter of names.
                if !workers.by_key.contains_key(&name.key) {
                    named.note(name.key, by.clone(), now);
                }
                return None;
            };
            // Of what was said just now it is known how long ago, whatever the store's clock shows.
            let then = if live { wall - (now - at) } else { skew.stamp(at) };
            if begun_since(fleet, worker, then, wall) {
                gone += 1;
                return None;
            }
            Copy::of(planner, ask, worker, at, beside.follow(ask, worker, at))
        };
        let Some(Taken { news, gap, age, emptied }) = heard.take(batch, now + -late, copy) else {
            return self.refuse(NewsLost::Routers);
        };
        sharing.news.inc_by(Way::Received, news);
        sharing.dropped.inc_by(NewsLost::UnknownWorker, unknown);
        sharing.dropped.inc_by(NewsLost::Restarted, gone);
        sharing.dropped.inc_by(NewsLost::Gap, usize::from(gap));
        sharing.lag.set(late + age);
        for (worker, blocks) in emptied {
            if let Some(worker) = self.fleet.snapshot().worker(worker) {
                self.fleet.forgot(worker, Forgot::Unconfirmed, blocks);
            }
        }
        sharing.peers.set(self.heard.routers() as i64);
    }

    /// Counts what cannot be taken up, and says so the first time.
    fn refuse(&mut self, why: NewsLost) {
        self.peers.metrics.sharing.dropped.inc(why);
        if self.refused.contains(&why) {
            return;
        }
        self.refused.push(why);
        let what = match why {
            NewsLost::Version => {
                "a router of another version writes to the stream of sharing: neither takes up what the other says, until all are of one \
                 version"
            }
            NewsLost::Routers => {
                "too many routers write to the stream of sharing: what further ones say is not taken up; give each fleet's routers a \
                 sharing.key_prefix of their own"
            }
            _ => {
                "something else than routers writes to the stream of sharing, or what they wrote was changed: it is not taken up; see who may \
                 write there, or give sharing.key_prefix another name"
            }
        };
        let most = (why == NewsLost::Routers).then_some(MOST_ROUTERS);
        tracing::warn!(store = self.store.address(), stream = self.store.key(), most, "{what}");
    }

    fn expire(&mut self) {
        self.heard.expire(self.clock.now());
        self.peers.metrics.sharing.peers.set(self.heard.routers() as i64);
        let others = self.heard.names().map(|(name, spoke)| Other { name, spoke });
        let mut seen = Seen { others: others.collect(), unknown_workers: self.unknown.lasting() };
        self.peers.metrics.sharing.unknown_workers.set(seen.unknown_workers as i64);
        seen.others.sort_by(|one, other| one.name.cmp(&other.name));
        *self.peers.seen.lock() = seen;
    }

    /// What has come to be so, in the log.
    fn tell(&mut self) {
        let now = self.clock.now();
        let stream = self.store.key();
        match self.others.look(self.heard.routers(), now) {
            Some(Word::Alone) => tracing::info!(
                stream,
                "no other router is heard over the store of sharing so far: others need the same cache.hash_key_file, cache.block_bytes, \
                 sharing.key_prefix and database"
            ),
            Some(Word::Others(others)) => {
                let names: Vec<_> = self.heard.names().filter_map(|(name, _)| name).take(NAMED).collect();
                tracing::info!(others, among = names.join(" "), "other routers that share");
            }
            None => {}
        }
        if let Some((workers, by)) = self.unknown.look(now) {
            tracing::warn!(
                workers,
                router = by.as_deref(),
                "another router places requests on workers that are not known here, and they count for nothing: all routers must have \
                 the same workers by the same addresses (under workers; localhost is not 127.0.0.1)"
            );
        }
    }
}

/// Whether the worker's process began after `then`, so that what was sent there is gone. Not if it has yet to begin: then its clock is before
/// ours, and nothing is known. Seconds since 1970.
fn begun_since(fleet: &Fleet, worker: WorkerId, then: f64, now: f64) -> bool {
    let begun = fleet.snapshot().worker(worker).and_then(|worker| worker.process_started());
    begun.is_some_and(|begun| then < begun && begun <= now)
}

/// Who is meant by a name.
#[derive(Default)]
struct Workers {
    /// The fleet that it was made of.
    of: Weak<Snapshot>,
    by_key: HashMap<u64, (WorkerId, u64)>,
}

impl Workers {
    fn follow(&mut self, fleet: &Fleet) {
        let now = fleet.snapshot();
        if std::ptr::eq(Weak::as_ptr(&self.of), Arc::as_ptr(&now)) {
            return;
        }
        self.of = Arc::downgrade(&now);
        let named = |worker| {
            let Name { key, pod } = name_of(worker);
            (key, (worker.id, pod))
        };
        self.by_key = now.workers.iter().map(|worker| named(worker)).collect();
    }

    /// Where both know the pod, it must be the same: at an address may be another one by now.
    fn find(&self, name: Name) -> Option<WorkerId> {
        let (worker, pod) = self.by_key.get(&name.key)?;
        (name.pod == 0 || *pod == 0 || name.pod == *pod).then_some(*worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_has_taken_over_an_address_is_another_worker() {
        let workers =
            Workers { of: Weak::new(), by_key: [(1, (WorkerId(3), 7)), (2, (WorkerId(4), 0))].into() };
        let find = |key, pod| workers.find(Name { key, pod });
        assert_eq!(find(1, 7), Some(WorkerId(3)));
        assert_eq!(find(1, 0), Some(WorkerId(3)), "its address is all that they know of it");
        assert_eq!(find(1, 8), None);
        assert_eq!(find(2, 8), Some(WorkerId(4)));
        assert_eq!(find(5, 0), None);
    }
}
