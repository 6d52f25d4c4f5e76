//! Requests that were sent to a real vLLM 0.32, byte for byte, and what it answered: the same status, headers, framing and
//! body must come, but for what cannot be the same (ids, times, texts, token counts of another tokenizer).

use std::path::Path;

use super::raw::{Response, exchange, post};
use super::*;

pub fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of the exchanges whose names begin with one of `prefixes`.
fn exchanges(prefixes: &[&str]) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm");
    let files =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let requests = files.filter_map(|file| file.strip_suffix(".req").map(str::to_owned));
    let mut names: Vec<String> =
        requests.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).collect();
    names.sort();
    names
}

/// Replaces the value behind each `"key":` by `*`.
fn mask(text: &str, key: &str) -> String {
    let key = format!("\"{key}\":");
    let mut masked = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(&key) {
        let (before, value) = rest.split_at(at + key.len());
        masked.push_str(before);
        masked.push('*');
        let mut stream = serde_json::Deserializer::from_str(value).into_iter::<serde_json::Value>();
        stream.next().unwrap().unwrap();
        rest = &value[stream.byte_offset()..];
    }
    masked + rest
}

const OWN: [&str; 8] =
    ["id", "created", "root", "content", "text", "system_fingerprint", "prompt_tokens", "total_tokens"];
const CACHE: [&str; 2] = ["cached_tokens", "created_cache_tokens"];

fn comparable(response: &Response) -> (u16, Vec<(String, String)>, Vec<String>) {
    let mut headers = response.headers.clone();
    headers.sort();
    for (name, value) in &mut headers {
        if ["date", "x-request-id", "content-length"].contains(&name.as_str()) {
            value.clear();
        }
    }
    let keys = OWN.iter().chain(&CACHE);
    let chunks =
        response.chunks.iter().map(|chunk| keys.clone().fold(chunk.clone(), |text, key| mask(&text, key)));
    (response.status, headers, chunks.collect())
}

async fn compare(address: SocketAddr, names: &[String]) {
    for name in names {
        let request = fixture(&format!("{name}.req"));
        let head_only = request.starts_with(b"HEAD ");
        let expected = Response::parse(&fixture(&format!("{name}.resp")), head_only);
        let got = exchange(address, &request).await;
        let (expected_parts, got_parts) = (comparable(&expected), comparable(&got));
        assert_eq!(got_parts, expected_parts, "{name}");
        if expected.status >= 400 {
            assert_eq!(got.body(), expected.body(), "{name}: errors are the same to the byte");
        }
    }
}

#[tokio::test]
async fn errors_are_as_captured() {
    let (_fleet, address) = start(as_captured()).await;
    let names =
        exchanges(&["err_", "completion_max_tokens_0", "completion_suffix", "embeddings_", "chat_x_data"]);
    assert!(names.len() > 25, "{names:?}");
    compare(address, &names).await;
}

#[tokio::test]
async fn answers_are_as_captured() {
    let (_fleet, address) = start(as_captured()).await;
    let names = exchanges(&["chat", "completion", "get_", "ok_"]);
    assert!(names.len() > 15, "{names:?}");
    compare(address, &names).await;
}

#[tokio::test]
async fn transport_is_as_captured() {
    let (_fleet, address) = start(as_captured()).await;
    compare(address, &exchanges(&["tr_"])).await;
}

#[tokio::test]
async fn the_key_guards_what_it_guards_in_vllm() {
    let key = warmroute::engine::http::ApiKey::new("sekret");
    let (_fleet, address) = start(EngineConfig { api_key: Some(key), ..as_captured() }).await;
    let mut names = exchanges(&["auth_"]);
    names.retain(|name| name != "auth_nokey_tokenize");
    assert!(names.len() > 8, "{names:?}");
    compare(address, &names).await;
}

#[tokio::test]
async fn tokenize_and_detokenize_have_the_captured_fields() {
    let (_fleet, address) = start(as_captured()).await;
    for name in ["tokenize_prompt", "tokenize_chat", "detokenize", "auth_nokey_tokenize"] {
        let expected = Response::parse(&fixture(&format!("{name}.resp")), false).json();
        let got = exchange(address, &fixture(&format!("{name}.req"))).await.json();
        let names =
            |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&got), names(&expected), "{name}");
    }
    let text = "Prompts <|im_start|>with\n\n a 2024 été.";
    let tokens = post(address, "/tokenize", &serde_json::json!({ "prompt": text })).await.json();
    assert_eq!(tokens["count"].as_u64().unwrap() as usize, tokens["tokens"].as_array().unwrap().len());
    let back = post(address, "/detokenize", &serde_json::json!({ "tokens": tokens["tokens"] })).await.json();
    assert_eq!(back["prompt"], text);
}

/// Metric names with their labels, the values left out.
fn series(page: &str) -> std::collections::BTreeSet<&str> {
    let lines = page.lines().filter(|line| line.starts_with("vllm:") && !line.contains("cache_config_info"));
    lines.filter_map(|line| line.rsplit_once(' ')).map(|(series, _)| series).collect()
}

#[tokio::test]
async fn metrics_are_a_subset_of_the_captured_ones() {
    let (_fleet, address) = start(as_captured()).await;
    let captured = Response::parse(&fixture("get_metrics_after_basic.resp"), false);
    let page = raw::get(address, "/metrics").await;
    assert_eq!(page.header("content-type"), captured.header("content-type"));
    let (ours, theirs) = (page.body(), captured.body());
    let (ours, theirs) = (series(&ours), series(&theirs));
    let unknown: Vec<_> = ours.difference(&theirs).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    let of = |name: &str| ours.iter().any(|series| series.starts_with(&format!("{name}{{")));
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:admission_rejections_total",
        "vllm:request_prompt_tokens_bucket",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
    ] {
        assert!(of(name), "{name} is missing");
    }
    let config =
        page.body().lines().find(|line| line.starts_with("vllm:cache_config_info{")).unwrap().to_owned();
    for label in [r#"block_size="16""#, r#"num_gpu_blocks="585""#, r#"kv_cache_size_tokens="9360""#] {
        assert!(config.contains(label), "{label} in {config}");
    }
    assert!(
        page.body().contains("\nprocess_start_time_seconds ")
            || page.body().contains("process_start_time_seconds 1")
    );
}
