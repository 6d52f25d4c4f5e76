//! Keeps other sites' pages from acting through the browser of an operator, who can reach the admin listener where they cannot.

use http::{HeaderMap, header};

/// The request was made by a page of another site. Programs that are no browsers send neither header.
pub(super) fn is_of_another_site(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        // `none`: typed in by the operator.
        return !matches!(site.as_bytes(), b"same-origin" | b"none");
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let host = headers.get(header::HOST).map(|host| host.as_bytes()).unwrap_or_default();
    let authority =
        [&b"http://"[..], b"https://"].iter().find_map(|scheme| origin.as_bytes().strip_prefix(*scheme));
    // `null` is the origin of a page that hides where it is from.
    !authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn of_another_site(pairs: &[(&'static str, &'static str)]) -> bool {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), HeaderValue::from_static(value)));
        is_of_another_site(&pairs.collect())
    }

    #[test]
    fn only_the_own_page_and_programs_may_act() {
        let host = ("host", "127.0.0.1:9090");
        assert!(!of_another_site(&[host]));
        assert!(!of_another_site(&[host, ("origin", "http://127.0.0.1:9090")]));
        assert!(!of_another_site(&[host, ("sec-fetch-site", "same-origin")]));
        assert!(of_another_site(&[host, ("origin", "http://evil.example")]));
        assert!(
            of_another_site(&[host, ("origin", "http://127.0.0.1:8000")]),
            "another port is another site"
        );
        assert!(of_another_site(&[host, ("origin", "null")]));
        assert!(of_another_site(&[host, ("sec-fetch-site", "same-site")]));
        assert!(of_another_site(&[
            host,
            ("sec-fetch-site", "cross-site"),
            ("origin", "http://127.0.0.1:9090")
        ]));
        assert!(of_another_site(&[("origin", "http://evil.example")]));
    }
}
