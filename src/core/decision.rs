//! The values that a decision is made from and what it says: kept whole, so that every choice can be explained.

use crate::core::blocks::Chain;
use crate::core::ids::WorkerId;
use crate::core::price::Terms;

/// How a worker is picked.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Uniformly among the eligible workers, as a Kubernetes Service does.
    Random,
    /// The worker with the lowest [`price`](crate::core::price).
    Kv,
}

/// What the planner is told of a worker when it joins.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Stable over restarts and equal on all replicas (a hash of the worker's address or pod name): breaks ties for cold
    /// prefixes, so that replicas agree.
    pub key: u64,
    /// KV cache size in tokens, if known.
    pub capacity_tokens: Option<u64>,
    /// Tokens in a block of the engine: what it caches is a multiple of this. vLLM's default is 16.
    pub engine_block_tokens: u32,
    /// Prefill speed in tokens a second, if known; learned otherwise.
    pub prefill_speed: Option<f64>,
}

/// One request, as far as placement is concerned.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Empty when the prompt could not be read: routed by load.
    pub chain: Chain,
    /// Tokens that one block of the chain stands for.
    pub block_tokens: f64,
    /// Tokens of the whole prompt (estimated from its bytes in the proxy, exact in the simulator).
    pub prompt_tokens: f64,
    /// Tokens expected to be generated.
    pub output_tokens: f64,
    /// Whether the first token will be seen (a streamed answer) or must be guessed from elapsed time.
    pub streams: bool,
}

/// Why the worker was picked; a closed set, used as a metric label.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Policy `Random`.
    Random,
    /// The only eligible worker.
    Only,
    /// No other worker holds more of the prompt, and some hold less.
    Warm,
    /// Some other worker holds more, but sending there would cost more.
    Spill,
    /// Not known to hold the most of it, but its home: other routers send such prompts there too.
    Home,
    /// Nobody holds any of it.
    Cold,
    /// The prompt has no full block or could not be read.
    Load,
}

impl Reason {
    pub const ALL: [Reason; 7] =
        [Reason::Random, Reason::Only, Reason::Warm, Reason::Spill, Reason::Home, Reason::Cold, Reason::Load];

    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Random => "random",
            Reason::Only => "only",
            Reason::Warm => "warm",
            Reason::Spill => "spill",
            Reason::Home => "home",
            Reason::Cold => "cold",
            Reason::Load => "load",
        }
    }
}

/// One worker as the planner saw it.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub worker: WorkerId,
    pub terms: Terms,
}

/// What was decided and from what.
#[derive(Clone, Debug)]
pub struct Decision {
    pub worker: WorkerId,
    /// Its place in `candidates`.
    pub pick: usize,
    pub reason: Reason,
    /// Prompt tokens believed to be cached on the picked worker.
    pub predicted_cached_tokens: f64,
    /// All eligible workers, as given. `pushed` is worked out only for those that could still win.
    pub candidates: Vec<Candidate>,
    /// The place in `candidates` of the worker that would have been next; `None` if there is no other.
    pub runner_up: Option<usize>,
}
