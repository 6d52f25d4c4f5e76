//! From EndpointSlices to workers, as kube-proxy goes from them to a Service's endpoints. Pure: [`super::kubernetes`] brings the
//! slices, whole or one by one.
//!
//! What kube-proxy does, and so what is done here, for each Service by itself:
//! - of an endpoint only the first address counts, of slices only those of IP addresses, of ports only TCP ones with a number;
//! - a condition that is not told is a good one: ready, serving, not terminating;
//! - the ready endpoints are used; where there is none, those that are terminating and still serve;
//! - an address that is listed twice (endpoints move between slices) is one endpoint.
//!
//! Where kube-proxy goes by what it read first, or has one rule set for each address family, this goes by what is best for a
//! worker: of two pods at one address the ready one is there, and a pod with addresses of both families is one worker.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::config::PortChoice;

/// One EndpointSlice, as far as it matters.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Slice {
    /// The Service it is of.
    pub service: Arc<str>,
    pub ports: Vec<Port>,
    /// It has ports of other protocols than TCP, which are not among them.
    pub other_ports: bool,
    /// Its endpoints are names (FQDN), which are not among them: nobody knows where they are.
    pub names: bool,
    pub endpoints: Vec<Endpoint>,
}

/// What is wrong with slices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The port that is asked for is not there.
    Port(String),
    /// There is nobody.
    Nobody(String),
}

/// A TCP port of a slice's endpoints.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    pub name: String,
    pub number: u16,
}

/// An endpoint as a slice has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    pub address: IpAddr,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub pod: Option<Pod>,
    pub zone: Option<Arc<str>>,
}

/// Who is behind an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pod {
    pub name: Arc<str>,
    pub uid: Arc<str>,
}

/// Whether new requests may go to an endpoint.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Intake {
    /// It is on its way out, and others are there.
    Terminating,
    NotReady,
    #[default]
    Open,
}

/// A worker as found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub address: IpAddr,
    pub port: u16,
    pub pod: Option<Pod>,
    pub zone: Option<Arc<str>>,
    pub intake: Intake,
}

/// All slices of one entry of the config, by name.
#[derive(Clone, Debug, Default)]
pub struct Slices {
    by_name: BTreeMap<Arc<str>, Slice>,
}

impl Slices {
    /// What a list has told: everything.
    pub fn of(list: impl IntoIterator<Item = (Arc<str>, Slice)>) -> Slices {
        Slices { by_name: list.into_iter().collect() }
    }

    /// A slice was added or changed.
    pub fn put(&mut self, name: Arc<str>, slice: Slice) {
        self.by_name.insert(name, slice);
    }

