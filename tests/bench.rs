//! `warmroute bench` against small servers that behave well or badly, over real sockets.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, its helpers too")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use clap::Parser;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use warmroute::config::{Mode, Origin, Worker};
use warmroute::engine::http::{EngineConfig, Fleet};
use warmroute::experiment::bench::{self, BenchArgs};
use warmroute::testing::TestRouter;

/// What a request asked for.
struct Asked {
    path: String,
    body: Vec<u8>,
}

/// An OpenAI-compatible server of a few lines: what it answers is up to the test.
struct Toy {
    address: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    connections: AtomicUsize,
    /// Bodies of generation requests, in order of arrival.
    bodies: Mutex<Vec<Value>>,
    /// System messages seen so far: the toy's prefix cache, which never forgets.
    seen: Mutex<HashSet<String>>,
    hits: AtomicUsize,
    queries: AtomicUsize,
}

/// `None` lets the toy answer as a vLLM would.
type Twist = fn(&State, &Asked) -> Option<String>;

impl Toy {
    async fn start(twist: Twist) -> Toy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                shared.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, Arc::clone(&shared), twist));
            }
        });
        Toy { address, state }
    }

    async fn bench(&self, more: &[&str]) -> Result<Value, String> {
        let base = ["--target", &self.address, "--metrics", &self.address];
        bench(&[&base[..], more].concat()).await
    }
}

async fn bench(args: &[&str]) -> Result<Value, String> {
    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: BenchArgs,
    }
    let args = Command::try_parse_from([&["bench"], args, &["--json"]].concat()).unwrap().args;
    let mut out = Vec::new();
    bench::run(&args, &mut out).await.map_err(|error| format!("{error:#}"))?;
    Ok(serde_json::from_slice(&out).unwrap())
}

async fn serve(mut stream: TcpStream, state: Arc<State>, twist: Twist) {
    let mut pending = Vec::new();
    while let Some(asked) = read_request(&mut stream, &mut pending).await {
        let twisted = twist(&state, &asked);
        let answer = twisted.clone().unwrap_or_else(|| answer(&state, &asked));
        if stream.write_all(answer.as_bytes()).await.is_err() || twisted.is_some() {
            return;
        }
    }
}

async fn read_request(stream: &mut TcpStream, pending: &mut Vec<u8>) -> Option<Asked> {
    loop {
        if let Some(head_end) = pending.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&pending[..head_end]).to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if pending.len() >= head_end + 4 + length {
                let path = head.split(' ').nth(1)?.to_owned();
                let body = pending[head_end + 4..head_end + 4 + length].to_vec();
                pending.drain(..head_end + 4 + length);
                return Some(Asked { path, body });
            }
        }
        if stream.read_buf(pending).await.ok()? == 0 {
            return None;
        }
    }
}

/// As vLLM answers; four bytes are a token, and there is no chat template.
fn answer(state: &State, asked: &Asked) -> String {
    let body: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
    match asked.path.as_str() {
        "/v1/models" => whole("200 OK", &json!({"data": [{"id": "toy"}]}).to_string()),
        "/tokenize" => {
            let text = prompt_of(&body);
            let tokens: Vec<u32> = text
                .as_bytes()
                .chunks(4)
                .map(|four| four.iter().fold(0, |token, &byte| 256 * token + u32::from(byte)))
                .collect();
            whole("200 OK", &json!({"count": tokens.len(), "tokens": tokens}).to_string())
        }
        "/metrics" => whole("200 OK", &metrics(state)),
        _ => generate(state, body),
    }
}

fn metrics(state: &State) -> String {
    let finished = state.bodies.lock().unwrap().len();
    format!(
        "vllm:prefix_cache_hits_total{{engine=\"0\"}} {}\nvllm:prefix_cache_queries_total{{engine=\"0\"}} {}\n\
         vllm:request_success_total{{engine=\"0\"}} {finished}\n",
        state.hits.load(Ordering::SeqCst),
        state.queries.load(Ordering::SeqCst),
    )
}

fn prompt_of(body: &Value) -> String {
    let part = |index: usize| body["messages"][index]["content"].as_str().unwrap_or_default();
    format!("{} {}", part(0), part(1))
}

