//! What a client, or a proxy between, notices in time: caching, streaming, leaving, stopping, limits.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::captures::fixture;
use super::raw::{BOUND, Response, exchange, get, metric, post, request, request_with, until_metric};
use super::*;

fn prompt(seed: u32, words: usize) -> String {
    (0..words).map(|word| format!(" p{seed}w{word}")).collect()
}

fn completion(seed: u32, words: usize, max_tokens: u32) -> Value {
    json!({ "model": "tiny", "prompt": prompt(seed, words), "max_tokens": max_tokens })
}

fn cached(response: &Response) -> u64 {
    response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn the_second_of_two_equal_prompts_is_cached() {
    let (_fleet, address) = start(as_captured()).await;
    let first = post(address, "/v1/completions", &completion(1, 200, 4)).await;
    let second = post(address, "/v1/completions", &completion(1, 200, 4)).await;
    let tokens = second.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((cached(&first), cached(&second)), (0, (tokens - 1) / 16 * 16));
    assert_eq!(first.json()["choices"], second.json()["choices"], "the same prompt has the same answer");
}

#[tokio::test]
async fn usage_tells_nothing_of_the_cache_unless_asked_to() {
    let (_fleet, address) =
        start(EngineConfig { enable_prompt_tokens_details: false, ..as_captured() }).await;
    let whole = post(address, "/v1/completions", &completion(1, 20, 4)).await.json();
    assert!(whole["usage"]["prompt_tokens_details"].is_null());
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2, "stream": true, "stream_options": { "include_usage": true } });
    let usage = post(address, "/v1/chat/completions", &body).await.events().pop().unwrap()["usage"].clone();
    assert!(usage["completion_tokens"] == 2 && usage.get("prompt_tokens_details").is_none(), "{usage}");
}

#[tokio::test]
async fn the_next_turn_of_a_chat_finds_the_answer_cached() {
    let (_fleet, address) = start(as_captured()).await;
    let mut messages = vec![json!({ "role": "user", "content": prompt(1, 30) })];
    let first = post(address, "/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 100 }))
        .await
        .json();
    let answer = first["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    messages.push(json!({ "role": "assistant", "content": answer }));
    messages.push(json!({ "role": "user", "content": "Go on." }));
    let next = post(address, "/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 1 })).await;
    let before = first["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(cached(&next), (before - 1) / 16 * 16);
}

#[tokio::test]
async fn salts_and_adapters_have_caches_of_their_own() {
    let config = EngineConfig { lora_modules: vec!["a1".to_owned()], ..as_captured() };
    let (_fleet, address) = start(config).await;
    let mut body = completion(1, 100, 1);
    let mut ask = async |name: &str, value: &str| {
        body[name] = value.into();
        cached(&post(address, "/v1/completions", &body).await) > 0
    };
    assert!(!ask("model", "tiny").await);
    assert!(!ask("model", "a1").await);
    assert!(ask("model", "a1").await);
    assert!(!ask("cache_salt", "s").await);
    assert!(ask("cache_salt", "s").await);
    let models = get(address, "/v1/models").await.json();
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&json!("a1"), &json!("tiny")));
}

#[tokio::test]
async fn token_ids_and_several_prompts() {
    let (_fleet, address) = start(as_captured()).await;
    let ids: Vec<u32> = (1000..1100).collect();
    let one = json!({ "prompt": ids, "max_tokens": 1 });
    post(address, "/v1/completions", &one).await;
    let two = json!({ "prompt": [ids, [1, 2, 3]], "max_tokens": 2, "n": 3 });
    let answer = post(address, "/v1/completions", &two).await;
    assert_eq!(cached(&answer), 96);
    let answer = answer.json();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 6);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(103), &json!(12))
    );
}

#[tokio::test]
async fn a_chat_without_a_limit_stops_by_itself() {
    let (_fleet, address) = start(EngineConfig { answer_tokens: 7, ..as_captured() }).await;
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "stop": ["a"], "ignore_eos": true, "min_tokens": 3 });
    let answer = post(address, "/v1/chat/completions", &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
        (&json!("stop"), &json!(7))
    );
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let (_fleet, address) = start(as_captured()).await;
    let mut body =
        json!({ "messages": [{ "role": "user", "content": prompt(1, 10) }], "max_tokens": 20, "n": 2 });
    let whole = post(address, "/v1/chat/completions", &body).await.json();
    body["stream"] = true.into();
    let stream = post(address, "/v1/chat/completions", &body).await;
    assert_eq!(stream.chunks.last().unwrap(), "data: [DONE]\n\n");
    for choice in 0..2 {
        let own = |event: &Value| event["choices"][0]["index"] == choice;
        let text: String = stream
            .events()
            .iter()
            .filter(|event| own(event))
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(text, whole["choices"][choice]["message"]["content"]);
    }
    assert_ne!(whole["choices"][0]["message"], whole["choices"][1]["message"]);
}

