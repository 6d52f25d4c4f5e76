//! Follows the EndpointSlices of one entry of `workers.kubernetes`: lists them, watches from there, and lists anew when the watch
//! ends, breaks, falls silent or expires, and every `workers.kubernetes_api.resync` in any case.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{FutureExt, Stream, StreamExt};
use k8s_openapi::api::discovery::v1::{Endpoint as ApiEndpoint, EndpointPort, EndpointSlice};
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use tokio::time::{Instant, timeout, timeout_at};
use tower::util::MapResponseLayer;

use super::endpoints::{Endpoint, Fault, Found, Pod, Port, Slice, Slices};
use super::{Ear, Failure};
use crate::config::{self, Kubernetes, KubernetesApi, Origin, Scheme};
use crate::fleet::roster::Member;
use crate::metrics::Trouble;

/// Where every pod finds what it needs for the API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// To connect to the API server, and for a whole list.
const CONNECT: Duration = Duration::from_secs(5);
const LIST: Duration = Duration::from_secs(15);
/// The API server is asked to end a watch when all is to be listed anew; if it does not within this time, nobody is there.
const GRACE: Duration = Duration::from_secs(2);
/// A watch that ends sooner did not work.
const LIVED: Duration = Duration::from_secs(1);
/// For longer than this it is not left alone, whatever it says: somebody has to notice that it is back.
const LONGEST_WISH: Duration = Duration::from_secs(60);
/// What is told of the API server's own words.
const WORDS: usize = 200;
/// Longest that a watch may be asked to last: the API server's own limit is five minutes.
const LONGEST_WATCH: u64 = 290;

/// Whether the API server can be asked, as far as files and environment tell. To be called within a runtime.
pub(super) fn check(workers: &config::Workers) -> Result<(), String> {
    workers.kubernetes.iter().try_for_each(|source| open(source, &workers.kubernetes_api).map(drop))
}

/// How the API server is reached.
fn reach(api: &KubernetesApi) -> Result<kube::Config, String> {
    let url = match &api.url {
        Some(url) => url.clone(),
        None => url_of_the_cluster()?,
    };
    let url: http::Uri = url.parse().map_err(|error| format!("{url} is not an address: {error}"))?;
    let file = |key: &str, named: &Option<PathBuf>, usual: &str| match named {
        // In the clear, and without a token, only where the address says so.
        None if url.scheme_str() == Some("http") => Ok(None),
        named => {
            let path = named.clone().unwrap_or_else(|| Path::new(ACCOUNT).join(usual));
            match std::fs::metadata(&path) {
                Ok(_) => Ok(Some(path)),
                Err(error) => Err(format!("{} cannot be read: {error}; see {key}", path.display())),
            }
        }
    };
    let ca = file("workers.kubernetes_api.ca", &api.ca, "ca.crt")?;
    let token = file("workers.kubernetes_api.token_file", &api.token_file, "token")?;
    let mut config = kube::Config::new(url);
    config.root_cert_file = ca;
    config.auth_info.token_file = token.map(|path| path.to_string_lossy().into_owned());
    config.connect_timeout = Some(CONNECT);
    // What is tried again and when is this module's business.
    config.default_retry = false;
    Ok(config)
}

fn url_of_the_cluster() -> Result<String, String> {
    let read = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    match (read("KUBERNETES_SERVICE_HOST"), read("KUBERNETES_SERVICE_PORT")) {
        (Some(host), Some(port)) => Ok(match host.parse() {
            Ok(IpAddr::V6(address)) => format!("https://[{address}]:{port}"),
            _ => format!("https://{host}:{port}"),
        }),
        _ => Err("the environment names no API server, so this is no pod; give workers.kubernetes_api.url"
            .to_owned()),
    }
}

fn namespace(source: &Kubernetes) -> Result<String, String> {
    if let Some(namespace) = &source.namespace {
        return Ok(namespace.clone());
    }
    let path = Path::new(ACCOUNT).join("namespace");
    match std::fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        _ => Err(format!(
            "{source} needs a `namespace`, since {} does not tell the router's own",
            path.display()
        )),
    }
}

/// The slices that can be asked for.
struct Door {
    slices: Api<EndpointSlice>,
    /// For how many seconds the API server wants to be left alone, as its last answer said.
    retry_after: Arc<AtomicU64>,
}

