//! How fast the load generator itself is: one process of it on one core, against a server on another that answers at once,
//! with small requests. What it reaches here is the ceiling of what it can measure elsewhere.
//!
//! `cargo bench --bench generator`; cores are pinned by `taskset`, where there is one.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use warmroute::experiment::load::{Finished, Job, Load};
use warmroute::experiment::progress::Progress;
use warmroute::experiment::stats::{self, Percentiles};
use warmroute::experiment::target::Target;
use warmroute::experiment::workload::Arrivals;

const REQUESTS: usize = 50_000;
const CONCURRENCY: usize = 16;
/// Requests a second of the open loops.
const RATES: [usize; 3] = [1_000, 5_000, 8_000];
const OPEN_SECONDS: usize = 5;

const EVENTS: &str = concat!(
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"length\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":6,\"completion_tokens\":1,",
    "\"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n",
    "data: [DONE]\n\n"
);

/// Answers every request, the end of which it tells by the end of its JSON, with the same stream.
async fn answer(mut stream: TcpStream, response: Arc<[u8]>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        if buffer[..length].ends_with(b"}") && stream.write_all(&response).await.is_err() {
            return;
        }
    }
}

/// Prints its address and serves until it is killed.
async fn serve() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", EVENTS.len());
    let response: Arc<[u8]> = [head.as_bytes(), EVENTS.as_bytes()].concat().into();
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        tokio::spawn(answer(stream, Arc::clone(&response)));
    }
}

async fn generate(url: &str) {
    let target = Target::resolve(url).await.unwrap();
    let body = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let job = Job { path: "/v1/chat/completions", body: Bytes::from_static(body) };
    let load = |keep_alive| Load {
        target: target.clone(),
        keep_alive,
        timeout: Duration::from_secs(10),
        progress: Progress::hidden(),
    };
    let jobs = |count: usize| {
        let job = job.clone();
        Arc::new(move |index| (index < count).then(|| job.clone()))
    };
    for keep_alive in [false, true] {
        let finished = load(keep_alive).closed_loop(CONCURRENCY, 0, jobs(REQUESTS)).await;
        let connections = if keep_alive { "kept connections" } else { "a connection each" };
        println!("{CONCURRENCY} in flight, {connections}: {}", told(&finished));
    }
    for rate in RATES {
        let at = (0..rate * OPEN_SECONDS).map(|nth| nth as f64 / rate as f64).collect();
        let finished = load(true).play(jobs(rate * OPEN_SECONDS), &Arrivals::Open(at)).await;
        let mut late: Vec<f64> =
            finished.outcomes.iter().map(|one| one.late.unwrap().as_secs_f64() * 1e3).collect();
        late.sort_by(f64::total_cmp);
        let [p50, p99] = [0.5, 0.99].map(|share| stats::quantile(&late, share).unwrap());
        println!("open loop at {rate}/s: {}; late p50 {p50:.2} ms, p99 {p99:.2} ms", told(&finished));
    }
}

fn told(finished: &Finished) -> String {
    let times = finished.outcomes.iter().map(|one| one.result.as_ref().unwrap().ttft.as_secs_f64() * 1e3);
    let ttft = Percentiles::of(times.collect()).unwrap();
    let rate = finished.outcomes.len() as f64 / finished.wall.as_secs_f64();
    format!("{rate:.0} requests/s, TTFT p50 {:.3} ms, p99 {:.3} ms", ttft.p50, ttft.p99)
}

/// This program again, as `role`, on one core if that can be had.
fn start(core: &str, role: &[&str], out: Stdio) -> Child {
    let myself = std::env::current_exe().unwrap();
    let pinned = Command::new("taskset").arg("-c").arg(core).arg(&myself).args(role).stdout(out).spawn();
    pinned.unwrap_or_else(|_| {
        println!("(no taskset: cores are not pinned)");
        Command::new(&myself).args(role).stdout(Stdio::piped()).spawn().unwrap()
    })
}

fn main() {
    let roles: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match roles.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => runtime.block_on(serve()),
        ["generate", url] => runtime.block_on(generate(url)),
        _ => {
            let mut server = start("1", &["serve"], Stdio::piped());
            let mut url = String::new();
            BufReader::new(server.stdout.take().unwrap()).read_line(&mut url).unwrap();
            let ended = start("0", &["generate", url.trim()], Stdio::inherit()).wait().unwrap();
            server.kill().unwrap();
            server.wait().unwrap();
            assert!(ended.success());
        }
    }
}
