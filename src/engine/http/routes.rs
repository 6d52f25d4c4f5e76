//! Which paths there are, who may use them, and what each answers.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::header::{
    ALLOW, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, LOCATION, SERVER, VARY,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use super::body::{Busy, EngineBody, Ticket};
use super::error::ApiError;
use super::metrics::Metrics;
use super::request::{Kind, Reader};
use super::worker::{Command, Order, Shared, unix_now};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const JSON: &str = "application/json";

/// vLLM sets no limit; this one keeps a test from filling the memory.
const LONGEST_BODY: usize = 256 << 20;

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Route {
    Generate(Kind),
    Models,
    Health,
    Version,
    Load,
    Metrics,
    Tokenize,
    Detokenize,
    ResetPrefixCache,
}

/// Each path, the methods it takes (as an `allow` header names them) and its handler.
const ROUTES: [(&str, &str, Route); 11] = [
    ("/v1/chat/completions", "POST", Route::Generate(Kind::Chat)),
    ("/v1/completions", "POST", Route::Generate(Kind::Completion)),
    ("/v1/models", "GET", Route::Models),
    ("/health", "GET", Route::Health),
    ("/ping", "GET, POST", Route::Health),
    ("/version", "GET", Route::Version),
    ("/load", "GET", Route::Load),
    ("/metrics", "GET, HEAD", Route::Metrics),
    ("/tokenize", "POST", Route::Tokenize),
    ("/detokenize", "POST", Route::Detokenize),
    ("/reset_prefix_cache", "POST", Route::ResetPrefixCache),
];

fn find(path: &str) -> Option<(&'static str, Route)> {
    ROUTES.iter().find(|(known, ..)| *known == path).map(|&(_, methods, route)| (methods, route))
}

/// What is to be sent, before headers that all answers have.
enum Reply {
    Json(String),
    Text(String),
    Empty,
    Events(mpsc::UnboundedReceiver<Bytes>, Ticket),
}

