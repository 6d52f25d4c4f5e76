//! Looks one entry of `workers.dns` up, again and again: the addresses of a headless Service's name, or its service record. The DNS
//! knows no pods and tells changes late; where the API server can be asked, [`super::kubernetes`] is the better source.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use tokio::time::timeout;

use super::{Ear, Failure};
use crate::config::{self, Dns, Origin, Record, Scheme};
use crate::fleet::roster::Member;
use crate::metrics::Trouble;

/// Records that live for no time at all are asked for again after this.
const SHORTEST: Duration = Duration::from_millis(500);

/// For one name to be looked up, whatever its server does.
const LIMIT: Duration = Duration::from_secs(5);
/// For one answer: a lost one is asked for again within the limit.
const ANSWER: Duration = Duration::from_secs(2);
/// Names of a service record that are looked up at once.
const AT_ONCE: usize = 16;

pub(super) async fn follow(mut ear: Ear, source: Dns) {
    let resolver = loop {
        match resolver(&source) {
            Ok(resolver) => break resolver,
            Err(error) => ear.failed(&Failure::new(Trouble::Unreachable, error)),
        }
        ear.pause(Duration::ZERO).await;
    };
    loop {
        match look_up(&resolver, &source.of).await {
            Ok(Heard { places, until, fault }) => {
                ear.heard(members(&places, &source), fault);
                ear.calm();
                let lives = until.saturating_duration_since(Instant::now());
                tokio::time::sleep(lives.clamp(SHORTEST, source.interval.max(SHORTEST))).await;
            }
            Err(failure) => {
                ear.failed(&failure);
                ear.pause(Duration::ZERO).await;
            }
        }
    }
}

fn resolver(source: &Dns) -> Result<TokioResolver, NetError> {
    let mut builder = if source.nameservers.is_empty() {
        TokioResolver::builder_tokio()?
    } else {
        let servers = source.nameservers.iter().map(|server| {
            let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
            connections.iter_mut().for_each(|connection| connection.port = server.port());
            NameServerConfig::new(server.ip(), true, connections)
        });
        let config = ResolverConfig::from_name_servers(servers.collect());
        TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
    };
    // How long an answer may be used is this module's business.
    builder.options_mut().cache_size = 0;
    builder.options_mut().timeout = builder.options_mut().timeout.min(ANSWER);
    builder.build()
}

type Places = Vec<(IpAddr, u16)>;

/// Where workers listen, in order, until when that can be relied on, and what is wrong with others.
struct Heard {
    places: Places,
    until: Instant,
    fault: Option<Failure>,
}

async fn look_up(resolver: &TokioResolver, record: &Record) -> Result<Heard, Failure> {
    match record {
        Record::Address { name, port } => {
            let found = addresses(resolver, name).await.map_err(|error| failure(name, &error))?;
            heard(name, found.addresses.iter().map(|address| (*address, *port)).collect(), found.until, None)
        }
        Record::Service { srv } => service(resolver, srv).await,
    }
}

/// What a service record leads to.
async fn service(resolver: &TokioResolver, srv: &str) -> Result<Heard, Failure> {
    let found = limited(resolver.lookup(srv, RecordType::SRV)).await.map_err(|error| failure(srv, &error))?;
    let targets = || {
        found.answers().iter().filter_map(|record| match &record.data {
            RData::SRV(target) => Some(target),
            _ => None,
        })
    };
    // Those of a higher number are for when all of the lowest are away; a Service's are all of one.
    let first = targets().map(|target| target.priority).min().unwrap_or_default();
    // Port 0 is none: nobody can be asked there.
    let (usable, portless): (Vec<_>, Vec<_>) =
        targets().filter(|target| target.priority == first).partition(|target| target.port > 0);
    let fault = portless.first().map(|target| {
        Failure::new(Trouble::Port, format!("{srv} names no port of {} (it says 0)", target.target))
    });
    let usable: Vec<_> = usable.iter().map(|target| (target.target.to_string(), target.port)).collect();
    let asked = stream::iter(usable).map(|(name, port)| target(resolver.clone(), name, port));
    let answers: Vec<_> = asked.buffered(AT_ONCE).try_collect().await?;
    let (mut places, mut until) = (Places::new(), found.valid_until());
    for (found, port) in answers.into_iter().flatten() {
        places.extend(found.addresses.iter().map(|address| (*address, port)));
        until = until.min(found.until);
    }
    heard(srv, places, until, fault)
}

