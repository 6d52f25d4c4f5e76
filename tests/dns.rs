//! Workers found by DNS: addresses and service records that change, live for their time, and are away for a while.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::UdpSocket;
use warmroute::config::{Config, Mode};
use warmroute::testing::{FakeEngine, TestRouter, until};

const A: u16 = 1;
const AAAA: u16 = 28;
const SRV: u16 = 33;

/// What a name server answers: records by name and type, or an answer code.
#[derive(Default)]
struct Zone {
    records: HashMap<(String, u16), Vec<Vec<u8>>>,
    fails: bool,
    /// A name and type by themselves, and how they fail.
    failing: HashMap<(String, u16), Failing>,
    asked: usize,
}

#[derive(Copy, Clone, PartialEq)]
enum Failing {
    /// SERVFAIL.
    Code,
    /// An answer that nobody can read.
    Unreadable,
    /// No answer.
    Silent,
}

#[derive(Clone)]
struct NameServer {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
}

impl NameServer {
    async fn start() -> NameServer {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a loopback port");
        let server = NameServer { address: socket.local_addr().expect("an address"), zone: Arc::default() };
        let zone = server.zone.clone();
        tokio::spawn(async move {
            let mut query = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                let reply = answer(&mut zone.lock(), &query[..length]);
                if let Some(reply) = reply {
                    let _ = socket.send_to(&reply, from).await;
                }
            }
        });
        server
    }

    fn addresses(&self, name: &str, addresses: &[Ipv4Addr]) {
        let records = addresses.iter().map(|address| address.octets().to_vec()).collect();
        self.zone.lock().records.insert((name.to_owned(), A), records);
    }

    fn addresses_of_six(&self, name: &str, addresses: &[Ipv6Addr]) {
        let records = addresses.iter().map(|address| address.octets().to_vec()).collect();
        self.zone.lock().records.insert((name.to_owned(), AAAA), records);
    }

    fn fails_for(&self, name: &str, kind: u16, how: Failing) {
        self.zone.lock().failing.insert((name.to_owned(), kind), how);
    }

    fn is_well_again(&self) {
        self.zone.lock().failing.clear();
    }

    fn services(&self, name: &str, targets: &[(u16, u16, &str)]) {
        let record = |(priority, port, target): &(u16, u16, &str)| {
            let mut data = Vec::new();
            for number in [*priority, 10, *port] {
                data.extend_from_slice(&number.to_be_bytes());
            }
            data.extend_from_slice(&labels(target));
            data
        };
        self.zone.lock().records.insert((name.to_owned(), SRV), targets.iter().map(record).collect());
    }

    fn fail(&self, fails: bool) {
        self.zone.lock().fails = fails;
    }
}

