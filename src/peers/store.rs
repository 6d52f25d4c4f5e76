//! The store: a Redis or Valkey stream that all routers of a kind write and read. The only file that knows its client.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    RedisError, RedisResult, TlsCertificates, Value, cmd,
};
use tokio::task::spawn_blocking;

use crate::config::{Secret, Sharing, StoreKind};
use crate::core::blocks::HashKey;

/// To open a connection, and for an answer beyond the time that it was asked to wait.
const CONNECT: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(4);
/// How long a read waits for news.
pub const WAIT: Duration = Duration::from_secs(1);
/// Batches that are read at once: some megabytes where all are full.
pub const AT_ONCE: usize = 64;

/// Of an entry's fields the only one: news.
const FIELD: &str = "n";

/// Where a batch is in the stream.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Place {
    /// By the store's clock.
    pub ms: u64,
    pub number: u64,
}

impl Place {
    fn parse(id: &[u8]) -> Option<Place> {
        let (ms, number) = std::str::from_utf8(id).ok()?.split_once('-')?;
        Some(Place { ms: ms.parse().ok()?, number: number.parse().ok()? })
    }
}

enum Access {
    Server(Client),
    Cluster(ClusterClient),
    /// Who know the primary server.
    Sentinel(SentinelClient),
}

/// How the store is reached, and the stream in it.
pub struct Store {
    sharing: Sharing,
    key: String,
}

impl Store {
    /// Asks nobody yet. The stream is one for all routers that hash alike, so that others never mix with them.
    ///
    /// # Errors
    /// Names the key at fault.
    pub fn new(sharing: &Sharing, hash_key: &HashKey, block_bytes: usize) -> Result<Arc<Store>, String> {
        access(sharing)?;
        let kind = format!("warmroute stream of news, blocks of {block_bytes}");
        let fingerprint = blake3::keyed_hash(&hash_key.0, kind.as_bytes()).to_hex();
        let key = format!("{}:news:{}", sharing.key_prefix, &fingerprint[..16]);
        Ok(Arc::new(Store { sharing: sharing.clone(), key }))
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// As the config names it; there is no password in it.
    pub fn address(&self) -> String {
        self.sharing.addresses()
    }

    /// With the password and the authorities that the files have now.
    ///
    /// # Errors
    /// If it cannot be reached, or turns the password away.
    pub async fn connect(&self) -> RedisResult<Link> {
        let sharing = self.sharing.clone();
        let access = spawn_blocking(move || access(&sharing)).await.map_err(std::io::Error::from)?;
        let unusable = |why| RedisError::from((ErrorKind::InvalidClientConfig, "cannot be used", why));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(WAIT + ANSWER));
        Ok(match access.map_err(unusable)? {
            Access::Server(client) => {
                Link::Server(client.get_multiplexed_async_connection_with_config(&config).await?)
            }
            Access::Sentinel(mut client) => {
                Link::Server(client.get_async_connection_with_config(&config).await?)
            }
            Access::Cluster(client) => Link::Cluster(client.get_async_connection().await?),
        })
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// Of which it is not known whether it was added.
    pub async fn add(&self, link: &mut Link, batch: &[u8]) -> RedisResult<()> {
        let mut add = cmd("XADD");
        add.arg(&self.key).arg("MAXLEN").arg("~").arg(self.sharing.most).arg("*").arg(FIELD).arg(batch);
        link.ask(&add).await.map(drop)
    }

    /// Where the newest batch is, if there is one.
    ///
    /// # Errors
    /// Of the store.
    pub async fn newest(&self, link: &mut Link) -> RedisResult<Option<Place>> {
        let mut range = cmd("XREVRANGE");
        range.arg(&self.key).arg("+").arg("-").arg("COUNT").arg(1);
        let answer = link.ask(&range).await?;
        Ok(entries(answer).first().map(|(place, _)| *place))
    }

    /// The batches after `last`, the oldest first; none if none comes for [`WAIT`].
    ///
    /// # Errors
    /// Of the store.
    pub async fn read(&self, link: &mut Link, last: Place) -> RedisResult<Vec<(Place, Vec<u8>)>> {
        let mut read = cmd("XREAD");
        read.arg("COUNT").arg(AT_ONCE).arg("BLOCK").arg(WAIT.as_millis() as u64);
        read.arg("STREAMS").arg(&self.key).arg(format!("{}-{}", last.ms, last.number));
        Ok(match link.ask(&read).await? {
            Value::Array(streams) => streams.into_iter().flat_map(of_stream).collect(),
            _ => Vec::new(),
        })
    }
}

/// A connection.
pub enum Link {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    async fn ask(&mut self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Link::Server(connection) => command.query_async(connection).await,
            Link::Cluster(connection) => command.query_async(connection).await,
        }
    }
}

