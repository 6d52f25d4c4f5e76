//! What a decision is made of: `POST /explain` for a request that goes nowhere, `GET /decisions` for the last ones that were made, and
//! `GET /prefixes` for where the prefixes live that are asked for most.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::json;

use super::answer::{Page, object, page, text};
use super::body;
use super::query::Query;
use crate::config::Mode;
use crate::core::prompt::{Endpoint, Opaque};
use crate::metrics::{Fallback, Label};
use crate::proxy::Proxy;
use crate::proxy::decisions::Unexplained;
use crate::proxy::route::Route;

/// Prefixes that are shown unless another number is asked for.
const PREFIXES: usize = 32;

/// `?mode=` and `?path=` of a request to explain: by the mode that it would go by, and as whatever the body looks like, if they are
/// absent.
struct How {
    mode: Option<Mode>,
    endpoint: Option<Endpoint>,
}

impl How {
    fn read(query: Option<&str>) -> Result<How, String> {
        let query = Query::read(query, &["mode", "path"])?;
        let mode = match query.get("mode") {
            None => None,
            Some("kv") => Some(Mode::Kv),
            Some("random") => Some(Mode::Random),
            Some(_) => return Err("mode: unknown; kv or random\n".to_owned()),
        };
        let endpoint = match query.get("path").map(|path| Route::of(&Method::POST, path)) {
            None => None,
            Some(Route::Routed(endpoint)) => Some(endpoint),
            Some(_) => {
                let paths = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages";
                return Err(format!("path: unknown; {paths}\n"));
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
        Err(why) => return text(StatusCode::BAD_REQUEST, &why),
    };
    let (body, _held) = match body::read(&proxy, request, config.limits.body).await {
        Ok(read) => read,
        Err(refused) => return refused,
    };
    match proxy.explain_apart(endpoint, body, mode).await {
        Some(Ok(explanation)) => json_page(&explanation),
        Some(Err(Unexplained::NoWorker)) => {
            text(StatusCode::SERVICE_UNAVAILABLE, "no worker can take such a request now\n")
        }
        Some(Err(Unexplained::Unread(opaque))) => {
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
        None => text(StatusCode::INTERNAL_SERVER_ERROR, "the decision could not be worked out\n"),
    }
}

/// The last decisions, newest first; `?last=` limits how many.
pub(super) fn decisions(proxy: &Proxy, query: Option<&str>) -> Page {
    match Query::read(query, &["last"]).and_then(|query| query.number("last", usize::MAX)) {
        Ok(last) => object(StatusCode::OK, &json!({"decisions": proxy.decisions.last(last)})),
        Err(why) => text(StatusCode::BAD_REQUEST, &why),
    }
}

/// Where the prefixes live that are asked for most; `?most=` says how many.
pub(super) fn prefixes(proxy: &Proxy, query: Option<&str>) -> Page {
    match Query::read(query, &["most"]).and_then(|query| query.number("most", PREFIXES)) {
        Ok(most) => object(StatusCode::OK, &json!({"prefixes": proxy.homes(most)})),
        Err(why) => text(StatusCode::BAD_REQUEST, &why),
    }
}

fn json_page(value: &impl Serialize) -> Page {
    match serde_json::to_string_pretty(value) {
        Ok(text) => page(StatusCode::OK, "application/json", text + "\n"),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("it cannot be shown: {error}\n")),
    }
}
