//! The heads of requests and responses on their way through: what belongs to one hop stays on it (RFC 9110, 7.6.1), the rest
//! is not touched.

use std::net::SocketAddr;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::response;
use http::uri::PathAndQuery;
use http::{Method, StatusCode, Uri, Version};
use smallvec::SmallVec;

use super::error::ProxyError;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Says where an answer comes from and why (`explain.header`).
pub const DECISION: HeaderName = HeaderName::from_static("x-warmroute-decision");

const ADDED_NAMES: usize = 4;
/// What a worker is told besides, where nobody has said it yet.
static ADDED: [HeaderName; ADDED_NAMES] = [FORWARDED_FOR, FORWARDED_PROTO, FORWARDED_HOST, REQUEST_ID];

/// A request's head as a worker gets it, but for the worker's own name.
#[derive(Clone, Debug)]
pub struct UpstreamHead {
    pub method: Method,
    pub target: Uri,
    /// The client's. `Host` is still among them; it is never sent.
    pub headers: HeaderMap,
    /// Of the names in [`ADDED`]. Apart, as a map of names would be searched for each, and grow.
    added: [Option<HeaderValue>; ADDED_NAMES],
}

impl UpstreamHead {
    /// Turns the client's head into the worker's. `random` makes a request id where the client sent none.
    ///
    /// # Errors
    /// If the target is not a path (`CONNECT`), if more than one host is named, or if the body has a coding that stays on it: hyper
    /// takes `chunked` off alone.
    pub fn of(head: Parts, forwarded: &Forwarded, random: u128) -> Result<UpstreamHead, ProxyError> {
        let Parts { method, uri, mut headers, version, .. } = head;
        if method == Method::CONNECT {
            return Err(ProxyError::Target);
        }
        let present = Present::of(&headers);
        if present.repeated && headers.get_all(header::HOST).iter().nth(1).is_some() {
            return Err(ProxyError::Hosts);
        }
        if present.coding {
            let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
            if codings.next().is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
                || codings.next().is_some()
            {
                return Err(ProxyError::Coding);
            }
            headers.remove(header::TRANSFER_ENCODING);
        }
        let asked_host = match uri.authority() {
            // An absolute target names the host; it is never where the request is sent.
            Some(authority) => HeaderValue::try_from(authority.as_str()).ok(),
            None => headers.get(header::HOST).cloned(),
        };
        let asked = version == Version::HTTP_11 && present.connection;
        let switch = if asked { asked_switch(&headers) } else { None };
        present.remove_hop_by_hop(&mut headers);
        if let Some(protocol) = switch {
            ask_to_switch(&mut headers, protocol);
        }
        if present.expect {
            headers.remove(header::EXPECT);
        }
        if version == Version::HTTP_2 {
            join_cookies(&mut headers);
        }
        // What `Connection` named is no longer there.
        let said = if present.connection { Present::of(&headers).added } else { present.added };
        let [told_for, told_proto, told_host, told_id] = said;
        if told_for {
            forwarded.follow(&mut headers);
        }
        let added = [
            (!told_for).then(|| forwarded.address.clone()),
            (!told_proto).then(|| forwarded.proto.clone()),
            asked_host.filter(|_| !told_host),
            (!told_id).then(|| made_id(random)),
        ];
        Ok(UpstreamHead { method, target: Uri::from(path_of(uri)), headers, added })
    }

    pub fn request_id(&self) -> Option<&HeaderValue> {
        let [.., id] = &self.added;
        id.as_ref().or_else(|| self.headers.get(REQUEST_ID))
    }

    /// What is sent besides `headers`.
    pub fn added(&self) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> + Clone {
        ADDED.iter().zip(&self.added).filter_map(|(name, value)| Some((name, value.as_ref()?)))
    }
}

/// The target as a path. An absolute one may have none (RFC 9112, 3.2.1): then it is the root.
fn path_of(uri: Uri) -> PathAndQuery {
    let root = PathAndQuery::from_static("/");
    let Some(path) = uri.into_parts().path_and_query else { return root };
    match path.as_str() {
        // An empty one says so too.
        "/" => root,
        rooted if rooted.starts_with(['/', '*']) => path,
        query => PathAndQuery::try_from(format!("/{query}")).unwrap_or(root),
    }
}