/// A name on the wire.
fn labels(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.trim_end_matches('.').split('.') {
        wire.push(u8::try_from(label.len()).expect("a short label"));
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    wire
}

/// The one question of a query: name, type, and how many bytes it takes.
fn question(query: &[u8]) -> (String, u16, usize) {
    let (mut at, mut name) = (12, String::new());
    while query[at] != 0 {
        let length = usize::from(query[at]);
        name += std::str::from_utf8(&query[at + 1..][..length]).expect("text");
        name.push('.');
        at += 1 + length;
    }
    (name.to_ascii_lowercase(), u16::from_be_bytes([query[at + 1], query[at + 2]]), at + 5 - 12)
}

fn answer(zone: &mut Zone, query: &[u8]) -> Option<Vec<u8>> {
    zone.asked += 1;
    let (name, kind, length) = question(query);
    let failing = zone.failing.get(&(name.clone(), kind)).copied();
    if failing == Some(Failing::Silent) {
        return None;
    }
    let known = zone.records.keys().any(|(known, _)| *known == name);
    let none = Vec::new();
    let fails = zone.fails || failing == Some(Failing::Code);
    let records = if fails { &none } else { zone.records.get(&(name, kind)).unwrap_or(&none) };
    let code = match (fails, known) {
        (true, _) => 2,
        (false, true) => 0,
        (false, false) => 3,
    };
    let mut reply = query[..2].to_vec();
    reply.extend_from_slice(&[0x84, code, 0, 1]);
    reply.extend_from_slice(&u16::try_from(records.len()).expect("few").to_be_bytes());
    reply.extend_from_slice(&[0; 4]);
    reply.extend_from_slice(&query[12..12 + length]);
    for data in records {
        reply.extend_from_slice(&[0xc0, 12]);
        reply.extend_from_slice(&kind.to_be_bytes());
        // Class IN, and not a second to live: they are asked for again at once.
        reply.extend_from_slice(&[0, 1, 0, 0, 0, 0]);
        reply.extend_from_slice(&u16::try_from(data.len()).expect("short").to_be_bytes());
        reply.extend_from_slice(data);
    }
    if failing == Some(Failing::Unreadable) {
        // It says that there are records, and has none.
        reply.truncate(12);
        reply[7] = 9;
    }
    Some(reply)
}

fn config(entry: &str) -> Config {
    let parsed =
        Config::parse(&format!("workers: {{dns: [{entry}]}}"), Path::new("c.yaml")).expect("an entry");
    let mut config = TestRouter::config(Mode::Kv, &[]);
    config.workers = parsed.workers;
    config
}

async fn fleet(router: &TestRouter) -> Vec<String> {
    let page: serde_json::Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
    let workers = page["workers"].as_array().expect("workers").clone();
    workers.iter().map(|worker| worker["url"].as_str().expect("a URL").replace("http://", "")).collect()
}

async fn fleet_is(router: &TestRouter, wanted: &[SocketAddr]) {
    let wanted: Vec<String> = wanted.iter().map(SocketAddr::to_string).collect();
    until(&format!("the fleet to be {wanted:?}"), async || fleet(router).await == wanted).await;
}

/// Three engines at addresses of their own and one port.
async fn engines() -> (u16, Vec<FakeEngine>) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
    let port = free.expect("a loopback port").port();
    let mut engines = Vec::new();
    for host in 1..=3 {
        engines.push(FakeEngine::start_at(SocketAddr::from(([127, 78, 0, host], port))).await);
    }
    (port, engines)
}

