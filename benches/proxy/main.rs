//! What a request costs in the proxy itself: warmroute beside nginx, haproxy and Envoy, before the same workers without latency and
//! under the same client (wrk), in turns. Everything runs on one CPU, one thread of work a proxy, and what is compared are ratios of
//! neighbouring runs: `taskset -c 1 cargo bench --bench proxy`. README.md has the method.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "no runtime: its threads may sleep")]

mod client;
mod contenders;
mod engine;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use client::Client;
use comfy_table::{Table, presets};
use contenders::Contender;

const WORKERS: usize = 6;
const CONNECTIONS: usize = 8;

/// What is asked for. `prefix` and `own` are characters of the prompt: four a token.
struct Shape {
    name: &'static str,
    prefix: usize,
    own: usize,
    streams: bool,
    /// A connection for each request.
    closes: bool,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "300 tokens", prefix: 1_000, own: 200, streams: false, closes: false },
    Shape { name: "8,000 tokens (32 KB)", prefix: 28_800, own: 3_200, streams: false, closes: false },
    Shape { name: "stream of 64 events", prefix: 1_000, own: 200, streams: true, closes: false },
    Shape { name: "300 tokens, a connection each", prefix: 1_000, own: 200, streams: false, closes: true },
];

/// One run of one contender.
#[derive(Copy, Clone)]
struct Run {
    cpu_us: f64,
    requests_per_s: f64,
    p50_us: f64,
    p99_us: f64,
}

/// The client: 24 prefixes in turn, each prompt with an end of its own.
fn script(shape: &Shape) -> String {
    let Shape { prefix, own, streams, closes, .. } = shape;
    let connection = if *closes { "close" } else { "keep-alive" };
    format!(
        r#"
math.randomseed(os.time())
local function text(length)
  local words = {{}}
  for at = 1, math.ceil(length / 9) do words[at] = string.format("%08x", math.random(0, 2147483647)) end
  return string.sub(table.concat(words, " "), 1, length)
end
local prefixes, own, serial = {{}}, text({own} - 20), math.random(1, 1000000) * 1000000
for at = 1, 24 do prefixes[at] = text({prefix}) end
local headers = {{ ["Content-Type"] = "application/json", ["Connection"] = "{connection}" }}
request = function()
  serial = serial + 1
  local body = '{{"model":"m","stream":{streams},"messages":[{{"role":"system","content":"' .. prefixes[serial % 24 + 1] ..
    '"}},{{"role":"user","content":"' .. string.format("%019d ", serial) .. own .. '"}}]}}'
  return wrk.format("POST", "/v1/chat/completions", headers, body)
end
done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format("RESULT %d %d %d %f %f\n", summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout, latency:percentile(50), latency:percentile(99)))
end
"#
    )
}

/// Runs wrk.
fn ask(address: SocketAddr, script: &Path, connections: usize, seconds: u64) -> [f64; 5] {
    let output = Command::new("wrk")
        .args(["-t1", &format!("-c{connections}"), &format!("-d{seconds}s"), "-s"])
        .arg(script)
        .arg(format!("http://{address}"))
        .output()
        .expect("wrk, Debian's package of that name");
    let text = String::from_utf8_lossy(&output.stdout);
    let result = text.lines().find_map(|line| line.strip_prefix("RESULT "));
    let result =
        result.unwrap_or_else(|| panic!("wrk said: {text}{}", String::from_utf8_lossy(&output.stderr)));
    let figures: Vec<f64> = result.split(' ').map(|figure| figure.parse().unwrap()).collect();
    figures.try_into().unwrap()
}