pub(super) async fn follow(mut ear: Ear, source: Kubernetes, api: KubernetesApi) {
    let mut opened: Option<Door> = None;
    loop {
        let door = match opened.take().map_or_else(|| open(&source, &api), Ok) {
            Ok(door) => door,
            Err(why) => {
                ear.failed(&Failure::new(Trouble::Unreachable, why));
                ear.pause(Duration::ZERO).await;
                continue;
            }
        };
        match list_and_watch(&mut ear, &source, &door, api.resync).await {
            Ok(()) => opened = Some(door),
            Err(failure) => {
                // Listing anew is the cure.
                if failure.trouble == Trouble::Expired && ear.pause == super::FIRST_PAUSE {
                    ear.metrics.failed(failure.trouble);
                } else {
                    ear.failed(&failure);
                }
                let wanted = match failure.status {
                    Some(429 | 503) => Duration::from_secs(door.retry_after.load(Ordering::Relaxed)),
                    _ => Duration::ZERO,
                };
                ear.pause(wanted.min(LONGEST_WISH)).await;
                // The token in the file may be another one by now, which a new client reads at once.
                opened = (failure.status != Some(401)).then_some(door);
            }
        }
    }
}

fn open(source: &Kubernetes, api: &KubernetesApi) -> Result<Door, String> {
    let (config, namespace) = (reach(api)?, namespace(source)?);
    let retry_after = Arc::new(AtomicU64::new(0));
    let heard = retry_after.clone();
    let listen = MapResponseLayer::new(move |response: http::Response<_>| {
        let wish = response
            .headers()
            .get(http::header::RETRY_AFTER)
            .and_then(|wish| wish.to_str().ok()?.parse().ok());
        heard.store(wish.unwrap_or(0), Ordering::Relaxed);
        response
    });
    let client = kube::client::ClientBuilder::try_from(config)
        .map_err(|error| format!("no client of the API server: {}", root(&error)))?
        .with_layer(&listen)
        .build();
    Ok(Door { slices: Api::namespaced(client, &namespace), retry_after })
}

/// One round: a list, and a watch from there until it is time for the next.
async fn list_and_watch(
    ear: &mut Ear,
    source: &Kubernetes,
    door: &Door,
    resync: Duration,
) -> Result<(), Failure> {
    let late = |_| Failure::new(Trouble::Unreachable, "the API server did not answer in time");
    let selector = source.selector();
    // Spread, so that replicas do not ask all at once.
    let resync = resync.mul_f64(rand::random_range(0.9..1.0));
    let due = Instant::now() + resync;

    let params = ListParams::default().labels(&selector);
    let list =
        timeout(LIST, door.slices.list(&params)).await.map_err(late)?.map_err(|error| failure(&error))?;
    let version = list.metadata.resource_version.unwrap_or_default();
    let mut slices = Slices::of(list.items.iter().filter_map(read));
    tell(ear, source, &slices);

    // Rounded up: one that ends before it is due is one that broke.
    let seconds = (resync.as_secs_f64().ceil() as u64).clamp(1, LONGEST_WATCH) as u32;
    let params = WatchParams::default().labels(&selector).timeout(seconds);
    let watching = door.slices.watch(&params, &version);
    let events = timeout(LIST, watching).await.map_err(late)?.map_err(|error| failure(&error))?;
    watch(ear, source, &mut slices, events, due).await?;
    ear.calm();
    Ok(())
}

async fn watch(
    ear: &mut Ear,
    source: &Kubernetes,
    slices: &mut Slices,
    events: impl Stream<Item = kube::Result<WatchEvent<EndpointSlice>>>,
    due: Instant,
) -> Result<(), Failure> {
    let began = Instant::now();
    // One that lives so long is a good one, whatever ends it; one that does not is no reason to ask again as soon as before.
    let mut unsure = Some(began + LIVED);
    let mut events = pin!(events);
    loop {
        let event = timeout_at(unsure.unwrap_or(due + GRACE), events.next()).await;
        if unsure.is_some_and(|lived| Instant::now() >= lived) {
            unsure = None;
            ear.calm();
            if event.is_err() {
                continue;
            }
        }
        let Ok(event) = event else {
            return Err(Failure::new(
                Trouble::Silent,
                "the API server neither tells anything nor ends its watch",
            ));
        };
        let Some(event) = event else {
            // What it tells at once is no reason to ask again at once.
            let soon = began.elapsed() < LIVED && Instant::now() < due;
            return if soon { Err(Failure::new(Trouble::Broken, "the watch ended at once")) } else { Ok(()) };
        };
        let mut changed = apply(slices, event)?;
        // Whatever else has come already is taken in one step with it.
        while let Some(Some(event)) = events.next().now_or_never() {
            changed |= apply(slices, event)?;
        }
        if changed {
            tell(ear, source, slices);
        }
        if Instant::now() >= due {
            return Ok(());
        }
    }
}

