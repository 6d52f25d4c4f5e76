//! A JSON string in one spelling. Canonical text is JSON text with the fewest escapes: `\"`, `\\`, the short ones for the
//! control characters that have one, `\u00xx` for the others, `\udxxx` for a lone surrogate (hexadecimal in lower case), and
//! everything else as it is. Nearly every client writes prompts like that, so nearly every prompt is canonical where it lies;
//! had the text to be decoded, every line end in it would cut it into small pieces.

use memchr::memchr;

use crate::core::prompt::canon::{Pieces, Sink};

/// The inside of a well-formed JSON string, without its quotes.
#[derive(Copy, Clone)]
pub(super) struct Text<'d> {
    inside: &'d [u8],
    /// No `\u` and no `\/` in it: canonical as it lies.
    plain: bool,
}

impl<'d> Text<'d> {
    pub fn new(inside: &'d [u8], plain: bool) -> Text<'d> {
        Text { inside, plain }
    }

    /// Whether this spells `word`, which needs no escape.
    pub fn is(self, word: &str) -> bool {
        self.which(&[word]).is_some()
    }

    /// Which of `words`, none of which needs an escape, this spells.
    pub fn which(self, words: &[&str]) -> Option<usize> {
        if self.plain {
            return words.iter().position(|word| word.as_bytes() == self.inside);
        }
        let most = words.iter().map(|word| word.len()).max()?;
        let spelled = (self.inside.len() <= most * LONGEST_ESCAPE).then(|| self.opening(most + 1))?;
        words.iter().position(|word| word.as_bytes() == spelled)
    }

    /// Whether this begins with `word`, which needs no escape.
    pub fn starts_with(self, word: &str) -> bool {
        if self.plain {
            return self.inside.starts_with(word.as_bytes());
        }
        self.opening(word.len()).starts_with(word.as_bytes())
    }

    /// At least the first `bytes` canonical bytes, if there are as many.
    fn opening(self, bytes: usize) -> Vec<u8> {
        let mut opening = Vec::new();
        let spelled = self.inside.len().min(bytes * LONGEST_ESCAPE);
        Text { inside: &self.inside[..spelled], plain: false }.write(&mut opening);
        opening
    }

    /// What follows the first line end; `None` if it is all one line.
    pub fn after_first_line(self) -> Option<Text<'d>> {
        let mut at = 0;
        loop {
            at += memchr(b'\\', self.inside.get(at..)?)?;
            let escape = Escape::read(&self.inside[at..]);
            at += escape.length;
            if escape.code == u32::from(b'\n') {
                return Some(Text { inside: self.inside.get(at..)?, plain: self.plain });
            }
        }
    }

    pub fn is_empty(self) -> bool {
        self.inside.is_empty()
    }

    /// Puts the canonical bytes, without quotes.
    pub fn write(self, sink: &mut impl Sink) {
        if self.plain {
            return sink.put(self.inside);
        }
        let mut pieces = Pieces::new(sink);
        let mut rest = self.inside;
        while let Some(run) = if rest.first() == Some(&b'\\') { Some(0) } else { memchr(b'\\', rest) } {
            let (clear, spelled) = rest.split_at(run);
            pieces.put(clear);
            let escape = Escape::read(spelled);
            put_code(&mut pieces, escape.code);
            rest = spelled.get(escape.length..).unwrap_or_default();
        }
        pieces.put(rest);
        pieces.flush();
    }

    /// The characters, for people and labels: what is no Unicode is replaced. Cut at `most` bytes, at a character.
    pub fn display(self, most: usize) -> String {
        let mut shown = String::new();
        // Two characters more than are kept, so that the cut through the spelling falls behind the cut through the text.
        let mut rest = &self.inside[..self.inside.len().min((most + 2) * LONGEST_ESCAPE)];
        while let Some(first) = rest.first() {
            let length = if *first == b'\\' {
                let escape = Escape::read(rest);
                shown.push(char::from_u32(escape.code).unwrap_or(char::REPLACEMENT_CHARACTER));
                escape.length
            } else {
                let run = memchr(b'\\', rest).unwrap_or(rest.len());
                shown.push_str(&String::from_utf8_lossy(&rest[..run]));
                run
            };
            rest = rest.get(length..).unwrap_or_default();
        }
        let end = (0..=most.min(shown.len())).rev().find(|end| shown.is_char_boundary(*end));
        shown.truncate(end.unwrap_or(0));
        shown
    }
}

/// `\u0061`
const LONGEST_ESCAPE: usize = 6;

/// One escape sequence: the code it stands for (a surrogate if that stands alone) and its length. In a well-formed string there
/// is always a whole one; where the string was cut short, what is missing counts as zero.
struct Escape {
    code: u32,
    length: usize,
}

impl Escape {
    fn read(spelled: &[u8]) -> Escape {
        let short = |code: u8| Escape { code: u32::from(code), length: 2 };
        match spelled.get(1) {
            Some(b'b') => short(8),
            Some(b'f') => short(12),
            Some(b'n') => short(b'\n'),
            Some(b'r') => short(b'\r'),
            Some(b't') => short(b'\t'),
            Some(b'u') => {
                let first = unit(&spelled[2..]);
                if let (0xd800..0xdc00, Some(b"\\u")) = (first, spelled.get(6..8)) {
                    let second = unit(&spelled[8..]);
                    if (0xdc00..0xe000).contains(&second) {
                        let code = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                        return Escape { code, length: 2 * LONGEST_ESCAPE };
                    }
                }
                Escape { code: first, length: LONGEST_ESCAPE }
            }
            Some(sign) => short(*sign),
            None => short(0),
        }
    }
}