fn run(contender: &Contender, script: &Path, connections: usize, seconds: u64) -> Run {
    let before = contender.cpu_seconds();
    let [requests, microseconds, errors, p50_us, p99_us] =
        ask(contender.address, script, connections, seconds);
    assert!(requests > 0.0 && errors == 0.0, "{}: {errors} of {requests} requests failed", contender.name);
    let cpu_us = (contender.cpu_seconds() - before) * 1e6 / requests;
    Run { cpu_us, requests_per_s: requests * 1e6 / microseconds, p50_us, p99_us }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median of this run's figure over the other's in the same round.
fn ratio(runs: &[Run], others: &[Run], figure: impl Fn(&Run) -> f64) -> f64 {
    median(runs.iter().zip(others).map(|(run, other)| figure(run) / figure(other)).collect())
}

fn compare(contenders: &[Contender], shape: &Shape, rounds: usize, seconds: u64, directory: &Path) {
    let lua = directory.join("client.lua");
    std::fs::write(&lua, script(shape)).unwrap();
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); contenders.len()];
    let mut alone: Vec<Vec<Run>> = runs.clone();
    for round in 0..=rounds {
        for (at, contender) in contenders.iter().enumerate() {
            let many = run(contender, &lua, CONNECTIONS, seconds);
            let one = run(contender, &lua, 1, 1);
            // The first round fills caches and pools.
            if round > 0 {
                runs[at].push(many);
                alone[at].push(one);
            }
        }
    }
    let at = |name: &str| contenders.iter().position(|contender| contender.name == name);
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        shape.name,
        "CPU us a request",
        "x haproxy",
        "requests/s",
        "x nginx",
        "p99 us",
        "alone: p50 us",
        "more than nginx's",
    ]);
    for (place, contender) in contenders.iter().enumerate() {
        let of = |runs: &[Run], figure: fn(&Run) -> f64| median(runs.iter().map(figure).collect());
        let beside = |name: &str, figure: fn(&Run) -> f64| {
            at(name)
                .map_or(String::new(), |other| format!("{:.2}", ratio(&runs[place], &runs[other], figure)))
        };
        let alone_p50 = of(&alone[place], |run| run.p50_us);
        let nginx_p50 = at("nginx").map(|other| of(&alone[other], |run| run.p50_us));
        table.add_row([
            contender.name.to_owned(),
            format!("{:.1}", of(&runs[place], |run| run.cpu_us)),
            beside("haproxy", |run| run.cpu_us),
            format!("{:.0}", of(&runs[place], |run| run.requests_per_s)),
            beside("nginx", |run| run.requests_per_s),
            format!("{:.0}", of(&runs[place], |run| run.p99_us)),
            format!("{alone_p50:.0}"),
            nginx_p50.map_or(String::new(), |nginx| format!("{:+.0}", alone_p50 - nginx)),
        ]);
    }
    println!("\n{table}");
}

/// How long events of paced streams are under way, eight streams at a time and one alone.
fn pace_events(contenders: &[Contender]) {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "an event under way, us",
        "5 ms apart: p50",
        "p99",
        "CPU an event",
        "20 ms apart: p50",
        "p99",
        "CPU an event",
        "alone, 5 ms apart: p50",
        "p99",
    ]);
    for contender in contenders {
        let mut row = vec![contender.name.to_owned()];
        for (pace, streams, connections) in [(5, 6, CONNECTIONS), (20, 2, CONNECTIONS), (5, 32, 1)] {
            let before = contender.cpu_seconds();
            let mut all: Vec<u64> = std::thread::scope(|scope| {
                let listen = || {
                    let mut client = Client::of(contender.address);
                    (0..streams).flat_map(|_| client.listen(Duration::from_millis(pace))).collect::<Vec<_>>()
                };
                let listening: Vec<_> = (0..connections).map(|_| scope.spawn(listen)).collect();
                listening.into_iter().flat_map(|listening| listening.join().unwrap()).collect()
            });
            all.sort_unstable();
            for share in [50, 99] {
                row.push(format!("{:.0}", all[all.len() * share / 100] as f64 / 1e3));
            }
            if connections > 1 {
                row.push(format!("{:.1}", (contender.cpu_seconds() - before) * 1e6 / all.len() as f64));
            }
        }
        table.add_row(row);
    }
    println!("\n{table}");
}

/// What one core has to do with prompts of 128,000 tokens, 20 a second.
fn large_prompts(contenders: &[Contender]) {
    const TIME: Duration = Duration::from_secs(5);
    println!("\nPrompts of 512 KB, 20 a second: share of one core");
    for contender in contenders.iter().skip(1) {
        client::steadily(contender.address, 512 << 10, 20, TIME / 5);
        let before = contender.cpu_seconds();
        client::steadily(contender.address, 512 << 10, 20, TIME);
        let share = (contender.cpu_seconds() - before) / TIME.as_secs_f64();
        println!("{:17} {:5.1} %", contender.name, share * 100.0);
    }
}

