//! The requests of one engine, in a table whose slots are used again, and what both schedulers do to one of them.

use std::collections::VecDeque;

use super::pool::{BlockId, BlockPool, Content};
use super::{CountLookups, Counters, Event, Spec, What, Work};
use crate::core::ids::Time;

/// One request of one engine. Void once the request has finished or was aborted.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct RequestId {
    slot: u32,
    generation: u32,
}

impl RequestId {
    /// A small number that no other live request of the engine has: an index for the caller's own table.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

#[derive(Debug)]
pub(super) struct Request {
    generation: u32,
    live: bool,
    pub work: Work,
    /// Tokens that are known: the prompt and what was generated.
    pub tokens: u32,
    /// Tokens whose KV is computed or was found; behind `tokens` while prefilling.
    pub computed: u32,
    pub table: Vec<BlockId>,
    /// Blocks of `table` whose content was declared.
    filled: u32,
    pub admitted: bool,
    pub preempted: bool,
}

impl Request {
    pub fn live(&self) -> bool {
        self.live
    }

    pub fn generated(&self) -> u32 {
        self.tokens - self.work.prompt_tokens
    }

    /// Tokens that are still to be generated.
    pub fn left(&self) -> u32 {
        self.work.output_tokens - self.generated()
    }

    /// Only the newest token is not computed yet.
    pub fn decodes(&self) -> bool {
        self.generated() > 0 && self.computed + 1 == self.tokens
    }
}

/// What the prefix cache has for a request: `tokens` of it in `blocks`, `free` of which nobody uses now.
pub(super) struct Hit {
    pub tokens: u32,
    pub blocks: u32,
    pub free: u32,
}

/// Everything of an engine that does not depend on how it schedules.
#[derive(Debug)]
pub(super) struct State {
    pub spec: Spec,
    pub pool: BlockPool,
    pub counters: Counters,
    /// Slots of requests that wait, in the order in which they will be served.
    pub waiting: VecDeque<u32>,
    requests: Vec<Request>,
    vacant: Vec<u32>,
    /// The blocks of the last look-up.
    hits: Vec<BlockId>,
}

impl State {
    pub fn new(spec: Spec) -> State {
        State {
            pool: BlockPool::new(spec.usable_blocks()),
            spec,
            counters: Counters::default(),
            waiting: VecDeque::new(),
            requests: Vec::new(),
            vacant: Vec::new(),
            hits: Vec::new(),
        }
    }

    pub fn insert(&mut self, work: Work) -> RequestId {
        let tokens = work.prompt_tokens;
        if let Some(slot) = self.vacant.pop() {
            let request = &mut self.requests[slot as usize];
            let generation = request.generation.wrapping_add(1);
            let table = std::mem::take(&mut request.table);
            *request = Request::new(generation, work, tokens, table);
            return RequestId { slot, generation };
        }
        self.requests.push(Request::new(0, work, tokens, Vec::new()));
        RequestId { slot: self.requests.len() as u32 - 1, generation: 0 }
    }

    pub fn live(&self) -> usize {
        self.requests.len() - self.vacant.len()
    }

    pub fn of(&self, slot: u32) -> &Request {
        &self.requests[slot as usize]
    }

    pub fn of_mut(&mut self, slot: u32) -> &mut Request {
        &mut self.requests[slot as usize]
    }

    pub fn id(&self, slot: u32) -> RequestId {
        RequestId { slot, generation: self.of(slot).generation }
    }

    /// The slot of a request that is still there.
    pub fn slot(&self, id: RequestId) -> Option<u32> {
        let request = self.requests.get(id.slot())?;
        (request.live && request.generation == id.generation).then_some(id.slot)
    }

    /// Gives back the request's blocks and voids its id. The caller takes the slot out of its own lists.
    pub fn remove(&mut self, slot: u32) {
        self.release(slot);
        let request = self.of_mut(slot);
        request.live = false;
        request.work.blocks = Default::default();
        self.vacant.push(slot);
    }

