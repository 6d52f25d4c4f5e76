//! The middle of a request's way: from its head to the worker's answer.

use std::sync::Arc;

use http::{Request, Response, header};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::error::ProxyError;
use super::failover::{self, Answered};
use super::headers::{self, UpstreamHead};
use super::patience::Limits;
use super::relay::{Dialect, Relay, ResponseBody};
use super::route::Route;
use super::upstream::Upstream;
use super::watch::{Watch, is_event_stream};
use super::{Client, Proxy, body};

/// A request with what the connection and the stack know of it.
pub struct Inbound {
    pub request: Request<Incoming>,
    pub client: Arc<Client>,
    pub route: Route,
    pub arrived: Instant,
}

/// Finds a worker for the request and gives its answer.
///
/// # Errors
/// See [`ProxyError`].
pub async fn forward(proxy: Arc<Proxy>, inbound: Inbound) -> Result<Response<ResponseBody>, ProxyError> {
    let Inbound { request, client, route, arrived } = inbound;
    let endpoint = match route {
        Route::Blocked => return Err(ProxyError::ControlPath),
        Route::Routed(endpoint) => Some(endpoint),
        Route::Plain => None,
    };
    let config = proxy.config.load_full();
    let (head, incoming) = request.into_parts();
    let waits = head.headers.contains_key(header::EXPECT);
    let head = UpstreamHead::of(head, client.peer, rand::random())?;
    let body = body::read(incoming, waits, config.limits.body, config.timeouts.client_body).await?;

    let asked = proxy.read_ask(endpoint, &body);
    let upstream = Upstream {
        repeatable: endpoint.is_some() || head.method.is_safe(),
        head,
        body,
        connect: config.timeouts.connect,
        pool_idle: config.timeouts.pool_idle,
        limits: Limits::of(&config),
    };
    let Answered { response, patience, placed } = failover::send(&proxy, &asked, &upstream, &client).await?;

    let (mut head, answer) = response.into_parts();
    headers::clean_response(&mut head, &placed.worker.authority);
    if let Some(id) = upstream.head.request_id() {
        head.headers.entry(headers::REQUEST_ID).or_insert_with(|| id.clone());
    }
    let watch = Watch::new(placed, asked, &head, arrived, proxy);
    let dialect = is_event_stream(&head).then_some(Dialect(endpoint));
    let relay = Relay::new(answer, patience, watch, dialect);
    Ok(Response::from_parts(head, ResponseBody::Relayed(Box::new(relay))))
}
