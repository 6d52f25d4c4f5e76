//! The status page at `/`: static files that are part of the program, and what browsers are told about them.

use http::{HeaderValue, StatusCode, header};

use super::answer::{Page, page};

/// Nothing from elsewhere, no script or style in the markup, nobody's frame, no form that goes anywhere.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The file of the page at `path`, if there is one.
pub(super) fn file(path: &str) -> Option<Page> {
    let (kind, text) = match path {
        "/" => ("text/html; charset=utf-8", include_str!("status/index.html")),
        "/status.css" => ("text/css; charset=utf-8", include_str!("status/status.css")),
        "/status.js" => ("text/javascript; charset=utf-8", include_str!("status/status.js")),
        "/status.svg" => ("image/svg+xml", include_str!("status/status.svg")),
        _ => return None,
    };
    let mut page = page(StatusCode::OK, kind, text);
    let headers = page.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Some(page)
}
