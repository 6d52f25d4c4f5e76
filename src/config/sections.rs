//! The sections of the config, each with its defaults and the reason for them.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use super::{Draw, Traces, scalar};
use crate::core::blocks::DEFAULT_BLOCK_BYTES;
use crate::core::planner;
use crate::core::price::PriceSettings;

/// Mode `random`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Random {
    pub draw: Draw,
}

impl Default for Random {
    fn default() -> Self {
        // What it replaces draws per connection, so that is the honest comparison.
        Random { draw: Draw::Connection }
    }
}

/// When a worker is taken out and let in again.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Health {
    /// Path that is probed; 2xx is healthy.
    #[serde(deserialize_with = "probe_path")]
    pub path: String,
    /// Time between probes of a worker; off: no probes, and every worker counts as healthy until it fails.
    #[serde(with = "scalar::timer")]
    pub interval: Option<Duration>,
    /// How long a probe may take.
    #[serde(with = "scalar::duration")]
    pub timeout: Duration,
    /// Failed probes in a row that take a worker out.
    #[serde(deserialize_with = "scalar::count")]
    pub probe_failures: usize,
    /// Requests in a row that could not connect, or broke before an answer, that take a worker out.
    #[serde(deserialize_with = "scalar::count")]
    pub request_failures: usize,
    /// How long a worker stays out before one request may try it again; doubles each time, up to thirty times this.
    #[serde(with = "scalar::duration")]
    pub retry_after: Duration,
    /// A worker that has several requests and brings nothing for any of them for so long counts as stalled: others are
    /// preferred until something comes. Nothing is cut for it.
    #[serde(with = "scalar::timer")]
    pub stalled_after: Option<Duration>,
    /// Once connections to a worker fail, an answer of its may stay silent for so long; then it is ended, or if its client has
    /// seen nothing of it, asked for elsewhere.
    #[serde(with = "scalar::timer")]
    pub unreachable_silence: Option<Duration>,
}

impl Default for Health {
    fn default() -> Self {
        Health {
            path: "/health".to_owned(),
            interval: Some(Duration::from_secs(2)),
            // An engine under full load answers its probe late (seconds were seen); being slow is not being dead.
            timeout: Duration::from_secs(5),
            probe_failures: 3,
            request_failures: 3,
            retry_after: Duration::from_secs(1),
            stalled_after: Some(Duration::from_secs(30)),
            // vLLM kills its engine as it stops listening, and its running requests hang from then on.
            unreachable_silence: Some(Duration::from_secs(5)),
        }
    }
}

/// How the workers' metrics pages are read.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scrape {
    /// Path of the page.
    #[serde(deserialize_with = "probe_path")]
    pub path: String,
    /// Time between two readings of one worker; off: none is read, and restarts are seen by refused connections only.
    #[serde(with = "scalar::timer")]
    pub interval: Option<Duration>,
    /// How long a reading may take.
    #[serde(with = "scalar::duration")]
    pub timeout: Duration,
    /// Time between two readings of a worker's list of models (`/v1/models`), which says what it can be asked for; also read when
    /// it has come up. off: any worker is taken to serve any model.
    #[serde(with = "scalar::timer")]
    pub models_interval: Option<Duration>,
    /// Largest page that is read; it is read in pieces and never held.
    #[serde(with = "scalar::size")]
    pub limit: usize,
}

impl Default for Scrape {
    fn default() -> Self {
        Scrape {
            path: "/metrics".to_owned(),
            // A real page is 65 KB and costs its engine a few milliseconds.
            interval: Some(Duration::from_secs(2)),
            timeout: Duration::from_secs(2),
            // Adapters are loaded by hand or by the day.
            models_interval: Some(Duration::from_secs(15)),
            limit: 16 << 20,
        }
    }
}

fn probe_path<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    scalar::checked(from, |text| match text.parse::<http::uri::PathAndQuery>() {
        Ok(_) if text.starts_with('/') => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not a path; it begins with a slash, as in /health")),
    })
}

/// What is learned from the workers' answers.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Feedback {
    /// Streamed requests to `/v1/chat/completions` and `/v1/completions` whose client did not ask for `usage` are made to ask
    /// for it, and the event that brings it is kept from the client. The one option that changes bytes of a body, so it is off
    /// unless the operator says otherwise.
    pub ask_for_usage: bool,
}

/// How prompts are cut into blocks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cache {
    /// Bytes of prompt in one hashed block. Needs a restart.
    #[serde(with = "scalar::size")]
    pub block_bytes: usize,
    /// Bytes that one token stands for, until it is learned for a model from the workers' `usage`.
    #[serde(deserialize_with = "scalar::positive")]
    pub bytes_per_token: f64,
    /// Blocks believed to be cached over all workers: what bounds the memory of the belief. Needs a restart.
    #[serde(deserialize_with = "scalar::count")]
    pub max_blocks: usize,
    /// File with a secret of any length under which blocks are hashed. Replicas that share it place alike; without one the
    /// key is random for each process. Needs a restart.
    pub hash_key_file: Option<PathBuf>,
}