/// Resident memory once so many distinct prompts of 8 KB have gone through.
fn memory(contenders: &[Contender], idle: &[f64]) {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["resident MiB", "at rest", "after 20,000 prompts", "after 200,000", "after 400,000"]);
    for (contender, idle) in contenders.iter().zip(idle).skip(1) {
        let mut row = vec![contender.name.to_owned(), format!("{idle:.1}")];
        let mut sent = 0;
        for until in [20_000, 200_000, 400_000] {
            client::fill(contender.address, sent, until - sent, 8 << 10, CONNECTIONS as u64);
            sent = until;
            row.push(format!("{:.1}", contender.resident_mib()));
        }
        table.add_row(row);
    }
    println!("\n{table}");
}

/// What a second core is worth: client, workers and a proxy of one thread together on one CPU, and of two threads on two, in turns.
fn second_core(workers: &[SocketAddr], directory: &Path, rounds: usize, seconds: u64) {
    let this = Contender::direct(workers[0]);
    let start = |name, cpus: &[&str]| Contender::on(name, cpus, workers, directory);
    let pairs: Vec<[Contender; 2]> = ["nginx", "warmroute kv"]
        .into_iter()
        .filter_map(|name| Some([start(name, &["0"])?, start(name, &["0", "1"])?]))
        .collect();
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "a second core",
        "",
        "requests/s on one",
        "on two",
        "x",
        "x nginx's on two",
        "CPU us a request on one",
        "on two",
    ]);
    for shape in &SHAPES {
        let lua = directory.join("client.lua");
        std::fs::write(&lua, script(shape)).unwrap();
        let mut runs: Vec<[Vec<Run>; 2]> = pairs.iter().map(|_| Default::default()).collect();
        for round in 0..=rounds {
            for (runs, [one, two]) in runs.iter_mut().zip(&pairs) {
                this.run_on("0");
                let on_one = run(one, &lua, CONNECTIONS, seconds);
                this.run_on("0,1");
                let on_two = run(two, &lua, 2 * CONNECTIONS, seconds);
                if round > 0 {
                    runs[0].push(on_one);
                    runs[1].push(on_two);
                }
            }
        }
        let of = |runs: &[Run], figure: fn(&Run) -> f64| median(runs.iter().map(figure).collect());
        let speed = |run: &Run| run.requests_per_s;
        for ([on_one, on_two], [contender, _]) in runs.iter().zip(&pairs) {
            table.add_row([
                shape.name.to_owned(),
                contender.name.to_owned(),
                format!("{:.0}", of(on_one, speed)),
                format!("{:.0}", of(on_two, speed)),
                format!("{:.2}", ratio(on_two, on_one, speed)),
                format!("{:.2}", ratio(on_two, &runs[0][1], speed)),
                format!("{:.1}", of(on_one, |run| run.cpu_us)),
                format!("{:.1}", of(on_two, |run| run.cpu_us)),
            ]);
        }
    }
    println!("\n{table}");
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |value| value.parse().expect("a number"))
}

fn main() {
    let (rounds, seconds) = (setting("ROUNDS", 5), setting("SECONDS", 3));
    let only = std::env::var("SHAPE").unwrap_or_default();
    let directory = std::env::temp_dir().join(format!("warmroute-proxy-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let workers: Vec<SocketAddr> = (0..WORKERS).map(|_| engine::start()).collect();
    let contenders = contenders::start_all(&workers, &directory);
    let idle: Vec<f64> = contenders.iter().map(Contender::resident_mib).collect();
    let wanted = |name: &str| name.contains(&only);
    // First, as what it tells depends on what went before.
    if wanted("memory") {
        memory(&contenders, &idle);
    }
    for shape in SHAPES.iter().filter(|shape| wanted(shape.name)) {
        compare(&contenders, shape, rounds as usize, seconds, &directory);
    }
    if wanted("paced") {
        pace_events(&contenders);
    }
    if wanted("512 KB") {
        large_prompts(&contenders);
    }
    if wanted("second core") && contenders::threads() == 2 {
        second_core(&workers, &directory, rounds as usize, seconds);
    }
    drop(contenders);
    let _ = std::fs::remove_dir_all(&directory);
}