/// Opens a connection, sends a request and reads until `wanted` has been seen.
async fn begin(address: SocketAddr, request: &[u8], wanted: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut seen = String::new();
    let read = async {
        let mut buffer = [0; 4096];
        while !seen.contains(wanted) {
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(count > 0, "closed before {wanted:?}: {seen:?}");
            seen.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
    };
    timeout(BOUND, read).await.unwrap_or_else(|_| panic!("never saw {wanted:?}"));
    (stream, seen)
}

fn long_stream(seed: u32) -> Vec<u8> {
    let mut body = completion(seed, 100, 3000);
    body["stream"] = true.into();
    request_with("POST", "/v1/completions", "", &body.to_string())
}

#[tokio::test]
async fn the_head_of_a_stream_comes_before_any_work() {
    // So slow that no token can come while this test runs.
    let (_fleet, address) = start(EngineConfig { time_scale: 1e-6, ..as_captured() }).await;
    let (_stream, head) = begin(address, &long_stream(1), "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && !head.contains("data:"), "{head}");
    assert_eq!(get(address, "/load").await.json()["server_load"], 1);
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_and_leaves_its_blocks() {
    let (_fleet, address) = start(EngineConfig { time_scale: 1.0, ..as_captured() }).await;
    let (stream, _) = begin(address, &long_stream(1), "data: ").await;
    assert_eq!(metric(address, "vllm:num_requests_running").await, 1.0);
    drop(stream);
    until_metric(address, "vllm:num_requests_running", 0.0).await;
    assert_eq!(get(address, "/load").await.json()["server_load"], 0);
    assert!(metric(address, "vllm:generation_tokens_total").await < 3000.0);
    let page = get(address, "/metrics").await.body();
    let aborted = page.lines().find(|line| line.contains(r#"finished_reason="abort""#)).unwrap();
    assert!(aborted.ends_with(" 0.0"), "as in vLLM: {aborted}");
    assert!(cached(&post(address, "/v1/completions", &completion(1, 100, 1)).await) > 0);
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_ends_its_request_too() {
    let (_fleet, address) = start(EngineConfig { time_scale: 1e-6, ..as_captured() }).await;
    let mut whole = TcpStream::connect(address).await.unwrap();
    let body = completion(1, 100, 3000).to_string();
    whole.write_all(&request_with("POST", "/v1/completions", "", &body)).await.unwrap();
    let (stream, _) = begin(address, &long_stream(2), "\r\n\r\n").await;
    let both = async { while get(address, "/load").await.json()["server_load"] != 2 {} };
    timeout(BOUND, both).await.unwrap();
    drop((whole, stream));
    let none = async { while get(address, "/load").await.json()["server_load"] != 0 {} };
    timeout(BOUND, none).await.unwrap();
}

#[tokio::test]
async fn a_client_that_closes_its_sending_side_gets_nothing_more() {
    let (_fleet, address) = start(EngineConfig { time_scale: 1.0, ..as_captured() }).await;
    let (mut stream, _) = begin(address, &long_stream(1), "data: ").await;
    stream.shutdown().await.unwrap();
    let mut rest = Vec::new();
    // Closed or reset: either way no end of the answer.
    let _ = timeout(BOUND, stream.read_to_end(&mut rest)).await.unwrap();
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    until_metric(address, "vllm:num_requests_running", 0.0).await;
}

#[tokio::test]
async fn idle_connections_are_closed_but_only_after_a_response() {
    let (_fleet, address) = start(EngineConfig { keep_alive_seconds: 0.05, ..as_captured() }).await;
    let mut unused = TcpStream::connect(address).await.unwrap();
    let again = request_with("GET", "/version", "", "");
    let (mut stream, _) = begin(address, &again, "0.32.0").await;
    stream.write_all(&again).await.unwrap();
    let mut rest = Vec::new();
    timeout(BOUND, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("0.32.0"), "kept alive for a second request");
    // The one that had no response yet has been idle for longer.
    unused.write_all(&request("GET", "/version", "")).await.unwrap();
    let mut answer = Vec::new();
    timeout(BOUND, unused.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("0.32.0"));
}

#[tokio::test]
async fn beyond_the_limit_requests_get_503() {
    let config = EngineConfig { max_num_queued_reqs: Some(2), time_scale: 1e-6, ..as_captured() };
    let (_fleet, address) = start(config).await;
    let (_one, _) = begin(address, &long_stream(1), "\r\n\r\n").await;
    let (_two, _) = begin(address, &long_stream(2), "\r\n\r\n").await;
    let third = post(address, "/v1/completions", &completion(3, 10, 1)).await;
    let expected = Response::parse(&fixture("overload_3.resp"), false);
    assert_eq!((third.status, third.body()), (503, expected.body()));
    assert_eq!(get(address, "/health").await.status, 200);
    let page = get(address, "/metrics").await.body();
    assert!(
        page.contains(
            "vllm:admission_rejections_total{model_name=\"tiny\",reason=\"max_num_queued_reqs\"} 1.0"
        )
    );
}

#[tokio::test]
async fn the_cache_is_reset_only_when_idle() {
    let (_fleet, address) = start(EngineConfig { time_scale: 1.0, ..as_captured() }).await;
    let (stream, _) = begin(address, &long_stream(1), "data: ").await;
    assert_eq!(post(address, "/reset_prefix_cache", &json!({})).await.json(), json!({ "success": false }));
    drop(stream);
    until_metric(address, "vllm:num_requests_running", 0.0).await;
    assert_eq!(post(address, "/reset_prefix_cache", &json!({})).await.json(), json!({ "success": true }));
    assert_eq!(cached(&post(address, "/v1/completions", &completion(1, 100, 1)).await), 0);
}

#[tokio::test]
async fn workers_share_nothing() {
    let fleet = Fleet::start(vec![as_captured(), as_captured()]).await.unwrap();
    let [one, two] = fleet.addresses() else { panic!("two workers") };
    assert_ne!(one, two);
    post(*one, "/v1/completions", &completion(1, 100, 1)).await;
    assert_eq!(cached(&post(*two, "/v1/completions", &completion(1, 100, 1)).await), 0);
    assert!(cached(&post(*one, "/v1/completions", &completion(1, 100, 1)).await) > 0);
    assert_eq!(
        metric(*one, "vllm:prompt_tokens_total").await,
        2.0 * metric(*two, "vllm:prompt_tokens_total").await
    );
}

#[tokio::test]
async fn a_stop_lets_answers_end_and_takes_no_new_ones() {
    let (fleet, address) = start(as_captured()).await;
    let mut body = completion(1, 100, 200);
    body["stream"] = true.into();
    let asked = request_with("POST", "/v1/completions", "", &body.to_string());
    let (mut stream, mut seen) = begin(address, &asked, "data: ").await;
    let stop = tokio::spawn(fleet.stop());
    let mut rest = Vec::new();
    timeout(BOUND, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    seen.push_str(std::str::from_utf8(&rest).unwrap());
    let whole = Response::parse(seen.as_bytes(), false);
    assert_eq!((whole.events().len(), whole.chunks.len()), (200, 201));
    timeout(BOUND, stop).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "refused");
}

#[tokio::test]
async fn a_taken_port_and_bad_settings_are_errors_at_start() {
    let (_fleet, address) = start(as_captured()).await;
    let taken = Fleet::start(vec![as_captured(), EngineConfig { listen: address, ..as_captured() }]).await;
    let error = taken.err().unwrap().to_string();
    assert!(error.starts_with(&format!("worker 1: cannot listen on {address}: ")), "{error}");
    let bad = Fleet::start(vec![EngineConfig { time_scale: -1.0, ..as_captured() }]).await;
    assert_eq!(bad.err().unwrap().to_string(), "worker 0: `time_scale` must be a number above 0, got -1");
}

#[tokio::test]
async fn what_is_not_json_or_too_deep_is_refused() {
    let (_fleet, address) = start(as_captured()).await;
    let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
    for body in [deep.as_str(), "nonsense", "{\"prompt\": 1e999}", "{\"prompt\": \"\\ud800\"}"] {
        let answer = exchange(address, &request("POST", "/v1/completions", body)).await;
        assert_eq!(answer.status, 400, "{}", answer.body());
    }
}