impl Default for Cache {
    fn default() -> Self {
        // Four bytes a token is English under common tokenizers.
        Cache {
            block_bytes: DEFAULT_BLOCK_BYTES,
            bytes_per_token: 4.0,
            max_blocks: planner::Settings::default().max_blocks,
            hash_key_file: None,
        }
    }
}

/// The price's weights as they are typed; the defaults are those of [`PriceSettings`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Price {
    #[serde(deserialize_with = "scalar::not_negative")]
    pub queue_weight: f64,
    #[serde(deserialize_with = "scalar::positive")]
    pub crowded_seconds: f64,
    #[serde(deserialize_with = "scalar::not_negative")]
    pub displacement_weight: f64,
    #[serde(deserialize_with = "scalar::not_negative")]
    pub recent_weight: f64,
    #[serde(deserialize_with = "scalar::not_negative")]
    pub recent_cap: f64,
    #[serde(deserialize_with = "scalar::positive")]
    pub replicate_shares: f64,
    #[serde(deserialize_with = "scalar::not_negative")]
    pub memory_weight: f64,
}

impl Default for Price {
    fn default() -> Self {
        PriceSettings::default().into()
    }
}

impl From<PriceSettings> for Price {
    fn from(settings: PriceSettings) -> Self {
        let PriceSettings {
            queue_weight,
            crowded_seconds,
            displacement_weight,
            recent_weight,
            recent_cap,
            replicate_shares,
            memory_weight,
        } = settings;
        Price {
            queue_weight,
            crowded_seconds,
            displacement_weight,
            recent_weight,
            recent_cap,
            replicate_shares,
            memory_weight,
        }
    }
}

impl From<Price> for PriceSettings {
    fn from(price: Price) -> Self {
        let Price {
            queue_weight,
            crowded_seconds,
            displacement_weight,
            recent_weight,
            recent_cap,
            replicate_shares,
            memory_weight,
        } = price;
        PriceSettings {
            queue_weight,
            crowded_seconds,
            displacement_weight,
            recent_weight,
            recent_cap,
            replicate_shares,
            memory_weight,
        }
    }
}

pub(super) fn serialize_price<S: Serializer>(settings: &PriceSettings, to: S) -> Result<S::Ok, S::Error> {
    Price::from(settings.clone()).serialize(to)
}

/// What a client may ask of the proxy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Largest request body; above it the answer is 413.
    #[serde(with = "scalar::size")]
    pub body: usize,
    /// All request bodies that are held at once, each until its worker has answered; what would be more is answered 503 with
    /// `Retry-After`.
    #[serde(with = "scalar::size")]
    pub bodies: usize,
    /// Largest request head; above it the answer is 431.
    #[serde(with = "scalar::size")]
    pub head: usize,
    /// Client connections open at once; more wait in the system's accept queue.
    #[serde(deserialize_with = "scalar::count")]
    pub connections: usize,
    /// Requests at all workers together; more wait in the queue. off: no limit.
    #[serde(with = "scalar::limit")]
    pub in_flight: Option<usize>,
    /// Requests at each worker. off: no limit.
    #[serde(with = "scalar::limit")]
    pub in_flight_per_worker: Option<usize>,
    /// Requests that may wait for a place; above it the answer is 503 with `Retry-After`.
    #[serde(deserialize_with = "scalar::count")]
    pub queue: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            // vLLM has no limit of its own; a request with several base64 images passes 64 MiB.
            body: 128 << 20,
            // Half of what deploy/warmroute.yaml gives the process; a body of a long prompt has a few hundred kilobytes.
            bodies: 512 << 20,
            head: 64 << 10,
            connections: 16_384,
            // A Service has no such limits, and vLLM queues by itself.
            in_flight: None,
            in_flight_per_worker: None,
            queue: 1_024,
        }
    }
}

