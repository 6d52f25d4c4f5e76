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

/// The body of a chat request to them: some two thousand tokens of prefix, and a few of its own.
pub fn chat(prefix: usize, serial: usize) -> String {
    let text = |seed: usize, words: usize| -> String {
        (0..words).map(|at| format!("w{}x{at} ", seed * 31)).collect()
    };
    let (system, user) = (text(prefix + 1, 480), text(1_000_000 + serial, 40));
    format!(
        r#"{{"model":"warmroute-sim","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}],"max_tokens":4}}"#
    )
}
