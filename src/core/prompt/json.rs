//! JSON read where it lies: one pass checks that a body is well formed and notes where its long values end, after which
//! [`Value`]s are walked in any order without a tree, a copy, or a second look at what is skipped.
//!
//! Stricter than nothing and laxer than `serde_json` in four things, which vLLM's parser takes or at least answers itself:
//! invalid UTF-8 in strings, lone surrogate escapes, numbers beyond any float, and the same key twice (the last one counts).

use smallvec::SmallVec;

use crate::core::prompt::Opaque;
use crate::core::prompt::check::Check;
use crate::core::prompt::scan::{near_end, run_end, whole_number};
use crate::core::prompt::text::Text;

/// Values at least this long are noted by the check, so that skipping them costs a look-up instead of a scan.
pub(super) const LONG: usize = 256;

/// Where a long value lies. `plain` says that it is canonical as it lies: no escapes but those that [`Text`] keeps, and no space
/// between tokens.
pub(super) struct Note {
    pub start: usize,
    pub end: usize,
    pub plain: bool,
}

/// So few, those of a short conversation, take no memory of their own.
pub(super) type Notes = SmallVec<[Note; 8]>;

/// A body that is well formed as far as it goes.
pub(super) struct Document<'a> {
    body: &'a [u8],
    /// In the order of their starts.
    notes: Notes,
}

impl<'a> Document<'a> {
    /// Checks the whole body, which must be one object. A body that fails is cut off behind the last member of the outermost
    /// object that is whole, so that the members before the fault can still be read.
    pub fn check(body: &'a [u8]) -> (Document<'a>, Result<(), Opaque>) {
        let mut check = Check::new(body);
        let outcome = check.document();
        let mut document = Document { body, notes: check.notes };
        if outcome.is_err() {
            document.body = &body[..check.good];
            document.notes.retain(|note| note.end != 0 && note.end <= check.good);
        }
        (document, outcome)
    }

    pub fn root(&self) -> Value<'_> {
        Value { document: self, start: skip_space(self.body, 0) }
    }

    fn note(&self, start: usize) -> Option<&Note> {
        let at = self.notes.binary_search_by_key(&start, |note| note.start).ok()?;
        self.notes.get(at)
    }

    /// The end of the string whose opening quote is at `start`, and whether it is plain.
    fn string(&self, start: usize) -> (usize, bool) {
        let body = self.body;
        if let Ok(end) = near_end(body, start + 1)
            && body[end] == b'"'
        {
            return (end + 1, true);
        }
        if let Some(note) = self.note(start) {
            return (note.end, note.plain);
        }
        let (mut at, mut plain) = (start + 1, true);
        while let Some(end) = run_end(body, at) {
            if body[end] == b'"' {
                return (end + 1, plain);
            }
            plain &= !matches!(body.get(end + 1), Some(b'u' | b'/'));
            at = end + 2;
        }
        (body.len(), plain)
    }

    fn end(&self, start: usize) -> usize {
        match self.body.get(start) {
            Some(b'"') => self.string(start).0,
            Some(b'{' | b'[') => match self.note(start) {
                Some(note) => note.end,
                None => self.container_end(start),
            },
            _ => self.scalar_end(start),
        }
    }

    fn container_end(&self, start: usize) -> usize {
        let (mut at, mut depth) = (start, 0usize);
        while let Some(byte) = self.body.get(at) {
            match byte {
                b'"' => {
                    at = self.string(at).0;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            at += 1;
            if depth == 0 {
                break;
            }
        }
        at
    }

    fn scalar_end(&self, start: usize) -> usize {
        let rest = self.body.get(start..).unwrap_or_default();
        let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t');
        start + rest.iter().position(ends).unwrap_or(rest.len())
    }
}

/// One value of a [`Document`].
#[derive(Copy, Clone)]
pub(super) struct Value<'d> {
    document: &'d Document<'d>,
    start: usize,
}

impl<'d> Value<'d> {
    fn opening(self) -> u8 {
        self.document.body.get(self.start).copied().unwrap_or(0)
    }

    pub fn is_null(self) -> bool {
        self.opening() == b'n'
    }

    pub fn is_true(self) -> bool {
        self.opening() == b't'
    }

    pub fn is_false(self) -> bool {
        self.opening() == b'f'
    }

    pub fn is_object(self) -> bool {
        self.opening() == b'{'
    }

    /// `{}` or `[]`.
    pub fn is_empty(self) -> bool {
        let inside = skip_space(self.document.body, self.start + 1);
        matches!((self.opening(), self.document.body.get(inside)), (b'{', Some(b'}')) | (b'[', Some(b']')))
    }

