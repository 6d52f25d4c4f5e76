//! What sharing costs: three routers, or so many, of one process each, over a redis-server, that place and end requests of 8,000 tokens
//! without HTTP around it; the same without sharing is to be taken off. `cargo bench --bench sharing [-- DECISIONS_PER_SECOND SECONDS ROUTERS]`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench")]

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warmroute::app;
use warmroute::config::{Config, Origin, Sharing, StoreUrl, Worker};
use warmroute::core::blocks::{Chain, HashKey, Widths};
use warmroute::core::booking::Finished;
use warmroute::core::ids::{BlockHash, mix};
use warmroute::core::planner::{Ask, Policy};
use warmroute::lifecycle::Stop;
use warmroute::peers::claim::Claim;
use warmroute::proxy::Proxy;

const WORKERS: u16 = 16;
/// Blocks of 256 bytes: those that a conversation has in common with its turn before, and those that are new.
const KNOWN: u64 = 110;
const NEW: u64 = 15;
const CONVERSATIONS: u64 = 400;
/// Seconds from placement to first token and to the end.
const FIRST: Duration = Duration::from_millis(200);
const END: Duration = Duration::from_millis(1_200);
/// Before it is counted.
const WARM_UP: Duration = Duration::from_secs(3);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if let [kind, port, rate, seconds] = &args[..]
        && kind == "router"
    {
        return router(port.parse().ok(), rate.parse().unwrap(), seconds.parse().unwrap());
    }
    let number = |at: usize, other: f64| args.get(at).map_or(other, |arg| arg.parse().unwrap());
    let (rate, seconds, routers) = (number(0, 1_000.0), number(1, 20.0), number(2, 3.0) as usize);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let directory = tempfile::tempdir().unwrap();
    let mut redis = Command::new("redis-server");
    redis
        .args(["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1"])
        .arg("--dir")
        .arg(directory.path());
    let Ok(mut redis) = redis.stdout(Stdio::null()).spawn() else {
        return println!("left out: redis-server is not installed");
    };
    for (what, port) in [("nothing shared", "none".to_owned()), ("shared", port.to_string())] {
        let before = cpu_seconds(&redis.id().to_string());
        let each = (rate / routers as f64).to_string();
        let running: Vec<Child> = (0..routers)
            .map(|_| {
                let mut router = Command::new(std::env::current_exe().unwrap());
                router
                    .args(["router", &port, &each, &seconds.to_string()])
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        println!("{what}, {rate} decisions a second of {routers} routers:");
        for router in running {
            print!("  {}", String::from_utf8(router.wait_with_output().unwrap().stdout).unwrap());
        }
        let store = (cpu_seconds(&redis.id().to_string()) - before) / (seconds + WARM_UP.as_secs_f64());
        println!("  store: {:.1} % of a core", 100.0 * store);
    }
    println!("  {}", kept(port).unwrap());
    redis.kill().unwrap();
    redis.wait().unwrap();
}

/// What the stream takes.
fn kept(port: u16) -> redis::RedisResult<String> {
    let mut store = redis::Client::open(format!("redis://127.0.0.1:{port}"))?.get_connection()?;
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut store)?;
    let batches: usize = redis::cmd("XLEN").arg(&keys[0]).query(&mut store)?;
    let bytes: f64 = redis::cmd("MEMORY").arg("USAGE").arg(&keys[0]).query(&mut store)?;
    Ok(format!("kept: {batches} batches in {:.1} MB", bytes / 1e6))
}

