//! Workers found by DNS: addresses and service records that change, live for their time, and are away for a while.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::UdpSocket;
use warmroute::config::{Config, Mode};
use warmroute::testing::{FakeEngine, TestRouter, until};

const A: u16 = 1;
const SRV: u16 = 33;

/// What a name server answers: records by name and type, or an answer code.
#[derive(Default)]
struct Zone {
    records: HashMap<(String, u16), Vec<Vec<u8>>>,
    fails: bool,
    asked: usize,
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
                let _ = socket.send_to(&reply, from).await;
            }
        });
        server
    }

    fn addresses(&self, name: &str, addresses: &[Ipv4Addr]) {
        let records = addresses.iter().map(|address| address.octets().to_vec()).collect();
        self.zone.lock().records.insert((name.to_owned(), A), records);
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

fn answer(zone: &mut Zone, query: &[u8]) -> Vec<u8> {
    zone.asked += 1;
    let (name, kind, length) = question(query);
    let known = zone.records.keys().any(|(known, _)| *known == name);
    let none = Vec::new();
    let records = if zone.fails { &none } else { zone.records.get(&(name, kind)).unwrap_or(&none) };
    let code = match (zone.fails, known) {
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
    reply
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
