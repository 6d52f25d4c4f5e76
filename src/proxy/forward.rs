//! The middle of a request's way: from its head to the worker's answer.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header, response};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::ask_usage::ask_for_usage;
use super::body::{self, Caps, Held};
use super::error::ProxyError;
use super::failover::{self, Answered};
use super::headers::{self, UpstreamHead};
use super::hide_usage::WithoutUsage;
use super::note::Note;
use super::patience::Limits;
use super::place::{Asked, Placed};
use super::relay::{Dialect, Relay, ResponseBody};
use super::route::Route;
use super::tunnel::Tunnelled;
use super::upstream::Upstream;
use super::watch::{Watch, is_event_stream};
use super::{Client, Proxy};
use crate::core::prompt::Endpoint;
use crate::fleet::answer::Answer;
use crate::fleet::health::Event;
use crate::fleet::probe;

/// Larger bodies are read apart from the runtime's threads, which have other requests to move meanwhile. To read so much takes
/// from 0.06 ms (text) to 0.6 ms (token ids); to hand it to another thread, some hundredths.
const READ_AT_ONCE: usize = 256 << 10;

/// A request with what the connection and the stack know of it.
pub struct Inbound {
    pub request: Request<Incoming>,
    pub client: Arc<Client>,
    pub route: Route,
    pub note: Note,
    pub arrived: Instant,
}

/// Finds a worker for the request and gives its answer.
///
/// # Errors
/// See [`ProxyError`].
pub async fn forward(proxy: Arc<Proxy>, inbound: Inbound) -> Result<Response<ResponseBody>, ProxyError> {
    let Inbound { request, client, route, note, arrived } = inbound;
    let endpoint = match route {
        Route::Blocked => return Err(ProxyError::ControlPath),
        Route::Routed(endpoint) => Some(endpoint),
        // Passed on, it would come back: from a worker that is this router, in a circle.
        Route::Plain if probe::is_of_a_router(request.headers()) => return Err(ProxyError::Router),
        Route::Plain => None,
    };
    let config = proxy.config.load_full();
    // What is given up before the first wait takes no room in what waits, which is moved as a whole.
    let (mut upstream, incoming, waits) = {
        let (head, incoming) = request.into_parts();
        let waits = head.headers.contains_key(header::EXPECT);
        let mut head = UpstreamHead::of(head, &client.forwarded, rand::random())?;
        note.identified(&head);
        note.pass_on(&mut head.headers);
        let upstream = Upstream {
            repeatable: endpoint.is_some() || head.method.is_safe(),
            head,
            body: Bytes::new(),
            held: Held::none(&proxy.metrics.body_bytes),
            connect: config.timeouts.connect,
            pool_idle: config.timeouts.pool_idle,
            limits: Limits::of(&config),
        };
        (upstream, incoming, waits)
    };
    let caps =
        Caps { each: config.limits.body, all: config.limits.bodies, idle: config.timeouts.client_body };
    upstream.body = body::read(incoming, waits, &caps, &mut upstream.held).await?;

    let wants_usage = config.feedback.ask_for_usage;
    let (asked, added) = read_prompt(&proxy, endpoint, &upstream.body, wants_usage).await?;
    note.asked(&asked);
    let hides = added.is_some();
    if let Some(changed) = added {
        upstream.body = changed;
    }
    let Answered { response, patience, placed } =
        failover::send(&proxy, &asked, &upstream, &client, &note).await?;

    let (mut head, answer) = response.into_parts();
    note.answered(head.status);
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return switch(head, answer, placed, &client).await;
    }
    headers::clean_response(&mut head, &placed.worker.authority);
    if let Some(id) = upstream.head.request_id() {
        head.headers.entry(headers::REQUEST_ID).or_insert_with(|| id.clone());
    }
    // A worker's own would be another proxy's, or a forgery.
    head.headers.remove(headers::DECISION);
    if config.explain.header
        && let Ok(words) = HeaderValue::try_from(placed.in_words())
    {
        head.headers.insert(headers::DECISION, words);
    }
    let watch = Watch::new(placed, asked, &head, arrived, note, proxy);
    let streams = is_event_stream(&head);
    let relay = Relay::new(answer, patience, watch, streams.then_some(Dialect(endpoint)));
    let body = if hides && streams && head.status == StatusCode::OK {
        head.headers.remove(header::CONTENT_LENGTH);
        ResponseBody::WithoutUsage(Box::new(WithoutUsage::new(relay)))
    } else {
        ResponseBody::Relayed(Box::new(relay))
    };
    Ok(Response::from_parts(head, body))
}

/// Reads what placement needs, and makes the body that asks for usage if that is wanted and the client did not.
async fn read_prompt(
    proxy: &Arc<Proxy>,
    endpoint: Option<Endpoint>,
    body: &Bytes,
    wants_usage: bool,
) -> Result<(Asked, Option<Bytes>), ProxyError> {
    let read = move |proxy: &Proxy, body: &Bytes| {
        let asked = proxy.read_ask(endpoint, body);
        let added = endpoint.filter(|_| wants_usage && asked.ask.streams);
        let added = added.and_then(|endpoint| ask_for_usage(endpoint, body));
        (asked, added)
    };
    if body.len() <= READ_AT_ONCE {
        return Ok(read(proxy, body));
    }
    let _turn = proxy.large_reads.acquire().await.map_err(|_| ProxyError::Internal)?;
    let (proxy, body) = (proxy.clone(), body.clone());
    // A panic there has printed where it was.
    let read = tokio::task::spawn_blocking(move || read(&proxy, &body)).await;
    let (mut asked, added) = read.map_err(|_| ProxyError::Internal)?;
    asked.apart = asked.reading;
    Ok((asked, added))
}

/// The worker has switched protocols: leaves its socket for the client's connection to be joined with, once the head is
/// written there.
async fn switch(
    mut head: response::Parts,
    answer: Answer,
    mut placed: Box<Placed>,
    client: &Client,
) -> Result<Response<ResponseBody>, ProxyError> {
    let worker = answer.into_tunnel().ok_or(ProxyError::Internal)?;
    placed.report(Event::Answered);
    headers::clean_response(&mut head, &placed.worker.authority);
    // hyper's own handle on the worker's connection is of no use any more, and would be taken for the client's.
    head.extensions.clear();
    *client.tunnel.lock() = Some(Tunnelled { worker, placed });
    Ok(Response::from_parts(head, ResponseBody::whole(Bytes::new())))
}