/// The addresses of a service record's target, with its port; none if it has gone since the record was made.
async fn target(
    resolver: TokioResolver,
    name: String,
    port: u16,
) -> Result<Option<(Addresses, u16)>, Failure> {
    match addresses(&resolver, &name).await {
        Ok(found) => Ok(Some((found, port))),
        Err(error) if error.is_no_records_found() => Ok(None),
        Err(error) => Err(failure(&name, &error)),
    }
}

fn heard(name: &str, mut places: Places, until: Instant, fault: Option<Failure>) -> Result<Heard, Failure> {
    places.sort_unstable();
    places.dedup();
    if places.is_empty() {
        let none = || Failure::new(Trouble::Absent, format!("{name} has no address"));
        return Err(fault.unwrap_or_else(none));
    }
    Ok(Heard { places, until, fault })
}

/// The addresses of a name, and until when they are.
struct Addresses {
    addresses: Vec<IpAddr>,
    until: Instant,
}

/// A name's addresses of both families. One family that cannot be looked up is a failure of the whole: those that were known of it are
/// not gone for that. That there are none of it has to be said (NODATA, NXDOMAIN).
async fn addresses(resolver: &TokioResolver, name: &str) -> Result<Addresses, NetError> {
    if let Ok(address) = name.parse() {
        return Ok(Addresses { addresses: vec![address], until: Instant::now() + LIMIT });
    }
    limited(async {
        // By the search list, if the name is not a whole one; the other family then of the name that was found there.
        let (found, other) = match resolver.lookup(name, RecordType::A).await {
            Ok(found) => (found, Some(RecordType::AAAA)),
            Err(first) => match resolver.lookup(name, RecordType::AAAA).await {
                Ok(found) => {
                    let said = says_none(&first).is_some_and(|asked| asked == found.query().name());
                    (found, (!said).then_some(RecordType::A))
                }
                Err(second) => return Err(if first.is_no_records_found() { second } else { first }),
            },
        };
        let mut addresses = ips(&found);
        let mut until = found.valid_until();
        if let Some(other) = other {
            match resolver.lookup(found.query().name().clone(), other).await {
                Ok(found) => {
                    addresses.extend(ips(&found));
                    until = until.min(found.valid_until());
                }
                Err(error) if error.is_no_records_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Addresses { addresses, until })
    })
    .await
}

fn ips(found: &Lookup) -> Vec<IpAddr> {
    found.answers().iter().filter_map(|record| record.data.ip_addr()).collect()
}

/// The name that has no such records, if that is what was said.
fn says_none(error: &NetError) -> Option<&Name> {
    match error {
        NetError::Dns(DnsError::NoRecordsFound(none)) => Some(none.query.name()),
        _ => None,
    }
}

async fn limited<T>(asked: impl Future<Output = Result<T, NetError>>) -> Result<T, NetError> {
    timeout(LIMIT, asked).await.unwrap_or(Err(NetError::Timeout))
}

fn failure(name: &str, error: &NetError) -> Failure {
    // A name without addresses may be a Service that has just lost its last pod, or a server that has not heard of it yet.
    if error.is_no_records_found() {
        return Failure::new(Trouble::Absent, format!("{name} has no such record"));
    }
    Failure::new(Trouble::Unreachable, format!("{name} cannot be looked up: {error}"))
}

fn members(places: &Places, source: &Dns) -> Vec<Member> {
    let worker = |(address, port): &(IpAddr, u16)| config::Worker {
        url: Origin::at(source.scheme == Scheme::Https, *address, *port),
        capacity_tokens: source.capacity_tokens,
        prefill_speed: source.prefill_speed,
    };
    places.iter().map(worker).map(Member::plain).collect()
}
