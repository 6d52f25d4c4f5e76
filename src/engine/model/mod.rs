//! vLLM V1's prefix cache and scheduler, pure: time is an argument, nothing waits, nothing is random.
//!
//! [`Engine`] is one worker. Work goes in by [`Engine::submit`], time by [`Engine::advance`], [`Event`]s come out, each with
//! the time at which it happened; [`Engine::next_event`] says how long nothing will. The HTTP engine sleeps until then, the
//! simulator jumps. Content is named by hashes only, so blocks may have any size: 16 tokens as on a GPU, 512 as in traces.

mod chunked;
mod engine;
pub mod pool;
mod request;
mod serial;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::ids::{BlockHash, Time};

pub use engine::Engine;
pub use request::RequestId;

/// The worker to model. `Default` is the worker of the Service experiment: 9,344 usable tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Spec {
    /// Tokens in a KV block, at least 1.
    pub block_size: u32,
    /// KV blocks as vLLM counts them (`num_gpu_blocks`): one of them is the null block, which holds nothing. At least 2.
    pub num_blocks: u32,
    /// Requests that may run at the same time, at least 1.
    pub max_num_seqs: u32,
    pub timing: Timing,
    /// When a look-up moves the prefix-cache counters.
    pub count_lookups: CountLookups,
    /// Whether every generated token is an [`Event`], or only the first. Without, steps in which nothing else happens are
    /// taken together.
    pub token_events: bool,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            block_size: 16,
            num_blocks: 585,
            max_num_seqs: 256,
            timing: Timing::default(),
            count_lookups: CountLookups::default(),
            token_events: false,
        }
    }
}

/// How the worker spends time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Timing {
    /// vLLM V1's scheduler with chunked prefill.
    Chunked(Chunked),
    /// One prefill at a time at a fixed rate, each running request decoding at a fixed rate, prompt and output reserved at
    /// admission: the model that published comparisons of routers use. A few steps a request.
    Serial(Serial),
}

impl Default for Timing {
    fn default() -> Self {
        Timing::Chunked(Chunked::default())
    }
}

/// Speeds and limits of [`Timing::Chunked`]. A step takes `step_seconds + prefill tokens / prefill_tokens_per_s + decoding
/// requests x decode_seconds`. By default an idle worker gives the first token of a 2,371-token prompt after 108 ms when it
/// is new and after 40 ms when 2,032 of its tokens are cached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Chunked {
    /// Tokens that one step may compute (`max_num_batched_tokens`), at least 1.
    pub max_num_batched_tokens: u32,
    /// Fixed cost of a step, in seconds.
    pub step_seconds: f64,
    pub prefill_tokens_per_s: f64,
    /// Cost of one decoding request in a step, in seconds.
    pub decode_seconds: f64,
    /// Time between the arrival of a request and its place in the queue, in seconds: HTTP, template, tokenizer. It keeps no
    /// other request waiting.
    pub frontend_seconds: f64,
}

impl Default for Chunked {
    fn default() -> Self {
        Chunked {
            max_num_batched_tokens: 2048,
            step_seconds: 0.010,
            prefill_tokens_per_s: 35_000.0,
            decode_seconds: 0.000_3,
            frontend_seconds: 0.020,
        }
    }
}

impl Chunked {
    /// The same worker `speed` times as fast; what happens before the queue takes as long.
    pub fn at_speed(&self, speed: f64) -> Chunked {
        Chunked {
            step_seconds: self.step_seconds / speed,
            prefill_tokens_per_s: self.prefill_tokens_per_s * speed,
            decode_seconds: self.decode_seconds / speed,
            ..self.clone()
        }
    }
}

/// Speeds of [`Timing::Serial`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Serial {
    pub prefill_tokens_per_s: f64,
    /// Of each running request.
    pub decode_tokens_per_s: f64,
}

impl Default for Serial {
    fn default() -> Self {
        Serial { prefill_tokens_per_s: 8_000.0, decode_tokens_per_s: 40.0 }
    }
}

