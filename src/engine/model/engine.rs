//! One worker: the scheduler that its [`Timing`] names, and what is the same for all.

use std::sync::Arc;

use super::chunked::ChunkedScheduler;
use super::request::{RequestId, State};
use super::serial::SerialScheduler;
use super::{BadSpec, Counters, Event, Refused, Spec, Timing, Work};
use crate::core::ids::{BlockHash, Time};

/// One simulated worker in virtual time. Times handed in must not go backwards, and the caller calls
/// [`advance`](Engine::advance) up to a time before it submits or aborts at that time.
#[derive(Debug)]
pub struct Engine {
    state: State,
    scheduler: Scheduler,
}

#[derive(Debug)]
enum Scheduler {
    Chunked(ChunkedScheduler),
    Serial(SerialScheduler),
}

impl Engine {
    pub fn new(spec: Spec) -> Result<Engine, BadSpec> {
        spec.check()?;
        let scheduler = match &spec.timing {
            Timing::Chunked(timing) => Scheduler::Chunked(ChunkedScheduler::new(timing.clone())),
            Timing::Serial(timing) => Scheduler::Serial(SerialScheduler::new(timing.clone())),
        };
        Ok(Engine { state: State::new(spec), scheduler })
    }

    pub fn spec(&self) -> &Spec {
        &self.state.spec
    }

    /// Queues a request that arrives at `now`. Nothing happens to it before the next [`advance`](Engine::advance).
    pub fn submit(&mut self, work: Work, now: Time) -> Result<RequestId, Refused> {
        self.check(&work)?;
        let id = self.state.insert(work);
        let slot = id.slot() as u32;
        match &mut self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.submit(slot, now),
            Scheduler::Serial(scheduler) => scheduler.submit(&mut self.state, slot, now),
        }
        Ok(id)
    }

    /// Whether the worker could ever serve `work`; else the reason that [`submit`](Engine::submit) would give.
    pub fn check(&self, work: &Work) -> Result<(), Refused> {
        if work.prompt_tokens == 0 {
            return Err(Refused::EmptyPrompt);
        }
        if work.output_tokens == 0 {
            return Err(Refused::NoOutput);
        }
        // The last generated token is never computed, so it needs no room; the serial model reserves it all the same.
        let spared = u64::from(matches!(self.scheduler, Scheduler::Chunked(_)));
        let tokens = u64::from(work.prompt_tokens) + u64::from(work.output_tokens) - spared;
        let needed = tokens.div_ceil(u64::from(self.state.spec.block_size));
        let usable = self.state.spec.usable_blocks();
        if needed > u64::from(usable) || tokens > u64::from(u32::MAX) {
            return Err(Refused::TooLarge { needed, usable });
        }
        Ok(())
    }

    /// Ends a request without further events; its full blocks stay cached. False if it had ended already.
    pub fn abort(&mut self, id: RequestId, now: Time) -> bool {
        let Some(slot) = self.state.slot(id) else { return false };
        match &mut self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.abort(&mut self.state, slot),
            Scheduler::Serial(scheduler) => scheduler.abort(&mut self.state, slot, now),
        }
        true
    }

    /// Until when nothing happens by itself; `None` if nothing ever will.
    pub fn next_event(&self) -> Option<Time> {
        match &self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.next_event(&self.state),
            Scheduler::Serial(scheduler) => scheduler.next_event(),
        }
    }

    /// Lets time pass up to and including `until`, appending what happens to `out` in order.
    pub fn advance(&mut self, until: Time, out: &mut Vec<Event>) {
        match &mut self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.advance(&mut self.state, until, out),
            Scheduler::Serial(scheduler) => scheduler.advance(&mut self.state, until, out),
        }
    }

    /// Tokens of such a prompt that the cache holds now; looking changes nothing and is not counted. For oracles.
    pub fn cached_tokens(&self, blocks: &Arc<[BlockHash]>, prompt_tokens: u32) -> u32 {
        let most = (prompt_tokens.saturating_sub(1) / self.state.spec.block_size) as usize;
        let found = self.state.pool.matching(&blocks[..most.min(blocks.len())]);
        found as u32 * self.state.spec.block_size
    }

    /// Tokens that must be computed before every request here now has its first token (after a preemption: its next), given
    /// what is cached now. Looks at the whole queue: for oracles.
    pub fn uncached_tokens(&self, now: Time) -> u64 {
        match &self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.uncached_tokens(&self.state),
            Scheduler::Serial(scheduler) => scheduler.uncached_tokens(&self.state, now),
        }
    }

    /// Requests in the running batch (`vllm:num_requests_running`).
    pub fn running(&self) -> usize {
        match &self.scheduler {
            Scheduler::Chunked(scheduler) => scheduler.running(),
            Scheduler::Serial(scheduler) => scheduler.running(),
        }
    }

    /// Requests in the scheduler's queue (`vllm:num_requests_waiting`). Those still in the frontend are not in it.
    pub fn waiting(&self) -> usize {
        self.state.waiting.len()
    }

    /// Requests that were submitted and neither finished nor were aborted.
    pub fn unfinished(&self) -> usize {
        self.state.live()
    }

    /// Share of the usable blocks that running requests hold (`vllm:kv_cache_usage_perc`): 0 when idle, however much is
    /// cached.
    pub fn kv_cache_usage(&self) -> f64 {
        f64::from(self.state.pool.used()) / f64::from(self.state.pool.usable())
    }

    pub fn counters(&self) -> Counters {
        self.state.counters
    }

    /// Forgets all that is cached. Does nothing and answers false while a request holds blocks.
    #[must_use]
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.state.pool.reset()
    }
}
