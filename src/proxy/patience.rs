//! When to stop waiting for a worker that says nothing, also because this process ends. A vLLM that is told to end refuses new connections and lets its running
//! requests hang for ever, without a byte or a FIN: somebody has to notice.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{OptionFuture, pending};
use thiserror::Error;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Client, Cut};
use crate::config::Config;
use crate::fleet::worker::Worker;

/// Why an answer is no longer waited for.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Error)]
pub enum GivenUp {
    /// Connections to the worker fail, and nothing has come since.
    #[error("the worker takes no connections and has fallen silent")]
    Lost,
    /// `timeouts.silence`
    #[error("nothing came for too long")]
    Silent,
    /// `timeouts.response`
    #[error("the answer took too long in all")]
    Late,
    /// The drain cuts what still runs.
    #[error("this process ends")]
    Leaving,
}

/// The limits on waiting; `None` is for ever.
#[derive(Copy, Clone, Debug)]
pub struct Limits {
    pub when_unreachable: Option<Duration>,
    pub silence: Option<Duration>,
    pub response: Option<Duration>,
}

impl Limits {
    pub fn of(config: &Config) -> Limits {
        Limits {
            when_unreachable: config.health.unreachable_silence,
            silence: config.timeouts.silence,
            response: config.timeouts.response,
        }
    }
}

/// Counts what renews the patience. Clones are the same count.
#[derive(Clone, Default)]
pub struct Heard(Arc<AtomicU64>);

impl Heard {
    /// Something came, or the worker is asked anew: what it owed before says nothing of that.
    pub fn renew(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The patience with one answer.
pub struct Patience {
    pub heard: Heard,
    cut: Cut,
    limits: Limits,
    /// When the answer must be over.
    late: Option<Instant>,
    wait: Wait,
}

enum Wait {
    /// Nobody has to wake it until the worker is lost: there is no other limit, and the connection's own task polls this when it hears of a
    /// lost worker.
    AtRest(Arc<Worker>),
    Ends(Pin<Box<dyn Future<Output = GivenUp> + Send>>),
}

impl Patience {
    pub fn with(worker: Arc<Worker>, limits: Limits, client: &Arc<Client>) -> Patience {
        let heard = Heard::default();
        let rests = limits.silence.is_none() && limits.response.is_none() && !client.streams;
        // One beyond the clock is none.
        let late = limits.response.and_then(|limit| Instant::now().checked_add(limit));
        let wait = if rests {
            Wait::AtRest(worker)
        } else {
            Wait::Ends(Box::pin(end(worker, heard.clone(), limits, late)))
        };
        Patience { heard, cut: client.cut(), limits, late, wait }
    }

    /// Why the answer is to end, however much of it is there.
    pub fn is_over(&self) -> Option<GivenUp> {
        if self.cut.is_made() {
            return Some(GivenUp::Leaving);
        }
        self.late.filter(|late| *late <= Instant::now()).map(|_| GivenUp::Late)
    }

    /// Ready when the wait is over. To be polled whenever the answer is not ready, and not again after this is.
    pub fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<GivenUp> {
        if self.cut.poll(cx).is_ready() {
            return Poll::Ready(GivenUp::Leaving);
        }
        if let Wait::AtRest(worker) = &self.wait {
            if !worker.is_unreachable() {
                return Poll::Pending;
            }
            self.wait = Wait::Ends(Box::pin(end(worker.clone(), self.heard.clone(), self.limits, self.late)));
        }
        match &mut self.wait {
            Wait::AtRest(_) => Poll::Pending,
            Wait::Ends(end) => end.as_mut().poll(cx),
        }
    }
}

async fn end(worker: Arc<Worker>, heard: Heard, limits: Limits, late: Option<Instant>) -> GivenUp {
    let lost = async {
        match limits.when_unreachable {
            None => pending().await,
            Some(limit) => lost(&worker, &heard, limit).await,
        }
    };
    let silent = async {
        match limits.silence {
            None => pending().await,
            Some(limit) => silent(&heard, limit).await,
        }
    };
    tokio::select! {
        () = lost => GivenUp::Lost,
        () = silent => GivenUp::Silent,
        Some(()) = OptionFuture::from(late.map(sleep_until)) => GivenUp::Late,
    }
}

async fn lost(worker: &Worker, heard: &Heard, limit: Duration) {
    loop {
        worker.unreachable().await;
        let before = heard.count();
        sleep(limit).await;
        if worker.is_unreachable() && heard.count() == before {
            return;
        }
    }
}

/// Looks four times within the limit, so that it is overrun by a quarter at most, without a look at the clock for each piece.
async fn silent(heard: &Heard, limit: Duration) {
    let mut before = heard.count();
    let mut quiet = 0;
    while quiet < 4 {
        sleep(limit / 4).await;
        let now = heard.count();
        quiet = if now == before { quiet + 1 } else { 0 };
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, advance, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_ends_within_a_quarter_more_than_its_limit_and_not_before() {
        let heard = Heard::default();
        let begun = Instant::now();
        let waiting = tokio::spawn({
            let heard = heard.clone();
            async move { silent(&heard, Duration::from_secs(60)).await }
        });
        for _ in 0..10 {
            advance(Duration::from_secs(59)).await;
            heard.renew();
        }
        let last = Instant::now();
        assert!(!waiting.is_finished());
        waiting.await.unwrap();
        let waited = last.elapsed();
        assert!((60..=75).contains(&waited.as_secs()), "{waited:?}, begun {:?} ago", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn without_limits_it_waits_for_ever() {
        let forever = async {
            let heard = Heard::default();
            tokio::select! {
                () = pending() => {}
                () = silent(&heard, Duration::from_secs(1_000_000)) => {}
            }
        };
        assert!(timeout(Duration::from_secs(900_000), forever).await.is_err());
    }
}
