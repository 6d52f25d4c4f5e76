//! One by one, and random clusters against the rules written down plainly.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const HTTP: u16 = 8000;

fn endpoint(host: u8, uid: &str) -> Endpoint {
    Endpoint {
        address: IpAddr::from([10, 0, 0, host]),
        ready: true,
        serving: true,
        terminating: false,
        pod: Some(Pod { name: format!("pod-{uid}").into(), uid: uid.into() }),
        zone: None,
    }
}

fn not_ready(host: u8) -> Endpoint {
    Endpoint { ready: false, serving: false, ..endpoint(host, &host.to_string()) }
}

fn terminating(host: u8, serving: bool) -> Endpoint {
    Endpoint { ready: false, serving, terminating: true, ..endpoint(host, &host.to_string()) }
}

fn slice(endpoints: &[Endpoint]) -> Slice {
    Slice {
        service: "vllm".into(),
        ports: vec![Port { name: "http".to_owned(), number: HTTP }],
        endpoints: endpoints.to_vec(),
        ..Slice::default()
    }
}

fn slices(list: &[Slice]) -> Slices {
    Slices::of(list.iter().enumerate().map(|(at, slice)| (format!("slice-{at}").into(), slice.clone())))
}

/// Last byte of each address and what is to be done with it.
fn seen(slices: &Slices) -> Vec<(u8, Intake)> {
    let (workers, fault) = slices.workers(&PortChoice::Only);
    assert_eq!(fault, None);
    workers
        .iter()
        .map(|worker| match worker.address {
            IpAddr::V4(address) => (address.octets()[3], worker.intake),
            IpAddr::V6(_) => (0, worker.intake),
        })
        .collect()
}

#[test]
fn ready_ones_are_used_and_the_others_are_there_without_being_used() {
    let slices =
        slices(&[slice(&[endpoint(1, "a"), not_ready(2), terminating(3, true), terminating(4, false)])]);
    let all = [Intake::Open, Intake::NotReady, Intake::Terminating, Intake::Terminating];
    assert_eq!(seen(&slices), (1..=4).zip(all).collect::<Vec<_>>());
}

#[test]
fn where_none_is_ready_those_that_leave_and_still_serve_are_used() {
    let slices = slices(&[slice(&[not_ready(2)]), slice(&[terminating(3, true), terminating(4, false)])]);
    assert_eq!(seen(&slices), [(2, Intake::NotReady), (3, Intake::Open), (4, Intake::Terminating)]);
}

#[test]
fn each_service_has_a_last_resort_of_its_own() {
    let other = Slice { service: "other".into(), ..slice(&[terminating(3, true)]) };
    assert_eq!(seen(&slices(&[slice(&[endpoint(1, "a")]), other])), [(1, Intake::Open), (3, Intake::Open)]);
}

#[test]
fn a_reused_address_is_the_running_pods() {
    let old = Endpoint { pod: endpoint(3, "old").pod, ..terminating(3, true) };
    // Its readiness is not told yet: even so the address is no longer the old one's.
    let new = Endpoint { ready: false, serving: false, ..endpoint(3, "new") };
    for list in [[&old, &new], [&new, &old]] {
        let list = list.map(|endpoint| slice(std::slice::from_ref(endpoint)));
        let (workers, _) = slices(&list).workers(&PortChoice::Only);
        assert_eq!(workers.len(), 1);
        assert_eq!(workers[0].pod.as_ref().map(|pod| &*pod.uid), Some("new"));
        assert_eq!(workers[0].intake, Intake::NotReady);
    }
}

#[test]
fn an_endpoint_that_moves_between_slices_is_one() {
    let slices = slices(&[slice(&[endpoint(1, "a")]), slice(&[endpoint(1, "a"), endpoint(2, "b")])]);
    assert_eq!(seen(&slices), [(1, Intake::Open), (2, Intake::Open)]);
}

#[test]
fn a_pod_with_addresses_of_both_families_is_one_worker() {
    let six = |uid: &str| Endpoint { address: "fd00::1".parse().unwrap(), ..endpoint(1, uid) };
    assert_eq!(seen(&slices(&[slice(&[endpoint(1, "a")]), slice(&[six("a")])])), [(1, Intake::Open)]);
    assert_eq!(
        seen(&slices(&[slice(&[endpoint(1, "a")]), slice(&[six("b")])])),
        [(1, Intake::Open), (0, Intake::Open)]
    );
    assert_eq!(seen(&slices(&[slice(&[six("a")])])), [(0, Intake::Open)]);
}

