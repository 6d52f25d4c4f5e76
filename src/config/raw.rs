//! The config file as typed. Unknown keys are refused everywhere, since a misspelt one would silently do nothing. This is
//! the only file that knows the YAML library.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::sections::Price;
use super::{
    Cache, Config, Dns, Drain, Explain, Feedback, Health, Kubernetes, KubernetesApi, Limits, Log, Mode,
    Origin, Random, Retries, Scrape, Shadow, Sharing, Split, Timeouts, Tls, Worker, WorkerTls, scalar,
};

/// The top level of the file.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Raw {
    #[serde(deserialize_with = "scalar::listen")]
    pub listen: SocketAddr,
    #[serde(deserialize_with = "scalar::listen")]
    pub admin: SocketAddr,
    pub admin_names: Vec<HostName>,
    pub tls: Option<Tls>,
    pub mode: Mode,
    pub random: Random,
    pub split: Split,
    pub shadow: Shadow,
    pub explain: Explain,
    pub workers: RawWorkers,
    pub health: Health,
    pub scrape: Scrape,
    pub feedback: Feedback,
    pub cache: Cache,
    pub sharing: Option<Sharing>,
    pub price: Price,
    pub limits: Limits,
    pub timeouts: Timeouts,
    pub retries: Retries,
    pub drain: Drain,
    pub log: Log,
}

impl Default for Raw {
    fn default() -> Self {
        let config = Config::default();
        Raw {
            listen: config.listen,
            admin: config.admin,
            admin_names: Vec::new(),
            tls: config.tls,
            mode: config.mode,
            random: config.random,
            split: config.split,
            shadow: config.shadow,
            explain: config.explain,
            workers: RawWorkers::default(),
            health: config.health,
            scrape: config.scrape,
            feedback: config.feedback,
            cache: config.cache,
            sharing: config.sharing,
            price: config.price.into(),
            limits: config.limits,
            timeouts: config.timeouts,
            retries: config.retries,
            drain: config.drain,
            log: config.log,
        }
    }
}

/// A host's name, in lower case and nothing beside it.
pub struct HostName(pub String);

impl<'de> Deserialize<'de> for HostName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<HostName, D::Error> {
        scalar::checked(from, |text| {
            let name = text.trim_end_matches('.').to_ascii_lowercase();
            let sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            match !name.is_empty() && name.bytes().all(sound) {
                true => Ok(HostName(name)),
                false => Err(format!("`{text}` is not a host name; write it without scheme, port and path")),
            }
        })
    }
}

/// `workers:`
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub struct RawWorkers {
    #[serde(rename = "static", deserialize_with = "distinct_workers")]
    pub fixed: Vec<Worker>,
    #[serde(deserialize_with = "distinct")]
    pub kubernetes: Vec<Kubernetes>,
    pub kubernetes_api: KubernetesApi,
    #[serde(deserialize_with = "distinct")]
    pub dns: Vec<Dns>,
    pub zone_file: Option<PathBuf>,
    pub api_key_file: Option<PathBuf>,
    pub tls: WorkerTls,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawWorker {
    url: Origin,
    #[serde(default, deserialize_with = "scalar::optional_count")]
    capacity_tokens: Option<usize>,
    #[serde(default, deserialize_with = "scalar::optional_positive")]
    prefill_speed: Option<f64>,
}

fn distinct_workers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Worker>, D::Error> {
    struct Distinct;
    impl<'de> Visitor<'de> for Distinct {
        type Value = Vec<Worker>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of workers, each with a `url`")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Worker>, A::Error> {
            let mut seen = HashSet::new();
            let mut workers = Vec::new();
            while let Some(RawWorker { url, capacity_tokens, prefill_speed }) = list.next_element()? {
                if !seen.insert((url.host().to_owned(), url.port())) {
                    return Err(de::Error::custom(format_args!("{url} is in the list twice")));
                }
                let capacity_tokens = capacity_tokens.map(|tokens| tokens as u64);
                workers.push(Worker { url, capacity_tokens, prefill_speed });
            }
            Ok(workers)
        }
    }
    from.deserialize_seq(Distinct)
}

/// A list in which nothing is named twice.
fn distinct<'de, D: Deserializer<'de>, T: Deserialize<'de> + fmt::Display>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    struct Distinct<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de> + fmt::Display> Visitor<'de> for Distinct<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut seen = HashSet::new();
            let mut entries = Vec::new();
            while let Some(entry) = list.next_element::<T>()? {
                if !seen.insert(entry.to_string()) {
                    return Err(de::Error::custom(format_args!("{entry} is in the list twice")));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
    }
    from.deserialize_seq(Distinct(PhantomData))
}

/// A fault in the text, with its line if the YAML reader knows it.
pub struct RawError {
    pub line: Option<usize>,
    pub message: String,
}

/// Reads the text of a config file.
pub fn read(text: &str) -> Result<Raw, RawError> {
    let plain = |message: &str| RawError { line: None, message: message.to_owned() };
    // Some editors begin a file with a byte order mark; YAML takes it for no part of the text.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Err(plain("the file is empty; it needs at least `workers`"));
    }
    let raw: Raw = serde_yaml::from_str(text).map_err(|error| {
        let line = error.location().map(|location| location.line());
        let message = error.to_string();
        // The place is told in front of the message, where editors and terminals look for it.
        let message = message.split_once(" at line ").map_or(message.as_str(), |(message, _)| message);
        RawError { line, message: in_words(message) }
    })?;
    let RawWorkers { fixed, kubernetes, dns, .. } = &raw.workers;
    if fixed.is_empty() && kubernetes.is_empty() && dns.is_empty() {
        return Err(plain(
            "workers: nobody is named; a proxy needs at least one entry in workers.static, workers.kubernetes or workers.dns",
        ));
    }
    Ok(raw)
}

/// The reader's message, where it is about kinds of values, in words that know nothing of how this program calls its parts.
fn in_words(message: &str) -> String {
    let Some((key, kinds)) = message.split_once("invalid type: ") else { return message.to_owned() };
    let Some((found, wanted)) = kinds.rsplit_once(", expected ") else { return message.to_owned() };
    let key = if key.is_empty() { "the file: " } else { key };
    let found = match found.split(' ').next().unwrap_or_default() {
        "sequence" => "a list",
        "map" => "keys with values",
        "unit" => "nothing",
        "string" => "text",
        "integer" | "floating" => "a number",
        "boolean" => "a truth value",
        _ => found,
    };
    let wanted = match wanted.split(' ').next().unwrap_or_default() {
        "struct" | "map" => "keys with values, as in `key: value`,",
        "sequence" => "a list",
        "enum" | "string" | "path" => "a single value",
        _ => wanted,
    };
    format!("{key}{found} is here, where {wanted} should be")
}

/// Writes anything as YAML.
pub fn write(value: &impl Serialize) -> String {
    serde_yaml::to_string(value).unwrap_or_else(|error| format!("# cannot be shown: {error}\n"))
}
