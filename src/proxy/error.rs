//! What can go wrong with a request, and what its client is told: a neutral message in OpenAI's shape. Addresses, causes and
//! anything of the request stay in the log.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;
use thiserror::Error;

use super::complaints::Complaints;
use super::patience::GivenUp;
use super::relay::ResponseBody;
use crate::core::prompt::Endpoint;
use crate::fleet::connection::ExchangeError;
use crate::fleet::probe;
use crate::metrics::Outcome;

/// Why a stream ends before its end.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Abrupt {
    /// The worker broke off, or was given up.
    Broken,
    /// It took longer than `timeouts.response`, whoever was slow.
    Late,
    /// This process ends.
    Leaving,
}

impl Abrupt {
    fn code_and_message(self) -> (&'static str, &'static str) {
        match self {
            Abrupt::Broken => {
                ("stream_broken", "The inference server broke off in the middle of the answer.")
            }
            Abrupt::Late => ("gateway_timeout", "The answer took longer than it may; it is not complete."),
            Abrupt::Leaving => ("shutting_down", "The service is shutting down; the answer is not complete."),
        }
    }

    /// How the request has ended.
    pub fn outcome(self) -> Outcome {
        match self {
            Abrupt::Broken => Outcome::WorkerFailed,
            Abrupt::Late | Abrupt::Leaving => Outcome::Cut,
        }
    }
}

/// The event that ends a stream before its end, in the words of the endpoint's dialect, after `lead`.
pub fn stream_event(endpoint: Option<Endpoint>, lead: &str, why: Abrupt) -> Bytes {
    let (code, message) = why.code_and_message();
    let error = json!({"message": message, "type": "server_error", "param": null, "code": code});
    Bytes::from(match endpoint {
        Some(Endpoint::Messages) => {
            let data = json!({"type": "error", "error": {"type": "api_error", "message": message}});
            format!("{lead}event: error\ndata: {data}\n\n")
        }
        Some(Endpoint::Responses) => {
            let data =
                json!({"type": "error", "code": code, "message": message, "param": null, "error": error});
            format!("{lead}event: error\ndata: {data}\n\n")
        }
        Some(Endpoint::Chat | Endpoint::Completions) | None => {
            format!("{lead}data: {}\n\n", json!({ "error": error }))
        }
    })
}

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
    #[error("a router's probe: whoever probes takes this router for a worker")]
    Router,
    #[error("this path controls the engine and is not served here")]
    ControlPath,
    #[error("the request target is not a path")]
    Target,
    #[error("the request names more than one host")]
    Hosts,
    #[error("the request body has a transfer coding beside chunked")]
    Coding,
    /// Nobody is healthy, or everybody healthy was tried.
    #[error("no worker can take the request")]
    NoWorker,
    /// Every place is taken; seen by clients as [`ProxyError::Overloaded`].
    #[error("every place at the workers is taken")]
    Full,
    /// More of bodies is held than may be.
    #[error("the request bodies held at once have reached their limit of {limit} bytes")]
    NoRoom { limit: usize },
    #[error("the queue is full, or the wait in it was too long")]
    Overloaded,
    #[error("worker {worker}: {cause}")]
    Worker {
        worker: String,
        #[source]
        cause: ExchangeError,
    },
    #[error("worker {worker} was given up: {why}")]
    GivenUp { worker: String, why: GivenUp },
    /// Out of sockets on this side; no worker is at fault.
    #[error("worker {worker}: {cause}")]
    NoSocket { worker: String, cause: ExchangeError },
    #[error("this process ends")]
    Leaving,
    #[error("a fault of the proxy itself")]
    Internal,
}

/// What follows from an error.
struct Facts {
    origin: Origin,
    status: StatusCode,
    outcome: Outcome,
    /// A word for programs.
    code: &'static str,
    /// What the client is told.
    message: Cow<'static, str>,
}

