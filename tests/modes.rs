//! The two modes and the switch between them.

use warmroute::config::{Draw, Mode};
use warmroute::testing::{FakeEngine, TestRouter, Wire, until};

async fn engines(count: usize) -> Vec<FakeEngine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(FakeEngine::start().await);
    }
    engines
}

fn counts(engines: &[FakeEngine]) -> Vec<usize> {
    engines.iter().map(|engine| engine.seen().len()).collect()
}

#[tokio::test]
async fn random_draws_once_for_each_connection() {
    let engines = engines(4).await;
    let router = TestRouter::before(Mode::Random, &engines.iter().collect::<Vec<_>>()).await;
    for _ in 0..16 {
        let before = counts(&engines);
        let mut client = router.client().await;
        for _ in 0..10 {
            client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
        }
        let grown: Vec<usize> =
            counts(&engines).iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(grown.iter().filter(|count| **count > 0).count(), 1, "{grown:?}");
    }
    // Sixteen draws among four all on one worker would be a wonder (one in a billion).
    assert!(counts(&engines).iter().filter(|count| **count > 0).count() > 1);
}

#[tokio::test]
async fn random_can_draw_for_each_request() {
    let engines = engines(3).await;
    let mut config = TestRouter::config(Mode::Random, &engines.iter().collect::<Vec<_>>());
    config.random.draw = Draw::Request;
    let router = TestRouter::start(config).await;
    let mut client = router.client().await;
    for _ in 0..300 {
        client.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    }
    // A hundred each, six standard deviations either way.
    assert!(counts(&engines).iter().all(|count| (50..150).contains(count)), "{:?}", counts(&engines));
}

#[tokio::test]
async fn random_per_connection_has_nothing_to_fall_back_on() {
    let mut dead = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Random, &[&dead]);
    let alive = FakeEngine::start().await;
    config.workers.fixed.extend(TestRouter::config(Mode::Random, &[&alive]).workers.fixed);
    config.health.interval = None;
    config.health.request_failures = 1_000_000;
    let router = TestRouter::start(config).await;
    dead.kill().await;
    let mut statuses = Vec::new();
    for _ in 0..64 {
        statuses.push(router.client().await.post("/v1/completions", r#"{"prompt":"x"}"#).await.status());
    }
    assert!(statuses.contains(&502) && statuses.contains(&200), "{statuses:?}");
    assert_eq!(router.metric(r#"warmroute_retries_total{cause="connect"}"#).await, 0.0);
}

#[tokio::test]
async fn the_mode_is_switched_while_running() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let put = async |body: &str| {
        let mut admin = Wire::connect(router.admin).await;
        admin
            .send(format!("PUT /mode HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
            .await;
        admin.answer("PUT").await.unwrap()
    };
    for (body, mode) in [("random", "random"), (r#"{"mode":"kv"}"#, "kv"), ("\"random\"\n", "random")] {
        assert_eq!(put(body).await.status(), 200);
        assert!(router.admin("/mode").await.contains(&format!("\"{mode}\"")));
        assert_eq!(router.metric(&format!(r#"warmroute_mode{{mode="{mode}"}}"#)).await, 1.0);
        router.client().await.get("/v1/models").await;
        let counted = format!(r#"warmroute_requests_total{{mode="{mode}",outcome="ok",route="other"}}"#);
        until("the request to be counted under its mode", async || router.metric(&counted).await >= 1.0)
            .await;
    }
    let refused = put("sticky").await;
    assert_eq!((refused.status(), refused.text().as_str()), (400, "mode: unknown; send kv or random\n"));
    assert!(router.admin("/mode").await.contains("random"));
}
