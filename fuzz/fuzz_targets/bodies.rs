//! Bytes as choices that make a body of a likely shape, in some spelling. Spelling must not count.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::core::prompt::Endpoint;
use warmroute::core::prompt::twin::bodies::Choices;
use warmroute::core::prompt::twin::fast;
use warmroute_fuzz::{KEY, check};

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first() else { return };
    let endpoints = [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];
    let endpoint = endpoints[usize::from(first % 4)];
    let (shape, spelling) = rest.split_at(rest.len() / 2);
    let body = Choices(shape).body();
    let spelled = Choices(spelling).spell(&body);
    check(endpoint, spelled.as_bytes());
    assert_eq!(fast(endpoint, body.compact().as_bytes(), &KEY), fast(endpoint, spelled.as_bytes(), &KEY));
});