    /// Whether this is the text, or else the literal, `word`.
    pub fn is(self, word: &str) -> bool {
        match self.text() {
            Some(text) => text.is(word),
            None => &self.document.body[self.start..self.document.scalar_end(self.start)] == word.as_bytes(),
        }
    }

    pub fn text(self) -> Option<Text<'d>> {
        if self.opening() != b'"' {
            return None;
        }
        let (end, plain) = self.document.string(self.start);
        Some(Text::new(&self.document.body[self.start + 1..end - 1], plain))
    }

    /// The digits of a number.
    pub fn number(self) -> Option<&'d str> {
        if !matches!(self.opening(), b'-' | b'0'..=b'9') {
            return None;
        }
        let end = self.document.scalar_end(self.start);
        std::str::from_utf8(&self.document.body[self.start..end]).ok()
    }

    /// The elements, if this is an array.
    pub fn items(self) -> Option<impl Iterator<Item = Value<'d>>> {
        let document = self.document;
        let mut next = (self.opening() == b'[').then_some(self.start + 1)?;
        Some(std::iter::from_fn(move || {
            let start = skip_to_element(document.body, next);
            (document.body.get(start)? != &b']').then_some(())?;
            next = document.end(start);
            Some(Value { document, start })
        }))
    }

    /// Hands out the elements of an array of whole numbers; `None` where one is none, or not below 2^32.
    pub fn whole_numbers(self, mut put: impl FnMut(u32)) -> Option<()> {
        let body = self.document.body;
        let mut at = (self.opening() == b'[').then_some(self.start + 1)?;
        loop {
            at = skip_to_element(body, at);
            if body.get(at) == Some(&b']') {
                return Some(());
            }
            let (number, end) = whole_number(body, at)?;
            if matches!(body.get(end), Some(b'.' | b'e' | b'E')) {
                return None;
            }
            put(number);
            at = end;
        }
    }

    /// The members `names` of an object, the last one where a key comes twice; absent where they are null.
    pub fn members<const N: usize>(self, names: [&str; N]) -> [Option<Value<'d>>; N] {
        let mut found = [None; N];
        if self.opening() != b'{' {
            return found;
        }
        let document = self.document;
        let mut next = self.start + 1;
        loop {
            let key = skip_to_element(document.body, next);
            if document.body.get(key) != Some(&b'"') {
                return found;
            }
            let (key_end, plain) = document.string(key);
            let key = Text::new(&document.body[key + 1..key_end - 1], plain);
            let colon = skip_space(document.body, key_end);
            let value = Value { document, start: skip_space(document.body, colon + 1) };
            if let Some(slot) = key.which(&names) {
                found[slot] = (!value.is_null()).then_some(value);
            }
            next = document.end(value.start);
        }
    }

    /// Hands out this value without the space between its tokens: runs of bytes as they lie, and strings that are not plain.
    pub fn tokens(self, mut put: impl FnMut(Token<'d>)) {
        let body = self.document.body;
        if let Some(note) = self.document.note(self.start).filter(|note| note.plain) {
            return put(Token::Raw(&body[note.start..note.end]));
        }
        let (mut at, mut run, mut depth) = (self.start, self.start, 0usize);
        loop {
            match body.get(at) {
                Some(b'"') => {
                    let (end, plain) = self.document.string(at);
                    if !plain {
                        put(Token::Raw(&body[run..at + 1]));
                        put(Token::Text(Text::new(&body[at + 1..end - 1], plain)));
                        run = end - 1;
                    }
                    at = end;
                }
                Some(b'{' | b'[') => {
                    depth += 1;
                    at += 1;
                }
                Some(b'}' | b']') => {
                    depth -= 1;
                    at += 1;
                }
                Some(b',' | b':') => at += 1,
                Some(b' ' | b'\n' | b'\r' | b'\t') => {
                    put(Token::Raw(&body[run..at]));
                    at = skip_space(body, at);
                    run = at;
                }
                Some(_) => at = self.document.scalar_end(at),
                None => depth = 0,
            }
            if depth == 0 {
                break;
            }
        }
        put(Token::Raw(&body[run..at]));
    }
}

/// What [`Value::tokens`] hands out.
pub(super) enum Token<'d> {
    Raw(&'d [u8]),
    Text(Text<'d>),
}

pub(super) fn skip_space(body: &[u8], mut at: usize) -> usize {
    while matches!(body.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

fn skip_to_element(body: &[u8], at: usize) -> usize {
    let at = skip_space(body, at);
    if body.get(at) == Some(&b',') { skip_space(body, at + 1) } else { at }
}
