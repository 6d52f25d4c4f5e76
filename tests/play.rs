//! `warmroute bench play` and `bench import`: traces and users' own requests over real sockets, before simulated workers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, its helpers too")]

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::{Value, json};
use warmroute::config::{Mode, Origin, Worker};
use warmroute::engine::http::{EngineConfig, Fleet, Running};
use warmroute::engine::model::Spec;
use warmroute::experiment::bench::{self, BenchArgs};
use warmroute::experiment::simulate;
use warmroute::testing::TestRouter;

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn fixture(name: &str) -> String {
    here(&format!("tests/fixtures/traces/{name}.jsonl.gz")).to_str().unwrap().to_owned()
}

async fn bench(args: &[&str]) -> Result<Value, String> {
    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: BenchArgs,
    }
    let args = Command::try_parse_from([&["bench"], args, &["--json"]].concat())
        .map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    bench::run(&args.args, &mut out).await.map_err(|error| format!("{error:#}"))?;
    Ok(serde_json::from_slice(&out).unwrap())
}

/// Workers whose time goes `scale` times as fast, and their addresses.
async fn workers(count: usize, scale: f64, block_size: u32, num_blocks: u32) -> (Running, Vec<String>) {
    let config = EngineConfig {
        enable_prompt_tokens_details: true,
        time_scale: scale,
        engine: Spec { block_size, num_blocks, ..Spec::default() },
        ..EngineConfig::default()
    };
    let fleet = Fleet::start(vec![config; count]).await.unwrap();
    let urls = fleet.addresses().iter().map(|at| format!("http://{at}")).collect();
    (fleet, urls)
}

/// `play` on one worker by itself.
async fn play(url: &str, more: &[&str]) -> Result<Value, String> {
    bench(&[&["play", "--target", url, "--metrics", url], more].concat()).await
}

/// The share of cached tokens in virtual time, on the same rows of the same file.
fn simulated(file: &str, rows: &str) -> f64 {
    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: simulate::args::Args,
    }
    let fleet = ["--policy", "kv", "--workers", "4", "--seeds", "1", "--timing", "chunked", "--load", "0.8"];
    let rows = ["simulate", "--trace", file, "--rows", rows, "--json"];
    let args = Command::try_parse_from([&rows[..], &fleet].concat()).unwrap();
    let mut out = Vec::new();
    simulate::run(&args.args, &mut out).unwrap();
    let report: Value = serde_json::from_slice(&out).unwrap();
    report["rows"][0]["token_hit_share"].as_f64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_hits_as_often_over_http_as_in_virtual_time() {
    let scale = 20.0;
    let (_fleet, urls) = workers(4, scale, 512, 1025).await;
    let mut config = TestRouter::config(Mode::Kv, &[]);
    for url in &urls {
        let url = Origin::parse(url).unwrap();
        config.workers.fixed.push(Worker { url, capacity_tokens: Some(524_288), prefill_speed: None });
    }
    let router = TestRouter::start(config).await;
    let (target, admin) = (router.clients.to_string(), format!("http://{}", router.admin));
    for name in ["mooncake_conversation_h1", "mooncake_synthetic_h1"] {
        let (rows, file, speed) = ("60", fixture(name), (4.0 * 35_000.0 * scale).to_string());
        let mut args = vec!["play", "--target", &target, "--admin", &admin, "--trace", &file, "--rows", rows];
        args.extend(["--load", "0.8", "--prefill-speed", &speed]);
        urls.iter().for_each(|url| args.extend(["--metrics", url]));
        let report = bench(&args).await.unwrap();
        let points = report["points"].as_array().unwrap();
        let share = |point: &Value| point["usage_token_share"].as_f64().unwrap();
        for point in points {
            assert_eq!((&point["requests"], &point["failed"]), (&json!(60), &json!(0)), "{point:#}");
            // The ceiling is that of the order of the file; requests of one time come in any.
            assert!(share(point) <= point["played"]["ceiling"].as_f64().unwrap() + 0.01, "{point:#}");
            assert!(point["late_ms"]["p50"].as_f64().is_some());
        }
        // So few requests at random are a matter of luck; by prefix they are not.
        let (over_http, virtually) = (share(&points[1]), simulated(&file, rows));
        assert!(
            (over_http - virtually).abs() < 0.02,
            "{name}: {over_http} over HTTP, {virtually} in virtual time"
        );
        let predicted = report["points"][1]["predicted_token_share"].as_f64().unwrap();
        assert!(predicted > 0.0 && predicted <= 1.0, "{predicted}");
    }
}

