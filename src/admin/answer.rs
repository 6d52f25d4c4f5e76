//! The operator's answers: text, JSON, or whatever else, made whole.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::Value;

pub(super) type Page = Response<Full<Bytes>>;

pub(super) fn page(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Page {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub(super) fn text(status: StatusCode, body: &str) -> Page {
    page(status, "text/plain; charset=utf-8", body.to_owned())
}

pub(super) fn object(status: StatusCode, value: &Value) -> Page {
    page(status, "application/json", format!("{value:#}\n"))
}
