//! Keeps other sites' pages from acting through the browser of an operator, who can reach the admin listener where they cannot.
//!
//! A page of another site is told by what browsers say of it. One whose own name its owner has pointed to this listener (DNS rebinding)
//! looks like the listener's own page, but for that name: so from browsers only names are taken that nobody outside can point anywhere, and
//! those in `admin_names`. Programs that are no browsers send no such headers, and are not asked.

use std::net::IpAddr;

use http::{HeaderMap, header};

/// Names under which no public name can be registered: one's own machine, local networks (RFC 6762, and ICANN's `internal`), and
/// Kubernetes' Services as their search domains have them.
const PRIVATE: [&str; 4] = ["localhost", "local", "internal", "svc"];

/// Why a request that would change something is refused, if it is. `names` are the listener's own.
pub(super) fn refusal(headers: &HeaderMap, names: &[String]) -> Option<String> {
    if is_of_another_site(headers) {
        return Some("refused: this was sent by a page of another site\n".to_owned());
    }
    if !headers.contains_key(header::ORIGIN) && !headers.contains_key("sec-fetch-site") {
        return None;
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    (!is_own_name(host, names)).then(|| {
        format!(
            "refused: the page was opened as `{host}`, and anybody may have pointed such a name here; open it by its address, or as \
             localhost, or put the name under admin_names in the config\n"
        )
    })
}

/// `host` is as in a `Host` header.
fn is_own_name(host: &str, names: &[String]) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
    let top = name.rsplit('.').next().unwrap_or_default();
    // One without a dot is somebody's on this network.
    address.parse::<IpAddr>().is_ok()
        || (!name.is_empty() && top == name)
        || PRIVATE.contains(&top)
        || names.contains(&name)
}

/// The request was made by a page of another site. Programs that are no browsers send neither header.
fn is_of_another_site(headers: &HeaderMap) -> bool {
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

    #[test]
    fn a_name_that_anybody_can_point_here_is_no_own_name() {
        let names = ["warmroute.example.com".to_owned()];
        for host in [
            "127.0.0.1:9090",
            "[::1]:9090",
            "10.0.0.7",
            "localhost:9090",
            "LOCALHOST.",
            "warmroute",
            "warmroute-admin.models.svc:9090",
            "warmroute-admin.models.svc.cluster.local:9090",
            "admin.corp.internal",
            "warmroute.example.com:443",
            "Warmroute.Example.Com",
        ] {
            assert!(is_own_name(host, &names), "{host}");
        }
        for host in [
            "evil.example:9090",
            "a.warmroute.example.com",
            "127.0.0.1.evil.example",
            "",
            ":9090",
            "local.dev",
        ] {
            assert!(!is_own_name(host, &names), "{host}");
        }
    }

    #[test]
    fn only_browsers_are_asked_by_which_name_they_came() {
        let refused = |pairs: &[(&'static str, &'static str)]| {
            let pairs = pairs.iter().map(|(name, value)| {
                (header::HeaderName::from_static(name), HeaderValue::from_static(value))
            });
            refusal(&pairs.collect(), &[])
        };
        let host = ("host", "evil.example:9090");
        assert_eq!(refused(&[host]), None);
        let why = refused(&[host, ("origin", "http://evil.example:9090")]).unwrap();
        assert!(why.contains("`evil.example:9090`") && why.contains("admin_names"), "{why}");
        assert!(refused(&[host, ("sec-fetch-site", "same-origin")]).is_some());
        assert!(refused(&[("sec-fetch-site", "same-origin")]).is_some(), "no name at all");
    }
}
