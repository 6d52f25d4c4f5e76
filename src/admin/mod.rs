//! The operator's listener, apart from the clients': metrics, health, what is known of the fleet, and the mode.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::config::Mode;
use crate::lifecycle::Phase;
use crate::proxy::Proxy;

/// Largest body that is read here: a mode's name.
const BODY: usize = 1 << 10;
/// For a head to come; scrapers that keep their connection ask again within a minute or so.
const HEAD_TIME: Duration = Duration::from_secs(120);

type Page = Response<Full<Bytes>>;

/// Serves until it is dropped.
pub async fn serve(listener: TcpListener, proxy: Arc<Proxy>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!("no admin connection could be taken: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let proxy = proxy.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| answer(proxy.clone(), request));
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
            let connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
            if let Err(error) = connection.await {
                tracing::debug!("admin connection ended: {error}");
            }
        });
    }
}

async fn answer(proxy: Arc<Proxy>, request: Request<Incoming>) -> Result<Page, Infallible> {
    let path = request.uri().path();
    Ok(match (request.method(), path) {
        (&Method::GET | &Method::HEAD, "/metrics") => metrics(proxy).await,
        (&Method::GET | &Method::HEAD, "/healthz") => text(StatusCode::OK, "ok\n"),
        (&Method::GET | &Method::HEAD, "/readyz") => readiness(&proxy),
        (&Method::GET, "/fleet") => object(StatusCode::OK, &fleet(&proxy)),
        (&Method::GET, "/config") => page(StatusCode::OK, "application/yaml", proxy.config.load().to_yaml()),
        (&Method::GET, "/mode") => object(StatusCode::OK, &json!({"mode": proxy.config.load().mode})),
        (&Method::PUT, "/mode") => set_mode(&proxy, request).await,
        (_, "/metrics" | "/healthz" | "/readyz" | "/fleet" | "/config" | "/mode") => {
            text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n")
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; there are /metrics /healthz /readyz /fleet /config /mode (GET, PUT)\n",
        ),
    })
}

/// The page for Prometheus. It is made apart from the threads that have requests to move: with many workers it takes some
/// milliseconds.
async fn metrics(proxy: Arc<Proxy>) -> Page {
    let render = move || {
        proxy.fleet.show();
        proxy.metrics.set_phase(proxy.drain.phase());
        proxy.metrics.render()
    };
    match tokio::task::spawn_blocking(render).await {
        Ok(rendered) => page(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", rendered),
        // A panic there has printed where it was.
        Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "the page could not be made\n"),
    }
}

/// Ready while a worker can take requests and the process is not on its way out.
fn readiness(proxy: &Proxy) -> Page {
    let fleet = proxy.fleet.snapshot();
    let (usable, all) = (fleet.eligible().len(), fleet.workers.len());
    if proxy.drain.phase() > Phase::Serving {
        text(StatusCode::SERVICE_UNAVAILABLE, "not ready: shutting down\n")
    } else if usable == 0 {
        text(StatusCode::SERVICE_UNAVAILABLE, &format!("not ready: none of {all} workers is usable\n"))
    } else {
        text(StatusCode::OK, &format!("ready: {usable} of {all} workers are usable\n"))
    }
}

fn fleet(proxy: &Proxy) -> Value {
    let now = proxy.clock.now();
    let workers: Vec<Value> = proxy
        .fleet
        .snapshot()
        .workers
        .iter()
        .map(|worker| {
            let state = worker.standing().as_str();
            let belief = proxy.planner.belief(worker.id, now).map(|belief| {
                json!({
                    "blocks": belief.blocks,
                    "held_tokens": belief.held_tokens,
                    "capacity_tokens": belief.capacity_tokens,
                    "queue_tokens": belief.queue_tokens.round(),
                    "prefill_tokens_per_s": belief.prefill_speed.map(f64::round),
                    "credit": belief.credit,
                    "foreign_share": belief.foreign_share,
                })
            });
            json!({
                "url": worker.url,
                "state": state,
                "usable": worker.is_eligible(),
                "models": worker.models().map(|models| models.names().to_vec()),
                "in_flight": worker.metrics.in_flight.get(),
                "requests": worker.metrics.requests.get(),
                "connections": worker.metrics.connections.get(),
                "believed": belief,
            })
        })
        .collect();
    json!({"mode": proxy.config.load().mode, "workers": workers})
}

/// Takes `kv`, `random`, or `{"mode": "kv"}`.
async fn set_mode(proxy: &Proxy, request: Request<Incoming>) -> Page {
    let body = match Limited::new(request.into_body(), BODY).collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => return text(StatusCode::BAD_REQUEST, "the body cannot be read; send kv or random\n"),
    };
    let asked = match serde_json::from_slice::<Value>(&body) {
        Ok(Value::Object(object)) => object.get("mode").and_then(Value::as_str).map(str::to_owned),
        Ok(Value::String(mode)) => Some(mode),
        _ => std::str::from_utf8(&body).ok().map(|text| text.trim().to_owned()),
    };
    let mode = match asked.as_deref() {
        Some("kv") => Mode::Kv,
        Some("random") => Mode::Random,
        _ => return text(StatusCode::BAD_REQUEST, "mode: unknown; send kv or random\n"),
    };
    proxy.set_mode(mode);
    tracing::info!(mode = mode.as_str(), "mode switched through the admin listener");
    object(StatusCode::OK, &json!({"mode": mode}))
}

fn page(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Page {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn text(status: StatusCode, body: &str) -> Page {
    page(status, "text/plain; charset=utf-8", body.to_owned())
}

fn object(status: StatusCode, value: &Value) -> Page {
    page(status, "application/json", format!("{value:#}\n"))
}