#[tokio::test]
async fn sessions_and_texts_find_what_their_earlier_turns_left() {
    // One worker with room for all: what one cache without limit finds, but for the text's own tokens.
    let (_fleet, urls) = workers(1, 2000.0, 16, 60_000).await;
    for (trace, rows, least) in [("claude_code_sessions_a", "8", 0.7), ("lmcache_miniswe_text", "12", 0.6)] {
        let report =
            play(&urls[0], &["--trace", &fixture(trace), "--rows", rows, "--speed", "10000"]).await.unwrap();
        let point = &report["points"][0];
        assert_eq!((&point["requests"].to_string()[..], &point["failed"]), (rows, &json!(0)), "{point:#}");
        let (share, ceiling) =
            (point["usage_token_share"].as_f64().unwrap(), point["played"]["ceiling"].as_f64().unwrap());
        assert!(share > least && (share - ceiling).abs() < 0.05, "{trace}: {share}, ceiling {ceiling}");
    }
}

#[tokio::test]
async fn sizes_alone_share_nothing_but_the_template() {
    let (_fleet, urls) = workers(1, 2000.0, 16, 20_000).await;
    let args = ["--trace", &fixture("azure2023_code_h1"), "--rows", "20", "--concurrency", "4"];
    let point = &play(&urls[0], &args).await.unwrap()["points"][0];
    assert_eq!((&point["requests"], &point["concurrency"]), (&json!(20), &json!(4)));
    assert!(point["usage_token_share"].as_f64().unwrap() < 0.01, "{point:#}");
}

fn file(lines: &[String]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
    file.write_all(lines.join("\n").as_bytes()).unwrap();
    file
}

fn own(system: &str, user: &str) -> Value {
    json!({"messages": [{"role": "system", "content": system.repeat(40)}, {"role": "user", "content": user}],
           "max_tokens": 3})
}

#[tokio::test]
async fn own_requests_are_sent_as_they_are() {
    let (_fleet, urls) = workers(1, 100.0, 16, 2_000).await;
    let system = ["You are a patient librarian. ", "You are a hurried cook. "];
    let plain: Vec<String> =
        (0..6).map(|i| own(system[i % 2], &format!("question {i}")).to_string()).collect();
    let plain = file(&plain);
    let path = plain.path().to_str().unwrap();
    let point = &play(&urls[0], &["--trace", path, "--concurrency", "1"]).await.unwrap()["points"][0];
    assert_eq!((&point["requests"], &point["failed"]), (&json!(6), &json!(0)));
    assert!((point["hit_share"].as_f64().unwrap() - 4.0 / 6.0).abs() < 1e-6, "{point:#}");

    // Two runs are kept apart, so that the second finds no more than the first.
    let again =
        play(&urls[0], &["--trace", path, "--concurrency", "1", "--runs", "2", "--samples"]).await.unwrap();
    let runs = again["points"][0]["runs"].as_array().unwrap();
    assert_eq!(runs[0]["hit_share"], runs[1]["hit_share"]);

    let timed: Vec<String> =
        (0..4).map(|i| json!({"body": own(system[0], "?"), "timestamp": 50 * i}).to_string()).collect();
    let timed = file(&timed);
    let point = &play(&urls[0], &["--trace", timed.path().to_str().unwrap(), "--speed", "10"]).await.unwrap()
        ["points"][0];
    assert_eq!((&point["requests"], &point["concurrency"]), (&json!(4), &json!(0)));
    assert!(point["late_ms"]["max"].as_f64().is_some());
}

#[tokio::test]
async fn made_workloads_sweep_rates_lengths_and_capacity() {
    let (_fleet, urls) = workers(1, 200.0, 16, 585).await;
    let small = ["--prefix-tokens", "320", "--prompt-tokens", "340-700", "--output-tokens", "2-5"];
    let hot = [
        "--workload",
        "hot",
        "--popularity",
        "zipf:1",
        "--rate",
        "150,300",
        "--requests",
        "30",
        "--prefixes",
        "5",
    ];
    let report = play(&urls[0], &[&hot[..], &small].concat()).await.unwrap();
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for point in points {
        assert_eq!(
            (&point["requests"], &point["concurrency"], &point["prefixes"]),
            (&json!(30), &json!(0), &json!(5))
        );
        assert!(point["late_ms"]["p99"].as_f64().is_some(), "{point:#}");
    }

    let sweep =
        ["--workload", "service", "--capacity-ratio", "0.5,4", "--concurrency", "2", "--requests", "40"];
    let report = play(&urls[0], &[&sweep[..], &small].concat()).await.unwrap();
    let points = report["points"].as_array().unwrap();
    // 9,344 tokens hold 29.2 prefixes of 320.
    assert_eq!((&points[0]["prefixes"], &points[1]["prefixes"]), (&json!(15), &json!(117)));
    let hits = |at: usize| points[at]["prefix_token_share"].as_f64().unwrap();
    assert!(hits(0) > hits(1), "{} and {}", hits(0), hits(1));

    let chats =
        ["--workload", "chats", "--requests", "4", "--rate", "40", "--turns", "2-4", "--think", "0.01"];
    let point = &play(&urls[0], &[&chats[..], &small].concat()).await.unwrap()["points"][0];
    assert!(point["failed"] == 0 && point["hit_share"].as_f64().unwrap() > 0.5, "{point:#}");
}

