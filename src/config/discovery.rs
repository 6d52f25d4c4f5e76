//! `workers.kubernetes`, `workers.dns`: where workers are found, beside those that are named one by one.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};

use super::{scalar, selector};

/// How workers of one source are spoken to, and what is told of them all.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    #[default]
    Http,
    Https,
}

/// One entry of `workers.kubernetes`: the endpoints of one Service, or of all whose EndpointSlices a selector picks.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Kubernetes {
    #[serde(flatten)]
    pub of: Slices,
    /// Where they are; the router's own namespace if absent.
    pub namespace: Option<String>,
    pub port: PortChoice,
    pub scheme: Scheme,
    /// KV cache size in tokens of each worker; learned if absent.
    pub capacity_tokens: Option<u64>,
    /// Prefill speed of each worker in tokens a second; learned if absent.
    pub prefill_speed: Option<f64>,
}

/// Which EndpointSlices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Slices {
    /// Those of the Service with this name.
    Service(String),
    /// Those with these labels, as `kubectl get endpointslices --selector` takes them.
    Selector(String),
}

impl Kubernetes {
    /// The selector for the API server.
    pub fn selector(&self) -> String {
        match &self.of {
            Slices::Service(name) => format!("kubernetes.io/service-name={name}"),
            Slices::Selector(selector) => selector.clone(),
        }
    }
}

impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("kubernetes:")?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        match &self.of {
            Slices::Service(name) => f.write_str(name)?,
            Slices::Selector(selector) => write!(f, "{selector}")?,
        }
        match &self.port {
            PortChoice::Only => Ok(()),
            port => write!(f, ":{port}"),
        }
    }
}

/// Which of the ports of an endpoint.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum PortChoice {
    /// The only one there is.
    #[default]
    Only,
    /// The one that the Service calls so.
    Name(String),
    /// The one with this number on the pod.
    Number(u16),
}

impl fmt::Display for PortChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortChoice::Only => f.write_str("the only one"),
            PortChoice::Name(name) => f.write_str(name),
            PortChoice::Number(number) => write!(f, "{number}"),
        }
    }
}

impl Serialize for PortChoice {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            PortChoice::Only => to.serialize_none(),
            PortChoice::Name(name) => to.serialize_str(name),
            PortChoice::Number(number) => to.serialize_u16(*number),
        }
    }
}

impl<'de> Deserialize<'de> for PortChoice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<PortChoice, D::Error> {
        scalar::checked(from, |text| {
            if text.is_empty() {
                Ok(PortChoice::Only)
            } else if text.bytes().all(|byte| byte.is_ascii_digit()) {
                port(text).map(PortChoice::Number)
            } else if is_label(text) {
                Ok(PortChoice::Name(text.to_owned()))
            } else {
                Err(format!("`{text}` is neither the name of a port nor its number"))
            }
        })
    }
}

fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("`{text}` is not a port: a number from 1 to 65535")),
    }
}

/// A DNS label (RFC 1123), as Kubernetes names Services, namespaces and ports.
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    scalar::checked(from, |text| match text {
        "" => Ok(None),
        text if is_label(text) => Ok(Some(text.to_owned())),
        text => Err(format!("`{text}` is not a name in Kubernetes: up to 63 of a-z, 0-9 and -")),
    })
}

fn selector<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    scalar::checked(from, |text| match text {
        "" => Ok(None),
        text => match selector::check(text) {
            Ok(()) => Ok(Some(text.to_owned())),
            Err(why) => Err(format!("`{text}` is not a label selector, as in app=vllm,tier in (a,b): {why}")),
        },
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawKubernetes {
    #[serde(default, deserialize_with = "name")]
    service: Option<String>,
    #[serde(default, deserialize_with = "selector")]
    selector: Option<String>,
    #[serde(default, deserialize_with = "name")]
    namespace: Option<String>,
    #[serde(default)]
    port: PortChoice,
    #[serde(default)]
    scheme: Scheme,
    #[serde(default, deserialize_with = "scalar::optional_count")]
    capacity_tokens: Option<usize>,
    #[serde(default, deserialize_with = "scalar::optional_positive")]
    prefill_speed: Option<f64>,
}

impl<'de> Deserialize<'de> for Kubernetes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Kubernetes, D::Error> {
        let raw = RawKubernetes::deserialize(from)?;
        let of = match (raw.service, raw.selector) {
            (Some(service), None) => Slices::Service(service),
            (None, Some(selector)) => Slices::Selector(selector),
            (Some(_), Some(_)) => return Err(D::Error::custom("name a `service` or a `selector`, not both")),
            (None, None) => return Err(D::Error::custom("name a `service`, or give a `selector`")),
        };
        Ok(Kubernetes {
            of,
            namespace: raw.namespace,
            port: raw.port,
            scheme: raw.scheme,
            capacity_tokens: raw.capacity_tokens.map(|tokens| tokens as u64),
            prefill_speed: raw.prefill_speed,
        })
    }
}

/// `workers.kubernetes_api`: how the API server is reached. By default as any pod does, by its ServiceAccount.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesApi {
    /// Its address; what the pod's environment says if absent.
    #[serde(deserialize_with = "api_url")]
    pub url: Option<String>,
    /// Its certificate authorities, in PEM; the pod's own file if absent.
    pub ca: Option<PathBuf>,
    /// The bearer token; the pod's own file if absent. Read again every minute, as tokens are renewed.
    pub token_file: Option<PathBuf>,
    /// All is listed anew so often, whatever the watch has told: an event that was lost is made up for after this time.
    #[serde(with = "scalar::duration")]
    pub resync: Duration,
}

