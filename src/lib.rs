//! warmroute: a reverse proxy that takes a Kubernetes Service's place in front of vLLM pods and sends each request to the
//! worker whose KV cache already holds its prefix.
//!
//! The modules are floors; imports go down only, and `tests/architecture.rs` holds that:
//!
//! | floor | modules | what it is for |
//! | --- | --- | --- |
//! | 6 | [`cli`], [`app`], [`testing`] | process, arguments, wiring; the harness of the tests |
//! | 5 | [`experiment`], [`operator`] | workloads, load generator, report, simulate, demo; what an operator does from a terminal |
//! | 4 | [`admin`] | the operator's listener |
//! | 3 | [`proxy`], [`engine::http`] | what speaks HTTP to clients and workers; the simulated worker's server |
//! | 2 | [`fleet`], [`peers`] | who the workers are and what is known of them; what other routers do there |
//! | 1 | [`config`], [`metrics`], [`lifecycle`], [`threads`], [`bell`] | the base |
//! | 0 | [`core`], [`engine::model`] | pure: no I/O, no clock, no runtime |

pub mod admin;
pub mod app;
pub mod bell;
pub mod cli;
pub mod config;
pub mod core;
pub mod engine;
pub mod experiment;
pub mod fleet;
pub mod lifecycle;
pub mod metrics;
pub mod operator;
pub mod peers;
pub mod proxy;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
