//! A worker's cache under random draws, which need no prices and no index: whoever was drawn takes the request.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Unheard;
use crate::core::cache::{Bounds, Cache, Claim};
use crate::core::planner::Ask;

/// Shared with the requests in flight.
pub(super) type Drawn = Arc<Mutex<Cache>>;

pub(super) fn drawn() -> Drawn {
    Arc::new(Mutex::new(Cache::new(Bounds { tokens: None, blocks: 0 })))
}

/// One request there. Dropped before [`Stay::commit`] it was never there.
pub(super) struct Stay {
    cache: Drawn,
    claim: Option<Claim>,
    committed: bool,
    /// Of the blocks.
    content_tokens: u64,
    /// Of prompt and answer.
    tokens: u64,
}

impl Stay {
    /// And how many of the prompt's tokens are cached there: never the last one, which is always computed.
    pub(super) fn begin(cache: &Drawn, ask: &Ask) -> (Stay, f64) {
        let chain = &ask.chain;
        let block_tokens = ask.block_tokens.round().max(1.0) as u16;
        let content_tokens = chain.units(chain.hashes.len()) as u64 * u64::from(block_tokens);
        let tokens = (ask.prompt_tokens + ask.output_tokens).max(0.0) as u64;
        let block = |place| block_tokens.saturating_mul(chain.widths.at(place) as u16);
        let mut held = cache.lock();
        let claim = held.admit(&chain.hashes, block, tokens.saturating_sub(content_tokens), 0, &mut Unheard);
        drop(held);
        let cached = chain.units(claim.matched()) as f64 * ask.block_tokens;
        let cached = cached.min((ask.prompt_tokens - 1.0).max(0.0).floor());
        let stay =
            Stay { cache: Arc::clone(cache), claim: Some(claim), committed: false, content_tokens, tokens };
        (stay, cached)
    }

    /// The worker has taken the request.
    pub(super) fn commit(&mut self) {
        self.committed = true;
    }

    /// Prompt and answer had so many tokens in all.
    pub(super) fn correct(&mut self, tokens: u64) {
        self.tokens = tokens;
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let mut cache = self.cache.lock();
        match self.committed {
            true => cache.release(claim, self.tokens.saturating_sub(self.content_tokens), &mut Unheard),
            false => cache.undo(claim, &mut Unheard),
        }
    }
}
