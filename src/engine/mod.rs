//! A simulated vLLM worker: [`model`] is the pure prefix cache and scheduler (floor 0, shared with `simulate`), [`http`] serves
//! it over sockets as a vLLM would (floor 3).

pub mod http;
pub mod model;