fn generate(state: &State, body: Value) -> String {
    let prefix = body["messages"][0]["content"].as_str().unwrap().to_owned();
    let prompt_tokens = prompt_of(&body).len().div_ceil(4);
    let prefix_tokens = (prefix.len() + 1) / 4 / 16 * 16;
    let is_known = !state.seen.lock().unwrap().insert(prefix);
    let cached = if is_known { prefix_tokens } else { 0 };
    state.hits.fetch_add(cached, Ordering::SeqCst);
    state.queries.fetch_add(prompt_tokens, Ordering::SeqCst);
    state.bodies.lock().unwrap().push(body);
    stream(&[
        json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        json!({"choices": [{"delta": {"content": "x"}}]}),
        json!({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1,
               "prompt_tokens_details": {"cached_tokens": cached}}}),
    ])
}

fn stream(events: &[Value]) -> String {
    let mut body: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    body.push_str("data: [DONE]\n\n");
    whole("200 OK", &body)
}

fn whole(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn is_generation(asked: &Asked) -> bool {
    asked.path.starts_with("/v1/chat")
}

#[tokio::test]
async fn measures_shares_times_and_workers() {
    let toy = Toy::start(|_, _| None).await;
    let report = toy.bench(&["--prefixes", "2,3", "--requests", "20", "--runs", "2"]).await.unwrap();
    assert_eq!(report["targets"][0]["shareable_tokens"], 2032);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for point in points {
        assert_eq!(point["mode"], "target");
        assert_eq!(point["workers"], 1);
        assert_eq!(point["requests"], 20);
        assert_eq!(point["hit_share"], 1.0, "the toy forgets nothing");
        assert_eq!(point["prefix_token_share"], 1.0);
        assert_eq!(point["counter_token_share"], point["usage_token_share"]);
        let share = point["usage_token_share"].as_f64().unwrap();
        assert!((share - 2032.0 / 2371.0).abs() < 1e-3, "{share}");
        assert!(point["ttft_miss_ms"].is_null());
        assert!(point["ttft_hit_ms"]["p99"].as_f64().unwrap() > 0.0);
        assert!(point["requests_by_worker"].as_object().unwrap().values().all(|count| count == 20));
        assert_eq!(point["notes"], json!([]));
        assert_eq!(point["runs"].as_array().unwrap().len(), 2);
    }
}

#[tokio::test]
async fn a_seed_fixes_the_requests_and_each_run_has_its_own() {
    let bodies = async |seed: &str, runs: &str| {
        let toy = Toy::start(|_, _| None).await;
        let args = ["--prefixes", "3", "--requests", "10", "--concurrency", "1"];
        toy.bench(&[&args[..], &["--seed", seed, "--runs", runs]].concat()).await.unwrap();
        std::mem::take(&mut *toy.state.bodies.lock().unwrap())
    };
    let two_runs = bodies("5", "2").await;
    let (probe, one_run) = (1, 3 + 10);
    assert_eq!(two_runs.len(), probe + 2 * one_run);
    let texts = |bodies: &[Value], part: usize| -> HashSet<String> {
        bodies.iter().map(|body| body["messages"][part]["content"].as_str().unwrap().to_owned()).collect()
    };
    let (first, second) = two_runs[probe..].split_at(one_run);
    assert_eq!(texts(first, 0).len(), 3);
    assert!(texts(first, 0).is_disjoint(&texts(second, 0)), "prefixes come again in a later run");
    assert_eq!(texts(&two_runs[probe..], 1).len(), 2 * one_run, "a tail came twice");
    assert_eq!(bodies("5", "1").await[..], two_runs[..probe + one_run]);
    assert!(texts(&bodies("6", "1").await[probe..], 0).is_disjoint(&texts(&two_runs, 0)));
}

#[tokio::test]
async fn opens_a_connection_for_each_request_unless_told_to_keep_them() {
    let connections = async |flags: &[&str]| {
        let toy = Toy::start(|_, _| None).await;
        let args = ["--prefixes", "2", "--requests", "40", "--concurrency", "4", "--runs", "1"];
        toy.bench(&[&args[..], flags].concat()).await.unwrap();
        toy.state.connections.load(Ordering::SeqCst)
    };
    let (new, kept) = (connections(&[]).await, connections(&["--keep-alive"]).await);
    let (generations, one_each) = (1 + 2 + 40, 1 + 1 + 4);
    // Models, tokenizer and metrics pages take a few connections of their own, about as many in either case.
    assert!(new > generations, "{new} new connections");
    assert!(kept < one_each + 20, "{kept} kept connections");
}

#[tokio::test]
async fn names_the_flag_that_an_engine_lacks() {
    let toy = Toy::start(|_, asked| {
        let usage = json!({"prompt_tokens": 600, "completion_tokens": 2, "prompt_tokens_details": null});
        is_generation(asked).then(|| {
            stream(&[
                json!({"choices": [{"delta": {"content": "x"}}]}),
                json!({"choices": [], "usage": usage}),
            ])
        })
    })
    .await;
    let error = toy.bench(&[]).await.unwrap_err();
    assert!(error.contains("--enable-prompt-tokens-details"), "{error}");
}

#[tokio::test]
async fn an_engine_that_leaves_out_a_count_of_zero_can_be_measured() {
    let toy = Toy::start(|state, asked| {
        let body: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
        let answer = is_generation(asked).then(|| generate(state, body))?;
        // Shorter than announced then: let the end of the connection end the body instead.
        Some(answer.replace(r#","prompt_tokens_details":{"cached_tokens":0}"#, "").replacen(
            "content-length",
            "x-before",
            1,
        ))
    })
    .await;
    let report = toy.bench(&["--prefixes", "2", "--requests", "5", "--runs", "1"]).await.unwrap();
    assert_eq!(report["points"][0]["hit_share"], 1.0);
}

#[tokio::test]
async fn refuses_metrics_that_it_cannot_read() {
    for (twist, complaint) in [
        ((|_, asked| (asked.path == "/metrics").then(|| whole("404 Not Found", ""))) as Twist, "404"),
        (
            |_, asked| (asked.path == "/metrics").then(|| whole("200 OK", "up 1\n")),
            "vllm:prefix_cache_hits_total",
        ),
    ] {
        let toy = Toy::start(twist).await;
        let error = toy.bench(&[]).await.unwrap_err();
        assert!(error.contains(complaint) && error.contains("/metrics"), "{error}");
    }
}

#[tokio::test]
async fn sizes_prompts_without_a_tokenizer() {
    let toy = Toy::start(|_, asked| (asked.path == "/tokenize").then(|| whole("404 Not Found", "{}"))).await;
    let report = toy.bench(&["--prefixes", "2", "--requests", "5", "--runs", "1"]).await.unwrap();
    assert!(report["targets"][0]["shareable_tokens"].is_null());
    let share = report["points"][0]["usage_token_share"].as_f64().unwrap();
    assert!((share - 2032.0 / 2371.0).abs() < 0.02, "{share}");
    assert_eq!(report["points"][0]["prefix_token_share"], 1.0);
}

/// Spoils the eighth generation request (after the probe and two warm-ups) with `answer`.
fn eighth(state: &State, asked: &Asked, answer: fn() -> String) -> Option<String> {
    let mut bodies = state.bodies.lock().unwrap();
    let due = is_generation(asked) && bodies.len() == 7;
    due.then(|| {
        bodies.push(Value::Null);
        answer()
    })
}

#[tokio::test]
async fn failed_requests_are_told_and_count_in_no_figure() {
    let cases: [(Twist, &str); 4] = [
        (|state, asked| eighth(state, asked, || whole("503 Service Unavailable", "busy")), "503"),
        (
            |state, asked| {
                eighth(state, asked, || whole("200 OK", "data: {\"choices\":[{\"text\":\"x\"}]}\n\n"))
            },
            "[DONE]",
        ),
        (
            |state, asked| {
                eighth(state, asked, || "HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\ndata: ".into())
            },
            "broke off",
        ),
        (
            |state, asked| {
                eighth(state, asked, || stream(&[json!({"error": {"message": "EngineCore died"}})]))
            },
            "EngineCore died",
        ),
    ];
    for (twist, complaint) in cases {
        let toy = Toy::start(twist).await;
        let report = toy.bench(&["--prefixes", "2", "--requests", "20", "--runs", "1"]).await.unwrap();
        let point = &report["points"][0];
        assert_eq!((&point["requests"], &point["failed"]), (&json!(19), &json!(1)));
        let note = point["notes"][0].as_str().unwrap();
        assert!(note.contains(complaint), "{note}");
        assert_eq!(point["hit_share"], 1.0);
    }
}

#[tokio::test]
async fn a_target_that_refuses_everything_is_an_error_that_quotes_it() {
    let toy = Toy::start(|_, asked| {
        is_generation(asked).then(|| whole("404 Not Found", "The model `nope` does not exist"))
    })
    .await;
    let error = toy.bench(&["--model", "nope"]).await.unwrap_err();
    assert!(error.contains("404") && error.contains("`nope` does not exist"), "{error}");

    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let nobody = Toy { address: format!("http://{gone}"), state: Arc::default() };
    let error = nobody.bench(&[]).await.unwrap_err();
    assert!(error.contains(&gone) && error.contains("cannot connect"), "{error}");
}

#[tokio::test]
async fn warns_when_an_earlier_run_had_the_same_seed() {
    let toy = Toy::start(|_, _| None).await;
    let args = ["--prefixes", "2", "--requests", "5", "--runs", "1"];
    let first = toy.bench(&args).await.unwrap();
    assert_eq!(first["points"][0]["notes"], json!([]));
    let again = toy.bench(&args).await.unwrap();
    let note = again["points"][0]["notes"][0].as_str().unwrap();
    assert!(note.contains("2 of 2 prefixes") && note.contains("--seed"), "{note}");
}

#[tokio::test]
async fn arguments_out_of_range_are_named() {
    let toy = Toy::start(|_, _| None).await;
    for args in [
        ["--prefixes", "0"],
        ["--concurrency", "0"],
        ["--runs", "0"],
        ["--requests", "0"],
        ["--output-tokens", "0"],
    ] {
        let error = toy.bench(&args).await.unwrap_err();
        assert!(error.contains(args[0]), "{error}");
    }
    let error = toy.bench(&["--prompt-tokens", "2040"]).await.unwrap_err();
    assert!(error.contains("2040 tokens"), "{error}");
}

#[tokio::test]
async fn targets_take_turns_with_the_same_order_of_groups_and_texts_of_their_own() {
    // Both names lead to one engine, as when a Service and a proxy stand before the same pods.
    let toy = Toy::start(|_, _| None).await;
    let (random, kv) = (format!("random={}", toy.address), format!("kv={}", toy.address));
    let load = ["--prefixes", "3", "--requests", "10", "--concurrency", "1", "--runs", "2"];
    let targets = ["--target", &random, "--target", &kv, "--metrics", &toy.address];
    let report = bench(&[&targets[..], &load].concat()).await.unwrap();

    let modes: Vec<&str> =
        report["points"].as_array().unwrap().iter().map(|point| point["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["random", "kv"]);
    let bodies = toy.state.bodies.lock().unwrap();
    let runs: Vec<&[Value]> = bodies[2..].chunks(3 + 10).collect();
    let prefixes = |run: usize| -> Vec<&str> {
        runs[run].iter().map(|body| body["messages"][0]["content"].as_str().unwrap()).collect()
    };
    let groups = |run: usize| -> Vec<usize> {
        let prefixes = prefixes(run);
        prefixes.iter().map(|one| prefixes.iter().position(|other| one == other).unwrap()).collect()
    };
    assert_eq!(groups(0), groups(1), "random and kv in the first run");
    assert_eq!(groups(2), groups(3), "kv and random in the second");
    assert_ne!(groups(0), groups(2));
    let distinct: HashSet<&str> = (0..4).flat_map(prefixes).collect();
    assert_eq!(distinct.len(), 4 * 3, "a target met what another had left in the cache");
}

#[tokio::test]
async fn goes_on_from_its_journal() {
    let toy = Toy::start(|_, _| None).await;
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal.jsonl");
    let args =
        ["--prefixes", "2,3", "--requests", "10", "--runs", "2", "--journal", journal.to_str().unwrap()];
    let whole = toy.bench(&args).await.unwrap();
    let sent = toy.state.bodies.lock().unwrap().len();

    // As if it had been interrupted after three of the four runs.
    let text = std::fs::read_to_string(&journal).unwrap();
    let kept: String = text.split_inclusive('\n').take(1 + 3).collect();
    std::fs::write(&journal, kept).unwrap();
    let resumed = toy.bench(&args).await.unwrap();
    let (probe, last_run) = (1, 3 + 10);
    assert_eq!(toy.state.bodies.lock().unwrap().len(), sent + probe + last_run);
    assert_eq!(resumed["points"][0], whole["points"][0]);
    assert_eq!(resumed["points"][1]["runs"][0], whole["points"][1]["runs"][0]);

    let error = toy.bench(&[&args[..], &["--seed", "9"]].concat()).await.unwrap_err();
    assert!(error.contains("journal.jsonl") && error.contains("other settings"), "{error}");
}

#[tokio::test]
async fn several_targets_need_names_that_differ() {
    for (args, complaint) in [
        (["--target", "http://a", "--target", "b=http://b"], "NAME=URL"),
        (["--target", "a=http://a", "--target", "a=http://b"], "two targets are called `a`"),
        (["--target", "a=http://a", "--metrics", "b=http://b"], "no --target is called `b`"),
        (["--target=a=http://a", "--metrics", "http://c", "b=http://b"], "no --target is called `b`"),
    ] {
        let error = bench(&args).await.unwrap_err();
        assert!(error.contains(complaint), "{error}");
    }
}

#[tokio::test]
async fn compares_two_reports_request_by_request() {
    let warm = Toy::start(|_, _| None).await;
    let cold = Toy::start(|state, _| {
        state.seen.lock().unwrap().clear();
        None
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let load = ["--prefixes", "2", "--requests", "40", "--samples"];
    let mut files = Vec::new();
    for (name, toy) in [("warm", &warm), ("cold", &cold)] {
        let file = folder.path().join(name);
        std::fs::write(&file, toy.bench(&load).await.unwrap().to_string()).unwrap();
        files.push(file.to_str().unwrap().to_owned());
    }
    let hits = async |a: &str, b: &str| {
        let compared = bench(&["compare", a, b]).await.unwrap();
        compared["differences"]
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["figure"] == "hit %")
            .unwrap()
            .clone()
    };
    let between = hits(&files[0], &files[1]).await;
    assert_eq!(
        (&between["a"], &between["b"], &between["differs"]),
        (&json!(100.0), &json!(0.0), &json!(true))
    );
    assert_eq!(hits(&files[0], &files[0]).await["differs"], json!(false));

    let bare = warm.bench(&["--prefixes", "2", "--requests", "4", "--seed", "2"]).await.unwrap();
    let file = folder.path().join("bare");
    std::fs::write(&file, bare.to_string()).unwrap();
    let error = bench(&["compare", file.to_str().unwrap(), &files[0]]).await.unwrap_err();
    assert!(error.contains("--samples"), "{error}");
}

#[tokio::test]
async fn usage_and_counters_of_a_simulated_worker_agree() {
    let config =
        EngineConfig { enable_prompt_tokens_details: true, time_scale: 50.0, ..EngineConfig::default() };
    let fleet = Fleet::start(vec![config]).await.unwrap();
    let url = format!("http://{}", fleet.addresses()[0]);
    let load = ["--prefixes", "2,6", "--requests", "40", "--runs", "1", "--concurrency", "2"];
    let report = bench(&[&["--target", &url, "--metrics", &url][..], &load].concat()).await.unwrap();
    assert_eq!(report["targets"][0]["shareable_tokens"], 2032);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points[0]["hit_share"], 1.0, "two prefixes fit");
    assert_eq!(points[0]["usage_token_share"], json!((2032.0_f64 / 2371.0 * 1e6).round() / 1e6));
    let missed = points[1]["hit_share"].as_f64().unwrap();
    assert!(missed < 1.0, "six prefixes do not fit, yet {missed} hit");
    for point in points {
        let share = |count: &str| point[count].as_f64().unwrap();
        assert!((share("usage_token_share") - share("counter_token_share")).abs() <= 0.002, "{point:#}");
        assert_eq!(point["notes"], json!([]));
        assert_eq!(point["requests_by_worker"].as_object().unwrap().values().next().unwrap(), 40);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compares_the_modes_of_a_running_proxy_and_leaves_it_as_it_was() {
    let config =
        EngineConfig { enable_prompt_tokens_details: true, time_scale: 20.0, ..EngineConfig::default() };
    let fleet = Fleet::start(vec![config; 3]).await.unwrap();
    let mut config = TestRouter::config(Mode::Kv, &[]);
    let urls: Vec<String> = fleet.addresses().iter().map(|at| format!("http://{at}")).collect();
    for url in &urls {
        let url = Origin::parse(url).unwrap();
        config.workers.fixed.push(Worker { url, capacity_tokens: Some(9344), prefill_speed: None });
    }
    let router = TestRouter::start(config).await;

    let (target, admin) = (router.clients.to_string(), format!("http://{}", router.admin));
    let mut args = vec!["--target", &target, "--admin", &admin, "--prefixes", "6", "--runs", "2"];
    args.extend(["--requests", "60"]);
    urls.iter().for_each(|url| args.extend(["--metrics", url]));
    let report = bench(&args).await.unwrap();
    let points = report["points"].as_array().unwrap();
    let hits = |at: usize| points[at]["hit_share"].as_f64().unwrap();
    assert_eq!((&points[0]["mode"], &points[1]["mode"]), (&json!("random"), &json!("kv")));
    assert_eq!(points[0]["workers"], 3);
    assert!(hits(1) > hits(0), "random {}, kv {}", hits(0), hits(1));
    assert!(router.admin("/mode").await.contains("kv"));

    let error = bench(&["--target", &target, "--admin", &target]).await.unwrap_err();
    assert!(error.contains("--admin"), "{error}");
    let several = format!("{target},{target}");
    let error = bench(&["--target", &several, "--admin", &admin]).await.unwrap_err();
    assert!(error.contains("as they are"), "{error}");
}
