//! The serial reference model: one prefill at a time at a fixed rate, first come first served; each running request decodes
//! at a fixed rate; prompt and output blocks are reserved at admission, so that nothing is ever preempted.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::request::{RequestId, State};
use super::{Event, Serial, What};
use crate::core::ids::Time;

#[derive(Debug)]
pub(super) struct SerialScheduler {
    timing: Serial,
    /// The prompt in service.
    prefill: Option<Prefill>,
    /// Next token (or, without token events, last token) of each decoding request. Entries of aborted requests stay until
    /// their time comes.
    tokens: BinaryHeap<Reverse<Due>>,
    decoding: usize,
    /// When the head of the queue must be looked at, though nothing else happens then.
    look: Option<Time>,
}

#[derive(Copy, Clone, Debug)]
struct Prefill {
    slot: u32,
    uncached: u32,
    ends: Time,
}

#[derive(Copy, Clone, Debug)]
struct Due {
    at: Time,
    order: u64,
    request: RequestId,
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> Ordering {
        self.at.0.total_cmp(&other.at.0).then(self.order.cmp(&other.order))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl SerialScheduler {
    pub fn new(timing: Serial) -> SerialScheduler {
        SerialScheduler { timing, prefill: None, tokens: BinaryHeap::new(), decoding: 0, look: None }
    }

    pub fn submit(&mut self, state: &mut State, slot: u32, now: Time) {
        state.waiting.push_back(slot);
        self.look.get_or_insert(now);
    }

    pub fn abort(&mut self, state: &mut State, slot: u32, now: Time) {
        if let Some(prefill) = self.prefill
            && prefill.slot == slot
        {
            let left = self.prefill_left(prefill, now);
            let prompt = state.of(slot).work.prompt_tokens;
            state.unfill(slot, prompt - left.min(prompt));
            self.prefill = None;
        } else if state.of(slot).admitted {
            self.decoding -= 1;
        } else {
            state.waiting.retain(|&waiting| waiting != slot);
        }
        state.remove(slot);
        self.look.get_or_insert(now);
    }

    fn prefill_left(&self, prefill: Prefill, now: Time) -> u32 {
        let left = (prefill.ends - now) * self.timing.prefill_tokens_per_s;
        (left.ceil().max(0.0) as u32).min(prefill.uncached)
    }

    pub fn next_event(&self) -> Option<Time> {
        let prefill = self.prefill.map(|prefill| prefill.ends);
        let token = self.tokens.peek().map(|Reverse(due)| due.at);
        [prefill, token, self.look].into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0))
    }

    pub fn advance(&mut self, state: &mut State, until: Time, out: &mut Vec<Event>) {
        while let Some(now) = self.next_event() {
            if now > until {
                break;
            }
            while let Some(&Reverse(due)) = self.tokens.peek()
                && due.at <= now
            {
                self.tokens.pop();
                self.token(state, due, out);
            }
            if let Some(prefill) = self.prefill
                && prefill.ends <= now
            {
                self.prefill = None;
                self.first_token(state, prefill.slot, now, out);
            }
            self.look = None;
            self.admit(state, now, out);
        }
    }

    fn admit(&mut self, state: &mut State, now: Time, out: &mut Vec<Event>) {
        let Some(&slot) = state.waiting.front() else { return };
        if self.prefill.is_some() || self.running() >= state.spec.max_num_seqs as usize {
            return;
        }
        let hit = state.look_up(slot);
        let work = &state.of(slot).work;
        let (prompt, whole) = (work.prompt_tokens, work.prompt_tokens + work.output_tokens);
        let fits = state.blocks_for(whole) - hit.blocks + hit.free <= state.pool.free();
        state.count_look_up(slot, hit.tokens, fits);
        if !fits {
            return;
        }
        state.waiting.pop_front();
        state.start_on(slot, &hit);
        let reserved = state.reserve(slot, whole);
        debug_assert!(reserved, "checked above");
        state.fill(slot, prompt);
        state.of_mut(slot).admitted = true;
        state.tell(slot, What::Admitted { cached_tokens: hit.tokens }, now, out);
        let uncached = prompt - hit.tokens;
        let ends = now + f64::from(uncached) / self.timing.prefill_tokens_per_s;
        self.prefill = Some(Prefill { slot, uncached, ends });
    }

    fn first_token(&mut self, state: &mut State, slot: u32, now: Time, out: &mut Vec<Event>) {
        let request = state.of_mut(slot);
        request.computed = request.work.prompt_tokens;
        request.tokens += 1;
        state.tell(slot, What::FirstToken, now, out);
        self.decoding += 1;
        self.decode_on(state, slot, now, out);
    }

    fn token(&mut self, state: &mut State, due: Due, out: &mut Vec<Event>) {
        let Some(slot) = state.slot(due.request) else { return };
        let all = state.spec.token_events;
        let request = state.of_mut(slot);
        request.tokens += if all { 1 } else { request.left() };
        if all {
            state.tell(slot, What::Token, due.at, out);
        }
        self.decode_on(state, slot, due.at, out);
    }

    /// Ends the request or schedules its next token.
    fn decode_on(&mut self, state: &mut State, slot: u32, now: Time, out: &mut Vec<Event>) {
        let left = state.of(slot).left();
        if left == 0 {
            let computed = state.of(slot).tokens - 1;
            state.fill(slot, computed);
            state.tell(slot, What::Finished, now, out);
            state.remove(slot);
            self.decoding -= 1;
            return;
        }
        let steps = if state.spec.token_events { 1 } else { left };
        let at = now + f64::from(steps) / self.timing.decode_tokens_per_s;
        self.tokens.push(Reverse(Due { at, order: slot.into(), request: state.id(slot) }));
    }

    pub fn running(&self) -> usize {
        self.decoding + usize::from(self.prefill.is_some())
    }

    pub fn uncached_tokens(&self, state: &State, now: Time) -> u64 {
        let waiting: u64 = state.waiting.iter().map(|&slot| state.uncached(slot)).sum();
        waiting + self.prefill.map_or(0, |prefill| u64::from(self.prefill_left(prefill, now)))
    }
}