/// Answers one request. `busy` is held until the answer has been sent.
pub(super) async fn serve(
    shared: Arc<Shared>,
    busy: Busy,
    request: Request<Incoming>,
) -> Result<Response<EngineBody>, Infallible> {
    let given_id = request.headers().get(REQUEST_ID).cloned();
    let redirect = redirect(&request);
    let head = request.method() == Method::HEAD;
    let outcome = match redirect {
        Some(_) => Ok(Reply::Empty),
        None => answer(&shared, request).await,
    };
    let mut response = match outcome {
        Ok(Reply::Json(body)) => whole(StatusCode::OK, JSON, body, busy),
        Ok(Reply::Text(_)) if head => {
            whole(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", "", busy)
        }
        Ok(Reply::Text(body)) => {
            whole(StatusCode::OK, "text/plain; version=1.0.0; charset=utf-8", body, busy)
        }
        Ok(Reply::Empty) => Response::new(EngineBody::whole("", busy)),
        Ok(Reply::Events(events, ticket)) => {
            let mut response = Response::new(EngineBody::stream(events, ticket, busy));
            let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Err(ApiError { status, body, allow }) => {
            let mut response = whole(status, JSON, body, busy);
            if let Some(allow) = allow {
                response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
            }
            response
        }
    };
    if let Some(location) = redirect {
        *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        response.headers_mut().insert(LOCATION, location);
    }
    let unauthorized = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
    if !unauthorized {
        headers.insert(VARY, HeaderValue::from_static("Origin"));
    }
    if shared.config.enable_request_id_headers {
        let id = given_id.or_else(|| HeaderValue::from_str(&fresh_id(&shared)).ok());
        headers.extend(id.map(|id| (REQUEST_ID, id)));
    }
    Ok(response)
}

fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>, busy: Busy) -> Response<EngineBody> {
    let mut response = Response::new(EngineBody::whole(body, busy));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A known path with a slash behind it is sent to the path without, by an absolute address.
fn redirect(request: &Request<Incoming>) -> Option<HeaderValue> {
    let path = request.uri().path().strip_suffix('/')?;
    find(path)?;
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    HeaderValue::from_str(&format!("http://{host}{path}")).ok()
}

async fn answer(shared: &Arc<Shared>, request: Request<Incoming>) -> Result<Reply, ApiError> {
    let path = request.uri().path();
    authorize(shared, &request)?;
    let (methods, route) = find(path).ok_or_else(ApiError::not_found)?;
    if !methods.split(", ").any(|method| method == request.method().as_str()) {
        // Of two methods vLLM names the first, as it has them.
        let allow = methods.split(", ").next().unwrap_or(methods);
        return Err(ApiError::method_not_allowed(allow));
    }
    match route {
        Route::Health => Ok(Reply::Empty),
        Route::Version => Ok(Reply::Json(r#"{"version":"0.32.0"}"#.to_owned())),
        Route::Load => {
            let load = shared.in_flight.load(Ordering::Relaxed);
            Ok(Reply::Json(format!(r#"{{"server_load":{load}}}"#)))
        }
        Route::Models => Ok(Reply::Json(models(shared))),
        Route::Metrics => metrics(shared).await,
        Route::ResetPrefixCache => {
            let success = ask(shared, Command::ResetPrefixCache).await?;
            Ok(Reply::Json(format!(r#"{{"success":{success}}}"#)))
        }
        Route::Tokenize => {
            let body = body(request).await?;
            let (tokens, texts) = reader(shared).tokens(&body)?;
            let max_model_len = shared.config.max_model_len();
            let reply = json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts});
            Ok(Reply::Json(reply.to_string()))
        }
        Route::Detokenize => {
            let body = body(request).await?;
            let prompt = reader(shared).detokenized(&body)?;
            Ok(Reply::Json(json!({ "prompt": prompt }).to_string()))
        }
        Route::Generate(kind) => generate(shared, kind, request).await,
    }
}

fn reader(shared: &Shared) -> Reader<'_> {
    Reader { config: &shared.config, tokenizer: &shared.tokenizer }
}

/// Only what is under /v1 is guarded, and not its preflights.
fn authorize(shared: &Shared, request: &Request<Incoming>) -> Result<(), ApiError> {
    let Some(key) = &shared.config.api_key else { return Ok(()) };
    if !request.uri().path().starts_with("/v1") || request.method() == Method::OPTIONS {
        return Ok(());
    }
    let given = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = given.and_then(|given| given.split_once(' '));
    let good = token.is_some_and(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer") && key.is(token));
    if good { Ok(()) } else { Err(ApiError::unauthorized()) }
}

async fn body(request: Request<Incoming>) -> Result<Bytes, ApiError> {
    let kind = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let media = kind.split(';').next().unwrap_or_default().trim();
    let is_json = media.eq_ignore_ascii_case(JSON);
    let body = Limited::new(request.into_body(), LONGEST_BODY).collect().await;
    let body = body.map_err(|_| ApiError::undecodable_body())?.to_bytes();
    if is_json { Ok(body) } else { Err(ApiError::content_type()) }
}

async fn ask<T>(shared: &Shared, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, ApiError> {
    let (reply, answer) = oneshot::channel();
    shared.commands.send(command(reply)).map_err(|_| ApiError::dead())?;
    answer.await.map_err(|_| ApiError::dead())
}

async fn metrics(shared: &Shared) -> Result<Reply, ApiError> {
    let mut page = ask(shared, Command::Gauges).await?;
    page.push_str(&Metrics::rejections(&shared.config.model, shared.rejected.load(Ordering::Relaxed)));
    Ok(Reply::Text(page))
}

async fn generate(shared: &Arc<Shared>, kind: Kind, request: Request<Incoming>) -> Result<Reply, ApiError> {
    let headers = request.headers().clone();
    let body = body(request).await?;
    let generation = reader(shared).generation(kind, &body)?;
    data_parallel_rank(&headers)?;
    let mut ticket = Ticket::take(shared).ok_or_else(ApiError::busy)?;
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
    let id = generation.id.clone().or(given).unwrap_or_else(|| fresh_id(shared));
    let prefix = if kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" };
    let stream = generation.stream;
    let (out, mut events) = mpsc::unbounded_channel();
    let order = Order { ticket: ticket.number, id: format!("{prefix}{id}"), generation, out };
    shared.commands.send(Command::Generate(Box::new(order))).map_err(|_| ApiError::dead())?;
    if stream {
        return Ok(Reply::Events(events, ticket));
    }
    let whole = events.recv().await.ok_or_else(ApiError::dead)?;
    ticket.done = true;
    // What was written is UTF-8, as it was made of strings.
    String::from_utf8(whole.into()).map(Reply::Json).map_err(|_| ApiError::dead())
}

/// There is one rank. What is not a number is ignored.
fn data_parallel_rank(headers: &HeaderMap) -> Result<(), ApiError> {
    let rank = headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok()?.parse::<i64>().ok());
    match rank {
        None | Some(0) => Ok(()),
        Some(rank) => {
            let message = format!("data_parallel_rank {rank} is out of range [0, 1).");
            Err(ApiError::bad_request(&message, None))
        }
    }
}

/// Sixteen hex digits that this worker has not used yet and other workers hardly ever do.
fn fresh_id(shared: &Shared) -> String {
    let number = shared.ids.fetch_add(1, Ordering::Relaxed);
    let mixed = (number ^ shared.started.to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{:016x}", mixed ^ (mixed >> 31))
}

fn models(shared: &Shared) -> String {
    let config = &shared.config;
    let created = unix_now() as u64;
    let adapters = config.lora_modules.iter().map(|name| (name, Some(&config.model)));
    let all = [(&config.model, None)].into_iter().chain(adapters).map(|(name, parent)| {
        let max_model_len = parent.is_none().then(|| config.max_model_len());
        let permission = format!(
            r#"{{"id":"modelperm-{}","object":"model_permission","created":{created},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}"#,
            fresh_id(shared)
        );
        format!(
            r#"{{"id":{0},"object":"model","created":{created},"owned_by":"vllm","root":{0},"parent":{1},"max_model_len":{2},"permission":[{permission}]}}"#,
            json!(name),
            json!(parent),
            json!(max_model_len)
        )
    });
    format!(r#"{{"object":"list","data":[{}]}}"#, all.collect::<Vec<_>>().join(","))
}
