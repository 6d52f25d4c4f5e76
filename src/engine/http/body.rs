//! Response bodies, and what is given back when one has been sent or dropped.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::worker::{Command, Shared};

/// A response body; each frame of a streamed one is an event, and becomes an HTTP chunk.
pub(super) struct EngineBody {
    content: Content,
    _busy: Busy,
}

enum Content {
    Whole(Option<Bytes>),
    Stream { events: mpsc::UnboundedReceiver<Bytes>, ticket: Ticket },
}

impl EngineBody {
    pub fn whole(body: impl Into<Bytes>, busy: Busy) -> EngineBody {
        EngineBody { content: Content::Whole(Some(body.into())), _busy: busy }
    }

    pub fn stream(events: mpsc::UnboundedReceiver<Bytes>, ticket: Ticket, busy: Busy) -> EngineBody {
        EngineBody { content: Content::Stream { events, ticket }, _busy: busy }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.content {
            Content::Whole(body) => Poll::Ready(body.take().map(|body| Ok(Frame::data(body)))),
            Content::Stream { events, ticket } => {
                let event = std::task::ready!(events.poll_recv(cx));
                if event.is_none() {
                    ticket.done = true;
                }
                Poll::Ready(event.map(|event| Ok(Frame::data(event))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(body) if body.as_ref().is_none_or(Bytes::is_empty))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64)),
            Content::Stream { .. } => SizeHint::default(),
        }
    }
}

/// A generation in flight. Dropped before it is done (the client went away), it ends the work on it.
pub(super) struct Ticket {
    pub number: u64,
    pub done: bool,
    shared: Arc<Shared>,
}

impl Ticket {
    /// `None` if too many are in flight.
    pub fn take(shared: &Arc<Shared>) -> Option<Ticket> {
        let limit = shared.config.max_num_queued_reqs.unwrap_or(usize::MAX);
        let before = shared.in_flight.fetch_add(1, Ordering::Relaxed);
        let number = shared.tickets.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket { number, done: false, shared: shared.clone() };
        if before < limit {
            return Some(ticket);
        }
        shared.rejected.fetch_add(1, Ordering::Relaxed);
        None
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.done {
            // If the worker is gone there is nothing to end.
            let _ = self.shared.commands.send(Command::Abort(self.number));
        }
    }
}

/// Since when a connection is idle: only once it has had a response, as in uvicorn.
#[derive(Default)]
pub(super) struct Idle {
    since: Mutex<Option<Instant>>,
    changed: Notify,
}

/// A request on a connection, until its response has been sent.
pub(super) struct Busy(Arc<Idle>);

impl Idle {
    pub fn busy(self: &Arc<Self>) -> Busy {
        *self.since.lock() = None;
        Busy(self.clone())
    }

    /// Waits until the connection has been idle for `limit`.
    pub async fn expired(&self, limit: Duration) {
        loop {
            let since = *self.since.lock();
            match since {
                None => self.changed.notified().await,
                Some(since) => {
                    tokio::time::sleep_until(since + limit).await;
                    if *self.since.lock() == Some(since) {
                        return;
                    }
                }
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.since.lock() = Some(Instant::now());
        self.0.changed.notify_one();
    }
}
