//! The waits for a client on its connection, one at a time and each within its limit: for the head of its next request, for it to take
//! what was written, and for its goodbye when the process ends.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// What a client is waited for. One wait ends, and another of its kind begins, as these counts grow.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// The head of a request, after so many requests.
    Head { asked: u64 },
    /// That it takes what was handed out, as [`Handed`] counts that.
    Room { written: u64 },
    /// That it ends the connection, or asks for something: no more is wanted of it.
    Goodbye { asked: u64, written: u64 },
}

/// What was handed out to a client on its socket, or of one answer: twice as many as pieces, and one more while it has still to take them.
/// Only one hand counts.
#[derive(Default)]
pub struct Handed(AtomicU64);

impl Handed {
    /// Another piece can be handed out.
    pub fn goes_on(&self) {
        self.0.store((self.count() | 1) + 1, Ordering::Relaxed);
    }

    /// The client has still to take what was.
    pub fn stands(&self) {
        self.0.store(self.count() | 1, Ordering::Relaxed);
    }

    /// Grows with each piece.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// What the client is waited for, if it is.
    pub fn awaited(&self) -> Option<Awaited> {
        let written = self.count();
        (written % 2 == 1).then_some(Awaited::Room { written })
    }
}

/// Bounds the waits. All of a connection have one timer, which is moved: the runtime's list of timers has no part in that, as it has
/// where one is made and dropped.
#[derive(Default)]
pub struct Wait {
    timer: Option<Pin<Box<Sleep>>>,
    /// What it was set for.
    awaited: Option<Awaited>,
}

impl Wait {
    /// For the first head on a connection that was opened then.
    pub fn of_opening(opened: Instant, limit: Option<Duration>) -> Wait {
        let left = limit.unwrap_or_default().saturating_sub(opened.elapsed());
        Wait { timer: Some(Box::pin(sleep(left))), awaited: Some(Awaited::Head { asked: 0 }) }
    }

    /// Ready when that has been waited for as long as the limit, if there is one.
    pub fn poll(&mut self, cx: &mut Context<'_>, awaited: Awaited, limit: Option<Duration>) -> Poll<()> {
        let anew = self.awaited.replace(awaited) != Some(awaited);
        let Some(limit) = limit else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        if anew {
            // What is further off than the clock goes, tokio brings into its range.
            let end = Instant::now().checked_add(limit).unwrap_or_else(|| sleep(limit).deadline());
            timer.as_mut().reset(end);
        }
        timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::advance;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);
    const MOST_OF_IT: Duration = Duration::from_secs(9);

    async fn is_up(wait: &mut Wait, awaited: Awaited, limit: Option<Duration>) -> bool {
        poll_fn(|cx| Poll::Ready(wait.poll(cx, awaited, limit).is_ready())).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_for_a_head_is_from_the_opening_or_the_answer_before() {
        let opened = Instant::now();
        advance(MOST_OF_IT).await;
        let mut wait = Wait::of_opening(opened, Some(LIMIT));
        let mut is_up = async |awaited| is_up(&mut wait, awaited, Some(LIMIT)).await;
        let (first, second) = (Awaited::Head { asked: 0 }, Awaited::Head { asked: 1 });
        assert!(!is_up(first).await);
        advance(MOST_OF_IT).await;
        assert!(is_up(first).await, "counted from the opening");
        assert!(!is_up(second).await, "anew after a request");
        advance(MOST_OF_IT).await;
        assert!(!is_up(second).await);
        assert!(!is_up(Awaited::Room { written: 3 }).await, "it has its answer still to take");
        advance(MOST_OF_IT).await;
        assert!(!is_up(second).await, "anew once its answer was taken");
        advance(LIMIT + Duration::from_millis(1)).await;
        assert!(is_up(second).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_a_little_now_and_then_is_waited_for_anew_each_time() {
        let mut wait = Wait::of_opening(Instant::now(), None);
        for written in 0..10 {
            assert!(!is_up(&mut wait, Awaited::Room { written }, Some(LIMIT)).await);
            advance(MOST_OF_IT).await;
        }
        assert!(!is_up(&mut wait, Awaited::Room { written: 9 }, Some(LIMIT)).await);
        advance(MOST_OF_IT).await;
        assert!(is_up(&mut wait, Awaited::Room { written: 9 }, Some(LIMIT)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_or_with_one_beyond_the_clock_nothing_ends() {
        for limit in [None, Some(Duration::MAX)] {
            let mut wait = Wait::of_opening(Instant::now(), limit);
            for asked in [0, 1] {
                for awaited in [Awaited::Head { asked }, Awaited::Room { written: asked }] {
                    assert!(!is_up(&mut wait, awaited, limit).await);
                    advance(Duration::from_secs(1_000_000)).await;
                    assert!(!is_up(&mut wait, awaited, limit).await);
                }
            }
        }
    }
}