/// The UTF-16 unit that four hexadecimal digits spell.
fn unit(digits: &[u8]) -> u32 {
    let value = |digit: &u8| u32::from((digit & 15) + if digit.is_ascii_digit() { 0 } else { 9 });
    digits.iter().take(4).fold(0, |unit, digit| unit << 4 | value(digit))
}

/// Puts one character in its canonical spelling, given its code or that of a lone surrogate.
fn put_code<S: Sink>(pieces: &mut Pieces<S>, code: u32) {
    let hex = |shift: u32| b"0123456789abcdef"[(code >> shift & 15) as usize];
    match (code, char::from_u32(code)) {
        (0x22, _) => pieces.put(b"\\\""),
        (0x5c, _) => pieces.put(b"\\\\"),
        (8, _) => pieces.put(b"\\b"),
        (9, _) => pieces.put(b"\\t"),
        (10, _) => pieces.put(b"\\n"),
        (12, _) => pieces.put(b"\\f"),
        (13, _) => pieces.put(b"\\r"),
        (0x20.., Some(character)) => pieces.put_character(character),
        _ => pieces.put(&[b'\\', b'u', hex(12), hex(8), hex(4), hex(0)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(inside: &str) -> Text<'_> {
        Text::new(inside.as_bytes(), !inside.contains("\\u") && !inside.contains("\\/"))
    }

    fn canonical(inside: &str) -> String {
        let mut bytes = Vec::new();
        text(inside).write(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn spellings_of_one_text_become_one() {
        assert_eq!(canonical(r"a\/b"), "a/b");
        assert_eq!(canonical(r"\u0061\u00e9\u4e2d"), "aé中");
        assert_eq!(canonical(r"\ud83d\ude00"), "😀");
        assert_eq!(canonical(r"\u0022\u005C\u000a\u0009\u000D\u0008\u000c"), r#"\"\\\n\t\r\b\f"#);
        assert_eq!(canonical(r"\u0000\u001F\u007f"), "\\u0000\\u001f\u{7f}");
        assert_eq!(canonical(r#"\u003ca href=\"x\"\u003e\n"#), r#"<a href=\"x\">\n"#);
        assert_eq!(canonical(r"plain\ntext"), r"plain\ntext");
    }

    #[test]
    fn lone_surrogates_stay_apart() {
        assert_eq!(canonical(r"x \uD83d y"), r"x \ud83d y");
        assert_eq!(canonical(r"\ude00\ud83d"), r"\ude00\ud83d");
        assert_eq!(canonical(r"\ud83d\ud83d\ude00"), r"\ud83d😀");
        assert_eq!(canonical(r"\ud83d\u0041"), r"\ud83dA");
        assert_eq!(canonical(r"\ud83d\n"), r"\ud83d\n");
    }

    #[test]
    fn long_texts_with_escapes_come_whole() {
        for length in [0, 1, 511, 512, 513, 1023, 1024, 1025, 5000] {
            let (run, tail) = ("x".repeat(length), "y".repeat(length));
            assert_eq!(canonical(&format!("{run}\\u00e9{tail}\\/{run}")), format!("{run}é{tail}/{run}"));
            assert_eq!(canonical(&r"\u00e9".repeat(length)), "é".repeat(length));
        }
    }

    #[test]
    fn words_are_known_in_every_spelling() {
        assert!(text("role").is("role"));
        assert!(text(r"r\u006fle").is("role"));
        assert!(text(r"\u0072\u006f\u006c\u0065").is("role"));
        for other in ["rol", "roles", r"r\u006fles", r"r\u006fl", r"\u0072\u006f\u006c\u0066", "", r"\u0072"]
        {
            assert!(!text(other).is("role"), "{other}");
        }
        assert!(text("x-head: 1").starts_with("x-head"));
        assert!(text(r"\u0078-head").starts_with("x-head"));
        assert!(!text(r"\u0078-hea").starts_with("x-head"));
    }

    #[test]
    fn the_first_line_ends_at_a_line_end_only() {
        let after = |inside| {
            text(inside).after_first_line().map(|rest| {
                let mut bytes = Vec::new();
                rest.write(&mut bytes);
                String::from_utf8(bytes).unwrap()
            })
        };
        assert_eq!(after(r"a\nb\nc").as_deref(), Some(r"b\nc"));
        assert_eq!(after(r"a\u000ab\/").as_deref(), Some("b/"));
        assert_eq!(after(r"a\\nb\n").as_deref(), Some(""));
        assert_eq!(after(r"a\\nb"), None);
        assert_eq!(after(""), None);
    }

    #[test]
    fn display_never_cuts_a_character() {
        assert_eq!(text(r"a\/b \u00e9\ud83d").display(100), "a/b é\u{fffd}");
        assert_eq!(text("ééé").display(3), "é");
        assert_eq!(Text::new(b"\xff\xfeok", true).display(100), "\u{fffd}\u{fffd}ok");
        assert_eq!(text(r"\u00e9\u00e9").display(2), "é");
        for most in 0..40 {
            assert!(text(&r"😀\ud83d\ude00é".repeat(4)).display(most).len() <= most);
        }
    }
}