/// 32 hexadecimal digits.
fn made_id(random: u128) -> HeaderValue {
    let mut digits = [0; 32];
    for (at, digit) in digits.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(random >> (124 - 4 * at)) as usize & 15];
    }
    HeaderValue::from_bytes(&digits).expect("digits are a header's value")
}

/// For whom the requests of one connection are sent.
#[derive(Debug)]
pub struct Forwarded {
    address: HeaderValue,
    proto: HeaderValue,
}

impl Forwarded {
    /// `proto` is what the client speaks: `http` or `https`.
    pub fn new(peer: SocketAddr, proto: &'static str) -> Forwarded {
        let address = peer.ip().to_canonical().to_string();
        let address = HeaderValue::try_from(address).expect("an address is a header's value");
        Forwarded { address, proto: HeaderValue::from_static(proto) }
    }

    /// Adds the client to those for whom an outer proxy says that it asks.
    fn follow(&self, headers: &mut HeaderMap) {
        let mut chain = Vec::new();
        for before in headers.get_all(FORWARDED_FOR) {
            chain.extend_from_slice(before.as_bytes());
            chain.extend_from_slice(b", ");
        }
        chain.extend_from_slice(self.address.as_bytes());
        if let Ok(chain) = HeaderValue::try_from(chain) {
            headers.insert(FORWARDED_FOR, chain);
        }
    }
}

/// Makes the response head of the worker called `authority` ready for the client.
pub fn clean_response(head: &mut response::Parts, authority: &HeaderValue) {
    let headers = &mut head.headers;
    let present = Present::of(headers);
    let switches = head.status == StatusCode::SWITCHING_PROTOCOLS;
    let switched = if switches { headers.remove(header::UPGRADE) } else { None };
    present.remove_hop_by_hop(headers);
    if let Some(protocol) = switched {
        ask_to_switch(headers, protocol);
    }
    // The body goes out in this side's own framing and version. A length beside a coding is void (RFC 9112, 6.3): the body
    // was read by its chunks, and must not be cut to that length.
    if present.coding {
        headers.remove(header::TRANSFER_ENCODING);
        headers.remove(header::CONTENT_LENGTH);
    }
    head.version = Version::HTTP_11;
    if head.status.is_redirection()
        && let Some(here) =
            headers.get(header::LOCATION).and_then(|location| without_origin(location, authority))
    {
        headers.insert(header::LOCATION, here);
    }
}

/// A location on the worker itself, without the worker's address: whatever name and scheme the client has for this proxy, a
/// path leads there.
fn without_origin(location: &HeaderValue, authority: &HeaderValue) -> Option<HeaderValue> {
    let location: Uri = location.to_str().ok()?.parse().ok()?;
    let there = location.authority()?.as_str();
    let same = there.eq_ignore_ascii_case(authority.to_str().ok()?)
        || there
            .strip_suffix(":80")
            .or_else(|| there.strip_suffix(":443"))
            .is_some_and(|host| host.as_bytes().eq_ignore_ascii_case(authority.as_bytes()));
    same.then(|| location.path_and_query()?.as_str().try_into().ok()).flatten()
}

/// The protocol that the client asks to switch to, if it is one that is let through: websockets. Another one (`h2c`) would
/// carry requests past this proxy.
fn asked_switch(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let asks =
        asks.flat_map(|value| value.split(',')).any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    headers
        .get(header::UPGRADE)
        .filter(|to| asks && to.as_bytes().eq_ignore_ascii_case(b"websocket"))
        .cloned()
}

fn ask_to_switch(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// HTTP/2 clients may send cookies one by one; HTTP/1.1 has one line for them (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() > 1
        && let Ok(whole) = HeaderValue::try_from(crumbs.join(b"; ".as_slice()))
    {
        headers.insert(header::COOKIE, whole);
    }
}

