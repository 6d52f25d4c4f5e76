//! `sharing:` the store over which routers before the same workers tell each other what they place.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Secret, read_secret, scalar, tls};

/// A Redis or Valkey that is there already.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sharing {
    /// `redis://` or, in TLS, `rediss://`, host and port: the server, some of the cluster's, or its sentinels.
    pub urls: Vec<StoreUrl>,
    pub kind: StoreKind,
    /// What sentinels call the group of servers.
    pub group: String,
    /// Who asks; the store's default user if absent.
    pub user: Option<String>,
    /// File with the password, of the servers and of sentinels. Read at each connection, so that it may change.
    pub password_file: Option<PathBuf>,
    /// The authorities that may have signed the store's certificate, in PEM; the public ones if absent. Read as often.
    pub ca: Option<PathBuf>,
    /// What the names of its keys in the store begin with.
    #[serde(deserialize_with = "key_prefix")]
    pub key_prefix: String,
    /// How long what is to be said is gathered before it is sent.
    #[serde(deserialize_with = "delay", serialize_with = "scalar::duration::serialize")]
    pub delay: Duration,
    /// Batches that the store keeps, for those who come later.
    #[serde(deserialize_with = "scalar::count")]
    pub most: usize,
}

impl Default for Sharing {
    fn default() -> Self {
        Sharing {
            urls: Vec::new(),
            kind: StoreKind::Server,
            group: "mymaster".to_owned(),
            user: None,
            password_file: None,
            ca: None,
            key_prefix: "warmroute".to_owned(),
            // As good as at once for requests that take 50 ms and more, and a tenth of the writes.
            delay: Duration::from_millis(10),
            // Some ten thousand requests: what workers' caches can still hold.
            most: 30_000,
        }
    }
}

/// What the URLs lead to.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    /// One server, or whatever stands for one.
    Server,
    Cluster,
    /// Those who know which server is the primary one.
    Sentinel,
}

/// `redis://host:port` or `rediss://host:port`, with `/number` of a database behind it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(transparent)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(text: &str) -> Result<StoreUrl, String> {
        // Not the text itself: there may be a password in it.
        let refuse = |why: &str| Err(format!("is not a store's address: {why}, as in redis://valkey:6379"));
        let Some((scheme, rest)) = text.split_once("://") else {
            return refuse("write it with its scheme");
        };
        if !matches!(scheme, "redis" | "rediss") {
            return refuse("the scheme is redis or, in TLS, rediss");
        }
        if rest.contains('@') {
            return refuse(
                "user and password have keys of their own, sharing.user and sharing.password_file",
            );
        }
        if rest.contains(['?', '#']) {
            return refuse("write it without what follows ? or #");
        }
        let Ok(uri) = format!("http://{rest}").parse::<http::Uri>() else {
            return refuse("write a scheme, a host and a port up to 65535");
        };
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let host = uri.host().unwrap_or_default();
        let port = authority.get(host.len()..).unwrap_or_default();
        let sound = port.is_empty() || port[1..].parse::<u16>().is_ok_and(|port| port > 0);
        if host.is_empty() || !sound {
            return refuse("write a scheme, a host and a port up to 65535");
        }
        let database = uri.path().trim_start_matches('/');
        if !(database.is_empty() || database.parse::<u16>().is_ok()) {
            return refuse("behind host and port there is at most the number of a database");
        }
        Ok(StoreUrl(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_tls(&self) -> bool {
        self.0.starts_with("rediss:")
    }
}

impl<'de> Deserialize<'de> for StoreUrl {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        scalar::checked(from, StoreUrl::parse)
    }
}

impl Sharing {
    /// What can be told without asking the store. Reads its files.
    ///
    /// # Errors
    /// Names the key at fault.
    pub fn check(&self) -> Result<(), String> {
        if self.urls.is_empty() {
            return Err("sharing.urls: must name the store, as in redis://valkey:6379".to_owned());
        }
        if self.kind == StoreKind::Server && self.urls.len() > 1 {
            return Err("sharing.urls: several are for sharing.kind cluster or sentinel".to_owned());
        }
        let in_tls = self.urls.iter().filter(|url| url.is_tls()).count();
        if in_tls != 0 && in_tls != self.urls.len() {
            return Err("sharing.urls: all of them in TLS (rediss://), or none".to_owned());
        }
        if self.ca.is_some() && in_tls == 0 {
            return Err("sharing.ca: is for rediss:// and sharing.urls has none".to_owned());
        }
        if self.kind == StoreKind::Sentinel && self.group.is_empty() {
            return Err("sharing.group: must name the group of servers, as the sentinels do".to_owned());
        }
        if self.user.is_some() && self.password_file.is_none() {
            return Err("sharing.user: has no password; name it in sharing.password_file".to_owned());
        }
        self.authorities()?;
        self.password().map(drop)
    }

