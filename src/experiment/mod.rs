//! Experiments: what prefix routing is worth, measured.
//!
//! `bench` loads any OpenAI-compatible target, `demo` starts simulated workers and the proxy around the same experiment.
//! In the order of a measurement: [`service`] says which requests are sent, [`prompts`] writes their text in the sizes that
//! [`sizing`] finds, [`load`] drives them, [`exchange`] sends one and times it over a connection to a [`target`], reading the
//! stream with [`sse`]; [`counters`] asks the engines what they saw, [`figures`] and [`stats`] condense, [`report`] prints, and
//! [`published`] has the figures to compare with. [`simulate`] judges placement in virtual time, without sockets. What both can
//! play is a [`workload`]: made up, or read from a [`trace`] or a user's file. [`mod@play`] sends it as a [`scene`], in the words
//! of a [`scribe`]; [`import`] checks a file and tells what routing could be worth on it.

pub mod bench;
pub mod compare;
pub mod counters;
pub mod demo;
pub mod exchange;
pub mod figures;
pub mod import;
pub mod load;
pub mod matrix;
pub mod play;
pub mod progress;
pub mod prompts;
pub mod published;
pub mod report;
pub mod scene;
pub mod scribe;
pub mod service;
pub mod simulate;
pub mod sizing;
pub mod sse;
pub mod stats;
pub mod subject;
pub mod target;
pub mod targets;
pub mod trace;
pub mod workload;
