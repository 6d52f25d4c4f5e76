//! Sends what is to be said, in batches; and each second, if there is nothing, that this router lives.

use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::Peers;
use super::claim::{Event, Events};
use super::news::{News, Said, Writer};
use super::reach::{Side, pause};
use super::store::{Link, Store};
use crate::core::ids::Time;
use crate::lifecycle::Clock;
use crate::metrics::Way;

/// Without anything to say.
const PULSE: Duration = Duration::from_secs(1);
/// How often a router says what it is called.
const NAME: Duration = Duration::from_secs(5);
/// A batch is sent as soon as it has so many bytes, whatever the delay.
const BATCH_BYTES: usize = 64 << 10;
/// Of what waits already, more: over a slow store there is no other way to keep up.
const MOST_BATCH_BYTES: usize = 256 << 10;

/// Sends for as long as it is polled, or until it has said that this router leaves.
pub async fn run(peers: &Peers, store: &Store, mut events: Events, delay: Duration, clock: Clock) {
    let mut link = None;
    let (mut number, mut gap) = (0, 0);
    let mut next_pulse = Instant::now();
    let mut next_name = Instant::now();
    loop {
        let first = tokio::select! {
            event = events.next() => event,
            () = sleep_until(next_pulse) => None,
        };
        let batch = match first {
            Some(first) => gather(first, &mut events, delay).await,
            None => Vec::new(),
        };
        number += 1 + gap;
        // Where something was left out the others are to know; but only once all that is from before has been sent.
        gap = u64::from(events.is_empty() && peers.teller.take_lost());
        let now = Instant::now();
        let name = (now >= next_name).then_some(&*peers.name);
        if name.is_some() {
            next_name = now + NAME;
        }
        send(peers, store, &mut link, Head { number, name }, &batch, clock).await;
        next_pulse = Instant::now() + PULSE;
        if batch.iter().any(leaves) {
            peers.has_left.notify_one();
            return;
        }
    }
}

/// What the batch has beside what is said.
#[derive(Copy, Clone)]
struct Head<'a> {
    number: u64,
    name: Option<&'a str>,
}

fn leaves(event: &Event) -> bool {
    matches!(event.news, News::Left)
}

/// Who leaves says so at once: nobody waits for long for what was not said.
async fn gather(first: Event, events: &mut Events, delay: Duration) -> Vec<Event> {
    let mut bytes = first.weight();
    let mut last = leaves(&first);
    let mut batch = vec![first];
    let mut due = pin!(sleep(delay));
    while bytes < BATCH_BYTES && !last {
        tokio::select! {
            biased;
            event = events.next() => {
                let Some(event) = event else { break };
                bytes += event.weight();
                last = leaves(&event);
                batch.push(event);
            }
            () = &mut due => break,
        }
    }
    while bytes < MOST_BATCH_BYTES && !last {
        let Some(event) = events.at_hand() else { break };
        bytes += event.weight();
        last = leaves(&event);
        batch.push(event);
    }
    batch
}

/// Until the store has taken it.
async fn send(
    peers: &Peers,
    store: &Store,
    link: &mut Option<Link>,
    head: Head<'_>,
    batch: &[Event],
    clock: Clock,
) {
    for failures in 0.. {
        let bytes = write(peers.id, head, batch, clock.now());
        let sent = async {
            let link = match link {
                Some(link) => link,
                None => link.insert(store.connect().await?),
            };
            store.add(link, &bytes).await
        };
        match sent.await {
            Ok(()) => {
                peers.reach.works(Side::Writing, store);
                peers.metrics.sharing.news.inc_by(Way::Sent, batch.len());
                peers.metrics.sharing.bytes.inc_by(Way::Sent, bytes.len());
                return;
            }
            Err(error) => {
                *link = None;
                peers.reach.fails(Side::Writing, &error, store);
                sleep(pause(failures, rand::random())).await;
            }
        }
    }
}

fn write(router: u64, head: Head<'_>, batch: &[Event], now: Time) -> Vec<u8> {
    let mut writer = Writer::begin(router, head.number, head.name);
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
        let bytes = write(
            7,
            Head { number: 3, name: Some("a:1") },
            &[event(1.0, 1), event(2.5, 2), event(9.0, 3)],
            Time(2.51),
        );
        let batch = news::read(&bytes).unwrap();
        let ages: Vec<u64> = batch.said.iter().map(|said| said.age).collect();
        assert_eq!((batch.router, batch.number, ages), (7, 3, vec![1_510, 10, 0]));
        assert_eq!(batch.name.as_deref(), Some("a:1"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_is_what_comes_within_the_delay_or_what_fills_it() {
        let (teller, mut events) = Teller::new(Metrics::new());
        let teller = Arc::new(teller);
        (0..50_000).for_each(|request| teller.tell(Time(0.0), request, News::FirstToken));
        let delay = Duration::from_millis(10);
        let begun = Instant::now();
        let first = events.next().await.unwrap();
        let batch = gather(first, &mut events, delay).await;
        assert_eq!(batch.len(), MOST_BATCH_BYTES.div_ceil(12));
        assert_eq!(begun.elapsed(), Duration::ZERO, "a full one does not wait");
        let waiting = 50_000 - batch.len();
        for _ in 3..waiting {
            let _ = events.next().await;
        }
        let first = events.next().await.unwrap();
        assert_eq!(gather(first, &mut events, delay).await.len(), 3);
        assert!(begun.elapsed() >= delay);
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_word_does_not_wait() {
        let (teller, mut events) = Teller::new(Metrics::new());
        let teller = Arc::new(teller);
        teller.tell(Time(0.0), 1, News::FirstToken);
        teller.tell(Time(0.0), 0, News::Left);
        let begun = Instant::now();
        let first = events.next().await.unwrap();
        assert_eq!(gather(first, &mut events, Duration::from_secs(10)).await.len(), 2);
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
