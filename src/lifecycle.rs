//! The life of the process as types: its clock, what it was asked to do ([`Stop`]), and how far the drain has come
//! ([`Phase`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::bell::{Bell, Listener};
use crate::core::ids::Time;

/// Seconds since the process started; the only clock that reaches the core. Follows tokio's clock, so tests can pause it.
#[derive(Copy, Clone, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { origin: Instant::now() }
    }

    pub fn now(self) -> Time {
        self.at(Instant::now())
    }

    pub fn at(self, instant: Instant) -> Time {
        Time(instant.saturating_duration_since(self.origin).as_secs_f64())
    }
}

/// How urgently the process was asked to end. Grows only.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Urgency {
    None,
    /// Finish what runs.
    Drain,
    /// End at once.
    Now,
}

/// Asks the process to end; held by whoever may: signals, tests, a demo that is done.
#[derive(Clone, Debug)]
pub struct Stop {
    urgency: watch::Sender<Urgency>,
}

impl Default for Stop {
    fn default() -> Self {
        Stop { urgency: watch::Sender::new(Urgency::None) }
    }
}

impl Stop {
    /// The first request drains, a second one ends at once.
    pub fn request(&self) {
        self.urgency.send_modify(|urgency| {
            *urgency = match urgency {
                Urgency::None => Urgency::Drain,
                Urgency::Drain | Urgency::Now => Urgency::Now,
            };
        });
    }

    /// Waits until at least `urgency` was asked for.
    pub async fn at_least(&self, urgency: Urgency) {
        let mut asked = self.urgency.subscribe();
        // The sender is ourselves, so it cannot be gone.
        let _ = asked.wait_for(|asked| *asked >= urgency).await;
    }

    /// Turns SIGTERM and SIGINT into requests to end, for as long as the process lives.
    ///
    /// # Errors
    /// If the system refuses the handlers.
    pub fn on_signals(&self) -> std::io::Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let stop = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                stop.request();
            }
        });
        Ok(())
    }
}

/// Calls `heard` on SIGHUP, for as long as the future is polled; from now on it does not end the process.
///
/// # Errors
/// If the system refuses the handler.
pub fn on_hangup(heard: impl Fn()) -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        while hangup.recv().await.is_some() {
            heard();
        }
    })
}

/// How far the process is on its way out. Grows only.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// Normal work.
    Serving,
    /// Readiness is off, new work is still served.
    Leaving,
    /// No new connections; each open one ends after its running request.
    Draining,
    /// What still runs is cut.
    Cut,
}

/// In their order.
const PHASES: [Phase; 4] = [Phase::Serving, Phase::Leaving, Phase::Draining, Phase::Cut];

/// The phase, and the count of connections that must end before the process may. Cloned to whoever has to follow it.
#[derive(Clone, Debug)]
pub struct Drain {
    /// One of [`PHASES`], by its place.
    phase: Arc<AtomicUsize>,
    /// Rung when the phase changes.
    bell: Bell,
    open: watch::Sender<usize>,
}

impl Default for Drain {
    fn default() -> Self {
        Drain { phase: Arc::default(), bell: Bell::default(), open: watch::Sender::new(0) }
    }
}

/// Holds the end of the process up while it lives.
#[must_use = "the process may end as soon as this is dropped"]
#[derive(Debug)]
pub struct Blocker {
    open: watch::Sender<usize>,
}

impl Drop for Blocker {
    fn drop(&mut self) {
        self.open.send_modify(|open| *open -= 1);
    }
}

impl Drain {
    pub fn phase(&self) -> Phase {
        PHASES[self.phase.load(Ordering::Acquire)]
    }

    pub fn advance(&self, to: Phase) {
        if self.phase.fetch_max(to as usize, Ordering::AcqRel) < to as usize {
            self.bell.ring();
        }
    }

    /// Hears when the phase may have changed, for who looks at it often.
    pub fn listener(&self) -> Listener {
        self.bell.listener()
    }

    /// Waits until the phase is at least `phase`.
    pub async fn at_least(&self, phase: Phase) {
        self.bell.until(|| self.phase() >= phase).await;
    }

    pub fn block(&self) -> Blocker {
        self.open.send_modify(|open| *open += 1);
        Blocker { open: self.open.clone() }
    }

    /// Waits until no blocker lives.
    pub async fn all_done(&self) {
        let mut open = self.open.subscribe();
        let _ = open.wait_for(|open| *open == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_request_to_end_is_urgent_and_waits_see_both() {
        let stop = Stop::default();
        let waits = (stop.clone(), stop.clone());
        let both = tokio::spawn(async move {
            waits.0.at_least(Urgency::Drain).await;
            waits.1.request();
            waits.1.at_least(Urgency::Now).await;
        });
        stop.request();
        both.await.unwrap();
    }

    #[tokio::test]
    async fn the_drain_is_done_when_the_last_blocker_has_gone() {
        let drain = Drain::default();
        let (first, second) = (drain.block(), drain.block());
        let waiting = tokio::spawn({
            let drain = drain.clone();
            async move { drain.all_done().await }
        });
        drop(first);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(second);
        waiting.await.unwrap();
    }

    #[test]
    fn phases_never_go_back() {
        let drain = Drain::default();
        drain.advance(Phase::Draining);
        drain.advance(Phase::Leaving);
        assert_eq!(drain.phase(), Phase::Draining);
    }
}
