//! What it would cost to send a request to a worker, in seconds until its first token, term by term.

/// The weights of the price. Sources: each is found by search in a simulator; see `benches/README.md`.
#[derive(Clone, Debug)]
pub struct PriceSettings {
    pub queue_weight: f64,
}

impl Default for PriceSettings {
    fn default() -> Self {
        PriceSettings { queue_weight: 0.5 }
    }
}

/// The terms of one worker's price, kept so that a decision can be explained. Tokens unless named otherwise.
#[derive(Copy, Clone, Debug, Default)]
pub struct Terms {
    pub uncached: f64,
    pub queue: f64,
    pub total_seconds: f64,
}
