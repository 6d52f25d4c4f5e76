//! The simulated workers as a run sees them: engines, and what a router may count of its own work on each.

use crate::core::ids::{BlockHash, Time};
use crate::engine::model::{BadSpec, Chunked, Engine, Serial, Spec, Timing};

/// What the fleet is made of, and what happens to it while the workload runs.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetSpec {
    pub workers: usize,
    /// KV cache of each worker.
    pub capacity_tokens: u64,
    /// Speed of each worker as a share of the model's; the last one counts for all workers beyond the list.
    pub speeds: Vec<f64>,
    pub changes: Vec<Change>,
    pub timing: TimingModel,
}

/// How the engines spend time.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TimingModel {
    /// One prefill at a time, 8,000 prompt tokens a second, 40 generated a second for each of 64 running requests.
    #[default]
    Serial,
    /// vLLM's scheduler with chunked prefill, as fast as the simulated workers of `demo`.
    Chunked,
}

/// Something that happens to a worker at a time, in seconds.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Change {
    /// Its cache and its requests are lost, and it is gone for `down` seconds.
    Restart { at: f64, worker: usize, down: f64 },
    /// One more worker is there, cold.
    Join { at: f64 },
}

impl Change {
    pub fn at(&self) -> f64 {
        match self {
            Change::Restart { at, .. } | Change::Join { at } => *at,
        }
    }
}

/// Requests that a worker runs at once under [`TimingModel::Serial`].
const MAX_RUNNING: u32 = 64;

impl TimingModel {
    /// Prompt tokens a second of a worker of speed 1.
    pub fn prefill_speed(self) -> f64 {
        match self {
            TimingModel::Serial => Serial::default().prefill_tokens_per_s,
            TimingModel::Chunked => Chunked::default().prefill_tokens_per_s,
        }
    }

    fn timing(self) -> Timing {
        match self {
            TimingModel::Serial => Timing::Serial(Serial::default()),
            TimingModel::Chunked => Timing::Chunked(Chunked::default()),
        }
    }
}

impl FleetSpec {
    /// `workers` alike that nothing happens to.
    pub fn of(workers: usize, capacity_tokens: u64) -> FleetSpec {
        FleetSpec {
            workers,
            capacity_tokens,
            speeds: vec![1.0],
            changes: Vec::new(),
            timing: TimingModel::Serial,
        }
    }

    fn speed(&self, worker: usize) -> f64 {
        self.speeds.get(worker).or(self.speeds.last()).copied().unwrap_or(1.0)
    }

    /// Prompt tokens a second.
    pub fn prefill_speed(&self, worker: usize) -> f64 {
        self.speed(worker) * self.timing.prefill_speed()
    }

    /// Prompt tokens that all workers of the start can prefill in a second.
    pub fn prefill_capacity(&self) -> f64 {
        (0..self.workers).map(|worker| self.prefill_speed(worker)).sum()
    }

    /// Worker number `worker`, cold.
    pub fn engine(&self, worker: usize, block_tokens: u32) -> Result<Engine, BadSpec> {
        // One block more than can hold something: vLLM's null block.
        let blocks = self.capacity_tokens / u64::from(block_tokens) + 1;
        let usual = Spec::default();
        let serial = self.timing == TimingModel::Serial;
        let spec = Spec {
            block_size: block_tokens,
            num_blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            max_num_seqs: if serial { MAX_RUNNING } else { usual.max_num_seqs },
            timing: self.timing.timing(),
            ..usual
        };
        Engine::new(spec.at_speed(self.speed(worker)))
    }
}

/// One worker during a run.
#[derive(Debug)]
pub struct Worker {
    pub engine: Engine,
    pub up: bool,
    /// Requests sent there that have not ended.
    pub open: u32,
    /// Prompt tokens of those that have no first token yet.
    pub waiting_tokens: u64,
    /// And how many these are.
    pub waiting: u32,
    /// Prompt tokens of all requests ever sent there.
    pub asked_tokens: u64,
}

impl Worker {
    pub fn new(engine: Engine) -> Worker {
        Worker { engine, up: true, open: 0, waiting_tokens: 0, waiting: 0, asked_tokens: 0 }
    }
}

/// One request as a router sees it.
#[derive(Copy, Clone, Debug)]
pub struct Incoming<'a> {
    pub chain: &'a std::sync::Arc<[BlockHash]>,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// The prefix, group or session it belongs to: known to the fixed assignment only.
    pub group: u32,
    pub block_tokens: u32,
    pub key_blocks: usize,
    pub now: Time,
}