/// Timers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// To open a connection to a worker.
    #[serde(with = "scalar::duration")]
    pub connect: Duration,
    /// For a client connection to bring a complete request head, from its opening or from the end of the last response.
    #[serde(with = "scalar::timer")]
    pub client_head: Option<Duration>,
    /// Between two pieces of a request body.
    #[serde(with = "scalar::timer")]
    pub client_body: Option<Duration>,
    /// Longest time in which a client takes nothing of what was written to it; then its connection is closed.
    #[serde(with = "scalar::timer")]
    pub client_read: Option<Duration>,
    /// Longest wait in the queue for a place at a worker (see `limits.in_flight`).
    #[serde(with = "scalar::duration")]
    pub queue: Duration,
    /// Longest silence of a worker, before its answer and within it, to within a quarter; off: it may take its time.
    #[serde(with = "scalar::timer")]
    pub silence: Option<Duration>,
    /// Longest time for a whole answer; off: it may take its time.
    #[serde(with = "scalar::timer")]
    pub response: Option<Duration>,
    /// How long an idle connection to a worker is kept for reuse. Keep it below the worker's own limit
    /// (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s).
    #[serde(with = "scalar::duration")]
    pub pool_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            // Inside a cluster a connection opens in milliseconds; a lost SYN is sent again after a second.
            connect: Duration::from_secs(1),
            // Above the 60 s for which common load balancers keep a connection: they must be the ones to close it.
            client_head: Some(Duration::from_secs(75)),
            client_body: Some(Duration::from_secs(30)),
            // A program may stand still over what it has read; by then megabytes wait for it, and a worker with them.
            client_read: Some(Duration::from_secs(300)),
            queue: Duration::from_secs(30),
            // A long prompt in a long queue is silent for minutes, and a long generation takes as long as it takes.
            silence: None,
            response: None,
            pool_idle: Duration::from_secs(4),
        }
    }
}

/// Attempts on another worker, for requests that no worker has begun.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retries {
    /// Attempts for one request, the first included; 1 switches retries off.
    #[serde(deserialize_with = "scalar::count")]
    pub attempts: usize,
    /// Retries allowed per request served, over the last ten seconds.
    #[serde(deserialize_with = "scalar::budget_ratio")]
    pub ratio: f64,
    /// Retries a second that are allowed besides.
    #[serde(deserialize_with = "scalar::budget_reserve")]
    pub reserve: usize,
}

impl Default for Retries {
    fn default() -> Self {
        // A retry stands for a whole prefill. A fifth more than the traffic survives the loss of a worker in six without
        // becoming a storm.
        Retries { attempts: 3, ratio: 0.2, reserve: 10 }
    }
}

/// What happens on SIGTERM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Drain {
    /// New requests are still served for this long after readiness has gone, while Kubernetes takes the address away.
    #[serde(with = "scalar::duration_or_zero")]
    pub announce: Duration,
    /// Running requests may take this long, counted from the signal; then they are cut.
    #[serde(with = "scalar::duration_or_zero")]
    pub deadline: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Drain { announce: Duration::from_secs(5), deadline: Duration::from_secs(300) }
    }
}

/// The log, on standard error.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// A level (error, warn, info, debug, trace) or a filter such as `info,warmroute::fleet=debug`.
    #[serde(deserialize_with = "log_filter")]
    pub level: String,
    pub format: LogFormat,
    pub access: AccessLog,
    pub traces: Traces,
}

/// One JSON line for each request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccessLog {
    pub to: LogTo,
    /// Of all requests, the share that has a line, drawn at random.
    #[serde(deserialize_with = "scalar::share")]
    pub share: f64,
    /// Lines have the hashes of their prompt's blocks.
    pub blocks: bool,
}

impl Default for AccessLog {
    fn default() -> Self {
        AccessLog { to: LogTo::Off, share: 1.0, blocks: false }
    }
}

/// Where a log goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogTo {
    Off,
    Stdout,
    /// To which it is appended.
    File(PathBuf),
}

impl Serialize for LogTo {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            LogTo::Off => to.serialize_str("off"),
            LogTo::Stdout => to.serialize_str("stdout"),
            LogTo::File(path) => path.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for LogTo {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        scalar::checked(from, |text| match text {
            "off" | "false" => Ok(LogTo::Off),
            "stdout" => Ok(LogTo::Stdout),
            path if path.contains('/') => Ok(LogTo::File(path.into())),
            _ => {
                let file = "the path of a file with its folder, as in /var/log/access.jsonl";
                Err(format!("`{text}` is not off, stdout or {file}"))
            }
        })
    }
}

const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

fn log_filter<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    // A word alone is also the name of a part of the program to log everything of: not what a misspelt level means.
    let is_meant =
        |part: &str| part.contains('=') || LOG_LEVELS.iter().any(|level| part.eq_ignore_ascii_case(level));
    scalar::checked(from, |text| match text.parse::<tracing_subscriber::filter::Targets>() {
        Ok(_) if text.split(',').all(is_meant) && !text.contains(' ') => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not a log level or filter, as in info or info,warmroute::fleet=debug")),
    })
}

/// How log lines look.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

impl Default for Log {
    fn default() -> Self {
        Log {
            level: "info".to_owned(),
            format: LogFormat::Text,
            access: AccessLog::default(),
            traces: Traces::default(),
        }
    }
}
