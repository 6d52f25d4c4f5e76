//! How many requests may be at the workers at once, in all and each, and the bounded queue of those that wait for a place.
//! A place is a value: dropped, whatever became of its request, it is free again.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus::IntGauge;
use tokio::time::timeout;

use super::error::ProxyError;
use super::place::{Asked, Placed};
use super::{Client, Proxy};
use crate::fleet::Fleet;

/// One of the places that a counter gives out.
#[derive(Debug)]
pub struct Slot {
    counter: Arc<AtomicUsize>,
}

impl Slot {
    /// Takes a place if fewer than `limit` are taken.
    pub fn take(counter: &Arc<AtomicUsize>, limit: Option<usize>) -> Option<Slot> {
        let limit = limit.unwrap_or(usize::MAX);
        let more = |open: usize| (open < limit).then_some(open + 1);
        counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Slot { counter: counter.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Tells the one whose turn it is that a place may have become free. Held last by whoever holds a place, so that it is free by then.
pub struct Freed(pub Arc<Fleet>);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.capacity.notify_one();
    }
}

/// Counts one that waits.
struct Waiting(IntGauge);

impl Waiting {
    /// `None` if the queue is full.
    fn begin(gauge: &IntGauge, longest: usize) -> Option<Waiting> {
        gauge.inc();
        let waiting = Waiting(gauge.clone());
        (gauge.get() <= longest as i64).then_some(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Places the request, waiting in the queue where there is no room.
///
/// # Errors
/// As [`Proxy::place`]; and [`ProxyError::Overloaded`] if the queue is full or the wait too long.
pub async fn admit(proxy: &Arc<Proxy>, asked: &Asked, client: &Client) -> Result<Box<Placed>, ProxyError> {
    // Whoever comes now stands behind those who wait.
    if proxy.metrics.queued.get() == 0 {
        match proxy.place(asked, client, &[]) {
            Err(ProxyError::Full) => {}
            placed => return placed,
        }
    }
    let (longest, patience) = {
        let config = proxy.config.load();
        (config.limits.queue, config.timeouts.queue)
    };
    let _waiting = Waiting::begin(&proxy.metrics.queued, longest).ok_or(ProxyError::Overloaded)?;
    timeout(patience, wait_for_place(proxy, asked, client)).await.unwrap_or(Err(ProxyError::Overloaded))
}

async fn wait_for_place(
    proxy: &Arc<Proxy>,
    asked: &Asked,
    client: &Client,
) -> Result<Box<Placed>, ProxyError> {
    // The lock is fair: whoever has waited longest holds the turn and alone looks for a place; leaving hands it on.
    let _turn = proxy.turn.lock().await;
    loop {
        let mut freed = pin!(proxy.fleet.capacity.notified());
        // Listens before it looks, so that nothing that is freed in between is missed.
        freed.as_mut().enable();
        match proxy.place(asked, client, &[]) {
            Err(ProxyError::Full) => freed.await,
            placed => return placed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_and_come_back() {
        let counter = Arc::new(AtomicUsize::new(0));
        let one = Slot::take(&counter, Some(2)).unwrap();
        let two = Slot::take(&counter, Some(2)).unwrap();
        assert!(Slot::take(&counter, Some(2)).is_none());
        drop(one);
        let three = Slot::take(&counter, Some(2)).unwrap();
        assert!(Slot::take(&counter, Some(2)).is_none());
        assert!(Slot::take(&counter, None).is_some(), "without a limit there is always one");
        drop((two, three));
        assert_eq!(counter.load(Ordering::Acquire), 0);
    }

    #[test]
    fn the_queue_is_bounded_and_its_count_comes_back() {
        let gauge = IntGauge::new("queued", "test").unwrap();
        let one = Waiting::begin(&gauge, 1).unwrap();
        assert!(Waiting::begin(&gauge, 1).is_none());
        assert_eq!(gauge.get(), 1);
        drop(one);
        assert_eq!(gauge.get(), 0);
    }
}
