//! A request's booking, of which the other routers are told. The path of requests only hands over what is to be said: where that is
//! full it is left out and counted, and nobody waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self, Receiver, Sender};

use super::news::{MOST_BLOCKS, Name, News};
use crate::core::booking::Booking;
use crate::core::elsewhere::{self, Tell};
use crate::core::ids::Time;
use crate::core::planner::Ask;
use crate::metrics::{Metrics, NewsLost};

/// News that wait for the store: some minutes of ten requests a second, half a minute of some hundred.
const MOST_WAITING: usize = 65_536;
/// Bytes of them: of prompts of a million tokens a thousand are too many.
const MOST_BYTES: usize = 64 << 20;

/// What is to be said, and since when.
#[derive(Debug)]
pub struct Event {
    pub at: Time,
    pub request: u64,
    pub news: News,
}

impl Event {
    /// About the bytes that it becomes.
    pub fn weight(&self) -> usize {
        match &self.news {
            News::Placed(ask, _) => 48 + 8 * ask.chain.hashes.len(),
            _ => 12,
        }
    }
}

/// What waits, for the one who sends it.
pub struct Events {
    receiver: Receiver<Event>,
    waiting: Arc<AtomicUsize>,
}

impl Events {
    /// The next one; `None` once nobody is left to tell.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.receiver.recv().await?;
        self.waiting.fetch_sub(event.weight(), Ordering::Relaxed);
        Some(event)
    }

    /// The next one, if it waits already.
    pub fn at_hand(&mut self) -> Option<Event> {
        let event = self.receiver.try_recv().ok()?;
        self.waiting.fetch_sub(event.weight(), Ordering::Relaxed);
        Some(event)
    }

    pub fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }
}

/// Takes what is to be said.
pub struct Teller {
    sender: Sender<Event>,
    /// Bytes of what was handed over and not sent yet.
    waiting: Arc<AtomicUsize>,
    next: AtomicU64,
    /// Something was left out.
    lost: AtomicBool,
    metrics: Arc<Metrics>,
}

impl Teller {
    pub fn new(metrics: Arc<Metrics>) -> (Teller, Events) {
        Teller::with_room(MOST_WAITING, metrics)
    }

    fn with_room(room: usize, metrics: Arc<Metrics>) -> (Teller, Events) {
        let (sender, receiver) = mpsc::channel(room);
        let waiting = Arc::<AtomicUsize>::default();
        let events = Events { receiver, waiting: waiting.clone() };
        (Teller { sender, waiting, next: AtomicU64::new(1), lost: AtomicBool::new(false), metrics }, events)
    }

    /// The claim of a request that was placed at `now` on the worker of that name. Of one whose prompt would fill a batch nobody is told.
    pub fn claim(self: &Arc<Self>, booking: Booking, ask: &Ask, worker: Name, now: Time) -> Claim {
        if ask.chain.hashes.len() > MOST_BLOCKS {
            return Claim::silent(booking);
        }
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        Claim::told(booking, self.clone(), request, ask, worker, now)
    }

    /// Whether something was left out since this was asked last.
    pub(super) fn take_lost(&self) -> bool {
        self.lost.swap(false, Ordering::AcqRel)
    }
}

impl Tell for Arc<Teller> {
    type Worker = Name;

    fn tell(&self, at: Time, request: u64, news: News) {
        let event = Event { at, request, news };
        let weight = event.weight();
        // Counted before it can be taken out.
        let is_full = self.waiting.fetch_add(weight, Ordering::Relaxed) + weight > MOST_BYTES
            || matches!(self.sender.try_send(event), Err(TrySendError::Full(_)));
        if is_full {
            self.waiting.fetch_sub(weight, Ordering::Relaxed);
            self.metrics.sharing.dropped.inc(NewsLost::Full);
            self.lost.store(true, Ordering::Release);
        }
    }
}