#[test]
fn the_port_is_picked_by_name_or_number_and_what_is_wrong_is_told() {
    let ports = |ports: &[(&str, u16)]| Slice {
        ports: ports
            .iter()
            .map(|(name, number)| Port { name: (*name).to_owned(), number: *number })
            .collect(),
        ..slice(&[endpoint(1, "a")])
    };
    let pick = |slice: Slice, choice: PortChoice| {
        let (workers, fault) = slices(&[slice]).workers(&choice);
        let Some(Fault::Port(fault)) = fault else {
            return (workers.first().map(|worker| worker.port), String::new());
        };
        (workers.first().map(|worker| worker.port), fault)
    };
    let (name, number) = (|name: &str| PortChoice::Name(name.to_owned()), PortChoice::Number);
    let udp = || Slice { other_ports: true, ..ports(&[]) };
    let two = || ports(&[("http", 8000), ("metrics", 9000)]);
    assert_eq!(pick(ports(&[("", 8000)]), PortChoice::Only).0, Some(8000));
    assert_eq!(pick(two(), name("metrics")).0, Some(9000));
    assert_eq!(pick(two(), number(8000)).0, Some(8000));
    assert_eq!(pick(ports(&[]), number(8000)).0, Some(8000), "a headless Service may name none");
    for (slice, choice, words) in [
        (
            two(),
            PortChoice::Only,
            "Service vllm: it has several ports, 8000 (http), 9000 (metrics); say which",
        ),
        (two(), name("https"), "no port of its pods is https; there are 8000 (http), 9000 (metrics)"),
        (ports(&[("", 8000)]), number(80), "no port of its pods is 80; there are 8000"),
        (ports(&[]), PortChoice::Only, "it names no port; give its pods' `port` as a number"),
        (ports(&[]), name("http"), "it names no port, and so none called http"),
        (udp(), PortChoice::Only, "none of its ports is one of TCP"),
        (udp(), name("http"), "none of its ports is one of TCP"),
        (udp(), number(8000), "none of its ports is one of TCP"),
    ] {
        let (port, fault) = pick(slice, choice);
        assert_eq!(port, None);
        assert!(fault.contains(words), "{fault}");
    }
}

#[test]
fn slices_that_are_empty_are_no_fault_whatever_their_ports() {
    let empty = Slice { ports: Vec::new(), ..slice(&[]) };
    assert_eq!(seen(&slices(&[empty, slice(&[endpoint(1, "a")])])), [(1, Intake::Open)]);
}

#[test]
fn slices_without_anybody_are_a_fault_that_names_the_service() {
    let fault = |list: &[Slice]| match slices(list).workers(&PortChoice::Only) {
        (workers, Some(Fault::Nobody(why))) if workers.is_empty() => why,
        other => panic!("{other:?}"),
    };
    let empty = Slice { ports: Vec::new(), ..slice(&[]) };
    for list in [vec![empty.clone()], vec![empty.clone(), slice(&[])]] {
        assert_eq!(fault(&list), "the Service vllm has no endpoints: does its selector match any pod?");
    }
    let names = Slice { names: true, ..slice(&[]) };
    assert!(fault(&[empty, names]).contains("Service vllm: its endpoints are names (addressType FQDN)"));
    assert_eq!(slices(&[]).workers(&PortChoice::Only), (Vec::new(), None), "that is another fault");
    // Nobody of them may be asked, and yet they are there.
    assert_eq!(slices(&[slice(&[not_ready(1)])]).workers(&PortChoice::Only).1, None);
}

/// What happens in a cluster, as far as its endpoints show it.
#[derive(Clone, Debug)]
enum Step {
    /// A pod is listed at this address in this slice, in this condition.
    Put {
        slice: u8,
        host: u8,
        ready: bool,
        serving: bool,
        terminating: bool,
    },
    /// It is listed there no more.
    Drop {
        slice: u8,
        host: u8,
    },
    DeleteSlice(u8),
    /// What the watch tells from here on is lost, until all is listed anew.
    Lose,
    Relist,
}

