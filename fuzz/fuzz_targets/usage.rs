//! An answer of any bytes, in pieces of any sizes: what is read of it, and what of it a client gets that did not ask for usage,
//! does not hang on how it is cut.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use warmroute::proxy::hide_usage::HideUsage;
use warmroute::proxy::sse::Events;
use warmroute::proxy::usage::UsageReader;

/// What is read: tokens of the prompt, cached, of the answer; first tokens and failures; the lead of what is added; what is shown.
type Read = (Option<[Option<u32>; 3]>, usize, bool, &'static str, Vec<u8>);

fn read<'p>(pieces: impl Iterator<Item = &'p [u8]>) -> Read {
    let (mut usage, mut events, mut hide) = (UsageReader::default(), Events::default(), HideUsage::default());
    let (mut tokens, mut failed, mut shown) = (0, false, Vec::new());
    for piece in pieces {
        usage.feed(piece);
        let seen = events.feed(piece);
        tokens += usize::from(seen.first_token);
        failed |= seen.failure;
        shown.extend_from_slice(&hide.feed(Bytes::copy_from_slice(piece)));
    }
    shown.extend_from_slice(&hide.finish());
    assert!(!hide.holds_anything());
    let found = usage.found().map(|found| [found.prompt_tokens, found.cached_tokens, found.output_tokens]);
    (found, tokens, failed, events.lead(), shown)
}

/// Whether `part` is `whole` with bytes left out.
fn is_within(part: &[u8], whole: &[u8]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|byte| rest.any(|other| other == byte))
}

fuzz_target!(|data: &[u8]| {
    let [cuts, rest @ ..] = data else { return };
    let (cuts, answer) = rest.split_at(usize::from(*cuts).min(rest.len() / 2));
    let whole = read(std::iter::once(answer));
    assert_eq!(whole, read(answer.chunks(1)));
    let mut left = answer;
    let mut cuts = cuts.iter().cycle();
    let pieces = std::iter::from_fn(|| {
        let size = cuts.next().map_or(left.len(), |cut| usize::from(*cut) + 1);
        let (piece, later) = left.split_at(size.min(left.len()));
        left = later;
        (!piece.is_empty()).then_some(piece)
    });
    assert_eq!(whole, read(pieces));
    assert!(whole.1 <= 1);
    if !answer.windows(7).any(|window| window == b"\"usage\"") {
        assert_eq!(whole.4, answer);
    } else if !answer.windows(20).any(|window| window == b"\"system_fingerprint\"") {
        assert!(is_within(&whole.4, answer));
    }
});
