//! One attempt of one request on one worker.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use memchr::memmem;

use super::body::Held;
use super::error::ProxyError;
use super::headers::UpstreamHead;
use super::patience::{GivenUp, Heard, Limits, Patience};
use super::place::Placed;
use super::{Client, Proxy};
use crate::fleet::answer::Answer;
use crate::fleet::connection::ExchangeError;
use crate::fleet::framing::Outgoing;
use crate::fleet::health::Event;
use crate::fleet::worker::Worker;
use crate::metrics::{FailureKind, Retry};

/// A request as it goes to whichever worker takes it.
pub struct Upstream {
    pub head: UpstreamHead,
    pub body: Bytes,
    /// Counts the body until the worker has answered.
    pub held: Held,
    /// Doing it twice does no harm but cost: inference, and what HTTP calls safe.
    pub repeatable: bool,
    pub connect: Duration,
    pub pool_idle: Duration,
    pub limits: Limits,
}

impl Upstream {
    fn request(&self, host: &HeaderValue) -> Outgoing {
        let UpstreamHead { method, target, headers, .. } = &self.head;
        Outgoing::with(method, target, host, headers, self.head.added(), self.body.clone())
    }

    /// Sends the request to the worker it was placed on and waits for the response head. A kept connection that turns out
    /// to have been closed is replaced by a new one; that says nothing of the worker.
    ///
    /// # Errors
    /// [`ProxyError::Worker`] or [`ProxyError::GivenUp`], of which the fleet has been told, [`ProxyError::NoSocket`], and
    /// [`ProxyError::Leaving`].
    pub async fn attempt(
        &self,
        proxy: &Arc<Proxy>,
        client: &Arc<Client>,
        placed: &mut Placed,
    ) -> Result<(Response<Answer>, Patience), ProxyError> {
        let worker = placed.worker.clone();
        let mut patience = Patience::with(worker.clone(), self.limits, client);
        let sent = {
            let heard = patience.heard.clone();
            let mut exchange = pin!(self.exchange(proxy, &worker, &heard));
            poll_fn(|cx| match exchange.as_mut().poll(cx) {
                Poll::Ready(sent) => Poll::Ready(Ok(sent)),
                Poll::Pending => patience.poll_end(cx).map(Err),
            })
            .await
        };
        let (event, kind, error) = match sent {
            Ok(Ok(response)) => {
                // A worker that turns the request away has computed nothing, and caches nothing of it.
                if response.status().is_success() {
                    placed.commit();
                }
                return Ok((response, patience));
            }
            Ok(Err(cause)) => {
                let (event, kind) = match cause {
                    ExchangeError::Local(_) => {
                        return Err(ProxyError::NoSocket { worker: worker.url.to_string(), cause });
                    }
                    ExchangeError::Connect(_) => (Event::Unreachable, FailureKind::Connect),
                    ExchangeError::Insecure(_) => (Event::Insecure, FailureKind::Connect),
                    ExchangeError::Dying => (Event::Dying, FailureKind::BeforeHead),
                    ExchangeError::Stale(_)
                    | ExchangeError::Broken(_)
                    | ExchangeError::Nonsense(_)
                    | ExchangeError::Unasked => (Event::Broke, FailureKind::BeforeHead),
                };
                proxy.fleet.exchange_failed(&worker, &cause);
                (event, kind, ProxyError::Worker { worker: worker.url.to_string(), cause })
            }
            // No word against the worker.
            Err(GivenUp::Leaving) => return Err(ProxyError::Leaving),
            Err(why @ GivenUp::Late) => {
                return Err(ProxyError::GivenUp { worker: worker.url.to_string(), why });
            }
            Err(why) => {
                let worker = worker.url.to_string();
                (Event::Broke, FailureKind::Silent, ProxyError::GivenUp { worker, why })
            }
        };
        worker.metrics.failed(kind);
        placed.report(event);
        Err(error)
    }

    async fn exchange(
        &self,
        proxy: &Proxy,
        worker: &Worker,
        heard: &Heard,
    ) -> Result<Response<Answer>, ExchangeError> {
        let mut pool_idle = Some(self.pool_idle);
        let mut response = loop {
            let connection = worker.pool.connection(self.connect, pool_idle).await?;
            if connection.is_new() {
                proxy.fleet.report(worker, Event::Opened);
            }
            match worker.pool.exchange(connection, self.request(&worker.authority)).await {
                Err(ExchangeError::Stale(_)) => {
                    proxy.metrics.retries.inc(Retry::Stale);
                    heard.renew();
                    // A new one is never stale.
                    pool_idle = None;
                }
                answered => break answered?,
            }
        };
        if self.repeatable
            && response.status() == StatusCode::INTERNAL_SERVER_ERROR
            && let Some(body) =
                response.body_mut().peek(LAST_WORDS_LENGTH).await.map_err(ExchangeError::Broken)?
            && LAST_WORDS.iter().any(|words| memmem::find(&body, words).is_some())
        {
            return Err(ExchangeError::Dying);
        }
        Ok(response)
    }
}

/// What vLLM 0.32 says in a 500 while it shuts down, and when its engine process has died. Nothing was done for the request,
/// and the next ones will fare no better there.
const LAST_WORDS: [&[u8]; 3] =
    [b"cannot schedule new futures after shutdown", b"EngineCore encountered an issue", b"EngineDeadError"];
/// Longest body that is searched for them.
const LAST_WORDS_LENGTH: u64 = 4 << 10;
