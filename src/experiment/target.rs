//! Where an experiment's requests go: the address of an HTTP/1.1 server, what every request to it carries, and the few
//! plain calls (`GET`, `POST` of JSON) that are made outside the measured load.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// A plain call (not the load) that has not been answered by then has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest answer of a plain call that is read; a `/metrics` page of a large engine has about 0.2 MB.
const CALL_BODY_LIMIT: usize = 16 << 20;

/// One HTTP/1.1 connection that requests can be sent on.
pub type Connection = SendRequest<Full<Bytes>>;

/// A server under test. Its name is resolved once, when it is made, so that no lookup is inside a measured time.
#[derive(Clone, Debug)]
pub struct Target {
    authority: String,
    path_prefix: String,
    /// Of each server: connections are made to them in turns.
    servers: Vec<Vec<SocketAddr>>,
    turn: Arc<AtomicUsize>,
    headers: HeaderMap,
}

impl Target {
    /// `urls` is `http://HOST[:PORT][/PATH]`, or several of them between commas: servers that are one target together, as replicas of
    /// a router are. The first stands for all in reports and in the `Host` of requests.
    ///
    /// # Errors
    /// If one of them is no such URL, its scheme is not `http`, or its host does not resolve.
    pub async fn resolve(urls: &str) -> Result<Target> {
        let mut parts = urls.split(',');
        let mut target = Target::resolve_one(parts.next().unwrap_or_default().trim()).await?;
        for url in parts {
            let other = Target::resolve_one(url.trim()).await?;
            if other.path_prefix != target.path_prefix {
                bail!("`{urls}`: the parts of one target must have the same path");
            }
            target.servers.extend(other.servers);
        }
        Ok(target)
    }

