//! Experiments: what prefix routing is worth, measured.
//!
//! `bench` loads any OpenAI-compatible target, `demo` starts simulated workers and the proxy around the same experiment.
//! In the order of a measurement: [`service`] says which requests are sent, [`prompts`] writes their text in the sizes that
//! [`sizing`] finds, [`load`] drives them, [`exchange`] sends one and times it over a connection to a [`target`], reading the
//! stream with [`sse`]; [`counters`] asks the engines what they saw, [`stats`] condenses, [`report`] prints, and
//! [`published`] has the figures to compare with. [`simulate`] judges placement in virtual time, without sockets, on made
//! workloads and on [`trace`]s.

pub mod bench;
pub mod compare;
pub mod counters;
pub mod demo;
pub mod exchange;
pub mod load;
pub mod matrix;
pub mod prompts;
pub mod published;
pub mod report;
pub mod service;
pub mod simulate;
pub mod sizing;
pub mod sse;
pub mod stats;
pub mod subject;
pub mod target;
pub mod trace;