fn apply(slices: &mut Slices, event: kube::Result<WatchEvent<EndpointSlice>>) -> Result<bool, Failure> {
    match event.map_err(|error| failure(&error))? {
        WatchEvent::Added(slice) | WatchEvent::Modified(slice) => match read(&slice) {
            Some((name, slice)) => slices.put(name, slice),
            None => return Ok(false),
        },
        WatchEvent::Deleted(slice) => slices.remove(slice.metadata.name.as_deref().unwrap_or_default()),
        WatchEvent::Bookmark(_) => return Ok(false),
        WatchEvent::Error(status) => return Err(refused(&status)),
    }
    Ok(true)
}

fn tell(ear: &mut Ear, source: &Kubernetes, slices: &Slices) {
    let (found, fault) = slices.workers(&source.port);
    let members = found.into_iter().map(|found| member(found, source)).collect();
    let fault = fault.map(|fault| match fault {
        Fault::Port(why) => Failure::new(Trouble::Port, why),
        Fault::Nobody(why) => Failure::new(Trouble::Absent, why),
    });
    let fault = fault.or_else(|| {
        let why = || format!("no EndpointSlice has the labels {}", source.selector());
        slices.is_empty().then(|| Failure::new(Trouble::Absent, why()))
    });
    ear.heard(members, fault);
}

fn member(found: Found, source: &Kubernetes) -> Member {
    let url = Origin::at(source.scheme == Scheme::Https, found.address, found.port);
    let worker =
        config::Worker { url, capacity_tokens: source.capacity_tokens, prefill_speed: source.prefill_speed };
    Member { worker, pod: found.pod, zone: found.zone, intake: found.intake }
}

fn failure(error: &kube::Error) -> Failure {
    let (trouble, what) = match error {
        kube::Error::Api(status) => return refused(status),
        kube::Error::SerdeError(_) | kube::Error::LinesCodecMaxLineLengthExceeded => {
            (Trouble::Malformed, "the API server's answer cannot be read")
        }
        kube::Error::ReadEvents(_) => (Trouble::Broken, "the API server cannot be heard"),
        _ => (Trouble::Unreachable, "the API server cannot be heard"),
    };
    Failure::new(trouble, format!("{what}: {}", root(error)))
}

/// The outer errors say only that something failed.
fn root(error: &kube::Error) -> String {
    let mut error: &dyn std::error::Error = error;
    while let Some(cause) = error.source() {
        error = cause;
    }
    error.to_string()
}

fn refused(status: &kube::core::Status) -> Failure {
    let trouble = match status.code {
        // Anything in JSON passes for such an object, and this one is none.
        0 => return Failure::new(Trouble::Malformed, "the API server's answer is no event of a watch"),
        410 => Trouble::Expired,
        _ => Trouble::Refused,
    };
    let words: String = status.message.chars().take(WORDS).collect();
    let failure = Failure::new(trouble, format!("the API server answers {}: {words}", status.code));
    Failure { status: Some(status.code), ..failure }
}

/// What matters of a slice, with its name. `None` for one of names, which nobody uses, or without its Service.
fn read(slice: &EndpointSlice) -> Option<(Arc<str>, Slice)> {
    let name = slice.metadata.name.as_deref()?;
    let labels = slice.metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get("kubernetes.io/service-name"));
    let is_tcp = |port: &&EndpointPort| port.protocol.as_deref().unwrap_or("TCP") == "TCP";
    let ports = slice.ports.iter().flatten().filter(is_tcp).filter_map(|port| {
        let number = port.port.and_then(|number| u16::try_from(number).ok()).filter(|number| *number > 0)?;
        Some(Port { name: port.name.clone().unwrap_or_default(), number })
    });
    let slice = Slice {
        service: service.map_or(name, String::as_str).into(),
        ports: ports.collect(),
        other_ports: !slice.ports.iter().flatten().all(|port| is_tcp(&port)),
        names: slice.address_type == "FQDN",
        endpoints: slice.endpoints.iter().filter_map(read_endpoint).collect(),
    };
    Some((name.into(), slice))
}

fn read_endpoint(endpoint: &ApiEndpoint) -> Option<Endpoint> {
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let target = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
    let pod = target.and_then(|target| {
        Some(Pod { name: target.name.as_deref()?.into(), uid: target.uid.as_deref()?.into() })
    });
    Some(Endpoint {
        address: endpoint.addresses.first()?.parse().ok()?,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        pod,
        zone: endpoint.zone.as_deref().map(Arc::from),
    })
}
