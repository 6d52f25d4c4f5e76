//! What it would cost to send a request to a worker, in seconds until its first token, term by term.
//!
//! ```text
//! price = ( uncached - popular + weight / (1 + x) * queue + displacement * pushed - ghost * x / (1 + x) * ghost_tokens ) / speed
//!         + min(recent_cap * prompt, recent * prompt * (recent(w) - least recent)) / speed
//!         + memory / (1 + x) * shortage * mean generation
//! x     = shortest queue of all workers in seconds / crowded_seconds        (0 while any worker is idle)
//! ```
//!
//! While somebody is idle, affinity and balance trade at a fixed rate; as every worker queues, the queue counts for less and
//! remembered homes count for more, because then lost hits cost more than uneven queues. What each term is worth, and what
//! was tried and dropped, is in `benches/README.md`.

/// The weights of the price. The constants are flat: halving or doubling one changes mean TTFT by a few per cent.
#[derive(Clone, Debug, PartialEq)]
pub struct PriceSettings {
    /// What a queued prefill token costs beside one of the request's own. 0 to 2.
    pub queue_weight: f64,
    /// Seconds of queue on *every* worker at which `queue_weight` has fallen to half. Above 0.
    pub crowded_seconds: f64,
    /// What a token pushed out of the worker's cache costs beside a token to prefill. 0 to 1.
    pub displacement_weight: f64,
    /// What the whole prompt costs more on a worker that was busy for one more share of the recent past. 0 to 4.
    pub recent_weight: f64,
    /// The most that the recent past may cost, as a share of the prompt. 0 to 1.
    pub recent_cap: f64,
    /// How many workers' shares of all requests a prefix may draw to each worker that holds it, on average, before another copy of
    /// it is free. 1 to 1,000.
    pub replicate_shares: f64,
    /// What a second of waiting for the memory of running requests counts. 0 to 4.
    pub memory_weight: f64,
    /// What a remembered home of an evicted prefix is worth, per token, when every worker queues. 0 to 1.
    pub ghost_weight: f64,
}

impl Default for PriceSettings {
    fn default() -> Self {
        PriceSettings {
            queue_weight: 0.5,
            crowded_seconds: 0.15,
            displacement_weight: 0.25,
            recent_weight: 1.0,
            recent_cap: 0.3,
            replicate_shares: 1.75,
            memory_weight: 1.0,
            ghost_weight: 0.8,
        }
    }
}

/// The terms of one worker's price, kept so that a decision can be explained. Tokens unless the name says otherwise.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Terms {
    /// Prompt tokens believed cached there.
    pub cached: f64,
    /// Prompt tokens to prefill.
    pub uncached: f64,
    /// Of `uncached`, those whose prefix so many requests share that one worker is not enough for it: a second copy will be
    /// used again and again, so this request does not bear its cost.
    pub popular: f64,
    /// Tokens booked there and not yet prefilled.
    pub queue: f64,
    /// Tokens of believed content that the request would push out.
    pub pushed: f64,
    /// What the recent past adds.
    pub recent: f64,
    /// Prompt tokens that used to be there and are nowhere now.
    pub ghost: f64,
    /// Seconds that the request would wait for the memory of running requests.
    pub memory: f64,
    /// Tokens a second, learned or assumed.
    pub speed: f64,
    /// Requests open there.
    pub open: usize,
    /// The price.
    pub seconds: f64,
}

impl PriceSettings {
    /// How far every worker queues, from 0 (somebody is idle) upward.
    pub fn crowding(&self, shortest_queue_seconds: f64) -> f64 {
        shortest_queue_seconds / self.crowded_seconds
    }

    /// The recent-past term, in tokens.
    pub fn recent_tokens(&self, prompt: f64, recent: f64, least_recent: f64) -> f64 {
        (self.recent_weight * prompt * (recent - least_recent)).min(self.recent_cap * prompt)
    }

    /// The price in seconds.
    pub fn seconds(&self, terms: &Terms, crowding: f64) -> f64 {
        let tokens = terms.uncached - terms.popular
            + self.queue_weight / (1.0 + crowding) * terms.queue
            + self.displacement_weight * terms.pushed
            + terms.recent
            - self.ghost_weight * crowding / (1.0 + crowding) * terms.ghost;
        tokens / terms.speed + self.memory_weight / (1.0 + crowding) * terms.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_costs_half_a_prefill_while_somebody_is_idle_and_less_when_nobody_is() {
        let price = PriceSettings::default();
        let terms = Terms { uncached: 1000.0, queue: 2000.0, speed: 1000.0, ..Terms::default() };
        assert_eq!(price.seconds(&terms, price.crowding(0.0)), 2.0);
        assert_eq!(price.seconds(&terms, price.crowding(0.15)), 1.5);
    }

    #[test]
    fn a_wait_for_memory_counts_less_when_every_worker_queues() {
        let price = PriceSettings::default();
        let terms = Terms { memory: 0.5, speed: 1000.0, ..Terms::default() };
        assert_eq!((price.seconds(&terms, 0.0), price.seconds(&terms, 1.0)), (0.5, 0.25));
    }

    #[test]
    fn a_ghost_counts_only_when_nobody_is_idle() {
        let price = PriceSettings::default();
        let terms = Terms { uncached: 1000.0, ghost: 1000.0, speed: 1000.0, ..Terms::default() };
        assert_eq!(price.seconds(&terms, 0.0), 1.0);
        assert!((price.seconds(&terms, 1.0) - 0.6).abs() < 1e-12);
    }

    #[test]
    fn the_recent_past_is_capped() {
        let price = PriceSettings::default();
        assert_eq!(price.recent_tokens(1000.0, 0.2, 0.1), 100.0);
        assert_eq!(price.recent_tokens(1000.0, 5.0, 0.0), 300.0);
    }
}