const ONE_HOP_NAMES: usize = 4;
/// Names that stay on one hop besides `Connection` and what that names.
static ONE_HOP: [HeaderName; ONE_HOP_NAMES] = [KEEP_ALIVE, PROXY_CONNECTION, header::TE, header::UPGRADE];

/// Which of the headers there are that something is done about. Most heads have few of them, and to go through the names once costs
/// less than to look for each.
#[derive(Default)]
struct Present {
    connection: bool,
    one_hop: [bool; ONE_HOP_NAMES],
    coding: bool,
    expect: bool,
    added: [bool; ADDED_NAMES],
    /// Some name has more than one line.
    repeated: bool,
}

impl Present {
    fn of(headers: &HeaderMap) -> Present {
        let mut present = Present { repeated: headers.len() > headers.keys_len(), ..Present::default() };
        for name in headers.keys() {
            present.connection |= name == header::CONNECTION;
            present.coding |= name == header::TRANSFER_ENCODING;
            present.expect |= name == header::EXPECT;
            for (present, of_one_hop) in present.one_hop.iter_mut().zip(&ONE_HOP) {
                *present |= name == of_one_hop;
            }
            for (present, added) in present.added.iter_mut().zip(&ADDED) {
                *present |= name == added;
            }
        }
        present
    }

    /// Removes what is for one connection only, with all that `Connection` names.
    fn remove_hop_by_hop(&self, headers: &mut HeaderMap) {
        if self.connection {
            remove_named(headers);
        }
        for (name, _) in ONE_HOP.iter().zip(self.one_hop).filter(|(_, present)| *present) {
            headers.remove(name);
        }
    }
}

