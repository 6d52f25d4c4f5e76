//! Reads what is said, from where it was left, and takes it up; ends what is open of routers that say nothing any more.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::RedisError;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::heard::{Heard, LEASE, Taken};
use super::news::{self, Name, Unreadable};
use super::reach::{Side, pause};
use super::store::{Place, Store};
use super::{Peers, READY_WITHIN, name_of};
use crate::core::ids::WorkerId;
use crate::core::planner::Planner;
use crate::fleet::{Fleet, Snapshot};
use crate::lifecycle::Clock;
use crate::metrics::{Forgot, NewsLost, Way};

pub struct Listener<'a> {
    peers: &'a Peers,
    store: &'a Store,
    fleet: Arc<Fleet>,
    planner: Arc<Planner>,
    clock: Clock,
    heard: Heard,
    workers: Workers,
    /// Of the last batch that was read.
    last: Place,
    /// How far the store's clock is before ours, in milliseconds; no less than it seems by any batch.
    ahead: f64,
    /// All that was there has been read: what comes now was said just now.
    caught_up: bool,
}

impl<'a> Listener<'a> {
    pub fn new(
        peers: &'a Peers,
        store: &'a Store,
        fleet: Arc<Fleet>,
        planner: Arc<Planner>,
        clock: Clock,
    ) -> Listener<'a> {
        let (heard, workers) = (Heard::default(), Workers::default());
        let last = Place::default();
        Listener { peers, store, fleet, planner, clock, heard, workers, last, ahead: 0.0, caught_up: false }
    }

    /// Listens for as long as it is polled.
    pub async fn run(mut self) {
        self.know_workers().await;
        let mut failures = 0;
        loop {
            let before = self.last;
            let Err(error) = self.follow().await;
            failures = if self.last == before { failures + 1 } else { 0 };
            self.peers.reach.fails(Side::Reading, &error);
            self.expire();
            sleep(pause(failures, rand::random())).await;
        }
    }

    /// What is said of workers that are not known yet would be lost.
    async fn know_workers(&self) {
        const LOOK: Duration = Duration::from_millis(20);
        let begun = Instant::now();
        while self.fleet.awaited_sources() > 0 && begun.elapsed() < READY_WITHIN {
            sleep(LOOK).await;
        }
    }

    /// Reads until the store fails.
    async fn follow(&mut self) -> Result<Infallible, RedisError> {
        let mut link = self.store.connect().await?;
        let newest = self.store.newest(&mut link).await?.unwrap_or_default();
        if newest < self.last {
            // Another store, or its data is gone: whatever is there was said after what is known, or is known by its number.
            self.last = Place::default();
        }
        self.ahead = newest.ms as f64 - self.clock.now().0 * 1e3;
        self.caught_up = self.last >= newest;
        loop {
            if self.caught_up {
                self.peers.reach.works(Side::Reading);
                self.peers.ready.store(true, Ordering::Release);
                self.expire();
            }
            let batches = self.store.read(&mut link, self.last).await?;
            // Of what was there at first, some may have been trimmed away since.
            self.caught_up |= batches.is_empty();
            for (place, bytes) in batches {
                self.take(place, &bytes);
                // There may be thousands of them, and requests on this thread.
                yield_now().await;
            }
            self.caught_up |= self.last >= newest;
        }
    }

    fn take(&mut self, place: Place, bytes: &[u8]) {
        self.last = place;
        let sharing = &self.peers.metrics.sharing;
        sharing.bytes.inc_by(Way::Received, bytes.len());
        let now = self.clock.now();
        self.ahead = self.ahead.max(place.ms as f64 - now.0 * 1e3);
        let batch = match news::read(bytes) {
            Ok(batch) if batch.router == self.peers.id => return,
            Ok(batch) => batch,
            Err(Unreadable::Version) => return sharing.dropped.inc(NewsLost::Version),
            Err(Unreadable::Malformed) => return sharing.dropped.inc(NewsLost::Malformed),
        };
        let mut late = (now.0 * 1e3 + self.ahead - place.ms as f64) / 1e3;
        if self.caught_up && late > LEASE {
            // The store's clock was put back.
            (self.ahead, late) = (place.ms as f64 - now.0 * 1e3, 0.0);
        }
        self.workers.follow(&self.fleet);
        let workers = &self.workers;
        let Taken { news, unknown, gap, age, emptied } =
            self.heard.take(batch, now + -late, &self.planner, |name| workers.find(name));
        sharing.news.inc_by(Way::Received, news);
        sharing.dropped.inc_by(NewsLost::UnknownWorker, unknown);
        sharing.dropped.inc_by(NewsLost::Gap, usize::from(gap));
        if news > 0 {
            sharing.lag.set(late + age);
        }
        for (worker, blocks) in emptied {
            if let Some(worker) = self.fleet.snapshot().worker(worker) {
                self.fleet.forgot(worker, Forgot::Unconfirmed, blocks);
            }
        }
        sharing.peers.set(self.heard.routers() as i64);
    }

    fn expire(&mut self) {
        self.heard.expire(self.clock.now());
        self.peers.metrics.sharing.peers.set(self.heard.routers() as i64);
    }
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
