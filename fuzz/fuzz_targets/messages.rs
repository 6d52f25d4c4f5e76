//! Bytes as a body of `Endpoint::Messages`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::core::prompt::Endpoint;

fuzz_target!(|body: &[u8]| warmroute_fuzz::check(Endpoint::Messages, body));
