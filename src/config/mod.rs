//! What the operator can set. [`raw`] reads the file as typed; what comes out here is checked, complete and ready to use:
//! nothing further down checks again or has a default of its own. Each section's `Default` is the only place where its
//! defaults are, and `config/warmroute.yaml` shows them all.

pub mod discovery;
pub mod raw;
pub mod scalar;
pub mod sections;
pub mod selector;
pub mod sharing;
pub mod tls;
pub mod traces;
pub mod trial;
pub mod watch;
pub mod worker;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

use crate::core::blocks::HashKey;
use crate::core::price::PriceSettings;

pub use discovery::{Dns, Kubernetes, KubernetesApi, PortChoice, Record, Scheme, Slices};
pub use sections::{
    AccessLog, Cache, Drain, Feedback, Health, Limits, Log, LogFormat, LogTo, Random, Retries, Scrape,
    Timeouts,
};
pub use sharing::{Sharing, StoreKind, StoreUrl};
pub use tls::{Tls, WorkerTls};
pub use traces::Traces;
pub use trial::{Explain, Shadow, Split, SplitBy};
pub use worker::Origin;

/// How requests are placed.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// To the worker that will answer soonest, by what it is believed to hold.
    Kv,
    /// As a Kubernetes Service does.
    Random,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Kv => "kv",
            Mode::Random => "random",
        }
    }

    pub fn other(self) -> Mode {
        match self {
            Mode::Kv => Mode::Random,
            Mode::Random => Mode::Kv,
        }
    }
}

/// When mode `random` draws.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Draw {
    /// Once for each client connection, and no retry elsewhere: what kube-proxy does.
    Connection,
    /// Anew for each request.
    Request,
}

/// One worker of the static list.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Worker {
    pub url: Origin,
    /// KV cache size in tokens; learned from the worker's own metrics if absent.
    pub capacity_tokens: Option<u64>,
    /// Prefill speed in tokens a second; learned if absent.
    pub prefill_speed: Option<f64>,
}

/// Who the workers are.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Workers {
    #[serde(rename = "static")]
    pub fixed: Vec<Worker>,
    pub kubernetes: Vec<Kubernetes>,
    pub kubernetes_api: KubernetesApi,
    pub dns: Vec<Dns>,
    /// File with the name of the zone that the router runs in: among workers that are as good, those of the same zone come first.
    pub zone_file: Option<PathBuf>,
    /// The name that was in it.
    #[serde(skip)]
    pub zone: Option<String>,
    /// Where the key lies that the proxy's own probes and scrapes present; clients' requests keep their own.
    pub api_key_file: Option<PathBuf>,
    #[serde(skip)]
    pub api_key: Option<Secret>,
    /// For those with an `https://` address.
    pub tls: WorkerTls,
}

/// A secret read from a file: it is in no dump, log or error.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl Secret {
    /// As the value of an `Authorization` header; `None` if it holds bytes that no header can.
    pub fn bearer(&self) -> Option<http::HeaderValue> {
        let mut value = http::HeaderValue::try_from(format!("Bearer {}", self.0)).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

/// The whole configuration, checked.
#[derive(Clone, Serialize)]
pub struct Config {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where the operator connects: metrics, health, control.
    pub admin: SocketAddr,
    /// Host names of the admin listener by which browsers may change something, in lower case, beside those that are safe anyhow.
    pub admin_names: Vec<String>,
    /// What clients are shown; they connect without TLS if absent.
    pub tls: Option<Tls>,
    pub mode: Mode,
    pub random: Random,
    pub split: Split,
    pub shadow: Shadow,
    pub explain: Explain,
    pub workers: Workers,
    pub health: Health,
    pub scrape: Scrape,
    pub feedback: Feedback,
    pub cache: Cache,
    /// Nothing is told to other routers if absent.
    pub sharing: Option<Sharing>,
    #[serde(serialize_with = "sections::serialize_price")]
    pub price: PriceSettings,
    pub limits: Limits,
    pub timeouts: Timeouts,
    pub retries: Retries,
    pub drain: Drain,
    pub log: Log,
    /// Under which prompts are hashed: from `cache.hash_key_file`, else random for this process.
    #[serde(skip)]
    pub hash_key: Option<HashKey>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.to_yaml())
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen: SocketAddr::from(([0, 0, 0, 0], 8080)),
            admin: SocketAddr::from(([0, 0, 0, 0], 9090)),
            admin_names: Vec::new(),
            tls: None,
            mode: Mode::Kv,
            random: Random::default(),
            split: Split::default(),
            shadow: Shadow::default(),
            explain: Explain::default(),
            workers: Workers::default(),
            health: Health::default(),
            scrape: Scrape::default(),
            feedback: Feedback::default(),
            cache: Cache::default(),
            sharing: None,
            price: PriceSettings::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            retries: Retries::default(),
            drain: Drain::default(),
            log: Log::default(),
            hash_key: None,
        }
    }
}

