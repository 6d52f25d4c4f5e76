//! Looks one entry of `workers.dns` up, again and again: the addresses of a headless Service's name, or its service record. The DNS
//! knows no pods and tells changes late; where the API server can be asked, [`super::kubernetes`] is the better source.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;

use super::{Ear, Failure};
use crate::config::{self, Dns, Origin, Record, Scheme};
use crate::fleet::roster::Member;
use crate::metrics::Trouble;

/// Records that live for no time at all are asked for again after this.
const SHORTEST: Duration = Duration::from_millis(500);

pub(super) async fn follow(mut ear: Ear, source: Dns) {
    let resolver = loop {
        match resolver(&source) {
            Ok(resolver) => break resolver,
            Err(error) => ear.failed(&Failure::new(Trouble::Unreachable, error)),
        }
        ear.pause().await;
    };
    loop {
        match look_up(&resolver, &source.of).await {
            Ok((places, until)) => {
                ear.heard(members(&places, &source), None);
                ear.calm();
                let lives = until.saturating_duration_since(Instant::now());
                tokio::time::sleep(lives.clamp(SHORTEST, source.interval.max(SHORTEST))).await;
            }
            Err(failure) => {
                ear.failed(&failure);
                ear.pause().await;
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
    builder.build()
}

type Places = Vec<(IpAddr, u16)>;

/// Where workers listen, in order, and until when that can be relied on.
async fn look_up(resolver: &TokioResolver, record: &Record) -> Result<(Places, Instant), Failure> {
    match record {
        Record::Address { name, port } => {
            let found = resolver.lookup_ip(name.as_str()).await.map_err(|error| failure(name, &error))?;
            sorted(found.iter().map(|address| (address, *port)).collect(), found.valid_until(), name)
        }
        Record::Service { srv } => {
            let found = resolver.srv_lookup(srv.as_str()).await.map_err(|error| failure(srv, &error))?;
            let targets = || {
                found.answers().iter().filter_map(|record| match &record.data {
                    RData::SRV(target) => Some(target),
                    _ => None,
                })
            };
            // Those of a higher number are for when all of the lowest are away; a Service's are all of one.
            let first = targets().map(|target| target.priority).min().unwrap_or_default();
            let mut places = Places::new();
            let mut until = found.valid_until();
            for target in targets().filter(|target| target.priority == first) {
                let name = target.target.to_string();
                match resolver.lookup_ip(target.target.clone()).await {
                    Ok(found) => {
                        places.extend(found.iter().map(|address| (address, target.port)));
                        until = until.min(found.valid_until());
                    }
                    // It has gone since the record was made.
                    Err(error) if error.is_no_records_found() => {}
                    Err(error) => return Err(failure(&name, &error)),
                }
            }
            sorted(places, until, srv)
        }
    }
}

fn sorted(mut places: Places, until: Instant, name: &str) -> Result<(Places, Instant), Failure> {
    places.sort_unstable();
    places.dedup();
    if places.is_empty() {
        return Err(Failure::new(Trouble::Absent, format!("{name} has no address")));
    }
    Ok((places, until))
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
