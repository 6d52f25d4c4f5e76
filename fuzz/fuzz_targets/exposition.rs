//! Metrics pages of any bytes, in pieces of any size: reading never fails, and how the page is cut does not matter.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::fleet::exposition::{PageReader, read};

fuzz_target!(|input: (u16, &[u8])| {
    let (size, page) = input;
    let mut reader = PageReader::default();
    page.chunks(usize::from(size).max(1)).for_each(|piece| reader.feed(piece));
    let pieces = reader.finish();
    assert_eq!(pieces, read(page));
    for value in [pieces.running, pieces.usage, pieces.hits, pieces.started].into_iter().flatten() {
        assert!(value.is_finite() && value >= 0.0);
    }
});