    /// A trailing `/v1` is dropped, since the paths of requests bring it along.
    async fn resolve_one(url: &str) -> Result<Target> {
        let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = with_scheme.parse().with_context(|| format!("`{url}` is not a URL"))?;
        if uri.scheme_str() != Some("http") {
            bail!("`{url}`: only http:// is spoken here");
        }
        let authority = uri.authority().with_context(|| format!("`{url}` has no host"))?;
        if authority.as_str().contains('@') || uri.query().is_some() || url.contains('#') {
            bail!("`{url}`: write it as http://HOST:PORT, without user, query or fragment");
        }
        let host = authority.host();
        // `uri.port_u16` takes a port that is no port for none.
        let port = match authority.as_str()[host.len()..].strip_prefix(':') {
            None => 80,
            Some(port) => match port.parse::<u16>() {
                Ok(port) if port > 0 => port,
                _ => bail!("`{url}`: the port is a number from 1 to 65535"),
            },
        };
        let bare_host = host.trim_start_matches('[').trim_end_matches(']');
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host((bare_host, port))
            .await
            .with_context(|| format!("cannot resolve `{host}` of `{url}`"))?
            .collect();
        let path = uri.path().trim_end_matches('/');
        let path_prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Target {
            authority: format!("{host}:{port}"),
            path_prefix,
            servers: vec![addresses],
            turn: Arc::default(),
            headers: HeaderMap::new(),
        })
    }

    /// Adds `NAME: VALUE` to every request.
    pub fn with_header(mut self, line: &str) -> Result<Target> {
        let (name, value) = line
            .split_once(':')
            .with_context(|| format!("header `{line}` is not of the form NAME: VALUE"))?;
        let name: HeaderName = name.trim().parse().with_context(|| format!("header name in `{line}`"))?;
        let value: HeaderValue = value.trim().parse().with_context(|| format!("value of header {name}"))?;
        self.headers.append(name, value);
        Ok(self)
    }

    /// `HOST:PORT`, by which reports name the target.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Opens a connection; the task that drives it ends with the last request on it.
    pub async fn connect(&self) -> std::io::Result<Connection> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let stream = TcpStream::connect(&self.servers[turn % self.servers.len()][..]).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        tokio::spawn(async move {
            // An error here reaches the request that is on the connection; nobody else waits for it.
            let _ = connection.await;
        });
        Ok(sender)
    }

    /// A request to `path`, with JSON unless `body` is empty.
    pub fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let has_body = !body.is_empty();
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        // Paths of load are constants; those of calls are checked there.
        *request.uri_mut() = self.uri(path).unwrap_or_default();
        let headers = request.headers_mut();
        headers.extend(self.headers.clone());
        if let Ok(host) = HeaderValue::from_str(&self.authority) {
            headers.insert(header::HOST, host);
        }
        if has_body {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        request
    }

    fn uri(&self, path: &str) -> Result<Uri, http::uri::InvalidUri> {
        format!("{}{}", self.path_prefix, path).try_into()
    }

    /// `GET path`, whole: the status and the body as text.
    pub async fn get(&self, path: &str) -> Result<(StatusCode, String)> {
        self.call(Method::GET, path, Bytes::new()).await
    }

    /// `POST path` with a JSON body, whole.
    pub async fn post(&self, path: &str, body: &Value) -> Result<(StatusCode, String)> {
        self.call(Method::POST, path, body.to_string().into()).await
    }

    /// `PUT path` with a plain body, whole.
    pub async fn post_bytes(&self, path: &str, body: Bytes) -> Result<(StatusCode, String)> {
        self.call(Method::POST, path, body).await
    }

    pub async fn put(&self, path: &str, body: &str) -> Result<(StatusCode, String)> {
        self.call(Method::PUT, path, Bytes::copy_from_slice(body.as_bytes())).await
    }

    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, String)> {
        let what = format!("{method} http://{}{}{path}", self.authority, self.path_prefix);
        self.uri(path).with_context(|| format!("`{path}` is not a path"))?;
        let exchange = async {
            let mut connection = self.connect().await.context("cannot connect")?;
            let response: Response<Incoming> =
                connection.send_request(self.request(method, path, body)).await.context("no answer")?;
            let status = response.status();
            let body = Limited::new(response.into_body(), CALL_BODY_LIMIT)
                .collect()
                .await
                .map_err(|error| anyhow::anyhow!("answer cut short: {error}"))?;
            anyhow::Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
        };
        match tokio::time::timeout(CALL_TIMEOUT, exchange).await {
            Ok(answer) => answer.with_context(|| what),
            Err(_) => bail!("{what}: no answer within {} s", CALL_TIMEOUT.as_secs()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "http://{}{}", self.authority, self.path_prefix)?;
        match self.servers.len() {
            1 => Ok(()),
            servers => write!(formatter, " and {} more", servers - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn takes_urls_as_people_write_them() {
        for (url, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
            ("http://127.0.0.1/base/v1", "http://127.0.0.1:80/base"),
            ("http://[::1]:81/", "http://[::1]:81"),
        ] {
            assert_eq!(Target::resolve(url).await.unwrap().to_string(), shown, "{url}");
        }
    }

    #[tokio::test]
    async fn names_what_is_wrong_with_a_url() {
        for (url, complaint) in [
            ("https://127.0.0.1", "only http://"),
            ("http://", "`http://`"),
            ("http://a b", "`http://a b`"),
            ("http://127.0.0.1:99999", "from 1 to 65535"),
            ("127.0.0.1:", "from 1 to 65535"),
            ("127.0.0.1:0", "from 1 to 65535"),
            ("[::1]:x", "`[::1]:x`"),
            ("http://me:word@127.0.0.1", "without user"),
            ("127.0.0.1/?a=b", "without user, query"),
            ("127.0.0.1:80,127.0.0.1:70000", "`127.0.0.1:70000`"),
        ] {
            let error = format!("{:#}", Target::resolve(url).await.unwrap_err());
            assert!(error.contains(complaint), "{url}: {error}");
        }
    }

    #[tokio::test]
    async fn several_servers_are_connected_to_in_turns() {
        let [one, other] = [0, 1].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [a, b] = [&one, &other].map(|server| server.local_addr().unwrap());
        let target = Target::resolve(&format!("http://{a},http://{b}")).await.unwrap();
        for _ in 0..3 {
            let _first = target.connect().await.unwrap();
            let _second = target.connect().await.unwrap();
            // Both have one waiting: an accept would hang otherwise.
            one.accept().unwrap();
            other.accept().unwrap();
        }
        assert_eq!(target.to_string(), format!("http://{a} and 1 more"));
        let error = Target::resolve(&format!("http://{a},http://{b}/other")).await.unwrap_err();
        assert!(error.to_string().contains("the same path"), "{error:#}");
    }

    #[tokio::test]
    async fn headers_go_on_every_request() {
        let target = Target::resolve("127.0.0.1:1").await.unwrap();
        let target = target.with_header("Authorization: Bearer abc").unwrap();
        let request = target.request(Method::GET, "/v1/models", Bytes::new());
        assert_eq!(request.headers()["authorization"], "Bearer abc");
        assert!(target.with_header("no colon").is_err());
    }
}
