//! One attempt of one request on one worker.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, Version, header};
use http_body_util::Full;

use super::Proxy;
use super::error::ProxyError;
use super::headers::UpstreamHead;
use super::place::Placed;
use crate::fleet::connection::{Answer, ExchangeError, Outgoing};
use crate::fleet::health::Event;
use crate::metrics::{FailureKind, Retry};

/// A request as it goes to whichever worker takes it.
pub struct Upstream {
    pub head: UpstreamHead,
    pub body: Bytes,
    /// Doing it twice does no harm but cost: inference, and what HTTP calls safe.
    pub repeatable: bool,
    pub connect: Duration,
    pub pool_idle: Duration,
}

impl Upstream {
    fn request(&self, host: &HeaderValue) -> Outgoing {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.head.method.clone();
        *request.uri_mut() = self.head.target.clone();
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = self.head.headers.clone();
        request.headers_mut().insert(header::HOST, host.clone());
        request
    }

    /// Sends the request to the worker it was placed on and waits for the response head. A kept connection that turns out
    /// to have been closed is replaced by a new one; that says nothing of the worker.
    ///
    /// # Errors
    /// [`ProxyError::Worker`]; the fleet has been told.
    pub async fn attempt(
        &self,
        proxy: &Arc<Proxy>,
        placed: &mut Placed,
    ) -> Result<Response<Answer>, ProxyError> {
        let worker = placed.worker.clone();
        let sent = worker.pool.send(self.request(&worker.authority), self.connect, self.pool_idle).await;
        let sent = match sent {
            Err(ExchangeError::Stale(_)) => {
                proxy.metrics.retries.inc(Retry::Stale);
                worker.pool.send_anew(self.request(&worker.authority), self.connect).await
            }
            sent => sent,
        };
        match sent {
            Ok(response) => {
                placed.report(Event::Answered);
                if let Some(booking) = &mut placed.booking {
                    booking.commit(proxy.clock.now());
                }
                Ok(response)
            }
            Err(cause) => {
                let (event, kind) = match cause {
                    ExchangeError::Connect(_) => (Event::ConnectFailed, FailureKind::Connect),
                    ExchangeError::Stale(_) | ExchangeError::Broken(_) | ExchangeError::Nonsense(_) => {
                        (Event::Broke, FailureKind::BeforeHead)
                    }
                };
                worker.metrics.failed(kind);
                placed.report(event);
                Err(ProxyError::Worker { worker: worker.config.url.to_string(), cause })
            }
        }
    }
}
