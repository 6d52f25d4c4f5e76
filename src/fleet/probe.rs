//! Active health probes: one task per worker asks its health page at intervals, each time on a new connection, since a
//! worker that is shutting down goes on serving the old ones.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use tokio::time::{MissedTickBehavior, timeout};

use super::Fleet;
use super::connection::ExchangeError;
use super::framing::Outgoing;
use super::health::Event;
use super::news::News;
use super::worker::Worker;
use crate::config::Secret;

/// Says in an answer that a router gave it, in the place of a worker's.
pub const ROUTER: HeaderName = HeaderName::from_static("x-warmroute-router");
/// By which a router knows another one's probe, or its own.
const AGENT: &str = "warmroute-probe";

/// Whether a request is the probe of a router, which takes whoever gets it for a worker.
pub fn is_of_a_router(headers: &HeaderMap) -> bool {
    headers.get(header::USER_AGENT).is_some_and(|agent| agent == AGENT)
}

/// The time to the next probe after a refused connection, until the worker counts as unreachable.
const AGAIN: Duration = Duration::from_millis(250);

/// Probes every worker for as long as it is polled; follows the worker list and the settings. One that has left the list is
/// probed until its last request has ended.
pub async fn run(fleet: Arc<Fleet>, key: Option<Secret>, connect: Duration) {
    let task = |worker| probe_one(fleet.clone(), Arc::downgrade(&worker), key.clone(), connect);
    fleet.for_each_worker(true, task).await;
}

async fn probe_one(fleet: Arc<Fleet>, worker: Weak<Worker>, key: Option<Secret>, connect: Duration) {
    let settings = fleet.health_settings();
    let Some(interval) = settings.interval else { return };
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said: Option<String> = None;
    let mut refused = 0;
    loop {
        // A refused connection is looked into at once: it may be the first sign of a worker that is going.
        if (1..settings.request_failures).contains(&refused) {
            tokio::time::sleep(interval.min(AGAIN)).await;
        } else {
            ticks.tick().await;
        }
        let Some(worker) = worker.upgrade() else { return };
        let request = probe_request(&worker, &settings.path, key.as_ref());
        let asked = timeout(settings.timeout, worker.pool.send_anew(request, connect)).await;
        let (event, fault) = match asked {
            Ok(Ok(response)) if response.headers().contains_key(ROUTER) => (
                Some(Event::ProbeFailed),
                Some("is answered by this router or another one, which is no worker: give the workers a Service that selects none of the router's pods".to_owned()),
            ),
            Ok(Ok(response)) if response.status().is_success() => (Some(Event::ProbePassed), None),
            Ok(Ok(response)) => (Some(Event::ProbeFailed), Some(format!("answered {}", response.status()))),
            // That says nothing of the worker.
            Ok(Err(error @ ExchangeError::Local(_))) => (None, Some(error.to_string())),
            Ok(Err(error @ ExchangeError::Connect(_))) => {
                fleet.exchange_failed(&worker, &error);
                (Some(Event::Unreachable), Some(error.to_string()))
            }
            Ok(Err(error @ ExchangeError::Insecure(_))) => (Some(Event::Insecure), Some(error.to_string())),
            Ok(Err(error)) => (Some(Event::ProbeFailed), Some(error.to_string())),
            Err(_) => (Some(Event::ProbeFailed), Some("did not answer in time".to_owned())),
        };
        refused = if event == Some(Event::Unreachable) { refused + 1 } else { 0 };
        // Said once for each new fault, not at each probe.
        if let Some(fault) = &fault
            && said.as_ref() != Some(fault)
        {
            fleet.tell(&worker, News::ProbeFailed { path: settings.path.clone(), fault: fault.clone() });
        }
        if let Some(event) = event {
            fleet.report(&worker, event);
        }
        said = fault;
    }
}

fn probe_request(worker: &Worker, path: &str, key: Option<&Secret>) -> Outgoing {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    headers.insert(header::USER_AGENT, HeaderValue::from_static(AGENT));
    if let Some(key) = key.and_then(Secret::bearer) {
        headers.insert(header::AUTHORIZATION, key);
    }
    let path = path.parse().expect("the config takes paths only");
    Outgoing::new(&Method::GET, &path, &worker.authority, &headers, Bytes::new())
}
