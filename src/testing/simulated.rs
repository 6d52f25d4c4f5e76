//! Simulated vLLM workers, as `warmroute engine` runs them, in the test's own process.

use crate::engine::http::{EngineConfig, Fleet, Running};

/// That many workers on free ports, whose answers tell what was cached and whose time runs `time_scale` times as fast; `model` is what
/// they serve.
pub async fn simulated(count: usize, model: &str, time_scale: f64) -> Running {
    let engine = EngineConfig {
        model: model.to_owned(),
        enable_prompt_tokens_details: true,
        time_scale,
        ..EngineConfig::default()
    };
    Fleet::start(vec![engine; count]).await.expect("free ports")
}
