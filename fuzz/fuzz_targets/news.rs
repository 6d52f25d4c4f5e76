//! Bytes as a batch of another router's news: refused, or the same when it is written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::peers::news::{VERSION, Writer, read};

fuzz_target!(|bytes: &[u8]| {
    // The first byte is the version, which a mutation would hardly ever hit again.
    let mut bytes = bytes.to_vec();
    if let Some(first) = bytes.first_mut().filter(|first| **first > 16) {
        *first = VERSION;
    }
    let Ok(batch) = read(&bytes) else { return };
    let mut writer = Writer::begin(batch.router, batch.number, batch.name.as_deref());
    batch.said.iter().for_each(|said| writer.say(said));
    let again = read(&writer.finish()).expect("what was read can be written");
    assert_eq!(format!("{batch:?}"), format!("{again:?}"));
});