#[tokio::test]
async fn what_cannot_be_played_is_refused_by_name() {
    let (_fleet, urls) = workers(1, 100.0, 16, 585).await;
    let (blocks, sessions) = (fixture("mooncake_conversation_h1"), fixture("claude_code_sessions_a"));
    let rates = fixture("servegen_client_rates");
    let cases: [(&[&str], &str); 9] = [
        (&["--trace", &blocks, "--speed", "2", "--rate", "3"], "only one of --speed"),
        (&["--trace", &blocks, "--speed", "0"], "--speed must be"),
        (&["--trace", &blocks, "--load", "0.5"], "--prefill-speed"),
        (&["--trace", &sessions, "--rate", "3"], "only --speed applies"),
        (&["--trace", &rates], "no requests"),
        (&["--workload", "hot"], "--rate"),
        (&["--workload", "conversation"], "--trace FILE"),
        (&["--workload", "service", "--rate", "3"], "--concurrency"),
        (&[], "--trace"),
    ];
    for (args, complaint) in cases {
        let error = play(&urls[0], args).await.unwrap_err();
        assert!(error.contains(complaint), "{args:?}: {error}");
    }
    let bad = file(&[own("a", "b").to_string(), "{\"messages\": 5}".to_owned()]);
    let error = play(&urls[0], &["--trace", bad.path().to_str().unwrap()]).await.unwrap_err();
    assert!(error.contains("line 2") && error.contains("cannot be read"), "{error}");
    let error =
        bench(&["play", "--target", &urls[0], "--workload", "service", "--capacity-ratio", "2"]).await;
    assert!(error.unwrap_err().contains("--metrics"));
}

#[tokio::test]
async fn a_file_is_checked_and_told_what_it_is_worth() {
    let lines: Vec<String> =
        (0..40).map(|i| own(&format!("You are number {}. ", i % 8), "?").to_string()).collect();
    let good = file(&lines);
    let told = bench(&["import", good.path().to_str().unwrap(), "--workers", "2"]).await.unwrap();
    assert_eq!((&told["rows"], &told["bad_rows"]), (&json!(40), &json!(0)));
    assert_eq!(told["requests_sharing"], 32.0 / 40.0);
    let last = told["curve"].as_array().unwrap().last().unwrap();
    assert_eq!(last["one_worker"], told["ceiling"]);
    assert!(last["service"].as_f64() <= last["routed"].as_f64(), "{told:#}");

    let bad = file(
        &[&lines[..3], &["not JSON".to_owned(), String::new(), "{\"prompt\": 7.5}".to_owned()]].concat(),
    );
    let error = bench(&["import", bad.path().to_str().unwrap()]).await.unwrap_err();
    assert!(error.contains("2 bad lines") && error.contains("line 4") && error.contains("line 6"), "{error}");
}

#[tokio::test]
async fn sessions_are_thought_of_side_by_side() {
    let told = bench(&["import", &fixture("claude_code_sessions_a"), "--workers", "4"]).await.unwrap();
    let curve = told["curve"].as_array().unwrap();
    let share = |at: usize, column: &str| curve[at][column].as_f64().unwrap();
    // The smallest cache holds the longest request of any session, so one session by itself would find everything in it.
    assert!(share(0, "one_worker") < share(0, "routed"), "{told:#}");
    assert!(share(0, "service") < share(0, "routed"), "{told:#}");
    let last = curve.len() - 1;
    assert!((share(last, "routed") - told["ceiling"].as_f64().unwrap()).abs() < 1e-9, "{told:#}");
}

/// The ceilings of the traces' own description, and of the simulator's.
#[tokio::test]
async fn ceilings_are_those_of_the_traces_description() {
    let traces = here("../shared/traces");
    if !traces.is_dir() {
        eprintln!("skipped: the traces are not at {}", traces.display());
        return;
    }
    for (name, ceiling) in [
        ("mooncake_conversation_h1", 0.3463),
        ("mooncake_synthetic_h1", 0.3218),
        ("claude_code_sessions_a", 0.9512),
        ("lmcache_miniswe_text", 0.9319),
        ("lmcache_magagent_text_a", 0.8122),
        ("azure2023_code_h1", 0.0),
    ] {
        let path = traces.join(format!("{name}.jsonl.gz"));
        let told = bench(&["import", path.to_str().unwrap()]).await.unwrap();
        let found = told["ceiling"].as_f64().unwrap();
        assert!((found - ceiling).abs() < 0.00006, "{name}: {found} is not {ceiling}");
    }
}