impl ProxyError {
    /// The one table of what follows from which error.
    fn facts(&self) -> Facts {
        use Origin::{Client, Proxy, Worker};
        use Outcome::{ClientGone, Cut, Internal, Refused, Shed, Unavailable, WorkerFailed};
        let (origin, status, outcome, code, message) = match self {
            ProxyError::BodyTooLarge { limit } => {
                let message =
                    format!("The request body is larger than the limit of {limit} bytes (limits.body).");
                return Facts {
                    origin: Client,
                    status: StatusCode::PAYLOAD_TOO_LARGE,
                    outcome: Refused,
                    code: "request_too_large",
                    message: message.into(),
                };
            }
            ProxyError::BodyStalled(_) => {
                (Client, 408, Refused, "request_timeout", "The request body did not arrive in time.")
            }
            ProxyError::BodyBroken(_) => {
                (Client, 400, ClientGone, "invalid_body", "The request body could not be read.")
            }
            ProxyError::ControlPath => {
                (Client, 403, Refused, "path_not_allowed", "This path is not served here.")
            }
            ProxyError::Router => {
                (Client, 508, Refused, "loop_detected", "This is a router, and no inference server.")
            }
            ProxyError::Target => {
                (Client, 400, Refused, "invalid_target", "The request target is not a path.")
            }
            ProxyError::Hosts => {
                (Client, 400, Refused, "invalid_host", "The request names more than one host.")
            }
            ProxyError::Coding => (
                Client,
                501,
                Refused,
                "unsupported_coding",
                "Transfer codings other than chunked are not supported.",
            ),
            ProxyError::NoWorker => (
                Proxy,
                503,
                Unavailable,
                "no_server_available",
                "No inference server is available at the moment. Try again later.",
            ),
            ProxyError::Leaving | ProxyError::GivenUp { why: GivenUp::Leaving, .. } => {
                (Proxy, 503, Cut, "shutting_down", "The service is shutting down. Try again.")
            }
            ProxyError::Full
            | ProxyError::Overloaded
            | ProxyError::NoRoom { .. }
            | ProxyError::NoSocket { .. } => {
                (Proxy, 503, Shed, "overloaded", "Too many requests are waiting. Try again later.")
            }
            ProxyError::Worker { .. } | ProxyError::GivenUp { why: GivenUp::Lost, .. } => (
                Worker,
                502,
                WorkerFailed,
                "bad_gateway",
                "The inference server could not be reached or broke off.",
            ),
            ProxyError::GivenUp { why: GivenUp::Silent | GivenUp::Late, .. } => {
                (Worker, 504, WorkerFailed, "gateway_timeout", "The inference server did not answer in time.")
            }
            ProxyError::Internal => {
                (Proxy, 500, Internal, "internal_error", "Something went wrong on our side.")
            }
        };
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Facts { origin, status, outcome, code, message: message.into() }
    }

    pub fn outcome(&self) -> Outcome {
        self.facts().outcome
    }

    /// What its client gets.
    pub fn status(&self) -> StatusCode {
        self.facts().status
    }

    /// Whether another worker may be asked, the client having seen nothing. If no connection could be opened, always: nobody
    /// has begun. If the worker lost the request, doing it again is safe if it is `repeatable`.
    pub fn may_go_elsewhere(&self, repeatable: bool) -> bool {
        match self {
            ProxyError::Worker { cause, .. } => match cause {
                ExchangeError::Connect(_) | ExchangeError::Insecure(_) => true,
                ExchangeError::Broken(_) | ExchangeError::Stale(_) | ExchangeError::Dying => repeatable,
                ExchangeError::Nonsense(_) | ExchangeError::Unasked | ExchangeError::Local(_) => false,
            },
            ProxyError::GivenUp { why: GivenUp::Lost, .. } => repeatable,
            _ => false,
        }
    }

    /// The request was not read to its end, so nothing can follow it on its connection.
    pub fn ends_connection(&self) -> bool {
        matches!(self, ProxyError::BodyStalled(_) | ProxyError::BodyBroken(_))
    }

    /// The response for the client.
    pub fn render(&self) -> Response<ResponseBody> {
        let Facts { origin, status, code, message, .. } = self.facts();
        let kind = if status.is_client_error() || origin == Origin::Client {
            "invalid_request_error"
        } else {
            "server_error"
        };
        let error = json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
        let mut response = Response::new(ResponseBody::whole(Bytes::from(error.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if matches!(self, ProxyError::Router) {
            headers.insert(probe::ROUTER, HeaderValue::from_static("warmroute"));
        }
        response
    }

    /// Tells the log, at the level that the fault deserves.
    pub fn log(&self, complaints: &Complaints) {
        let Facts { origin, code, .. } = self.facts();
        match origin {
            Origin::Client => tracing::debug!("request refused: {self}"),
            Origin::Worker => complaints.warn(code, self.worker(), &format_args!("request failed: {self}")),
            Origin::Proxy => {
                complaints.warn(code, self.worker(), &format_args!("request not served: {self}"))
            }
        }
    }

    fn worker(&self) -> &str {
        match self {
            ProxyError::Worker { worker, .. }
            | ProxyError::GivenUp { worker, .. }
            | ProxyError::NoSocket { worker, .. } => worker,
            _ => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_stream_is_an_event_in_the_endpoints_dialect() {
        let event = |endpoint, lead| {
            String::from_utf8(stream_event(endpoint, lead, Abrupt::Broken).to_vec()).unwrap()
        };
        let leaving = stream_event(Some(Endpoint::Chat), "", Abrupt::Leaving);
        assert!(String::from_utf8_lossy(&leaving).contains("\"code\":\"shutting_down\""));
        assert!(event(Some(Endpoint::Chat), "\n\n").starts_with("\n\ndata: {\"error\":{"));
        assert!(event(None, "").starts_with("data: {\"error\":{"));
        for endpoint in [Endpoint::Messages, Endpoint::Responses] {
            let event = event(Some(endpoint), "");
            let data = event.strip_prefix("event: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
            let data: serde_json::Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], "error");
            assert!(data["error"]["message"].is_string());
        }
    }
}
