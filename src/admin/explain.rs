//! What a decision is made of: `POST /explain` for a request that goes nowhere, `GET /decisions` for the last ones that were made, and
//! `GET /prefixes` for where the prefixes live that are asked for most.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::json;

use super::answer::{Page, object, page, text};
use crate::config::Mode;
use crate::core::prompt::{Endpoint, Opaque};
use crate::metrics::{Fallback, Label};
use crate::proxy::Proxy;
use crate::proxy::decisions::Unexplained;
use crate::proxy::route::Route;

/// Prefixes that are shown unless another number is asked for.
const PREFIXES: usize = 32;

/// The value of a query's key.
fn asked<'q>(query: Option<&'q str>, key: &str) -> Option<&'q str> {
    let pairs = query.unwrap_or_default().split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(name, _)| *name == key).map(|(_, value)| value)
}

/// `?mode=` and `?path=` of a request to explain: by the mode that it would go by, and as whatever the body looks like, if they are
/// absent.
struct How {
    mode: Option<Mode>,
    endpoint: Option<Endpoint>,
}

impl How {
    fn read(query: Option<&str>) -> Result<How, &'static str> {
        let mode = match asked(query, "mode") {
            None => None,
            Some("kv") => Some(Mode::Kv),
            Some("random") => Some(Mode::Random),
            Some(_) => return Err("mode: unknown; kv or random\n"),
        };
        let endpoint = match asked(query, "path").map(|path| Route::of(&Method::POST, path)) {
            None => None,
            Some(Route::Routed(endpoint)) => Some(endpoint),
            Some(_) => {
                return Err("path: /v1/chat/completions, /v1/completions, /v1/responses or /v1/messages\n");
            }
        };
        Ok(How { mode, endpoint })
    }
}

/// The body is that of a request; answers where it would go now, and why.
pub(super) async fn explain(proxy: Arc<Proxy>, request: Request<Incoming>) -> Page {
    let config = proxy.config.load_full();
    let How { mode, endpoint } = match How::read(request.uri().query()) {
        Ok(how) => how,
        Err(why) => return text(StatusCode::BAD_REQUEST, why),
    };
    let body = match Limited::new(request.into_body(), config.limits.body).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => {
            return text(StatusCode::BAD_REQUEST, &format!("the body cannot be read: {error}\n"));
        }
    };
    // A large body takes milliseconds, and the runtime's threads have requests to move.
    let explained = tokio::task::spawn_blocking(move || proxy.explain(endpoint, &body, mode)).await;
    match explained {
        Ok(Ok(explanation)) => json_page(&explanation),
        Ok(Err(Unexplained::NoWorker)) => {
            text(StatusCode::SERVICE_UNAVAILABLE, "no worker can take such a request now\n")
        }
        Ok(Err(Unexplained::Unread(opaque))) => {
            let reason = Fallback::from(opaque).as_str();
            let why = match opaque {
                Opaque::Json => "it is not a JSON object",
                Opaque::Depth => "it is nested too deep",
                Opaque::Shape => "it has no prompt of a known shape",
                Opaque::Stored => "its prompt goes on from something that only a worker has",
            };
            let said =
                format!("the prompt cannot be read: {why}; such a request is routed by load ({reason})\n");
            text(StatusCode::UNPROCESSABLE_ENTITY, &said)
        }
        // A panic there has printed where it was.
        Err(_) => text(StatusCode::INTERNAL_SERVER_ERROR, "the decision could not be worked out\n"),
    }
}

/// The last decisions, newest first; `?last=` limits how many.
pub(super) fn decisions(proxy: &Proxy, query: Option<&str>) -> Page {
    let last = match asked(query, "last").map(str::parse) {
        None => usize::MAX,
        Some(Ok(last)) => last,
        Some(Err(_)) => return text(StatusCode::BAD_REQUEST, "last: must be a number\n"),
    };
    object(StatusCode::OK, &json!({"decisions": proxy.decisions.last(last)}))
}

/// Where the prefixes live that are asked for most; `?most=` says how many.
pub(super) fn prefixes(proxy: &Proxy, query: Option<&str>) -> Page {
    let most = match asked(query, "most").map(str::parse) {
        None => PREFIXES,
        Some(Ok(most)) => most,
        Some(Err(_)) => return text(StatusCode::BAD_REQUEST, "most: must be a number\n"),
    };
    object(StatusCode::OK, &json!({"prefixes": proxy.homes(most)}))
}

fn json_page(value: &impl Serialize) -> Page {
    match serde_json::to_string_pretty(value) {
        Ok(text) => page(StatusCode::OK, "application/json", text + "\n"),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("it cannot be shown: {error}\n")),
    }
}
