//! Bytes as bytes to chain, and as the places where they are cut. Cuts must not count, and a prefix keeps its hashes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::core::blocks::{Chain, ChainBuilder};
use warmroute_fuzz::KEY;

fuzz_target!(|data: &[u8]| {
    let [length, times, cuts @ ..] = data else { return };
    let lengths = [1, 7, 63, 64, 65, 128, 200, 256, 512, 1000, 1024, 1025];
    let block_bytes = lengths[usize::from(*length) % lengths.len()];
    let bytes = cuts.repeat(1 + usize::from(*times) % 64);
    let whole = chain(block_bytes, &[bytes.as_slice()]);
    let mut pieces = Vec::new();
    let mut rest = bytes.as_slice();
    for cut in cuts {
        // Many short pieces, some long enough to be hashed where they lie.
        let cut = if *cut < 200 { usize::from(*cut) } else { usize::from(*cut - 199) * 997 };
        let (now, later) = rest.split_at(cut.min(rest.len()));
        pieces.push(now);
        rest = later;
    }
    pieces.push(rest);
    let cut = chain(block_bytes, &pieces);
    assert_eq!(whole.hashes, cut.hashes);
    assert_eq!(whole.bytes, cut.bytes);
    assert_eq!(whole.hashes.len(), bytes.len() / block_bytes);
    let prefix = chain(block_bytes, &pieces[..pieces.len() / 2]);
    assert_eq!(prefix.hashes[..], whole.hashes[..prefix.hashes.len()]);
});

fn chain(block_bytes: usize, pieces: &[&[u8]]) -> Chain {
    let mut builder = ChainBuilder::new(&KEY, block_bytes, b"m");
    for piece in pieces {
        builder.update(piece);
    }
    builder.finish()
}
