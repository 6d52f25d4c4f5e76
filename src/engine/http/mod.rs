//! Simulated vLLM workers over HTTP: what vLLM 0.32 answers, byte for byte where a client or a proxy could tell, from the
//! pure [`model`](crate::engine::model) instead of a GPU. No model, no tokenizer file: text is cut into pieces by rule and
//! answers are made-up words, always the same for the same prompt.
//!
//! The way of one request: [`server`] accepts, [`routes`] finds the handler and checks the key, [`request`] reads and
//! checks the body, [`template`] renders a chat, [`tokenizer`] cuts it and chains block hashes; the [`worker`] task owns the
//! model, lets time pass and hands each event to the request's [`answer`], which formats what goes out. [`metrics`] keeps
//! what `/metrics` shows.
//!
//! Not here: sampling parameters (they change nothing), log-probabilities, `echo`, LoRA loading at run time, `/v1/responses`
//! and `/v1/messages`, KV events.

mod answer;
mod args;
mod body;
mod config;
mod error;
mod metrics;
mod request;
mod routes;
mod server;
mod template;
mod tokenizer;
mod words;
mod worker;

pub use args::EngineArgs;
pub use config::{ApiKey, ConfigError, EngineConfig};
pub use server::{BindError, Bound, Fleet, Running};
