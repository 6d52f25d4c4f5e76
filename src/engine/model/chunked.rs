//! vLLM V1's scheduler with chunked prefill. Each step has a budget of tokens: running requests first, then waiting ones, first
//! come first served, if their whole sequence so far fits. When a running request finds no block, the one that started last
//! loses its blocks and waits again, first in the queue.

use std::collections::VecDeque;

use super::request::{RequestId, State};
use super::{Chunked, Event, What};
use crate::core::ids::Time;

#[derive(Debug)]
pub(super) struct ChunkedScheduler {
    timing: Chunked,
    /// Requests on their way to the queue and when they will be there.
    arriving: VecDeque<(Time, u32)>,
    /// Slots in the order of admission.
    running: Vec<u32>,
    /// What the step in progress computes: so many tokens of each.
    scheduled: Vec<(RequestId, u32)>,
    /// When the step in progress ends.
    step_ends: Option<Time>,
    /// When the last step ended.
    clock: Time,
    /// The head of the queue was looked up (so many tokens hit) and did not fit, and nothing was freed since.
    stuck: Option<u32>,
}

impl ChunkedScheduler {
    pub fn new(timing: Chunked) -> ChunkedScheduler {
        ChunkedScheduler {
            timing,
            arriving: VecDeque::new(),
            running: Vec::new(),
            scheduled: Vec::new(),
            step_ends: None,
            clock: Time(f64::NEG_INFINITY),
            stuck: None,
        }
    }

    pub fn submit(&mut self, slot: u32, now: Time) {
        self.arriving.push_back((now + self.timing.frontend_seconds, slot));
    }