    /// What the file of authorities says now, in PEM.
    ///
    /// # Errors
    /// If it cannot be read, or has no certificate in it.
    pub fn authorities(&self) -> Result<Option<Vec<u8>>, String> {
        const KEY: &str = "sharing.ca";
        let Some(path) = &self.ca else { return Ok(None) };
        let pem = tls::read(KEY, path)?;
        tls::certificates(KEY, path, &pem)?;
        Ok(Some(pem))
    }

    /// Where the store is. No secrets: a URL has none.
    pub fn addresses(&self) -> String {
        self.urls.iter().map(StoreUrl::as_str).collect::<Vec<_>>().join(" ")
    }

    /// What the file says now.
    ///
    /// # Errors
    /// If it cannot be read, or is empty.
    pub fn password(&self) -> Result<Option<Secret>, String> {
        let read = |path: &PathBuf| read_secret("sharing.password_file", path).map(Secret);
        self.password_file.as_ref().map(read).transpose()
    }
}

/// Longest wait of what is to be said.
const LONGEST_DELAY: Duration = Duration::from_secs(10);
const LONGEST_PREFIX: usize = 64;

fn delay<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    scalar::checked(from, |text| match scalar::parse_positive_duration(text)? {
        delay if delay <= LONGEST_DELAY => Ok(delay),
        _ => Err(format!("must be at most {}", humantime::format_duration(LONGEST_DELAY))),
    })
}

fn key_prefix<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/".contains(&byte);
    scalar::checked(from, |text| match text {
        text if (1..=LONGEST_PREFIX).contains(&text.len()) && text.bytes().all(sound) => Ok(text.to_owned()),
        _ => Err(format!("must be 1 to {LONGEST_PREFIX} letters, digits and any of -_.:/")),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn parse(sharing: &str, key: bool) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "secret\n").unwrap();
        let path = file.path().display();
        let cache = if key { format!("cache: {{hash_key_file: {path}}}\n") } else { String::new() };
        let sharing = sharing.replace("FILE", &path.to_string());
        let text = format!("workers: {{static: [{{url: 'http://a:1'}}]}}\n{cache}sharing: {sharing}\n");
        Config::parse(&text, Path::new("c.yaml")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_store_is_named_by_one_address_and_its_password_by_a_file() {
        let config = parse("{urls: ['rediss://valkey:6380/2'], user: w, password_file: FILE}", true).unwrap();
        let sharing = config.sharing.clone().unwrap();
        assert!(sharing.password_file.is_some());
        assert_eq!((sharing.delay, sharing.key_prefix.as_str()), (Duration::from_millis(10), "warmroute"));
        assert!(!config.to_yaml().contains("secret"), "{}", config.to_yaml());
        assert!(parse("null", false).unwrap().sharing.is_none());
    }

    #[test]
    fn what_could_not_work_is_refused_by_its_key() {
        let refused = |sharing: &str, words: &str| {
            let error = parse(sharing, true).unwrap_err();
            assert!(error.contains(words) && !error.contains("s3cret"), "{sharing}: {error}");
        };
        refused("{}", "sharing.urls");
        refused("{urls: ['http://a:1']}", "the scheme is redis");
        refused("{urls: ['redis://u:s3cret@a:1']}", "sharing.password_file");
        refused("{urls: ['redis://a:1/x']}", "number of a database");
        refused("{urls: ['redis://a:99999']}", "up to 65535");
        refused("{urls: ['redis://a:1', 'redis://b:1']}", "sharing.kind");
        refused("{urls: ['redis://a:1', 'rediss://b:1'], kind: cluster}", "or none");
        refused("{urls: ['redis://a:1'], ca: FILE}", "sharing.ca");
        refused("{urls: ['rediss://a:1'], ca: FILE}", "holds no certificate");
        refused("{urls: ['rediss://a:1'], ca: /nowhere}", "sharing.ca: /nowhere cannot be read");
        refused("{urls: ['redis://a:1'], user: w}", "sharing.user");
        refused("{urls: ['redis://a:1'], delay: 1m}", "sharing.delay: must be at most 10s");
        refused("{urls: ['redis://a:1'], kind: sentinel, group: ''}", "sharing.group");
        refused("{urls: ['redis://a:1'], key_prefix: '{a}'}", "letters, digits");
        refused("{urls: ['redis://a:1'], most: 0}", "most");
        refused("{url: 'redis://a:1'}", "unknown field");
        let no_key = parse("{urls: ['redis://a:1']}", false).unwrap_err();
        assert!(no_key.contains("cache.hash_key_file"), "{no_key}");
    }
}
