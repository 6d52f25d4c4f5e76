//! As much of an API server as the router asks for: lists of EndpointSlices and watches from a version on, with a log of changes
//! that can be forgotten (410).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::{Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

type Body = BoxBody<Bytes, Infallible>;

/// A change: its version, what the watch calls it, and the object.
type Change = (u64, &'static str, Value);

#[derive(Default)]
struct Store {
    slices: BTreeMap<String, Value>,
    log: Vec<Change>,
    /// Changes up to this version are forgotten.
    forgotten: u64,
    /// Changes are kept from watches.
    muted: bool,
    denied: bool,
    watch_denied: bool,
    /// What lists or watches are answered, in the place of what they ask for.
    instead: Option<(Asked, Instead)>,
    /// Tokens that are taken; `TOKEN` if empty.
    tokens: Vec<String>,
    lists: usize,
    asked: usize,
}

#[derive(Copy, Clone, PartialEq)]
pub enum Asked {
    List,
    Watch,
}

/// An answer: its status, the seconds of its `Retry-After` if any, and its body.
pub type Instead = (u16, Option<u64>, &'static str);

#[derive(Clone)]
pub struct Fake {
    pub address: SocketAddr,
    namespace: Arc<str>,
    store: Arc<Mutex<Store>>,
    version: Arc<watch::Sender<u64>>,
}

pub const TOKEN: &str = "the token of a fake ServiceAccount";

impl Fake {
    pub async fn start(namespace: &str) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port");
        let fake = Fake {
            address: listener.local_addr().expect("a bound listener has an address"),
            namespace: namespace.into(),
            store: Arc::default(),
            version: Arc::new(watch::Sender::new(1)),
        };
        let serving = fake.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let fake = serving.clone();
                let service = service_fn(move |request| {
                    let fake = fake.clone();
                    async move { Ok::<_, Infallible>(fake.answer(&request)) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        fake
    }

    pub fn put(&self, name: &str, mut slice: Value) {
        self.change(|store, version| {
            slice["metadata"]["resourceVersion"] = json!(version.to_string());
            let kind = if store.slices.insert(name.to_owned(), slice.clone()).is_some() {
                "MODIFIED"
            } else {
                "ADDED"
            };
            (kind, slice)
        });
    }

    pub fn delete(&self, name: &str) {
        self.change(|store, _| ("DELETED", store.slices.remove(name).expect("it is there")));
    }

    fn change(&self, change: impl FnOnce(&mut Store, u64) -> (&'static str, Value)) {
        let mut store = self.store.lock();
        let version = *self.version.borrow() + 1;
        let (kind, object) = change(&mut store, version);
        if !store.muted {
            store.log.push((version, kind, object));
        }
        self.version.send_replace(version);
    }

    /// From here on, watches are not told of changes.
    pub fn mute(&self, muted: bool) {
        self.store.lock().muted = muted;
    }

    /// Forgets what has changed: older watches have expired.
    pub fn forget(&self) {
        let mut store = self.store.lock();
        store.forgotten = *self.version.borrow();
        store.log.clear();
        drop(store);
        self.version.send_modify(|_| {});
    }

    /// Whoever asks has no right to.
    pub fn deny(&self, denied: bool) {
        self.store.lock().denied = denied;
    }

    /// Whoever asks may list and not watch.
    pub fn deny_watch(&self, denied: bool) {
        self.store.lock().watch_denied = denied;
    }

    pub fn answer_instead(&self, asked: Asked, instead: Instead) {
        self.store.lock().instead = Some((asked, instead));
    }

    pub fn take_only(&self, token: &str) {
        self.store.lock().tokens = vec![token.to_owned()];
    }

    /// How many requests there were, with whatever answer.
    pub fn asked(&self) -> usize {
        self.store.lock().asked
    }

    pub fn lists(&self) -> usize {
        self.store.lock().lists
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Body> {
        let query: BTreeMap<String, String> = request
            .uri()
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.replace("%2F", "/").replace("%3D", "=")))
            .collect();
        let (token, instead) = {
            let mut store = self.store.lock();
            store.asked += 1;
            (store.tokens.first().cloned().unwrap_or_else(|| TOKEN.to_owned()), store.instead)
        };
        let bearer = format!("Bearer {token}");
        let known = request.headers().get(header::AUTHORIZATION).is_some_and(|value| *value == *bearer);
        if !known {
            return refuse(StatusCode::UNAUTHORIZED, "Unauthorized");
        }
        let path = format!("/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices", self.namespace);
        if request.uri().path() != path {
            return refuse(StatusCode::NOT_FOUND, "not found");
        }
        let asked = if query.contains_key("watch") { Asked::Watch } else { Asked::List };
        if let Some((_, (status, retry_after, body))) = instead.filter(|(kind, _)| *kind == asked) {
            let mut response = Response::new(Full::from(body).boxed());
            *response.status_mut() = StatusCode::from_u16(status).expect("a status");
            let headers = response.headers_mut();
            retry_after.map(|seconds| headers.insert(header::RETRY_AFTER, seconds.into()));
            return response;
        }
        if self.store.lock().denied {
            return refuse(StatusCode::FORBIDDEN, "cannot list resource endpointslices");
        }
        let service =
            query.get("labelSelector").and_then(|labels| labels.strip_prefix("kubernetes.io/service-name="));
        let service = service.expect("the tests go by Service").to_owned();
        if query.contains_key("watch") {
            if self.store.lock().watch_denied {
                return refuse(StatusCode::FORBIDDEN, "cannot watch resource endpointslices");
            }
            let from = query["resourceVersion"].parse().expect("a version that was listed");
            let seconds = query["timeoutSeconds"].parse().expect("seconds");
            return Response::new(BodyExt::boxed(StreamBody::new(self.watch(service, from, seconds))));
        }
        let mut store = self.store.lock();
        store.lists += 1;
        let items: Vec<&Value> = store.slices.values().filter(|slice| is_of(slice, &service)).collect();
        let version = self.version.borrow().to_string();
        let list = json!({
            "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"resourceVersion": version}, "items": items,
        });
        Response::new(Full::from(list.to_string()).boxed())
    }

    fn watch(
        &self,
        service: String,
        from: u64,
        seconds: u64,
    ) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + use<> {
        let end = Instant::now() + Duration::from_secs(seconds);
        let (store, version) = (self.store.clone(), self.version.subscribe());
        let batches = stream::unfold((store, version, Some(from)), move |(store, mut version, from)| {
            let service = service.clone();
            async move {
                let from = from?;
                loop {
                    let now = *version.borrow_and_update();
                    let (lines, expired) = since(&store.lock(), &service, from);
                    if expired || !lines.is_empty() {
                        let next = (!expired).then_some(now);
                        return Some((lines, (store, version, next)));
                    }
                    if timeout_at(end, version.changed()).await.is_err() {
                        return None;
                    }
                }
            }
        });
        batches.map(|lines| Ok(Frame::data(Bytes::from(lines))))
    }
}

/// The lines of what has changed since, or that it is no longer known.
fn since(store: &Store, service: &str, from: u64) -> (String, bool) {
    if from < store.forgotten {
        let status = status(StatusCode::GONE, "too old resource version");
        return (format!("{}\n", json!({"type": "ERROR", "object": status})), true);
    }
    let changes = store.log.iter().filter(|(version, _, slice)| *version > from && is_of(slice, service));
    (
        changes.map(|(_, kind, object)| format!("{}\n", json!({"type": kind, "object": object}))).collect(),
        false,
    )
}

fn is_of(slice: &Value, service: &str) -> bool {
    slice["metadata"]["labels"]["kubernetes.io/service-name"] == service
}

fn status(status: StatusCode, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": status.canonical_reason(), "code": status.as_u16(),
    })
}

fn refuse(code: StatusCode, message: &str) -> Response<Body> {
    let mut response = Response::new(Full::from(status(code, message).to_string()).boxed());
    *response.status_mut() = code;
    response
}
