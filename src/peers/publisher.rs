//! Sends what is to be said, in batches; and each second, if there is nothing, that this router lives.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep, sleep_until};

use super::Peers;
use super::claim::Event;
use super::news::{News, Said, Writer};
use super::reach::{Side, pause};
use super::store::{Link, Store};
use crate::core::ids::Time;
use crate::lifecycle::Clock;
use crate::metrics::Way;

/// Without anything to say.
const PULSE: Duration = Duration::from_secs(1);
/// A batch is sent as soon as it has so many bytes, whatever the delay.
const BATCH_BYTES: usize = 64 << 10;

/// Sends for as long as it is polled, or until it has said that this router leaves.
pub async fn run(peers: &Peers, store: &Store, mut events: Receiver<Event>, delay: Duration, clock: Clock) {
    let mut link = None;
    let (mut number, mut gap) = (0, 0);
    let mut next_pulse = Instant::now();
    loop {
        let first = tokio::select! {
            event = events.recv() => event,
            () = sleep_until(next_pulse) => None,
        };
        let batch = match first {
            Some(first) => gather(first, &mut events, delay).await,
            None => Vec::new(),
        };
        number += 1 + gap;
        // Where something was left out the others are to know; but only once all that is from before has been sent.
        gap = u64::from(events.is_empty() && peers.teller.take_lost());
        send(peers, store, &mut link, &batch, number, clock).await;
        next_pulse = Instant::now() + PULSE;
        if batch.iter().any(|event| matches!(event.news, News::Left)) {
            peers.has_left.notify_one();
            return;
        }
    }
}

async fn gather(first: Event, events: &mut Receiver<Event>, delay: Duration) -> Vec<Event> {
    let mut bytes = weight(&first);
    let mut batch = vec![first];
    let mut due = pin!(sleep(delay));
    while bytes < BATCH_BYTES {
        tokio::select! {
            biased;
            event = events.recv() => {
                let Some(event) = event else { break };
                bytes += weight(&event);
                batch.push(event);
            }
            () = &mut due => break,
        }
    }
    batch
}

/// About the bytes that it becomes.
fn weight(event: &Event) -> usize {
    match &event.news {
        News::Placed(ask, _) => 48 + 8 * ask.chain.hashes.len(),
        _ => 12,
    }
}

/// Until the store has taken it.
async fn send(
    peers: &Peers,
    store: &Store,
    link: &mut Option<Link>,
    batch: &[Event],
    number: u64,
    clock: Clock,
) {
    for failures in 0.. {
        let bytes = write(peers.id, number, batch, clock.now());
        let sent = async {
            let link = match link {
                Some(link) => link,
                None => link.insert(store.connect().await?),
            };
            store.add(link, &bytes).await
        };
        match sent.await {
            Ok(()) => {
                peers.reach.works(Side::Writing);
                peers.metrics.sharing.news.inc_by(Way::Sent, batch.len());
                peers.metrics.sharing.bytes.inc_by(Way::Sent, bytes.len());
                return;
            }
            Err(error) => {
                *link = None;
                peers.reach.fails(Side::Writing, &error);
                sleep(pause(failures, rand::random())).await;
            }
        }
    }
}

fn write(router: u64, number: u64, batch: &[Event], now: Time) -> Vec<u8> {
    let mut writer = Writer::begin(router, number);
    for Event { at, request, news } in batch {
        let age = ((now - *at) * 1e3).max(0.0).round() as u64;
        writer.say(&Said { age, request: *request, news: news.clone() });
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::elsewhere::Tell;
    use crate::metrics::Metrics;
    use crate::peers::claim::Teller;
    use crate::peers::news;

    #[test]
    fn times_go_out_as_ages() {
        let event = |at, request| Event { at: Time(at), request, news: News::FirstToken };
        let bytes = write(7, 3, &[event(1.0, 1), event(2.5, 2), event(9.0, 3)], Time(2.51));
        let batch = news::read(&bytes).unwrap();
        let ages: Vec<u64> = batch.said.iter().map(|said| said.age).collect();
        assert_eq!((batch.router, batch.number, ages), (7, 3, vec![1_510, 10, 0]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_is_what_comes_within_the_delay_or_what_fills_it() {
        let (teller, mut events) = Teller::new(Metrics::new());
        let teller = Arc::new(teller);
        (0..50_000).for_each(|request| teller.tell(Time(0.0), request, News::FirstToken));
        let delay = Duration::from_millis(10);
        let begun = Instant::now();
        let first = events.recv().await.unwrap();
        let batch = gather(first, &mut events, delay).await;
        assert_eq!(batch.len(), BATCH_BYTES.div_ceil(12));
        assert_eq!(begun.elapsed(), Duration::ZERO, "a full one does not wait");
        while events.len() > 3 {
            let _ = events.recv().await;
        }
        let first = events.recv().await.unwrap();
        assert_eq!(gather(first, &mut events, delay).await.len(), 3);
        assert!(begun.elapsed() >= delay);
    }
}