/// Of all threads of a process, in the system and outside.
fn cpu_seconds(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn config(port: Option<u16>) -> Config {
    let free = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut config =
        Config { listen: free, admin: free, hash_key: Some(HashKey([1; 32])), ..Config::default() };
    config.health.interval = None;
    config.scrape.interval = None;
    config.scrape.models_interval = None;
    config.workers.fixed = (0..WORKERS)
        .map(|at| Worker {
            url: Origin::parse(&format!("http://127.0.0.1:{}", at + 1)).unwrap(),
            capacity_tokens: Some(500_000),
            prefill_speed: Some(20_000.0),
        })
        .collect();
    config.sharing = port.map(|port| Sharing {
        urls: vec![StoreUrl::parse(&format!("redis://127.0.0.1:{port}")).unwrap()],
        ..Sharing::default()
    });
    config
}

fn ask(serial: u64) -> Ask {
    let conversation = mix(serial) % CONVERSATIONS;
    let known = (0..KNOWN).map(|at| BlockHash(mix(conversation * 1_000 + at)));
    let salt = u64::from(std::process::id()) << 40;
    let new = (0..NEW).map(|at| BlockHash(mix(salt + (1 << 62) + serial * 100 + at)));
    let chain = Chain { hashes: known.chain(new).collect(), widths: Widths::GROWING, bytes: 32_000 };
    Ask { chain, block_tokens: 64.0, prompt_tokens: 8_000.0, output_tokens: 100.0, streams: true }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn router(port: Option<u16>, rate: f64, seconds: f64) {
    let bound = app::build(config(port)).unwrap();
    let proxy = bound.proxy().clone();
    let serving = tokio::spawn(bound.run(Stop::default(), None));
    drive(&proxy, rate, WARM_UP).await;
    let me = std::process::id().to_string();
    let (before, bytes) = (cpu_seconds(&me), shared_bytes(&proxy));
    drive(&proxy, rate, Duration::from_secs_f64(seconds)).await;
    let cpu = 100.0 * (cpu_seconds(&me) - before) / seconds;
    let [sent, received] = [0, 1].map(|way| (shared_bytes(&proxy)[way] - bytes[way]) / seconds / 1e6);
    let lag = 1e3 * proxy.metrics.sharing.lag.get();
    println!(
        "router: {cpu:.1} % of a core, {sent:.3} MB/s sent, {received:.3} MB/s received, last lag {lag:.1} ms"
    );
    serving.abort();
}

fn shared_bytes(proxy: &Proxy) -> [f64; 2] {
    let page = String::from_utf8(proxy.metrics.render()).unwrap();
    ["sent", "received"].map(|way| {
        let name = format!("warmroute_sharing_bytes_total{{way=\"{way}\"}} ");
        page.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0.0)
    })
}

type Begun = (Instant, Claim);

fn due(claims: &mut VecDeque<Begun>, at: Instant, after: Duration) -> Option<Begun> {
    claims.front().is_some_and(|(begun, _)| *begun + after <= at).then(|| claims.pop_front())?
}

async fn drive(proxy: &Arc<Proxy>, rate: f64, time: Duration) {
    let workers: Vec<_> = proxy.fleet.snapshot().workers.iter().map(|worker| worker.id).collect();
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    let mut serial = (proxy.clock.now().0 * 1e6) as u64;
    let (mut starting, mut running) = (VecDeque::new(), VecDeque::new());
    let until = Instant::now() + time;
    while Instant::now() < until {
        ticks.tick().await;
        serial += 1;
        let (at, now) = (Instant::now(), proxy.clock.now());
        let ask = ask(serial);
        if let Some((decision, booking)) = proxy.planner.plan(&ask, &workers, Policy::Kv, now, serial) {
            let worker = proxy.fleet.snapshot().worker(decision.worker).unwrap().clone();
            let mut claim = match &proxy.peers {
                Some(peers) => peers.claim(booking, &ask, &worker, now),
                None => Claim::silent(booking),
            };
            claim.commit(now);
            starting.push_back((at, claim));
        }
        while let Some((begun, mut claim)) = due(&mut starting, at, FIRST) {
            claim.first_token(now);
            running.push_back((begun, claim));
        }
        while let Some((_, claim)) = due(&mut running, at, END) {
            let (prompt_tokens, cached_tokens, output_tokens) = (Some(8_000), None, Some(100));
            claim.finish(Finished { prompt_tokens, cached_tokens, output_tokens }, now);
        }
    }
}
