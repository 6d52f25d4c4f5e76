//! The metrics page: the names that dashboards rely on, and that no client can make it grow.

use std::collections::BTreeSet;

use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, TestRouter};

/// The families, by name, after some traffic.
const NAMES: &[&str] = &[
    "warmroute_access_log_lost_total",
    "warmroute_build_info",
    "warmroute_client_connections",
    "warmroute_config_reloads_total",
    "warmroute_confirmed_cached_tokens_total",
    "warmroute_confirmed_prompt_tokens_total",
    "warmroute_decision_seconds",
    "warmroute_decisions_total",
    "warmroute_fallbacks_total",
    "warmroute_mode",
    "warmroute_output_tokens_total",
    "warmroute_predicted_cached_tokens_total",
    "warmroute_prompt_tokens_total",
    "warmroute_requests_in_flight",
    "warmroute_requests_queued",
    "warmroute_request_body_bytes",
    "warmroute_requests_total",
    "warmroute_retries_denied_total",
    "warmroute_retries_total",
    "warmroute_time_to_first_token_seconds",
    "warmroute_worker_basis",
    "warmroute_worker_cached_tokens_total",
    "warmroute_worker_connections",
    "warmroute_worker_credit_ratio",
    "warmroute_worker_foreign_ratio",
    "warmroute_worker_foreign_requests",
    "warmroute_worker_in_flight",
    "warmroute_worker_requests_total",
    "warmroute_worker_scrapes_total",
    "warmroute_worker_state",
];

#[tokio::test]
async fn the_families_are_those_that_are_documented() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let body = r#"{"messages":[{"role":"user","content":"x"}]}"#;
    router.client().await.post("/v1/chat/completions", body).await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let read = format!(r#"warmroute_worker_scrapes_total{{outcome="status",worker="{}"}}"#, engine.address());
    router.metric_is(&read, 1.0).await;
    let basis = format!(
        r#"warmroute_worker_basis{{basis="blind",reason="no_scrape",worker="{}"}}"#,
        engine.address()
    );
    router.metric_is(&basis, 1.0).await;
    let page = router.admin("/metrics").await;
    let names: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert_eq!(names, NAMES.iter().copied().collect());
    for name in names {
        assert!(page.contains(&format!("# HELP {name} ")), "{name} says what it is");
    }
}

#[tokio::test]
async fn a_request_is_counted_where_it_belongs() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    client.post("/v1/completions", r#"{"prompt":"x","model":"m"}"#).await;
    client.get("/v1/models").await;
    client.post("/sleep", "").await;
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    for series in [
        r#"warmroute_requests_total{mode="kv",outcome="ok",route="completions"}"#,
        r#"warmroute_requests_total{mode="kv",outcome="ok",route="other"}"#,
        r#"warmroute_requests_total{mode="kv",outcome="refused",route="blocked"}"#,
        r#"warmroute_output_tokens_total{model="m"}"#,
        "warmroute_client_connections",
    ] {
        assert_eq!(router.metric(series).await, 1.0, "{series}");
    }
    assert_eq!(router.metric(r#"warmroute_prompt_tokens_total{model="m"}"#).await, 10.0);
    let worker = engine.address();
    assert_eq!(router.metric(&format!(r#"warmroute_worker_requests_total{{worker="{worker}"}}"#)).await, 2.0);
    assert_eq!(router.metric(&format!(r#"warmroute_worker_in_flight{{worker="{worker}"}}"#)).await, 0.0);
}

#[tokio::test]
async fn clients_cannot_make_the_page_grow() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    let lines = async || router.admin("/metrics").await.lines().count();
    for n in 0..100 {
        client.post("/v1/completions", format!(r#"{{"prompt":"x","model":"m{n}"}}"#)).await;
        client.get(&format!("/path/{n}")).await;
    }
    let before = lines().await;
    for n in 100..1000 {
        client.post("/v1/completions", format!(r#"{{"prompt":"x","model":"m\"\n{n}"}}"#)).await;
        client.get(&format!("/path/{n}")).await;
    }
    assert_eq!(lines().await, before);
}