fn step() -> impl Strategy<Value = Step> {
    let (slice, host) = (0..4u8, 1..6u8);
    prop_oneof![
        8 => (slice.clone(), host.clone(), any::<[bool; 3]>()).prop_map(|(slice, host, [ready, serving, terminating])| {
            Step::Put { slice, host, ready, serving, terminating }
        }),
        3 => (slice.clone(), host).prop_map(|(slice, host)| Step::Drop { slice, host }),
        1 => slice.prop_map(Step::DeleteSlice),
        1 => Just(Step::Lose),
        1 => Just(Step::Relist),
    ]
}

/// The rules, said once more: which addresses a Service's traffic goes to.
fn used(cluster: &BTreeMap<u8, Slice>) -> BTreeSet<IpAddr> {
    let mut used = BTreeSet::new();
    for service in ["even", "odd"] {
        let listed: Vec<&Endpoint> = cluster
            .values()
            .filter(|slice| &*slice.service == service)
            .flat_map(|slice| &slice.endpoints)
            .collect();
        let at = |address: IpAddr| {
            let running: Vec<_> =
                listed.iter().filter(|e| e.address == address && !e.terminating).copied().collect();
            let here: Vec<_> = listed.iter().filter(|e| e.address == address).copied().collect();
            if running.is_empty() { here } else { running }
        };
        let addresses: BTreeSet<IpAddr> = listed.iter().map(|endpoint| endpoint.address).collect();
        let ready: Vec<_> =
            addresses.iter().filter(|address| at(**address).iter().any(|e| e.ready)).copied().collect();
        let leaving = |address: &&IpAddr| at(**address).iter().any(|e| e.serving && e.terminating);
        let last_resort: Vec<_> = addresses.iter().filter(leaving).copied().collect();
        used.extend(if ready.is_empty() { last_resort } else { ready });
    }
    used
}

proptest! {
    #[test]
    fn random_clusters_are_seen_as_kube_proxy_would(steps in vec(step(), 1..60)) {
        let mut cluster: BTreeMap<u8, Slice> = BTreeMap::new();
        let mut slices = Slices::default();
        let mut lost = false;
        for step in steps {
            let name = |at: u8| -> Arc<str> { format!("slice-{at}").into() };
            let touched = match &step {
                Step::Put { slice: at, host, ready, serving, terminating } => {
                    let service: Arc<str> = if at % 2 == 0 { "even" } else { "odd" }.into();
                    let slice = cluster.entry(*at).or_insert_with(|| Slice { service, ..slice(&[]) });
                    slice.endpoints.retain(|known| known.address != endpoint(*host, "").address);
                    let uid = format!("{at}{host}");
                    slice.endpoints.push(Endpoint {
                        ready: *ready,
                        serving: *serving,
                        terminating: *terminating,
                        ..endpoint(*host, &uid)
                    });
                    Some(*at)
                }
                Step::Drop { slice: at, host } => {
                    let gone = endpoint(*host, "").address;
                    if let Some(slice) = cluster.get_mut(at) {
                        slice.endpoints.retain(|known| known.address != gone);
                    }
                    cluster.contains_key(at).then_some(*at)
                }
                Step::DeleteSlice(at) => cluster.remove(at).map(|_| *at),
                Step::Lose => { lost = true; None }
                Step::Relist => {
                    lost = false;
                    slices = Slices::of(cluster.iter().map(|(at, slice)| (name(*at), slice.clone())));
                    None
                }
            };
            if let Some(at) = touched.filter(|_| !lost) {
                match cluster.get(&at) {
                    Some(slice) => slices.put(name(at), slice.clone()),
                    None => slices.remove(&name(at)),
                }
            }
            if lost {
                continue;
            }
            let (workers, fault) = slices.workers(&PortChoice::Only);
            let nobody = cluster.values().all(|slice| slice.endpoints.is_empty());
            prop_assert_eq!(fault.is_some(), nobody && !cluster.is_empty());
            let open: BTreeSet<IpAddr> =
                workers.iter().filter(|w| w.intake == Intake::Open).map(|w| w.address).collect();
            prop_assert_eq!(open, used(&cluster), "after {:?}", step);
            let listed: BTreeSet<IpAddr> =
                cluster.values().flat_map(|slice| &slice.endpoints).map(|e| e.address).collect();
            prop_assert_eq!(workers.iter().map(|w| w.address).collect::<BTreeSet<_>>(), listed);
            prop_assert_eq!(workers.len(), listed_len(&workers), "each once");
        }
    }
}

fn listed_len(workers: &[Found]) -> usize {
    workers.iter().map(|worker| worker.address).collect::<BTreeSet<_>>().len()
}
