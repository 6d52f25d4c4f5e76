//! Writes the canonical stream: the bytes that are chained into blocks. It is a row of one-letter tags, each followed by
//! canonical JSON or by a digest, so that no two different prompts give the same bytes.

use crate::core::blocks::{ChainBuilder, HashKey};
use crate::core::prompt::json::{Token, Value};
use crate::core::prompt::text::Text;

/// What an image, a sound or a film counts for: about 512 tokens of text, a usual size for a picture. Its digest repeated,
/// so that it fills blocks as its embeddings fill the engine's.
pub(super) const MEDIA_BYTES: usize = 2048;

/// Media that count so much, of one prompt; further ones count for their digests alone, so that a body of many small ones does not
/// grow a hundredfold.
pub(super) const MOST_MEDIA: usize = 64;

/// Where canonical bytes go.
pub(super) trait Sink {
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for ChainBuilder {
    fn put(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }
}

impl Sink for blake3::Hasher {
    fn put(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }
}

impl Sink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// A message, or what stands for one.
pub(super) const MESSAGE: u8 = b'm';
/// Name of a message's author.
pub(super) const NAME: u8 = b'n';
/// Reasoning of an earlier answer.
pub(super) const REASONING: u8 = b'r';
/// Content of a message; texts and media follow.
pub(super) const CONTENT: u8 = b'c';
/// Calls of tools.
pub(super) const CALLS: u8 = b'k';
/// The call that a tool's answer belongs to.
pub(super) const CALL_ID: u8 = b'i';
/// Definitions of tools.
pub(super) const TOOLS: u8 = b't';
/// Documents for retrieval-augmented generation.
pub(super) const DOCUMENTS: u8 = b'd';
/// A marker of the task, which some templates know.
pub(super) const TASK: u8 = b'w';
/// A reference to a tool inside content.
pub(super) const REFERENCE: u8 = b'f';
/// Something of a kind that is not known here, by its JSON.
pub(super) const UNKNOWN: u8 = b'u';
/// Ends of the prompt that differ from the usual one.
pub(super) const NO_GENERATION_PROMPT: u8 = b'g';
pub(super) const CONTINUES: u8 = b'o';
const MEDIA: u8 = b'I';

/// What a piece of media is to the engine. The discriminants go into digests.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Medium {
    Image = b'i' as isize,
    Audio = b'a' as isize,
    Video = b'v' as isize,
    Embeddings = b'e' as isize,
}

/// The writer.
pub(super) struct Canon<'k, S> {
    pub sink: S,
    key: &'k HashKey,
    /// How many media came by.
    pub media: usize,
}

impl<'k, S: Sink> Canon<'k, S> {
    pub fn new(sink: S, key: &'k HashKey) -> Canon<'k, S> {
        Canon { sink, key, media: 0 }
    }

    pub fn tag(&mut self, tag: u8) {
        self.sink.put(&[tag]);
    }

    /// A text that is written here, not read from the body, and needs no escapes.
    pub fn word(&mut self, word: &str) {
        self.sink.put(b"\"");
        self.sink.put(word.as_bytes());
        self.sink.put(b"\"");
    }

    pub fn text(&mut self, text: Text) {
        self.sink.put(b"\"");
        text.write(&mut self.sink);
        self.sink.put(b"\"");
    }

    /// Texts run into one.
    pub fn joined<'d>(&mut self, texts: impl Iterator<Item = Text<'d>>) {
        self.sink.put(b"\"");
        for text in texts {
            text.write(&mut self.sink);
        }
        self.sink.put(b"\"");
    }

    pub fn json(&mut self, value: Value) {
        write_json(value, &mut self.sink);
    }

    /// A tag and what it tags, if it is there.
    pub fn tagged(&mut self, tag: u8, value: Option<Value>) {
        if let Some(value) = value {
            self.tag(tag);
            self.json(value);
        }
    }

    /// A tag and several values as one list, `null` for what is not there.
    pub fn list<const N: usize>(&mut self, tag: u8, values: [Option<Value>; N]) {
        self.tag(tag);
        for (at, value) in values.into_iter().enumerate() {
            self.tag(if at == 0 { b'[' } else { b',' });
            match value {
                Some(value) => self.json(value),
                None => self.sink.put(b"null"),
            }
        }
        self.tag(b']');
    }

    /// Media by the digest of what `write` gives for them.
    pub fn media(&mut self, medium: Medium, write: impl FnOnce(&mut blake3::Hasher)) {
        self.media += 1;
        let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
        hasher.update(&[medium as u8]);
        write(&mut hasher);
        let digest = hasher.finalize();
        self.tag(MEDIA);
        let times = if self.media <= MOST_MEDIA { MEDIA_BYTES / 32 } else { 1 };
        let repeated = [*digest.as_bytes(); MEDIA_BYTES / 32];
        self.sink.put(repeated[..times].as_flattened());
    }
}

/// A value without space between its tokens, each string in its canonical spelling; the order of keys, and numbers, as sent.
pub(super) fn write_json(value: Value, sink: &mut impl Sink) {
    value.tokens(|token| match token {
        Token::Raw(bytes) => sink.put(bytes),
        Token::Text(text) => text.write(sink),
    });
}

/// Gathers small pieces, so that a sink sees them a kilobyte at a time. What is held is lost unless flushed at the end.
pub(super) struct Pieces<'s, S> {
    sink: &'s mut S,
    held: [u8; HELD],
    length: usize,
}

const HELD: usize = 1024;

impl<'s, S: Sink> Pieces<'s, S> {
    pub fn new(sink: &'s mut S) -> Pieces<'s, S> {
        Pieces { sink, held: [0; HELD], length: 0 }
    }

    pub fn put(&mut self, piece: &[u8]) {
        if piece.len() > HELD - self.length {
            self.flush();
            if piece.len() > HELD / 2 {
                return self.sink.put(piece);
            }
        }
        self.held[self.length..self.length + piece.len()].copy_from_slice(piece);
        self.length += piece.len();
    }

    pub fn put_character(&mut self, character: char) {
        if HELD - self.length < 4 {
            self.flush();
        }
        self.length += character.encode_utf8(&mut self.held[self.length..]).len();
    }

    pub fn flush(&mut self) {
        self.sink.put(&self.held[..self.length]);
        self.length = 0;
    }
}