/// Why a config is refused: the file, the line if known, and the key with its fault.
#[derive(Debug, Error, PartialEq)]
#[error("{}{}: {message}", file.display(), line.map(|line| format!(":{line}")).unwrap_or_default())]
pub struct ConfigError {
    pub file: PathBuf,
    pub line: Option<usize>,
    pub message: String,
}

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be read, is not YAML, or any key in it is unknown or has a value that cannot be used.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        Config::parse(&Config::read(path)?, path)
    }

    fn read(path: &Path) -> Result<String, ConfigError> {
        std::fs::read_to_string(path).map_err(|error| ConfigError {
            file: path.to_owned(),
            line: None,
            message: format!("cannot be read: {error}"),
        })
    }

    /// Checks `text`; `file` is only named in errors. Secrets are read from the files that it names.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigError> {
        let refuse = |line, message| ConfigError { file: file.to_owned(), line, message };
        let raw = raw::read(text).map_err(|error| refuse(error.line, error.message))?;
        Config::from_raw(raw).map_err(|message| refuse(None, message))
    }

    fn from_raw(raw: raw::Raw) -> Result<Config, String> {
        if overlap(raw.listen, raw.admin) {
            return Err(format!(
                "admin: {} is taken by listen: {}; give it a port of its own",
                raw.admin, raw.listen
            ));
        }
        if let Some(tls) = &raw.tls {
            tls.identity(&tls.read()?)?;
        }
        raw.workers.tls.client(raw.workers.tls.read()?.as_deref())?;
        let mut workers = Workers {
            zone: raw.workers.zone_file.as_deref().and_then(read_zone),
            fixed: raw.workers.fixed,
            kubernetes: raw.workers.kubernetes,
            kubernetes_api: raw.workers.kubernetes_api,
            dns: raw.workers.dns,
            zone_file: raw.workers.zone_file,
            api_key_file: raw.workers.api_key_file,
            api_key: None,
            tls: raw.workers.tls,
        };
        if let Some(path) = &workers.api_key_file {
            let secret = Secret(read_secret("workers.api_key_file", path)?);
            if secret.bearer().is_none() {
                let path = path.display();
                return Err(format!("workers.api_key_file: {path} must hold one key, on one line"));
            }
            workers.api_key = Some(secret);
        }
        let hash_key = match &raw.cache.hash_key_file {
            None => None,
            Some(path) => {
                let secret = read_secret("cache.hash_key_file", path)?;
                Some(HashKey(blake3::derive_key("warmroute 2026 prompt block hash key", secret.as_bytes())))
            }
        };
        if let Some(sharing) = &raw.sharing {
            sharing.check()?;
            if hash_key.is_none() {
                return Err(
                    "sharing: needs cache.hash_key_file, the same on all routers: what others say is \
                            in hashes by their key"
                        .to_owned(),
                );
            }
        }
        if raw.limits.bodies < raw.limits.body {
            return Err(
                "limits.bodies: must be at least limits.body, or the largest bodies would never pass"
                    .to_owned(),
            );
        }
        let Drain { announce, deadline } = raw.drain;
        if announce > deadline {
            return Err(format!(
                "drain.announce: {} is more than drain.deadline, {}, which counts from the same signal",
                humantime::format_duration(announce),
                humantime::format_duration(deadline)
            ));
        }
        Ok(Config {
            listen: raw.listen,
            admin: raw.admin,
            admin_names: raw.admin_names.into_iter().map(|name| name.0).collect(),
            tls: raw.tls,
            mode: raw.mode,
            random: raw.random,
            split: raw.split,
            shadow: raw.shadow,
            explain: raw.explain,
            workers,
            health: raw.health,
            scrape: raw.scrape,
            feedback: raw.feedback,
            cache: raw.cache,
            sharing: raw.sharing,
            price: raw.price.into(),
            limits: raw.limits,
            timeouts: raw.timeouts,
            retries: raw.retries,
            drain: raw.drain,
            log: raw.log,
            hash_key,
        })
    }

    /// The effective configuration as YAML, without secrets.
    pub fn to_yaml(&self) -> String {
        raw::write(self)
    }
}

/// One of two listeners would take the other's place. (With port 0 the system gives each its own.)
fn overlap(one: SocketAddr, two: SocketAddr) -> bool {
    // The unspecified IPv6 address takes IPv4 as well.
    let all = |a: SocketAddr, b: SocketAddr| a.ip().is_unspecified() && (a.is_ipv6() || b.is_ipv4());
    one.port() == two.port() && one.port() != 0 && (one.ip() == two.ip() || all(one, two) || all(two, one))
}

/// The zone is for ties only, and a cluster need not tell it: then there is none.
fn read_zone(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|zone| !zone.is_empty())
}

fn read_secret(key: &str, path: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{key}: {} cannot be read: {error}", path.display()))?;
    match text.trim() {
        "" => Err(format!("{key}: {} is empty", path.display())),
        secret => Ok(secret.to_owned()),
    }
}