/// `[name, entries]`
fn of_stream(stream: Value) -> Vec<(Place, Vec<u8>)> {
    match stream {
        Value::Array(mut parts) if parts.len() == 2 => parts.pop().map(entries).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// `[[id, [name, bytes]], ..]`; of what has other fields only the place is known.
fn entries(answer: Value) -> Vec<(Place, Vec<u8>)> {
    let Value::Array(entries) = answer else { return Vec::new() };
    let entry = |entry| {
        let Value::Array(parts) = entry else { return None };
        let mut parts = parts.into_iter();
        let Some(Value::BulkString(id)) = parts.next() else { return None };
        let fields = match parts.next() {
            Some(Value::Array(fields)) => <[Value; 2]>::try_from(fields).ok(),
            _ => None,
        };
        let bytes = match fields {
            Some([Value::BulkString(name), Value::BulkString(bytes)]) if name == FIELD.as_bytes() => bytes,
            _ => Vec::new(),
        };
        Some((Place::parse(&id)?, bytes))
    };
    entries.into_iter().filter_map(entry).collect()
}

fn access(sharing: &Sharing) -> Result<Access, String> {
    let key = |error: RedisError| format!("sharing: {error}");
    let authorities = sharing.authorities()?;
    let certificates = authorities.map(|ca| TlsCertificates { client_tls: None, root_cert: Some(ca) });
    let password = sharing.password()?;
    let infos = sharing.urls.iter().map(|url| info(sharing, password.as_ref(), url.as_str()));
    let infos = infos.collect::<RedisResult<Vec<ConnectionInfo>>>().map_err(key)?;
    match sharing.kind {
        StoreKind::Server => {
            let info = infos.into_iter().next().ok_or("sharing.urls: is empty")?;
            let client = match certificates {
                Some(certificates) => Client::build_with_tls(info, certificates),
                None => Client::open(info),
            };
            client.map(Access::Server).map_err(key)
        }
        StoreKind::Cluster => {
            let mut builder =
                ClusterClient::builder(infos).connection_timeout(CONNECT).response_timeout(WAIT + ANSWER);
            if let Some(certificates) = certificates {
                builder = builder.certs(certificates);
            }
            builder.build().map(Access::Cluster).map_err(key)
        }
        StoreKind::Sentinel => sentinel(sharing, password.as_ref(), &infos, certificates).map_err(key),
    }
}

fn info(sharing: &Sharing, password: Option<&Secret>, url: &str) -> RedisResult<ConnectionInfo> {
    let info = url.into_connection_info()?;
    let mut settings = info.redis_settings().clone();
    if let Some(user) = &sharing.user {
        settings = settings.set_username(user);
    }
    if let Some(Secret(password)) = password {
        settings = settings.set_password(password);
    }
    Ok(info.set_redis_settings(settings))
}

fn sentinel(
    sharing: &Sharing,
    password: Option<&Secret>,
    infos: &[ConnectionInfo],
    certificates: Option<TlsCertificates>,
) -> RedisResult<Access> {
    let addresses: Vec<ConnectionAddr> = infos.iter().map(|info| info.addr().clone()).collect();
    let in_tls = sharing.urls.iter().any(|url| url.is_tls());
    let mut builder = SentinelClientBuilder::new(addresses, &sharing.group, SentinelServerType::Master)?;
    if in_tls {
        builder = builder.set_client_to_redis_tls_mode(redis::TlsMode::Secure);
    }
    if let Some(certificates) = certificates {
        builder = builder.set_client_to_sentinel_certificates(certificates.clone());
        builder = builder.set_client_to_redis_certificates(certificates);
    }
    if let Some(user) = &sharing.user {
        builder = builder.set_client_to_redis_username(user).set_client_to_sentinel_username(user);
    }
    if let Some(Secret(password)) = password {
        builder = builder.set_client_to_redis_password(password).set_client_to_sentinel_password(password);
    }
    if let Some(info) = infos.first() {
        builder = builder.set_client_to_redis_db(info.redis_settings().db());
    }
    builder.build().map(Access::Sentinel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StoreUrl;

    fn sharing(kind: StoreKind, urls: &[&str]) -> Sharing {
        let urls = urls.iter().map(|url| StoreUrl::parse(url).unwrap()).collect();
        Sharing { kind, urls, ..Sharing::default() }
    }

    #[test]
    fn routers_that_hash_otherwise_have_another_stream() {
        let of = |key: u8, bytes| {
            let sharing = sharing(StoreKind::Server, &["redis://a:1"]);
            Store::new(&sharing, &HashKey([key; 32]), bytes).unwrap().key().to_owned()
        };
        assert_eq!(of(1, 256), of(1, 256));
        assert_ne!(of(1, 256), of(2, 256));
        assert_ne!(of(1, 256), of(1, 128));
        assert!(of(1, 256).starts_with("warmroute:news:"));
    }

    #[test]
    fn each_kind_of_store_can_be_named() {
        let key = HashKey([0; 32]);
        let made = |kind, urls: &[&str]| Store::new(&sharing(kind, urls), &key, 256).map(drop);
        for url in ["redis://a:1/3", "rediss://a:1", "redis://a", "redis://[::1]:1"] {
            assert_eq!(made(StoreKind::Server, &[url]), Ok(()), "{url}");
        }
        for kind in [StoreKind::Cluster, StoreKind::Sentinel] {
            assert_eq!(made(kind, &["redis://a:1", "redis://b:1"]), Ok(()));
            assert_eq!(made(kind, &["rediss://a:1", "rediss://b:1"]), Ok(()));
        }
        let absent = Sharing { ca: Some("/nowhere".into()), ..sharing(StoreKind::Server, &["rediss://a:1"]) };
        let refused = Store::new(&absent, &key, 256).map(drop).unwrap_err();
        assert!(refused.starts_with("sharing.ca: /nowhere"), "{refused}");
    }

    #[test]
    fn an_answer_of_another_form_is_no_news() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let entry = |id: &str, fields| Value::Array(vec![bulk(id), fields]);
        let good = entry("5-1", Value::Array(vec![bulk("n"), bulk("bytes")]));
        let other = entry("7-0", Value::Array(vec![bulk("a"), bulk("bytes")]));
        let odd = vec![good, entry("x", Value::Nil), entry("6-0", Value::Nil), Value::Int(3), other];
        let read = entries(Value::Array(odd));
        assert_eq!(read[0], (Place { ms: 5, number: 1 }, b"bytes".to_vec()));
        assert_eq!(read[1], (Place { ms: 6, number: 0 }, Vec::new()), "its place counts");
        assert_eq!(read[2], (Place { ms: 7, number: 0 }, Vec::new()));
        assert_eq!(read.len(), 3);
        assert!(entries(Value::Nil).is_empty() && of_stream(Value::Okay).is_empty());
    }
}