impl Default for KubernetesApi {
    fn default() -> Self {
        // A list is one small answer; kube-proxy never lists again, and has kept dead endpoints for it.
        KubernetesApi { url: None, ca: None, token_file: None, resync: Duration::from_secs(30) }
    }
}

fn api_url<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    scalar::checked(from, |text| {
        if text.is_empty() {
            return Ok(None);
        }
        match text.parse::<http::Uri>() {
            Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some() => {
                Ok(Some(text.to_owned()))
            }
            _ => Err(format!("`{text}` is not the address of an API server, as in https://10.96.0.1:443")),
        }
    })
}

/// One entry of `workers.dns`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Dns {
    #[serde(flatten)]
    pub of: Record,
    pub scheme: Scheme,
    /// Longest time between two look-ups; the records' own lifetime if that is shorter.
    #[serde(with = "scalar::duration")]
    pub interval: Duration,
    /// Who is asked; the system's if empty.
    pub nameservers: Vec<SocketAddr>,
    pub capacity_tokens: Option<u64>,
    pub prefill_speed: Option<f64>,
}

/// What is looked up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(untagged)]
pub enum Record {
    /// The addresses of a name; each is a worker, at this port.
    Address { name: String, port: u16 },
    /// A service record: it tells the port too.
    Service { srv: String },
}

impl fmt::Display for Dns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.of {
            Record::Address { name, port } => write!(f, "dns:{name}:{port}"),
            Record::Service { srv } => write!(f, "dns:{srv}"),
        }
    }
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawDns {
    #[serde(deserialize_with = "host_name")]
    name: Option<String>,
    #[serde(deserialize_with = "port_number")]
    port: Option<u16>,
    #[serde(deserialize_with = "host_name")]
    srv: Option<String>,
    scheme: Scheme,
    #[serde(with = "scalar::duration")]
    interval: Duration,
    nameservers: Vec<SocketAddr>,
    #[serde(deserialize_with = "scalar::optional_count")]
    capacity_tokens: Option<usize>,
    #[serde(deserialize_with = "scalar::optional_positive")]
    prefill_speed: Option<f64>,
}

impl Default for RawDns {
    fn default() -> Self {
        RawDns {
            name: None,
            port: None,
            srv: None,
            scheme: Scheme::Http,
            // What CoreDNS gives the records of a cluster to live.
            interval: Duration::from_secs(5),
            nameservers: Vec::new(),
            capacity_tokens: None,
            prefill_speed: None,
        }
    }
}

fn host_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let fits = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    scalar::checked(from, |text| match text {
        "" => Ok(None),
        text if text.len() <= 253 && text.strip_suffix('.').unwrap_or(text).split('.').all(fits) => {
            Ok(Some(text.to_ascii_lowercase()))
        }
        text => Err(format!("`{text}` is not a name in the DNS, as in vllm.models.svc.cluster.local")),
    })
}

fn port_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    scalar::checked(from, |text| if text.is_empty() { Ok(None) } else { port(text).map(Some) })
}

impl<'de> Deserialize<'de> for Dns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Dns, D::Error> {
        let raw = RawDns::deserialize(from)?;
        let of = match (raw.name, raw.port, raw.srv) {
            (Some(name), Some(port), None) => Record::Address { name, port },
            (None, None, Some(srv)) => Record::Service { srv },
            (Some(_), None, None) => {
                return Err(D::Error::custom("`port`: missing; addresses do not tell it"));
            }
            (None, Some(_), Some(_)) => {
                return Err(D::Error::custom("`port`: a service record tells it; leave one out"));
            }
            _ => return Err(D::Error::custom("give a `name` with a `port`, or an `srv`")),
        };
        Ok(Dns {
            of,
            scheme: raw.scheme,
            interval: raw.interval,
            nameservers: raw.nameservers,
            capacity_tokens: raw.capacity_tokens.map(|tokens| tokens as u64),
            prefill_speed: raw.prefill_speed,
        })
    }
}