/// Removes `Connection` and what it names.
fn remove_named(headers: &mut HeaderMap) {
    for line in headers.get_all(header::CONNECTION).iter().cloned().collect::<SmallVec<[HeaderValue; 2]>>() {
        for name in line.to_str().unwrap_or_default().split(',').map(str::trim) {
            let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { continue };
            // These frame or address the message itself; a client cannot have them taken away.
            if name != header::CONTENT_LENGTH && name != header::HOST {
                headers.remove(name);
            }
        }
    }
    headers.remove(header::CONNECTION);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn upstream(uri: &str, headers: &[(&str, &str)]) -> UpstreamHead {
        UpstreamHead::of(parts("POST", uri, headers), &client(), 7).unwrap()
    }

    /// All that is sent with it.
    fn sent(mut head: UpstreamHead) -> HeaderMap {
        let added: Vec<_> = head.added().map(|(name, value)| (name.clone(), value.clone())).collect();
        assert!(added.iter().all(|(name, _)| !head.headers.contains_key(name)), "said twice");
        head.headers.remove(header::HOST);
        head.headers.extend(added);
        head.headers
    }

    fn client() -> Forwarded {
        Forwarded::new("10.1.2.3:4567".parse().unwrap(), "http")
    }

    #[test]
    fn a_worker_is_always_asked_for_a_path() {
        for (uri, target) in [
            ("/a%2f/b?c=%20", "/a%2f/b?c=%20"),
            ("//a", "//a"),
            ("*", "*"),
            ("http://a", "/"),
            ("http://a#b", "/"),
            ("http://a?b", "/?b"),
            ("other://a", "/"),
            ("other://a?b", "/?b"),
            ("a:80", "/"),
        ] {
            let sent = upstream(uri, &[]).target.into_parts().path_and_query.expect("a path");
            assert_eq!(sent.as_str(), target, "{uri}");
        }
    }

    #[test]
    fn what_is_for_one_hop_stays_on_it() {
        let head = upstream(
            "/v1/completions",
            &[
                ("host", "front.example"),
                ("connection", "close, X-Drop-Me"),
                ("connection", "content-length"),
                ("x-drop-me", "1"),
                ("keep-alive", "timeout=1"),
                ("te", "trailers"),
                ("proxy-connection", "keep-alive"),
                ("upgrade", "h2c"),
                ("transfer-encoding", "chunked"),
                ("expect", "100-continue"),
                ("content-length", "5"),
                ("authorization", "Bearer k"),
            ],
        );
        let sent = sent(head);
        let mut names: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "authorization",
                "content-length",
                "x-forwarded-for",
                "x-forwarded-host",
                "x-forwarded-proto",
                "x-request-id"
            ]
        );
        assert_eq!(sent["x-forwarded-for"], "10.1.2.3");
        assert_eq!(sent["x-forwarded-host"], "front.example");
        assert_eq!(sent["x-request-id"], "00000000000000000000000000000007");
    }

    #[test]
    fn what_an_outer_proxy_said_stays() {
        let head = upstream(
            "/",
            &[
                ("x-forwarded-for", "192.0.2.1"),
                ("x-forwarded-for", "192.0.2.2"),
                ("x-forwarded-proto", "https"),
                ("x-forwarded-host", "api.example"),
                ("x-request-id", "mine"),
                ("host", "inner"),
            ],
        );
        assert_eq!(head.request_id().unwrap(), "mine");
        let sent = sent(head);
        assert_eq!(sent["x-forwarded-for"], "192.0.2.1, 192.0.2.2, 10.1.2.3");
        assert_eq!(sent["x-forwarded-proto"], "https");
        assert_eq!(sent["x-forwarded-host"], "api.example");
        assert_eq!(sent["x-request-id"], "mine");
    }

    #[test]
    fn a_client_cannot_have_taken_away_what_is_added() {
        let head = upstream(
            "/",
            &[
                ("connection", "x-forwarded-for, x-request-id, x-forwarded-host, x-forwarded-proto, host"),
                ("x-forwarded-for", "192.0.2.1"),
                ("x-request-id", "mine"),
                ("host", "front.example"),
            ],
        );
        assert_eq!(head.request_id().unwrap(), "00000000000000000000000000000007");
        let sent = sent(head);
        assert_eq!(sent["x-forwarded-for"], "10.1.2.3");
        assert_eq!(sent["x-forwarded-proto"], "http");
        assert_eq!(sent["x-forwarded-host"], "front.example");
        assert_eq!(sent["x-request-id"], "00000000000000000000000000000007");
    }

    #[test]
    fn a_redirect_to_the_worker_itself_loses_its_address() {
        let located = |status: u16, location: &str| {
            let response =
                http::Response::builder().status(status).header("location", location).body(()).unwrap();
            let mut head = response.into_parts().0;
            clean_response(&mut head, &HeaderValue::from_static("10.0.0.7:8000"));
            head.headers["location"].to_str().unwrap().to_owned()
        };
        assert_eq!(located(307, "http://10.0.0.7:8000/v1/models?a=%20b"), "/v1/models?a=%20b");
        assert_eq!(located(307, "http://10.0.0.7:8000"), "/");
        for elsewhere in [
            "http://10.0.0.8:8000/x",
            "https://docs.example/x",
            "/v1/models",
            "../x",
            "http://10.0.0.7:8000.evil/",
        ] {
            assert_eq!(located(307, elsewhere), elsewhere);
        }
        assert_eq!(located(201, "http://10.0.0.7:8000/x"), "http://10.0.0.7:8000/x");
    }

    #[test]
    fn hosts_that_contradict_each_other_are_refused() {
        let two = parts("GET", "/", &[("host", "a"), ("host", "b")]);
        assert!(UpstreamHead::of(two, &client(), 7).is_err());
    }

    #[test]
    fn the_target_is_path_and_query_byte_for_byte() {
        for target in ["/v1/models", "/a%2Fb/../c//d;e?x=%20&y=a+b&&", "/?", "/%zz?q=/?"] {
            assert_eq!(upstream(target, &[]).target.to_string(), target);
        }
        let absolute = upstream("http://169.254.169.254:80/v1/models?x", &[("host", "front")]);
        assert_eq!(absolute.target.to_string(), "/v1/models?x");
        assert_eq!(sent(absolute)["x-forwarded-host"], "169.254.169.254:80");
        assert!(UpstreamHead::of(parts("CONNECT", "a:443", &[]), &client(), 7).is_err());
    }
}
