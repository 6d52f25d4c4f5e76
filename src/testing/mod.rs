//! The harness of the tests: the real proxy in this process ([`TestRouter`]), workers that do as they are told
//! ([`FakeEngine`]) or as vLLM does ([`simulated()`]), and a client that sees every byte ([`Wire`]). Nothing here sleeps to wait for a state: whatever is
//! waited for is a gate, a count or a condition, under an outer bound after which the test fails.

#![expect(clippy::expect_used, clippy::panic, reason = "a harness fails the test on the spot")]

mod engine;
mod gate;
mod message;
mod router;
mod simulated;
mod wire;

use std::time::Duration;

pub use engine::{FakeEngine, PLAIN_ANSWER, Step};
pub use gate::Gate;
pub use message::{Head, Message};
pub use router::TestRouter;
pub use simulated::{chat, simulated};
pub use wire::{Answer, Wire};

/// Nothing that a test waits for takes this long on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for `what` under [`PATIENCE`].
pub async fn soon<T>(what: &str, wait: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(value) => value,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

/// Polls until `holds`, under [`PATIENCE`].
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    soon(what, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
