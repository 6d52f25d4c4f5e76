//! The tasks of the requests of an HTTP/2 connection: each ends its stream if the client takes nothing of its answer for too long. The
//! connection cannot tell: it goes on, and one of its streams stands still.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper::rt::Executor;

use super::Client;
use super::wait::Wait;

/// Runs the streams of one connection. hyper hands a request to the service and at once its task to this, one after another.
#[derive(Clone)]
pub struct Streams {
    client: Arc<Client>,
    limit: Option<Duration>,
}

impl Streams {
    /// `limit` is the longest time in which nothing is taken.
    pub fn of(client: Arc<Client>, limit: Option<Duration>) -> Streams {
        Streams { client, limit }
    }
}

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
{
    fn execute(&self, stream: F) {
        let (handed, limit) = (self.client.begun.lock().take(), self.limit);
        tokio::spawn(async move {
            let mut stream = pin!(stream);
            let mut wait = Wait::default();
            // Dropped at its end, it tells the client that the stream is over if it is not.
            poll_fn(|cx| match (stream.as_mut().poll(cx), &handed) {
                (Poll::Ready(_), _) => Poll::Ready(()),
                (Poll::Pending, Some(handed)) => match handed.awaited() {
                    Some(awaited) => wait.poll(cx, awaited, limit),
                    None => Poll::Pending,
                },
                (Poll::Pending, None) => Poll::Pending,
            })
            .await;
        });
    }
}
