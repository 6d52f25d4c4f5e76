//! Tries workers until one has answered. Another worker is asked only if the one before did not begin on the request or has
//! lost it, each worker at most once, and within a budget: a retry costs a whole prefill, and a storm of them is an outage.

use std::sync::Arc;

use http::Response;
use smallvec::SmallVec;
use tower::retry::budget::Budget;

use super::admission;
use super::error::ProxyError;
use super::note::Note;
use super::patience::Patience;
use super::place::{Asked, Placed};
use super::upstream::Upstream;
use super::{Client, Proxy};
use crate::config::{Draw, Mode};
use crate::core::ids::WorkerId;
use crate::fleet::answer::Answer;
use crate::fleet::connection::ExchangeError;
use crate::metrics::Retry;

/// A response head, and what its body goes on with.
pub struct Answered {
    pub response: Response<Answer>,
    pub patience: Patience,
    pub placed: Box<Placed>,
}

/// Places and sends the request, and answers with what the worker says and the place it has there.
///
/// # Errors
/// The last worker's error, or that there is no worker.
pub async fn send(
    proxy: &Arc<Proxy>,
    asked: &Asked,
    upstream: &Upstream,
    client: &Arc<Client>,
    note: &Note,
) -> Result<Answered, ProxyError> {
    let budget = proxy.budget.load_full();
    budget.deposit();
    let mut tried: SmallVec<[WorkerId; 4]> = SmallVec::new();
    let mut placed = admission::admit(proxy, asked, client).await?;
    let attempts = attempts(proxy, placed.mode);
    loop {
        note.placed(&placed);
        let error = match upstream.attempt(proxy, client, &mut placed).await {
            Ok((response, patience)) => return Ok(Answered { response, patience, placed }),
            Err(error) => error,
        };
        client.unpin();
        tried.push(placed.worker.id);
        // The place is given back before the next one is looked for.
        drop(placed);
        if !error.may_go_elsewhere(upstream.repeatable) || tried.len() >= attempts {
            return Err(error);
        }
        // What happened to the last worker tells more than that no other is left.
        let Ok(next) = proxy.place(asked, client, &tried) else { return Err(error) };
        if !budget.withdraw() {
            proxy.metrics.retries_denied.inc();
            return Err(error);
        }
        // Not a failed request yet.
        tracing::debug!("another worker is asked: {error}");
        proxy.metrics.retries.inc(match error {
            ProxyError::Worker { cause: ExchangeError::Connect(_) | ExchangeError::Insecure(_), .. } => {
                Retry::Connect
            }
            _ => Retry::Broken,
        });
        placed = next;
    }
}

/// A Service draws once per connection and has nothing to fall back on; mode `random` with that draw does the same.
fn attempts(proxy: &Proxy, mode: Mode) -> usize {
    let config = proxy.config.load();
    match (mode, config.random.draw) {
        (Mode::Random, Draw::Connection) => 1,
        _ => config.retries.attempts,
    }
}