    /// Gives back the request's blocks; it would have to start again.
    pub fn release(&mut self, slot: u32) {
        let request = &mut self.requests[slot as usize];
        self.pool.release(&mut request.table);
        request.computed = 0;
        request.filled = 0;
    }

    pub fn tell(&self, slot: u32, what: What, at: Time, out: &mut Vec<Event>) {
        out.push(Event { at, request: self.id(slot), what });
    }

    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.spec.block_size)
    }

    /// Looks the request's known tokens up. The last token is never taken from the cache: its logits are needed.
    pub fn look_up(&mut self, slot: u32) -> Hit {
        let request = &self.requests[slot as usize];
        let most = ((request.tokens - 1) / self.spec.block_size) as usize;
        let most = most.min(request.work.blocks.len());
        let free = self.pool.look_up(&request.work.blocks[..most], &mut self.hits);
        let blocks = self.hits.len() as u32;
        Hit { tokens: blocks * self.spec.block_size, blocks, free }
    }

    /// Counts a look-up of the request: `admitted` tells whether it led to admission.
    pub fn count_look_up(&mut self, slot: u32, hit_tokens: u32, admitted: bool) {
        let request = &self.requests[slot as usize];
        let counts = admitted || self.spec.count_lookups == CountLookups::EveryAttempt;
        if counts && !request.preempted {
            self.counters.prefix_cache_queries += u64::from(request.tokens);
            self.counters.prefix_cache_hits += u64::from(hit_tokens);
        }
    }

    /// Starts the request on the hits of the look-up just made.
    pub fn start_on(&mut self, slot: u32, hit: &Hit) {
        self.pool.touch(&self.hits);
        let request = &mut self.requests[slot as usize];
        request.table.extend_from_slice(&self.hits);
        request.computed = hit.tokens;
        request.filled = hit.blocks;
    }

    /// Room for the request's first `tokens` tokens. Takes nothing and answers false if there is too little.
    #[must_use]
    pub fn reserve(&mut self, slot: u32, tokens: u32) -> bool {
        let needed = self.blocks_for(tokens);
        let request = &mut self.requests[slot as usize];
        let missing = needed.saturating_sub(request.table.len() as u32);
        missing == 0 || self.pool.allocate(missing, &mut request.table)
    }

    /// Declares what the blocks hold that the request's first `tokens` tokens fill.
    pub fn fill(&mut self, slot: u32, tokens: u32) {
        let request = &mut self.requests[slot as usize];
        let full = tokens / self.spec.block_size;
        for block in request.filled..full {
            let hash = request.work.blocks.get(block as usize);
            let content = hash.map_or(Content::Unmatched, |&hash| Content::Known(hash));
            self.pool.fill(request.table[block as usize], content);
        }
        request.filled = full.max(request.filled);
    }

    /// Takes back what was declared beyond the request's first `tokens` tokens.
    pub fn unfill(&mut self, slot: u32, tokens: u32) {
        let full = tokens / self.spec.block_size;
        let request = &mut self.requests[slot as usize];
        for block in full..request.filled {
            self.pool.forget(request.table[block as usize]);
        }
        request.filled = request.filled.min(full);
    }

    /// Tokens of the request that would have to be computed if it were admitted now.
    pub fn uncached(&self, slot: u32) -> u64 {
        let request = self.of(slot);
        let most = ((request.tokens - 1) / self.spec.block_size) as usize;
        let most = most.min(request.work.blocks.len());
        let found = self.pool.matching(&request.work.blocks[..most]) as u64;
        u64::from(request.tokens) - found * u64::from(self.spec.block_size)
    }
}

impl Request {
    fn new(generation: u32, work: Work, tokens: u32, table: Vec<BlockId>) -> Request {
        Request {
            generation,
            live: true,
            work,
            tokens,
            computed: 0,
            table,
            filled: 0,
            admitted: false,
            preempted: false,
        }
    }
}
