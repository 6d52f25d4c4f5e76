//! Active health probes: one task per worker asks its health page at intervals, each time on a new connection, since a
//! worker that is shutting down goes on serving the old ones.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, header};
use http_body_util::Full;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, timeout};

use super::health::Event;
use super::worker::Worker;
use super::{Fleet, connection::Outgoing};
use crate::config::Secret;

/// Probes every worker for as long as it is polled; follows the worker list and the settings.
pub async fn run(fleet: Arc<Fleet>, key: Option<Secret>, connect: Duration) {
    let mut membership = fleet.membership();
    loop {
        membership.mark_unchanged();
        let mut probes = JoinSet::new();
        for worker in &fleet.snapshot().workers {
            probes.spawn(probe_one(fleet.clone(), worker.clone(), key.clone(), connect));
        }
        // Any change restarts the few tasks there are; the set ends them when it is dropped.
        if membership.changed().await.is_err() {
            return;
        }
    }
}

async fn probe_one(fleet: Arc<Fleet>, worker: Arc<Worker>, key: Option<Secret>, connect: Duration) {
    let settings = fleet.health_settings();
    let Some(interval) = settings.interval else { return };
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said: Option<String> = None;
    loop {
        ticks.tick().await;
        let request = probe_request(&worker, &settings.path, key.as_ref());
        let asked = timeout(settings.timeout, worker.pool.send_anew(request, connect)).await;
        let fault = match asked {
            Ok(Ok(response)) if response.status().is_success() => None,
            Ok(Ok(response)) => Some(format!("answered {}", response.status())),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("did not answer in time".to_owned()),
        };
        // Said once for each new fault, not at each probe.
        if let Some(fault) = &fault
            && said.as_ref() != Some(fault)
        {
            tracing::warn!(worker = %worker.config.url, path = settings.path, "health probe failed: {fault}");
        }
        fleet.report(&worker, if fault.is_none() { Event::ProbePassed } else { Event::ProbeFailed });
        said = fault;
    }
}

fn probe_request(worker: &Worker, path: &str, key: Option<&Secret>) -> Outgoing {
    let mut request = Request::new(Full::<Bytes>::default());
    *request.uri_mut() = path.parse().expect("the config takes paths only");
    request.headers_mut().insert(header::HOST, worker.authority.clone());
    request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    request.headers_mut().insert(header::USER_AGENT, HeaderValue::from_static("warmroute-probe"));
    if let Some(Secret(key)) = key
        && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {key}"))
    {
        value.set_sensitive(true);
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    request
}