    pub fn remove(&mut self, name: &str) {
        self.by_name.remove(name);
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The workers, in the order of their addresses, and what is wrong if anything is.
    pub fn workers(&self, choice: &PortChoice) -> (Vec<Found>, Option<Fault>) {
        let mut services: BTreeMap<&str, BTreeMap<(IpAddr, u16), &Endpoint>> = BTreeMap::new();
        let mut fault = None;
        for slice in self.by_name.values().filter(|slice| !slice.endpoints.is_empty()) {
            let port = match pick(slice, choice) {
                Ok(port) => port,
                Err(why) => {
                    fault = Some(Fault::Port(format!("Service {}: {why}", slice.service)));
                    continue;
                }
            };
            let service = services.entry(&slice.service).or_default();
            for endpoint in &slice.endpoints {
                let known = service.entry((endpoint.address, port)).or_insert(endpoint);
                if endpoint.rank() > known.rank() {
                    *known = endpoint;
                }
            }
        }
        let mut workers: BTreeMap<(IpAddr, u16), Found> = BTreeMap::new();
        for ((address, port), endpoint, intake) in services.into_values().flat_map(with_intake) {
            let found =
                Found { address, port, pod: endpoint.pod.clone(), zone: endpoint.zone.clone(), intake };
            // Of several Services: one that would use it is enough.
            let known = workers.entry((address, port)).or_insert_with(|| found.clone());
            if found.intake > known.intake {
                *known = found;
            }
        }
        if workers.is_empty() && fault.is_none() {
            fault = self.nobody();
        }
        (one_address_each(workers.into_values().collect()), fault)
    }

    /// Why there is no endpoint in any slice. None is a slice that nobody has filled, as of a Service that selects no pod.
    fn nobody(&self) -> Option<Fault> {
        if let Some(slice) = self.by_name.values().find(|slice| slice.names) {
            let why = "its endpoints are names (addressType FQDN), and only addresses can be followed";
            return Some(Fault::Nobody(format!("Service {}: {why}", slice.service)));
        }
        let first = self.by_name.values().next()?;
        let why = "has no endpoints: does its selector match any pod?";
        Some(Fault::Nobody(format!("the Service {} {why}", first.service)))
    }
}

impl Endpoint {
    fn rank(&self) -> (bool, bool, bool) {
        (!self.terminating, self.ready, self.serving)
    }
}

/// The port of a slice that is asked for.
fn pick(slice: &Slice, choice: &PortChoice) -> Result<u16, String> {
    let ports = &*slice.ports;
    if ports.is_empty() && slice.other_ports {
        return Err("none of its ports is one of TCP".to_owned());
    }
    let found = match choice {
        PortChoice::Only => match ports {
            [only] => return Ok(only.number),
            _ => None,
        },
        PortChoice::Name(name) => ports.iter().find(|port| port.name == *name),
        // A headless Service may name no port at all.
        PortChoice::Number(number) if ports.is_empty() => return Ok(*number),
        PortChoice::Number(number) => ports.iter().find(|port| port.number == *number),
    };
    found.map(|port| port.number).ok_or_else(|| {
        let told = |port: &Port| format!("{} ({})", port.number, port.name).replace(" ()", "");
        match (choice, ports.iter().map(told).collect::<Vec<_>>().join(", ")) {
            (PortChoice::Only, ports) if ports.is_empty() => {
                "it names no port; give its pods' `port` as a number".to_owned()
            }
            (PortChoice::Only, ports) => format!("it has several ports, {ports}; say which with `port`"),
            (choice, ports) if ports.is_empty() => format!("it names no port, and so none called {choice}"),
            (choice, ports) => format!("no port of its pods is {choice}; there are {ports}"),
        }
    })
}

type At = (IpAddr, u16);

/// Which of a Service's endpoints are used.
fn with_intake(endpoints: BTreeMap<At, &Endpoint>) -> impl Iterator<Item = (At, &Endpoint, Intake)> {
    let any_ready = endpoints.values().any(|endpoint| endpoint.ready);
    endpoints.into_iter().map(move |(at, endpoint)| {
        let last_resort = !any_ready && endpoint.serving && endpoint.terminating;
        let intake = match endpoint {
            endpoint if endpoint.ready || last_resort => Intake::Open,
            endpoint if endpoint.terminating => Intake::Terminating,
            _ => Intake::NotReady,
        };
        (at, endpoint, intake)
    })
}

/// Of a pod's addresses in both families the IPv4 one, which sorts first.
fn one_address_each(mut workers: Vec<Found>) -> Vec<Found> {
    let mut seen: HashSet<(Arc<str>, u16)> = HashSet::new();
    let both = workers.iter().any(|worker| worker.address.is_ipv4())
        && workers.iter().any(|worker| worker.address.is_ipv6());
    if both {
        workers.retain(|worker| {
            let Some(pod) = &worker.pod else { return true };
            let place = (pod.uid.clone(), worker.port);
            if worker.address.is_ipv6() {
                return !seen.contains(&place);
            }
            seen.insert(place);
            true
        });
    }
    workers
}

#[cfg(test)]
mod tests;