#[tokio::test]
async fn the_addresses_of_a_name_are_workers_and_a_name_server_that_fails_takes_none_away() {
    let (server, (port, engines)) = (NameServer::start().await, engines().await);
    let hosts: Vec<Ipv4Addr> = (1..=3).map(|host| Ipv4Addr::new(127, 78, 0, host)).collect();
    let places: Vec<SocketAddr> = engines.iter().map(FakeEngine::address).collect();
    server.addresses("vllm.models.svc.", &hosts[..2]);
    let entry = format!("{{name: vllm.models.svc., port: {port}, nameservers: ['{}']}}", server.address);
    let router = TestRouter::start_unready(config(&entry), None).await;
    fleet_is(&router, &places[..2]).await;
    server.addresses("vllm.models.svc.", &hosts[1..]);
    fleet_is(&router, &places[1..]).await;

    let source = format!(r#"source="dns:vllm.models.svc.:{port}""#);
    for (reason, trouble) in [("unreachable", true), ("absent", false)] {
        server.fail(trouble);
        if !trouble {
            server.zone.lock().records.clear();
        }
        let failures = format!(r#"warmroute_discovery_failures_total{{reason="{reason}",{source}}}"#);
        until(reason, async || router.metric(&failures).await > 0.0).await;
        assert_eq!(router.metric(&format!("warmroute_discovery_synced{{{source}}}")).await, 0.0);
        fleet_is(&router, &places[1..]).await;
    }
    server.addresses("vllm.models.svc.", &hosts[..1]);
    fleet_is(&router, &places[..1]).await;
    router.metric_is(&format!("warmroute_discovery_synced{{{source}}}"), 1.0).await;
}

#[tokio::test]
async fn service_records_tell_the_port_and_only_the_first_choice_counts() {
    let (server, (port, engines)) = (NameServer::start().await, engines().await);
    let places: Vec<SocketAddr> = engines.iter().map(FakeEngine::address).collect();
    for (host, name) in (1..=3).zip(["a.vllm.", "b.vllm.", "c.vllm."]) {
        server.addresses(name, &[Ipv4Addr::new(127, 78, 0, host)]);
    }
    server.services("_http._tcp.vllm.", &[(0, port, "a.vllm."), (0, port, "b.vllm."), (1, port, "c.vllm.")]);
    let entry = format!("{{srv: _http._tcp.vllm., nameservers: ['{}']}}", server.address);
    let router = TestRouter::start_unready(config(&entry), None).await;
    fleet_is(&router, &places[..2]).await;
    // A target that is gone already is left out.
    server.services("_http._tcp.vllm.", &[(0, port, "c.vllm."), (0, port, "gone.vllm.")]);
    fleet_is(&router, &places[2..]).await;
}

/// The one source of the fleet page, once that has a fault with these words.
async fn fault(router: &TestRouter, words: &str) {
    until(&format!("the fault {words}"), async || {
        let page: serde_json::Value = serde_json::from_str(&router.admin("/fleet").await).expect("JSON");
        page["sources"][0]["fault"].as_str().is_some_and(|fault| fault.contains(words))
    })
    .await;
}

async fn is_well(router: &TestRouter, source: &str) {
    router.metric_is(&format!(r#"warmroute_discovery_synced{{source="{source}"}}"#), 1.0).await;
}

#[tokio::test]
async fn a_family_of_addresses_that_cannot_be_looked_up_takes_nobody_away() {
    let (server, (port, engines)) = (NameServer::start().await, engines().await);
    let places: Vec<SocketAddr> = engines.iter().map(FakeEngine::address).collect();
    let six = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    server.addresses("both.", &[Ipv4Addr::new(127, 78, 0, 1)]);
    server.addresses_of_six("both.", &[Ipv6Addr::LOCALHOST]);
    let entry = format!("{{name: both., port: {port}, nameservers: ['{}']}}", server.address);
    let router = TestRouter::start_unready(config(&entry), None).await;
    let all = [places[0], six];
    fleet_is(&router, &all).await;
    for (kind, how) in [(A, Failing::Code), (AAAA, Failing::Code), (A, Failing::Unreadable)] {
        server.fails_for("both.", kind, how);
        fault(&router, "both. cannot be looked up").await;
        assert_eq!(fleet(&router).await.len(), 2);
        server.is_well_again();
        is_well(&router, &format!("dns:both.:{port}")).await;
    }
    // A family that is said to have none is gone.
    server.zone.lock().records.remove(&("both.".to_owned(), A));
    fleet_is(&router, &[six]).await;
    server.addresses("both.", &[Ipv4Addr::new(127, 78, 0, 2)]);
    server.zone.lock().records.remove(&("both.".to_owned(), AAAA));
    fleet_is(&router, &places[1..2]).await;
}

#[tokio::test]
async fn a_target_of_a_service_record_that_cannot_be_looked_up_takes_nobody_away() {
    let (server, (port, engines)) = (NameServer::start().await, engines().await);
    let places: Vec<SocketAddr> = engines.iter().map(FakeEngine::address).collect();
    for (host, name) in (1..=2).zip(["a.vllm.", "b.vllm."]) {
        server.addresses(name, &[Ipv4Addr::new(127, 78, 0, host)]);
    }
    server.services("_http._tcp.vllm.", &[(0, port, "a.vllm."), (0, port, "b.vllm.")]);
    let entry = format!("{{srv: _http._tcp.vllm., nameservers: ['{}']}}", server.address);
    let router = TestRouter::start_unready(config(&entry), None).await;
    fleet_is(&router, &places[..2]).await;
    server.fails_for("b.vllm.", A, Failing::Code);
    fault(&router, "b.vllm. cannot be looked up").await;
    assert_eq!(fleet(&router).await.len(), 2);
    server.is_well_again();
    is_well(&router, "dns:_http._tcp.vllm.").await;

    // Nobody can be asked at port 0.
    server.services("_http._tcp.vllm.", &[(0, port, "a.vllm."), (0, 0, "b.vllm.")]);
    fleet_is(&router, &places[..1]).await;
    fault(&router, "_http._tcp.vllm. names no port of b.vllm.").await;
    server.services("_http._tcp.vllm.", &[(0, 0, "b.vllm.")]);
    let failures = r#"warmroute_discovery_failures_total{reason="port",source="dns:_http._tcp.vllm."}"#;
    let before = router.metric(failures).await;
    until("another failure", async || router.metric(failures).await > before + 1.0).await;
    fleet_is(&router, &places[..1]).await;
}

#[tokio::test]
async fn a_name_server_that_says_nothing_is_a_fault_within_the_limit() {
    let server = NameServer::start().await;
    for kind in [A, AAAA] {
        server.fails_for("silent.", kind, Failing::Silent);
    }
    let entry = format!("{{name: silent., port: 8000, nameservers: ['{}']}}", server.address);
    let router = TestRouter::start_unready(config(&entry), None).await;
    fault(&router, "silent. cannot be looked up").await;
    assert!(server.zone.lock().asked > 1, "a lost answer is asked for again");
}
