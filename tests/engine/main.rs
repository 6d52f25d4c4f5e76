//! The simulated vLLM workers over real sockets.

#![expect(clippy::unwrap_used, reason = "in a test, what goes wrong should fail on the spot")]

mod behaviour;
mod captures;
mod command_line;
mod counters;
mod raw;

use std::net::SocketAddr;

use warmroute::engine::http::{EngineConfig, Fleet, Running};

/// The settings of the server that the captures come from, forty times as fast.
fn as_captured() -> EngineConfig {
    EngineConfig {
        model: "tiny".to_owned(),
        max_model_len: Some(4096),
        enable_prompt_tokens_details: true,
        enable_request_id_headers: true,
        time_scale: 40.0,
        ..EngineConfig::default()
    }
}

async fn start(config: EngineConfig) -> (Running, SocketAddr) {
    let fleet = Fleet::start(vec![config]).await.unwrap();
    let address = fleet.addresses()[0];
    (fleet, address)
}
