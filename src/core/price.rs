//! What it would cost to send a request to a worker, in seconds until its first token, term by term.
//!
//! ```text
//! price = ( uncached - popular + queue / (1 + x) * queued + displacement * (pushed + USED_ONCE * pushed once) ) / speed
//!         + uncached * min(recent_cap, recent * (recent(w) - least recent)) / speed
//!         + memory / (1 + x) * shortage * mean generation
//! x     = min(MOST_CROWDED, shortest queue of all workers in seconds / crowded_seconds)        (0 while any worker is idle)
//! ```
//!
//! While somebody is idle, affinity and balance trade at a fixed rate; as every worker queues, the queue counts for less,
//! because then lost hits cost more than uneven queues. What each term is worth, and what was tried and dropped, is in
//! `benches/README.md`.

/// What a pushed-out token that one request alone has used counts beside one that several have: the ends of prompts are mostly
/// not asked for again, but the history of a conversation is.
const USED_ONCE: f64 = 0.7;

/// The queue counts no less than one part in so many and one. Without end to it, a fleet that is far behind sends whatever is warm
/// to one place however long the queue is there: the mean gains by it, but the slowest hundredth waits longer than it would by load.
const MOST_CROWDED: f64 = 12.0;

/// The weights of the price. The constants are flat: halving or doubling one changes mean TTFT by a few per cent.
#[derive(Clone, Debug, PartialEq)]
pub struct PriceSettings {
    /// What a queued prefill token costs beside one of the request's own. 0 to 2.
    pub queue_weight: f64,
    /// Seconds of queue on *every* worker at which `queue_weight` has fallen to half. Above 0.
    pub crowded_seconds: f64,
    /// What a token pushed out of the worker's cache costs beside a token to prefill, if several requests have used it. 0 to 1.
    pub displacement_weight: f64,
    /// How many times its prefill a request costs more on a worker that was busy for all of the recent past, than on an idle one. 0 to 4.
    pub recent_weight: f64,
    /// The most that the recent past may cost, as a share of the prefill. 0 to 1.
    pub recent_cap: f64,
    /// How many workers' shares of all requests a prefix may draw to each worker that holds it, on average, before another copy of
    /// it is free. 1 to 1,000.
    pub replicate_shares: f64,
    /// What a second of waiting for the memory of running requests counts. 0 to 4.
    pub memory_weight: f64,
}

impl Default for PriceSettings {
    fn default() -> Self {
        PriceSettings {
            queue_weight: 0.5,
            crowded_seconds: 0.15,
            displacement_weight: 0.35,
            recent_weight: 1.0,
            recent_cap: 0.3,
            replicate_shares: 1.75,
            memory_weight: 1.0,
        }
    }
}

/// The terms of one worker's price, kept so that a decision can be explained. Tokens unless the name says otherwise.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Terms {
    /// Prompt tokens believed cached there.
    pub cached: f64,
    /// Of them those that others are assumed to have seen to, as this is the prompt's home.
    pub assumed: f64,
    /// Whether it is: of the workers that others use too, the first by hash of the prompt's first tokens.
    pub at_home: bool,
    /// Prompt tokens to prefill.
    pub uncached: f64,
    /// Of `uncached`, those of a prefix that should have a copy here: so many requests share it that the workers which hold it are
    /// not enough, or too slow. The copy will be used again and again, so this request does not bear its cost.
    pub popular: f64,
    /// Tokens booked there and not yet prefilled.
    pub queue: f64,
    /// Tokens of believed content that the request would push out, of blocks that several requests of late have used, and of others.
    pub pushed: f64,
    pub pushed_once: f64,
    /// What the recent past adds.
    pub recent: f64,
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
        (shortest_queue_seconds / self.crowded_seconds).min(MOST_CROWDED)
    }

    /// The recent-past term, in tokens.
    pub fn recent_tokens(&self, uncached: f64, recent: f64, least_recent: f64) -> f64 {
        uncached * (self.recent_weight * (recent - least_recent)).min(self.recent_cap)
    }

    /// The price in seconds.
    pub fn seconds(&self, terms: &Terms, crowding: f64) -> f64 {
        let tokens = terms.uncached - terms.popular
            + self.queue_weight / (1.0 + crowding) * terms.queue
            + self.displacement_weight * (terms.pushed + USED_ONCE * terms.pushed_once)
            + terms.recent;
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
        let far_behind = price.seconds(&terms, price.crowding(1e9));
        assert_eq!(far_behind, 1.0 + 1.0 / 13.0, "but never nothing");
    }

    #[test]
    fn a_wait_for_memory_counts_less_when_every_worker_queues() {
        let price = PriceSettings::default();
        let terms = Terms { memory: 0.5, speed: 1000.0, ..Terms::default() };
        assert_eq!((price.seconds(&terms, 0.0), price.seconds(&terms, 1.0)), (0.5, 0.25));
    }

    #[test]
    fn what_several_have_used_costs_more_to_push_out() {
        let price = PriceSettings::default();
        let shared = Terms { pushed: 1000.0, speed: 1000.0, ..Terms::default() };
        let once = Terms { pushed_once: 1000.0, speed: 1000.0, ..Terms::default() };
        assert_eq!(price.seconds(&shared, 0.0), 0.35);
        assert!((price.seconds(&once, 0.0) - 0.245).abs() < 1e-12);
    }

    #[test]
    fn the_recent_past_is_capped() {
        let price = PriceSettings::default();
        assert_eq!(price.recent_tokens(1000.0, 0.2, 0.1), 100.0);
        assert_eq!(price.recent_tokens(1000.0, 5.0, 0.0), 300.0);
    }
}
