//! What can go wrong with a request, and what its client is told: a neutral message in OpenAI's shape. Addresses, causes and
//! anything of the request stay in the log.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;
use thiserror::Error;

use super::relay::ResponseBody;
use crate::fleet::connection::ExchangeError;
use crate::metrics::Outcome;

/// Whose fault it is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    Client,
    Worker,
    Proxy,
}

/// Why a request got no answer from a worker.
#[derive(Debug, Error)]
pub enum ProxyError {
    #[error("the request body is larger than the limit of {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("the request body stalled for {} s", .0.as_secs_f64())]
    BodyStalled(Duration),
    #[error("the request body broke off: {0}")]
    BodyBroken(#[source] hyper::Error),
    #[error("this path controls the engine and is not served here")]
    ControlPath,
    #[error("the request target is not a path")]
    Target,
    #[error("the request names more than one host")]
    Hosts,
    /// Nobody is healthy, or everybody healthy was tried.
    #[error("no worker can take the request")]
    NoWorker,
    #[error("worker {worker}: {cause}")]
    Worker {
        worker: String,
        #[source]
        cause: ExchangeError,
    },
    #[error("a fault of the proxy itself")]
    Internal,
}

impl ProxyError {
    pub fn origin(&self) -> Origin {
        use ProxyError::*;
        match self {
            BodyTooLarge { .. } | BodyStalled(_) | BodyBroken(_) | ControlPath | Target | Hosts => {
                Origin::Client
            }
            Worker { .. } => Origin::Worker,
            NoWorker | Internal => Origin::Proxy,
        }
    }

    pub fn outcome(&self) -> Outcome {
        use ProxyError::*;
        match self {
            BodyTooLarge { .. } | BodyStalled(_) | ControlPath | Target | Hosts => Outcome::Refused,
            BodyBroken(_) => Outcome::ClientGone,
            NoWorker => Outcome::Unavailable,
            Worker { .. } => Outcome::WorkerFailed,
            Internal => Outcome::Internal,
        }
    }

    /// Whether another worker may be asked, the client having seen nothing. If no connection could be opened, always: nobody
    /// has begun. If the worker broke off, what it did is lost, and doing it again is safe if the request is `repeatable`.
    pub fn may_go_elsewhere(&self, repeatable: bool) -> bool {
        match self {
            ProxyError::Worker { cause: ExchangeError::Connect(_), .. } => true,
            ProxyError::Worker { cause: ExchangeError::Broken(_) | ExchangeError::Stale(_), .. } => {
                repeatable
            }
            _ => false,
        }
    }

    pub fn status(&self) -> StatusCode {
        use ProxyError::*;
        match self {
            BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BodyStalled(_) => StatusCode::REQUEST_TIMEOUT,
            BodyBroken(_) | Target | Hosts => StatusCode::BAD_REQUEST,
            ControlPath => StatusCode::FORBIDDEN,
            NoWorker => StatusCode::SERVICE_UNAVAILABLE,
            Worker { .. } => StatusCode::BAD_GATEWAY,
            Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// What the client is told, and a word for programs.
    fn told(&self) -> (String, &'static str) {
        use ProxyError::*;
        let text = match self {
            BodyTooLarge { limit } => {
                return (
                    format!("The request body is larger than the limit of {limit} bytes (limits.body)."),
                    "request_too_large",
                );
            }
            BodyStalled(_) => ("The request body did not arrive in time.", "request_timeout"),
            BodyBroken(_) => ("The request body could not be read.", "invalid_body"),
            ControlPath => ("This path is not served here.", "path_not_allowed"),
            Target => ("The request target is not a path.", "invalid_target"),
            Hosts => ("The request names more than one host.", "invalid_host"),
            NoWorker => {
                ("No inference server is available at the moment. Try again later.", "no_server_available")
            }
            Worker { .. } => ("The inference server could not be reached or broke off.", "bad_gateway"),
            Internal => ("Something went wrong on our side.", "internal_error"),
        };
        (text.0.to_owned(), text.1)
    }

    /// The response for the client.
    pub fn render(&self) -> Response<ResponseBody> {
        let status = self.status();
        let (message, code) = self.told();
        let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
        let error = json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
        let mut response = Response::new(ResponseBody::whole(Bytes::from(error.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// One line in the log, at the level that the fault deserves.
    pub fn log(&self) {
        match self.origin() {
            Origin::Client => tracing::debug!("request refused: {self}"),
            Origin::Worker => tracing::warn!("request failed: {self}"),
            Origin::Proxy => tracing::warn!("request not served: {self}"),
        }
    }
}
