//! What must hold for every body, whatever is in it.

pub mod http1;

use warmroute::core::blocks::HashKey;
use warmroute::core::prompt::twin::{fast, slow};
use warmroute::core::prompt::{Endpoint, Opaque, read};

pub const KEY: HashKey = HashKey([42; 32]);

/// Reading neither panics nor differs from the slow twin, and what it calls JSON is what `serde_json` does.
pub fn check(endpoint: Endpoint, body: &[u8]) {
    let chain = read(endpoint, body, &KEY, 64).chain;
    let canonical = fast(endpoint, body, &KEY);
    match (&chain, &canonical) {
        (Ok(chain), Ok((_, stream))) => {
            assert_eq!(chain.bytes, stream.len() as u64);
            assert_eq!(chain.hashes.len(), stream.len() / 64);
        }
        (Err(why), Err(also)) => assert_eq!(why, also),
        _ => panic!("one way of reading finds a prompt, another does not"),
    }
    if chain.as_ref().err() == Some(&Opaque::Depth) {
        return;
    }
    let object = body.trim_ascii_start().starts_with(b"{");
    let json = object && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok();
    assert_eq!(chain.as_ref().err() != Some(&Opaque::Json), json);
    let twin = slow(endpoint, body, &KEY);
    if twin != Err(Opaque::Json) {
        assert_eq!(canonical, twin);
    }
}
