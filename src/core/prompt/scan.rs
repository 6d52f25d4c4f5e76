//! Finding the ends of strings and numbers fast. Short ones, most of those in tools, are looked through eight bytes at a time in
//! one register, since calling into wide instructions costs more than they save there; long strings by `memchr`.

use memchr::memchr2;

/// Words of eight bytes to look through before `memchr` is worth its call.
const WORDS: usize = 2;

/// Bytes of a long string to look through at once.
const PIECE: usize = 16 << 10;

/// Where the ordinary characters from `at` on end: at a quote or a backslash. `None` if a control character or the end of the body
/// comes first.
pub(super) fn run_end(body: &[u8], at: usize) -> Option<usize> {
    match near_end(body, at) {
        Ok(end) => (*body.get(end)? >= b' ').then_some(end),
        Err(mut next) => {
            // Piece by piece, so that what one look-through brings into the nearest cache the other finds there.
            for piece in body.get(next..)?.chunks(PIECE) {
                let end = memchr2(b'"', b'\\', piece);
                let run = &piece[..end.unwrap_or(piece.len())];
                // A running minimum over all is what the compiler turns into wide instructions.
                if run.iter().copied().fold(u8::MAX, u8::min) < b' ' {
                    return None;
                }
                next += run.len();
                if end.is_some() {
                    return Some(next);
                }
            }
            None
        }
    }
}

/// The first quote, backslash or control character in the next few bytes, else where they end.
pub(super) fn near_end(body: &[u8], at: usize) -> Result<usize, usize> {
    let (words, _) = body.get(at..).unwrap_or_default().as_chunks::<8>();
    let near = &words[..words.len().min(WORDS)];
    for (place, word) in near.iter().enumerate() {
        let found = special(u64::from_le_bytes(*word));
        if found != 0 {
            return Ok(at + place * 8 + found.trailing_zeros() as usize / 8);
        }
    }
    Err(at + near.len() * 8)
}

/// Marks the high bit of each byte that is a quote, a backslash or a control character. Borrows may mark bytes above the lowest
/// marked one wrongly, never that one.
fn special(word: u64) -> u64 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    let below = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word & HIGH;
    let is = |sign: u8| below(word ^ (ONES * u64::from(sign)), 1);
    below(word, b' ') | is(b'"') | is(b'\\')
}

/// How many digits stand at `at`.
pub(super) fn digits(body: &[u8], at: usize) -> usize {
    let rest = body.get(at..).unwrap_or_default();
    match rest.first_chunk().map(|word| digits_in(u64::from_le_bytes(*word))) {
        Some(count @ 0..8) => count,
        _ => rest.iter().take_while(|byte| byte.is_ascii_digit()).count(),
    }
}

/// The whole number below 2^32 that stands at `at`, and where it ends.
pub(super) fn whole_number(body: &[u8], at: usize) -> Option<(u32, usize)> {
    let rest = body.get(at..)?;
    if let Some(word) = rest.first_chunk() {
        let word = u64::from_le_bytes(*word);
        if let count @ 1..8 = digits_in(word) {
            // Digits to the top, zeros below; then neighbours are added up to pairs, fours and all eight.
            let ones = word << (64 - 8 * count) & 0x0f0f_0f0f_0f0f_0f0f;
            let pairs = ones.wrapping_mul(10 << 8 | 1) >> 8 & 0x00ff_00ff_00ff_00ff;
            let fours = pairs.wrapping_mul(100 << 16 | 1) >> 16 & 0x0000_ffff_0000_ffff;
            let number = fours.wrapping_mul(10_000 << 32 | 1) >> 32;
            return Some((number as u32, at + count));
        }
    }
    let count = digits(body, at);
    let number = std::str::from_utf8(&rest[..count]).ok()?.parse().ok()?;
    Some((number, at + count))
}

/// How many of the eight bytes, from the lowest on, are digits.
fn digits_in(word: u64) -> usize {
    let distance = word ^ u64::from_ne_bytes([b'0'; 8]);
    let others = (distance.wrapping_add(u64::from_ne_bytes([0x80 - 10; 8])) | distance)
        & u64::from_ne_bytes([0x80; 8]);
    others.trailing_zeros() as usize / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_by_the_library() {
        for tail in ["", ",", "]", " 99999999", ".5", "e1", "-", "/", ":", "\u{7f}", "é"] {
            for number in [
                "",
                "0",
                "7",
                "10",
                "999",
                "1234567",
                "12345678",
                "123456789",
                "4294967295",
                "4294967296",
                "00",
                "007",
            ] {
                let text = format!("{number}{tail}");
                let expected = number.parse().ok().map(|value: u32| (value, number.len()));
                assert_eq!(whole_number(text.as_bytes(), 0), expected, "{text}");
                assert_eq!(digits(text.as_bytes(), 0), number.len(), "{text}");
            }
        }
        for number in (0..10_000_000).step_by(977) {
            let text = format!("x{number},123456789");
            assert_eq!(whole_number(text.as_bytes(), 1), Some((number, text.len() - 10)));
        }
        for byte in 0..=u8::MAX {
            let text = [b'1', byte, b'2', b'x', b'x', b'x', b'x', b'x', b'x'];
            assert_eq!(digits(&text, 0), if byte.is_ascii_digit() { 3 } else { 1 }, "{byte}");
        }
    }

    fn slow(body: &[u8], at: usize) -> Option<usize> {
        let ahead = body.get(at..)?.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f))?;
        (body[at + ahead] >= b' ').then_some(at + ahead)
    }

    #[test]
    fn agrees_with_a_plain_search_wherever_the_sign_is() {
        for filler in [b' ', b'a', 0x7f, 0x80, 0xff, b'!', b'#', b'[', b']'] {
            for length in 0..100 {
                for sign in [b'"', b'\\', 0, 0x1f, b'\n'] {
                    for at in 0..length {
                        let mut body = vec![filler; length];
                        body[at] = sign;
                        if at + 3 < length {
                            body[at + 3] = b'"';
                        }
                        for from in [0, 1, at, at + 1] {
                            assert_eq!(
                                run_end(&body, from),
                                slow(&body, from),
                                "{filler} {length} {sign} {at} {from}"
                            );
                        }
                    }
                }
                assert_eq!(run_end(&vec![filler; length], 0), None);
            }
        }
    }

    #[test]
    fn long_strings_are_searched_to_their_ends() {
        for at in [PIECE - 1, PIECE, PIECE + 15, PIECE + 16, PIECE + 17, 3 * PIECE] {
            for sign in [b'"', b'\\', b'\n'] {
                let mut body = vec![b'x'; 4 * PIECE];
                body[at] = sign;
                assert_eq!(run_end(&body, 0), slow(&body, 0), "{sign} {at}");
                assert_eq!(run_end(&body[..at], 0), None);
            }
        }
    }

    #[test]
    fn every_byte_is_told_apart() {
        for byte in 0..=u8::MAX {
            let body = [b'x', byte, b'x', b'x', b'x', b'x', b'x', b'x', b'"'];
            assert_eq!(run_end(&body, 0), slow(&body, 0), "{byte}");
        }
    }
}