/// When `prefix_cache_queries` and `prefix_cache_hits` move. Neither ever counts a preempted request's look-up again.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountLookups {
    /// Once, when the request is admitted, so that they agree with `usage`: vLLM 0.32, as measured.
    #[default]
    AtAdmission,
    /// At every attempt to admit, so that a request that waits for memory counts once a step: vLLM 0.24, as measured (4.5
    /// times the prompt tokens under pressure).
    EveryAttempt,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Work {
    /// The chained hashes of the sequence's full blocks in order: those of the prompt, then those that the answer will fill,
    /// as far as known. Full blocks beyond the list take room and age, but are never found.
    pub blocks: Arc<[BlockHash]>,
    /// At least 1.
    pub prompt_tokens: u32,
    /// Tokens that will be generated, at least 1.
    pub output_tokens: u32,
}

/// What happened, when, to whom.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Event {
    pub at: Time,
    pub request: RequestId,
    pub what: What,
}

/// What happens to a request, in this order; `Preempted` may come between any two after `Admitted`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// Its prefill begins; so many of its prompt's tokens were cached. Only once, even if it is preempted later.
    Admitted { cached_tokens: u32 },
    /// The prefill is over, the first token is there.
    FirstToken,
    /// One more token; only with [`Spec::token_events`].
    Token,
    /// It lost its blocks and waits again, first in the queue.
    Preempted,
    /// The last token was the last. The id is void from here on.
    Finished,
}

/// Counters since the start.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Tokens found there.
    pub prefix_cache_hits: u64,
    pub preemptions: u64,
}

/// Why [`Engine::submit`] refuses a request for good.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error("no output tokens are asked for; at least 1 is needed")]
    NoOutput,
    #[error("the request needs {needed} KV blocks, the worker has {usable}")]
    TooLarge { needed: u64, usable: u32 },
}

/// Why [`Engine::new`] refuses a [`Spec`]: `key` is the setting's name.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("`{key}` must be {must}, got {got}")]
pub struct BadSpec {
    pub key: &'static str,
    pub must: &'static str,
    pub got: f64,
}

impl Spec {
    /// The same worker `speed` times as fast.
    pub fn at_speed(self, speed: f64) -> Spec {
        let timing = match &self.timing {
            Timing::Chunked(usual) => Timing::Chunked(usual.at_speed(speed)),
            Timing::Serial(usual) => Timing::Serial(Serial {
                prefill_tokens_per_s: usual.prefill_tokens_per_s * speed,
                decode_tokens_per_s: usual.decode_tokens_per_s * speed,
            }),
        };
        Spec { timing, ..self }
    }

    /// Blocks that can hold something: all but the null block.
    pub fn usable_blocks(&self) -> u32 {
        self.num_blocks.saturating_sub(1)
    }

    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), BadSpec> {
        at_least("block_size", self.block_size, 1)?;
        at_least("num_blocks", self.num_blocks, 2)?;
        at_least("max_num_seqs", self.max_num_seqs, 1)?;
        match &self.timing {
            Timing::Chunked(timing) => {
                at_least("max_num_batched_tokens", timing.max_num_batched_tokens, 1)?;
                positive("step_seconds", timing.step_seconds)?;
                positive("prefill_tokens_per_s", timing.prefill_tokens_per_s)?;
                not_negative("decode_seconds", timing.decode_seconds)?;
                not_negative("frontend_seconds", timing.frontend_seconds)
            }
            Timing::Serial(timing) => {
                positive("prefill_tokens_per_s", timing.prefill_tokens_per_s)?;
                positive("decode_tokens_per_s", timing.decode_tokens_per_s)
            }
        }
    }
}

fn at_least(key: &'static str, got: u32, least: u32) -> Result<(), BadSpec> {
    let must = if least == 1 { "at least 1" } else { "at least 2" };
    if got >= least { Ok(()) } else { Err(BadSpec { key, must, got: f64::from(got) }) }
}

fn positive(key: &'static str, got: f64) -> Result<(), BadSpec> {
    let good = got > 0.0 && got.is_finite();
    if good { Ok(()) } else { Err(BadSpec { key, must: "a number above 0", got }) }
}

fn not_negative(key: &'static str, got: f64) -> Result<(), BadSpec> {
    let good = got >= 0.0 && got.is_finite();
    if good { Ok(()) } else { Err(BadSpec { key, must: "0 or a number above it", got }) }
}
