//! The counters of `/metrics` move as a real vLLM's do.

use serde_json::json;

use super::raw::{get, metric, post};
use super::*;

#[tokio::test]
async fn two_requests_of_a_hundred_tokens() {
    let (_fleet, address) = start(as_captured()).await;
    let ids: Vec<u32> = (2000..2100).collect();
    for _ in 0..2 {
        post(address, "/v1/completions", &json!({ "prompt": ids, "max_tokens": 5 })).await;
    }
    for (name, value) in [
        ("vllm:prefix_cache_queries_total", 200.0),
        ("vllm:prefix_cache_hits_total", 96.0),
        ("vllm:prompt_tokens_total", 200.0),
        ("vllm:prompt_tokens_cached_total", 96.0),
        ("vllm:generation_tokens_total", 10.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:time_to_first_token_seconds_count", 2.0),
        ("vllm:inter_token_latency_seconds_count", 8.0),
        ("vllm:e2e_request_latency_seconds_count", 2.0),
        ("vllm:request_prompt_tokens_sum", 200.0),
        ("vllm:request_generation_tokens_sum", 10.0),
        ("vllm:request_prefill_kv_computed_tokens_sum", 104.0),
    ] {
        assert_eq!(metric(address, name).await, value, "{name}");
    }
    let page = get(address, "/metrics").await.body();
    assert!(page.contains(
        "vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"tiny\"} 2.0"
    ));
}

#[tokio::test]
async fn times_are_told_in_model_seconds() {
    let (_fleet, address) = start(as_captured()).await;
    let ids: Vec<u32> = (1000..3371).collect();
    post(address, "/v1/completions", &json!({ "prompt": ids, "max_tokens": 64 })).await;
    // 108 ms and 63 steps of 10.3 ms, whatever the scale; the request may have to wait for the task that drives the model.
    let first_token = metric(address, "vllm:time_to_first_token_seconds_sum").await;
    assert!((0.107..0.109).contains(&first_token), "{first_token}");
    let whole = metric(address, "vllm:e2e_request_latency_seconds_sum").await;
    assert!((0.755..0.758).contains(&whole), "{whole}");
}

#[tokio::test]
async fn overcommitted_requests_are_preempted_and_finish() {
    let (_fleet, address) = start(EngineConfig { time_scale: 400.0, ..as_captured() }).await;
    let prompts: Vec<Vec<u32>> = (1..5).map(|seed| (0..1000).map(|id| 1000 * seed + id).collect()).collect();
    let body = json!({ "prompt": prompts, "max_tokens": 2500 });
    let answer = post(address, "/v1/completions", &body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 10_000);
    // As measured; the counters do not show the second prefill.
    assert_eq!(metric(address, "vllm:num_preemptions_total").await, 2.0);
    assert_eq!(metric(address, "vllm:prefix_cache_queries_total").await, 4000.0);
}
