//! The operator's listener, apart from the clients': metrics, health, what is known of the fleet, and what an operator turns.

mod answer;
mod body;
mod explain;
mod fleet;
mod guard;
mod query;
mod series;
mod sharing;
mod status;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::MissedTickBehavior;

use crate::config::Mode;
use crate::lifecycle::Phase;
use crate::peers::READY_WITHIN;
use crate::proxy::Proxy;
use answer::{Page, object, page, text};
use query::Query;
use series::Series;

/// Largest body that is read here: a mode's name.
const BODY: usize = 1 << 10;
/// For a head to come; scrapers that keep their connection ask again within a minute or so.
const HEAD_TIME: Duration = Duration::from_secs(120);

const WORKERS: &str = "/workers/";

/// Serves until it is dropped.
pub async fn serve(listener: TcpListener, proxy: Arc<Proxy>) {
    let mut connections = tokio::task::JoinSet::new();
    let series = Arc::new(Series::new());
    let mut samples = tokio::time::interval(series::EVERY);
    samples.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    let message = format!("no admin connection could be taken: {error}");
                    proxy.complaints.warn("accept of the admin listener", "", &message);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
            _ = samples.tick() => {
                series.take(&proxy);
                continue;
            }
        };
        let (proxy, series) = (proxy.clone(), series.clone());
        connections.spawn(async move {
            let service = service_fn(move |request| answer(proxy.clone(), series.clone(), request));
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
            let connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
            if let Err(error) = connection.await {
                tracing::debug!("admin connection ended: {error}");
            }
        });
    }
}

async fn answer(
    proxy: Arc<Proxy>,
    series: Arc<Series>,
    request: Request<Incoming>,
) -> Result<Page, Infallible> {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if !reads && let Some(why) = guard::refusal(request.headers(), &proxy.config.load().admin_names) {
        return Ok(text(StatusCode::FORBIDDEN, &why));
    }
    let path = request.uri().path();
    if reads && let Some(file) = status::file(path) {
        return Ok(file);
    }
    // Of what is only asked for its head, hyper leaves the body out.
    let method = if reads { &Method::GET } else { request.method() };
    Ok(match (method, path) {
        (&Method::GET, "/metrics") => metrics(proxy).await,
        (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
        (&Method::GET, "/readyz") => readiness(&proxy),
        (&Method::GET, "/fleet") => object(StatusCode::OK, &fleet::fleet(&proxy)),
        (&Method::GET, "/series") => match since(request.uri().query()) {
            Ok(since) => object(StatusCode::OK, &series.tell(&proxy, since)),
            Err(why) => text(StatusCode::BAD_REQUEST, &why),
        },
        (&Method::GET, "/config") => page(StatusCode::OK, "application/yaml", proxy.config.load().to_yaml()),
        (&Method::GET, "/mode") => object(StatusCode::OK, &json!({"mode": proxy.config.load().mode})),
        (&Method::PUT, "/mode") => set_mode(&proxy, request).await,
        (&Method::GET, "/decisions") => explain::decisions(&proxy, request.uri().query()),
        (&Method::GET, "/prefixes") => explain::prefixes(&proxy, request.uri().query()),
        (&Method::POST, "/explain") => explain::explain(proxy, request).await,
        (&Method::POST, path) if path.starts_with(WORKERS) => {
            fleet::set_draining(&proxy, &path[WORKERS.len()..])
        }
        (_, path) => refused(path),
    })
}

/// For a path that is not there, or not by that method.
fn refused(path: &str) -> Page {
    let allowed = match path {
        "/mode" => "GET, HEAD, PUT",
        "/explain" => "POST",
        path if path.starts_with(WORKERS) => "POST",
        "/" | "/metrics" | "/healthz" | "/readyz" | "/fleet" | "/series" | "/config" | "/decisions"
        | "/prefixes" => "GET, HEAD",
        _ => {
            return text(
                StatusCode::NOT_FOUND,
                "not found; there are / (a page for browsers) /metrics /healthz /readyz /fleet /series /config /mode (GET, PUT) \
                 /decisions /prefixes /explain (POST) /workers/NAME/drain and /workers/NAME/resume (POST)\n",
            );
        }
    };
    let mut page = text(StatusCode::METHOD_NOT_ALLOWED, &format!("method not allowed; there is {allowed}\n"));
    page.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    page
}

/// The sample after which more are wanted; 0 if nothing is said.
fn since(query: Option<&str>) -> Result<u64, String> {
    Query::read(query, &["since"])?.number("since", 0)
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

/// Ready while a worker can take requests and the process is not on its way out; and not before every source of workers was asked once,
/// since others would be missed whose models are asked for.
fn readiness(proxy: &Proxy) -> Page {
    let awaited = proxy.fleet.awaited_sources();
    let fleet = proxy.fleet.snapshot();
    let (usable, all) = (fleet.eligible().len(), fleet.workers.len());
    if proxy.drain.phase() > Phase::Serving {
        text(StatusCode::SERVICE_UNAVAILABLE, "not ready: shutting down\n")
    } else if awaited > 0 {
        let message = format!("not ready: {awaited} sources of workers have not been asked yet\n");
        text(StatusCode::SERVICE_UNAVAILABLE, &message)
    } else if proxy.peers.as_ref().is_some_and(|peers| !peers.is_ready()) {
        text(StatusCode::SERVICE_UNAVAILABLE, &awaits_others(proxy))
    } else if usable == 0 {
        text(StatusCode::SERVICE_UNAVAILABLE, &format!("not ready: none of {all} workers usable\n"))
    } else {
        text(StatusCode::OK, &format!("ready: {usable} of {all} workers usable\n"))
    }
}

/// Others are waited for, but not for long.
fn awaits_others(proxy: &Proxy) -> String {
    let fault = proxy.peers.as_ref().and_then(|peers| peers.fault());
    match (fault, &proxy.config.load().sharing) {
        (Some((_, fault)), Some(sharing)) => format!(
            "not ready: what other routers have said cannot be read yet, but is not waited for longer than {READY_WITHIN:?}; the store {} fails: \
             {fault}\n",
            sharing.addresses()
        ),
        _ => "not ready: what other routers have said is being taken up\n".to_owned(),
    }
}

/// Takes `kv`, `random`, or `{"mode": "kv"}`.
async fn set_mode(proxy: &Proxy, request: Request<Incoming>) -> Page {
    let (body, _held) = match body::read(proxy, request, BODY).await {
        Ok(read) => read,
        Err(refused) => return refused,
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