    pub fn abort(&mut self, state: &mut State, slot: u32) {
        self.arriving.retain(|&(_, arriving)| arriving != slot);
        state.waiting.retain(|&waiting| waiting != slot);
        self.running.retain(|&running| running != slot);
        self.stuck = None;
        state.remove(slot);
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn uncached_tokens(&self, state: &State) -> u64 {
        let prefilling = self.running.iter().map(|&slot| state.of(slot)).filter(|request| !request.decodes());
        let running: u64 = prefilling.map(|request| u64::from(request.tokens - request.computed)).sum();
        let arriving = self.arriving.iter().map(|&(_, slot)| slot);
        let waiting: u64 =
            state.waiting.iter().copied().chain(arriving).map(|slot| state.uncached(slot)).sum();
        running + waiting
    }

    fn decode_step_seconds(&self) -> f64 {
        self.timing.step_seconds + self.running.len() as f64 * self.timing.decode_seconds
    }

    pub fn next_event(&self, state: &State) -> Option<Time> {
        let arrival = self.arriving.front().map(|&(at, _)| at);
        let Some(ends) = self.step_ends else {
            let now = Time(self.clock.0.max(arrival.map_or(f64::NEG_INFINITY, |at| at.0)));
            return (arrival.is_some() || !self.running.is_empty() || !state.waiting.is_empty())
                .then_some(now);
        };
        let decode_on = ends + f64::from(self.quiet_from_here(state)) * self.decode_step_seconds();
        Some(arrival.map_or(decode_on, |at| Time(decode_on.0.min(at.0.max(ends.0)))))
    }

    /// How many more steps after the one in progress will pass for sure before anything can be told.
    fn quiet_from_here(&self, state: &State) -> u32 {
        let decoding = self.running.len() == self.scheduled.len() && !state.spec.token_events;
        if !decoding || !self.nobody_can_join(state) {
            return 0;
        }
        let left = |&slot: &u32| if state.of(slot).decodes() { state.of(slot).left() } else { 1 };
        let steps = self.running.iter().map(left).min().unwrap_or(1);
        let blocks_each = u64::from(steps / state.spec.block_size) + 2;
        let enough = blocks_each * self.running.len() as u64 <= u64::from(state.pool.free());
        if enough { steps - 1 } else { 0 }
    }

    fn nobody_can_join(&self, state: &State) -> bool {
        let full = self.running.len() >= state.spec.max_num_seqs as usize;
        state.waiting.is_empty() || full || self.stuck.is_some()
    }

    pub fn advance(&mut self, state: &mut State, until: Time, out: &mut Vec<Event>) {
        loop {
            if let Some(ends) = self.step_ends {
                if ends > until {
                    break;
                }
                self.finish_step(state, ends, out);
            }
            let now = match self.arriving.front() {
                Some(&(at, _)) if self.running.is_empty() && state.waiting.is_empty() => {
                    Time(at.0.max(self.clock.0))
                }
                _ => self.clock,
            };
            if now > until {
                break;
            }
            while let Some(&(at, slot)) = self.arriving.front()
                && at <= now
            {
                self.arriving.pop_front();
                state.waiting.push_back(slot);
            }
            if self.running.is_empty() && state.waiting.is_empty() {
                break;
            }
            self.clock = now;
            if !self.skip_quiet_steps(state, until) {
                self.start_step(state, out);
            }
        }
    }

    /// Takes steps together in which every running request decodes one token and nothing else happens: no block is filled
    /// or taken, nobody finishes, nobody joins. False if there is none.
    fn skip_quiet_steps(&mut self, state: &mut State, until: Time) -> bool {
        if state.spec.token_events || self.running.is_empty() || !self.nobody_can_join(state) {
            return false;
        }
        let size = state.spec.block_size;
        let mut steps = u32::MAX;
        for &slot in &self.running {
            let request = state.of(slot);
            if !request.decodes() || request.computed.is_multiple_of(size) {
                return false;
            }
            steps = steps.min(size - 1 - request.computed % size).min(request.left() - 1);
        }
        let each = self.decode_step_seconds();
        let arrival = self.arriving.front().map_or(f64::INFINITY, |&(at, _)| at.0);
        let before_arrival = ((arrival - self.clock.0) / each).ceil();
        let before_until = ((until - self.clock) / each).floor();
        let steps = f64::from(steps).min(before_arrival).min(before_until);
        if steps < 1.0 || self.running.len() as u32 > self.timing.max_num_batched_tokens {
            return false;
        }
        let count = steps as u32;
        for &slot in &self.running {
            let request = state.of_mut(slot);
            request.computed += count;
            request.tokens += count;
        }
        self.count_stuck(state, count);
        self.clock = self.clock + steps * each;
        true
    }

    /// The head of the queue, which is known not to fit, is looked up again in each of `steps` steps.
    fn count_stuck(&self, state: &mut State, steps: u32) {
        let Some((hit_tokens, &head)) = self.stuck.zip(state.waiting.front()) else { return };
        if self.running.len() < state.spec.max_num_seqs as usize {
            (0..steps).for_each(|_| state.count_look_up(head, hit_tokens, false));
        }
    }

    fn start_step(&mut self, state: &mut State, out: &mut Vec<Event>) {
        let mut budget = self.timing.max_num_batched_tokens;
        self.scheduled.clear();
        let preempted = self.schedule_running(state, &mut budget, out);
        if !preempted {
            self.schedule_waiting(state, &mut budget, out);
        }
        let (mut prefill, mut decoding) = (0, 0);
        for &(id, tokens) in &self.scheduled {
            if state.of(id.slot() as u32).decodes() {
                decoding += 1;
            } else {
                prefill += tokens;
            }
        }
        let seconds = self.timing.step_seconds
            + f64::from(prefill) / self.timing.prefill_tokens_per_s
            + f64::from(decoding) * self.timing.decode_seconds;
        self.step_ends = Some(self.clock + seconds);
    }

    /// Answers whether anybody was preempted.
    fn schedule_running(&mut self, state: &mut State, budget: &mut u32, out: &mut Vec<Event>) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let slot = self.running[index];
            let request = state.of(slot);
            let tokens = (request.tokens - request.computed).min(*budget);
            let upto = request.computed + tokens;
            let decodes = request.decodes();
            while !state.reserve(slot, upto) {
                preempted = true;
                self.preempt_last(state, out);
                if index == self.running.len() {
                    return preempted;
                }
            }
            state.fill(slot, upto);
            if !decodes {
                self.stuck = None;
            }
            self.scheduled.push((state.id(slot), tokens));
            *budget -= tokens;
            index += 1;
        }
        preempted
    }

    fn preempt_last(&mut self, state: &mut State, out: &mut Vec<Event>) {
        let Some(slot) = self.running.pop() else { return };
        state.release(slot);
        state.of_mut(slot).preempted = true;
        state.waiting.push_front(slot);
        state.counters.preemptions += 1;
        state.tell(slot, What::Preempted, self.clock, out);
        self.stuck = None;
    }

    fn schedule_waiting(&mut self, state: &mut State, budget: &mut u32, out: &mut Vec<Event>) {
        if self.stuck.is_some() {
            self.count_stuck(state, 1);
            return;
        }
        while *budget > 0
            && self.running.len() < state.spec.max_num_seqs as usize
            && let Some(&slot) = state.waiting.front()
        {
            let hit = state.look_up(slot);
            let known = state.of(slot).tokens;
            let fits = state.blocks_for(known) - hit.blocks + hit.free <= state.pool.free();
            state.count_look_up(slot, hit.tokens, fits);
            if !fits {
                self.stuck = Some(hit.tokens);
                return;
            }
            state.waiting.pop_front();
            state.start_on(slot, &hit);
            let tokens = (known - hit.tokens).min(*budget);
            let reserved = state.reserve(slot, hit.tokens + tokens);
            debug_assert!(reserved, "the whole sequence fits");
            state.fill(slot, hit.tokens + tokens);
            if !std::mem::replace(&mut state.of_mut(slot).admitted, true) {
                state.tell(slot, What::Admitted { cached_tokens: hit.tokens }, self.clock, out);
            }
            self.running.push(slot);
            self.scheduled.push((state.id(slot), tokens));
            *budget -= tokens;
        }
    }

    fn finish_step(&mut self, state: &mut State, now: Time, out: &mut Vec<Event>) {
        self.step_ends = None;
        self.clock = now;
        let mut finished = false;
        for &(id, tokens) in &self.scheduled {
            let Some(slot) = state.slot(id) else { continue };
            let request = state.of_mut(slot);
            request.computed += tokens;
            if request.computed < request.tokens {
                continue;
            }
            request.tokens += 1;
            let (first, last) = (request.generated() == 1, request.left() == 0);
            if first {
                state.tell(slot, What::FirstToken, now, out);
            } else if state.spec.token_events {
                state.tell(slot, What::Token, now, out);
            }
            if last {
                state.tell(slot, What::Finished, now, out);
                state.remove(slot);
                finished = true;
            }
        }
        if finished {
            self.stuck = None;
            self.running.retain(|&slot| state.of(slot).live());
        }
    }
}
