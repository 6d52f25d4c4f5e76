//! The one pass over a body that checks all of its grammar and notes where its long values end.

use smallvec::SmallVec;

use crate::core::prompt::Opaque;
use crate::core::prompt::json::{LONG, Note, Notes, skip_space};
use crate::core::prompt::scan::{digits, run_end};

/// Objects and arrays inside one another, the outermost counted; `serde_json` follows 127, Python about a thousand.
pub(super) const MAX_DEPTH: usize = 128;

/// Notes kept at most, against bodies made to have many; values beyond them are scanned again when skipped.
const MOST_NOTES: usize = 1 << 16;

/// The pass and what it has found.
pub(super) struct Check<'a> {
    body: &'a [u8],
    at: usize,
    /// In the order of their starts. Containers still open at a fault have the end 0.
    pub notes: Notes,
    /// End of the last whole member of the outermost object.
    pub good: usize,
    /// How often something was met that is not canonical as it lies: space between tokens, strings that are not plain.
    rough: usize,
}

type Checked = Result<(), Opaque>;

impl<'a> Check<'a> {
    pub fn new(body: &'a [u8]) -> Check<'a> {
        Check { body, at: 0, notes: Notes::new(), good: 0, rough: 0 }
    }

    /// The whole body: one object.
    pub fn document(&mut self) -> Checked {
        self.space();
        if self.peek() != b'{' {
            return Err(Opaque::Json);
        }
        self.value()?;
        self.space();
        if self.at == self.body.len() { Ok(()) } else { Err(Opaque::Json) }
    }

    /// One value with all that is in it. A loop instead of a recursion, so that no body can overflow the stack.
    fn value(&mut self) -> Checked {
        let mut open = Open::default();
        loop {
            let opening = self.peek();
            match opening {
                b'{' | b'[' => {
                    open.push(opening == b'{', self.note(self.at))?;
                    self.at += 1;
                    self.space();
                    if self.peek() != if opening == b'{' { b'}' } else { b']' } {
                        if opening == b'{' {
                            self.key()?;
                        }
                        continue;
                    }
                }
                b'"' => self.string()?,
                b'-' | b'0'..=b'9' => self.number()?,
                b't' => self.literal(b"true")?,
                b'f' => self.literal(b"false")?,
                b'n' => self.literal(b"null")?,
                _ => return Err(Opaque::Json),
            }
            // A value is complete, or a container opened that has nothing in it: what may follow?
            loop {
                let Some(object) = open.innermost() else { return Ok(()) };
                if open.opened.len() == 1 {
                    self.good = self.at;
                }
                self.space();
                match (self.peek(), object) {
                    (b',', _) => {
                        self.at += 1;
                        self.space();
                        if object {
                            self.key()?;
                        }
                        break;
                    }
                    (b'}', true) | (b']', false) => {
                        self.at += 1;
                        self.close(open.pop());
                    }
                    _ => return Err(Opaque::Json),
                }
            }
        }
    }

    fn key(&mut self) -> Checked {
        if self.peek() != b'"' {
            return Err(Opaque::Json);
        }
        self.string()?;
        self.space();
        if self.peek() != b':' {
            return Err(Opaque::Json);
        }
        self.at += 1;
        self.space();
        Ok(())
    }

    fn string(&mut self) -> Checked {
        let start = self.at;
        let mut plain = true;
        self.at += 1;
        loop {
            self.at = run_end(self.body, self.at).ok_or(Opaque::Json)?;
            if self.body[self.at] == b'"' {
                break;
            }
            match self.body.get(self.at + 1) {
                Some(b'"' | b'\\' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
                Some(b'/') => {
                    plain = false;
                    self.at += 2;
                }
                Some(b'u') => {
                    plain = false;
                    let digits = self.body.get(self.at + 2..self.at + 6).ok_or(Opaque::Json)?;
                    if !digits.iter().all(u8::is_ascii_hexdigit) {
                        return Err(Opaque::Json);
                    }
                    self.at += 6;
                }
                _ => return Err(Opaque::Json),
            }
        }
        self.at += 1;
        self.rough += usize::from(!plain);
        if self.at - start >= LONG && self.notes.len() < MOST_NOTES {
            self.notes.push(Note { start, end: self.at, plain });
        }
        Ok(())
    }

    fn number(&mut self) -> Checked {
        if self.peek() == b'-' {
            self.at += 1;
        }
        match self.peek() {
            b'0' => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == b'.' {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), b'e' | b'E') {
            self.at += 1;
            if matches!(self.peek(), b'+' | b'-') {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Checked {
        let count = digits(self.body, self.at);
        self.at += count;
        if count > 0 { Ok(()) } else { Err(Opaque::Json) }
    }

    fn literal(&mut self, literal: &[u8]) -> Checked {
        if !self.body[self.at..].starts_with(literal) {
            return Err(Opaque::Json);
        }
        self.at += literal.len();
        Ok(())
    }

    fn space(&mut self) {
        let end = skip_space(self.body, self.at);
        self.rough += usize::from(end > self.at);
        self.at = end;
    }

    /// The next byte; 0, which starts nothing, at the end.
    fn peek(&self) -> u8 {
        self.body.get(self.at).copied().unwrap_or(0)
    }

    /// Opens a note for a container: its place among the notes must be that of its start.
    fn note(&mut self, start: usize) -> Opened {
        if self.notes.len() >= MOST_NOTES {
            return Opened { note: None, rough: 0 };
        }
        self.notes.push(Note { start, end: 0, plain: true });
        Opened { note: Some(self.notes.len() - 1), rough: self.rough }
    }

    /// A container that has turned out short has only short values in it, so its note is the last one.
    fn close(&mut self, opened: Option<Opened>) {
        let Some(opened) = opened else { return };
        let Some(note) = opened.note.and_then(|at| self.notes.get_mut(at)) else { return };
        note.end = self.at;
        note.plain = self.rough == opened.rough;
        if note.end - note.start < LONG {
            self.notes.pop();
        }
    }
}

/// An open container: its note, if it has one, and how rough the body had been until then.
#[derive(Copy, Clone)]
struct Opened {
    note: Option<usize>,
    rough: usize,
}

/// The containers that are open, innermost last.
#[derive(Default)]
struct Open {
    /// Bit n: the container at depth n is an object.
    objects: u128,
    /// Prompts are seldom deeper than this.
    opened: SmallVec<[Opened; 16]>,
}

impl Open {
    fn push(&mut self, object: bool, opened: Opened) -> Checked {
        if self.opened.len() == MAX_DEPTH {
            return Err(Opaque::Depth);
        }
        let bit = 1 << self.opened.len();
        self.objects = if object { self.objects | bit } else { self.objects & !bit };
        self.opened.push(opened);
        Ok(())
    }

    fn pop(&mut self) -> Option<Opened> {
        self.opened.pop()
    }

    /// Whether the innermost open container is an object, if any is open.
    fn innermost(&self) -> Option<bool> {
        let at = self.opened.len().checked_sub(1)?;
        Some(self.objects >> at & 1 == 1)
    }
}