/// One request's claim on one worker. Dropped, it is taken back here and at the others.
pub type Claim = elsewhere::Claim<Arc<Teller>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::blocks::Chain;
    use crate::core::booking::Finished;
    use crate::core::ids::BlockHash;
    use crate::core::planner::{Planner, Policy, Settings, WorkerSpec};

    fn claim(teller: &Arc<Teller>) -> Claim {
        claim_of(teller, Chain::empty())
    }

    fn claim_of(teller: &Arc<Teller>, chain: Chain) -> Claim {
        let planner = Planner::new(Settings::default());
        let worker = planner.add_worker(WorkerSpec {
            key: 1,
            capacity_tokens: None,
            engine_block_tokens: 16,
            prefill_speed: None,
        });
        let ask = Ask { chain, block_tokens: 64.0, prompt_tokens: 10.0, output_tokens: 1.0, streams: true };
        let (_, booking) = planner.plan(&ask, &[worker], Policy::Kv, Time(1.0), 0).unwrap();
        teller.claim(booking, &ask, Name { key: 1, pod: 0 }, Time(1.0))
    }

    fn all(events: &mut Events) -> Vec<String> {
        std::iter::from_fn(|| events.at_hand())
            .map(|event| match event.news {
                News::Placed(..) => format!("{} {} placed", event.at.0, event.request),
                other => format!("{} {} {other:?}", event.at.0, event.request),
            })
            .collect()
    }

    #[test]
    fn each_claim_tells_one_beginning_and_one_end() {
        let (teller, mut receiver) = Teller::new(Metrics::new());
        let teller = Arc::new(teller);
        let mut finished = claim(&teller);
        finished.commit(Time(2.0));
        finished.first_token(Time(3.0));
        finished.finish(Finished::default(), Time(4.0));
        drop(claim(&teller));
        let mut cut = claim(&teller);
        cut.commit(Time(5.0));
        drop(cut);
        let said = all(&mut receiver);
        assert_eq!(said[..2], ["1 1 placed", "3 1 FirstToken"]);
        assert!(said[2].starts_with("4 1 Finished"), "{said:?}");
        assert_eq!(
            said[3..],
            ["1 2 placed", "1 2 Lost { committed: false }", "1 3 placed", "5 3 Lost { committed: true }"]
        );
    }

    #[test]
    fn of_a_prompt_that_would_fill_a_batch_nobody_is_told() {
        let (teller, mut receiver) = Teller::new(Metrics::new());
        let teller = Arc::new(teller);
        let chain = |blocks: usize| Chain::even((0..blocks as u64).map(BlockHash).collect(), 0);
        claim_of(&teller, chain(MOST_BLOCKS + 1)).finish(Finished::default(), Time(2.0));
        assert!(all(&mut receiver).is_empty());
        claim_of(&teller, chain(MOST_BLOCKS)).finish(Finished::default(), Time(2.0));
        assert_eq!(all(&mut receiver).len(), 2);
    }

    #[test]
    fn long_prompts_that_wait_are_bounded_by_their_bytes() {
        let metrics = Metrics::new();
        let (teller, mut events) = Teller::new(metrics.clone());
        let teller = Arc::new(teller);
        let chain = Chain::even((0..MOST_BLOCKS as u64).map(BlockHash).collect(), 0);
        let ask = Ask { chain, block_tokens: 64.0, prompt_tokens: 10.0, output_tokens: 1.0, streams: true };
        let placed = || News::Placed(ask.clone(), Name { key: 1, pod: 0 });
        let most = MOST_BYTES / (8 * MOST_BLOCKS);
        (0..10 * most as u64).for_each(|request| teller.tell(Time(1.0), request, placed()));
        let waits = all(&mut events).len();
        assert!((most - 1..=most).contains(&waits), "{waits}");
        assert!(teller.take_lost());
        teller.tell(Time(2.0), 1, placed());
        assert_eq!(all(&mut events).len(), 1, "there is room again");
        assert_eq!(teller.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_finds_no_room_is_left_out_and_counted() {
        let metrics = Metrics::new();
        let (teller, mut receiver) = Teller::with_room(1, metrics.clone());
        let teller = Arc::new(teller);
        drop(claim(&teller));
        assert_eq!(all(&mut receiver), ["1 1 placed"]);
        assert!(teller.take_lost() && !teller.take_lost());
        let page = String::from_utf8(metrics.render()).unwrap();
        assert!(page.contains("warmroute_sharing_dropped_total{reason=\"full\"} 1"), "{page}");
    }
}
