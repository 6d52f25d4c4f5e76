//! Reads the `usage` object of an answer on its way past, whether the answer is one JSON document or a stream of events,
//! however it is cut into pieces. Nothing is held back or copied but that object.
//!
//! An unescaped `"usage"` after a brace, a comma or white space can only be a key (inside a JSON string every quote is
//! escaped), so no JSON has to be followed to find it. The last object found counts: with `continuous_usage_stats` every
//! event has one.

use std::sync::LazyLock;

use memchr::memmem;
use serde::Deserialize;

use crate::core::booking::Finished;

const KEY: &[u8] = b"\"usage\"";
static FINDER: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new(KEY));
/// Longest usage object that is read.
const LONGEST: usize = 4 << 10;

/// Finds the usage in the pieces of one answer.
pub struct UsageReader {
    state: State,
    /// The last bytes of the piece before, where a key may have begun.
    tail: Vec<u8>,
    object: Vec<u8>,
    found: Option<Finished>,
}

enum State {
    Searching,
    /// The key was read, its value was not reached.
    Key,
    /// Inside the object.
    Object {
        depth: usize,
        in_string: bool,
        escaped: bool,
    },
}

impl Default for UsageReader {
    fn default() -> Self {
        UsageReader { state: State::Searching, tail: Vec::new(), object: Vec::new(), found: None }
    }
}

impl UsageReader {
    /// What was read, if anything was.
    pub fn found(&self) -> Option<Finished> {
        self.found
    }

    /// Takes the next piece.
    pub fn feed(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            piece = match self.state {
                State::Searching => self.search(piece),
                State::Key => self.open(piece),
                State::Object { .. } => self.take(piece),
            };
        }
    }

    /// Looks for the key and returns what comes after it.
    fn search<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        if !self.tail.is_empty() {
            // The key may lie across the seam: look at the few bytes around it.
            let before = self.tail.len();
            self.tail.extend_from_slice(&piece[..piece.len().min(KEY.len())]);
            let across = find_key(&self.tail);
            if let Some(end) = across.filter(|end| *end > before) {
                self.tail.clear();
                self.state = State::Key;
                return &piece[end - before..];
            }
            self.tail.truncate(before);
        }
        match find_key(piece) {
            Some(end) => {
                self.tail.clear();
                self.state = State::Key;
                &piece[end..]
            }
            None => {
                self.keep_tail(piece);
                &[]
            }
        }
    }

    /// Keeps as much as a key with the byte before it could have left behind.
    fn keep_tail(&mut self, piece: &[u8]) {
        self.tail.extend_from_slice(&piece[piece.len().saturating_sub(KEY.len())..]);
        let surplus = self.tail.len().saturating_sub(KEY.len());
        self.tail.drain(..surplus);
    }

    /// Expects a colon and a brace, with white space between.
    fn open<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        for (at, byte) in piece.iter().enumerate() {
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' | b':' => {}
                b'{' => {
                    self.object.clear();
                    self.state = State::Object { depth: 0, in_string: false, escaped: false };
                    return &piece[at..];
                }
                // `null`, or a value of another name.
                _ => {
                    self.state = State::Searching;
                    return &piece[at..];
                }
            }
        }
        &[]
    }

    fn take<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        let State::Object { depth, in_string, escaped } = &mut self.state else { return piece };
        let room = (LONGEST + 1).saturating_sub(self.object.len());
        for (at, byte) in piece.iter().enumerate().take(room) {
            match byte {
                _ if *escaped => *escaped = false,
                b'\\' if *in_string => *escaped = true,
                b'"' => *in_string = !*in_string,
                b'{' if !*in_string => *depth += 1,
                b'}' if !*in_string => *depth -= 1,
                _ => {}
            }
            if *depth == 0 {
                let (last, rest) = piece.split_at(at + 1);
                self.object.extend_from_slice(last);
                self.found = parse(&self.object).or(self.found);
                self.state = State::Searching;
                return rest;
            }
        }
        let (taken, rest) = piece.split_at(room.min(piece.len()));
        self.object.extend_from_slice(taken);
        if self.object.len() > LONGEST {
            self.state = State::Searching;
        }
        rest
    }
}

/// The place after the first `"usage"` that is a key, if there is one.
fn find_key(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + FINDER.find(&text[from..])?;
        from = at + KEY.len();
        if at > 0 && matches!(text[at - 1], b'{' | b',' | b' ' | b'\t' | b'\n' | b'\r') {
            return Some(from);
        }
    }
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<Details>,
    // The names in /v1/responses and /v1/messages.
    input_tokens: Option<u32>,
    output_tokens: Option<u32>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

fn parse(object: &[u8]) -> Option<Finished> {
    let usage: Usage = serde_json::from_slice(object).ok()?;
    let details = usage.prompt_tokens_details.or(usage.input_tokens_details);
    let prompt_tokens = usage.prompt_tokens.or(usage.input_tokens);
    Some(Finished {
        prompt_tokens,
        // No more than the prompt can have been cached, whatever an engine says.
        cached_tokens: details
            .and_then(|details| details.cached_tokens)
            .or(usage.cache_read_input_tokens)
            .map(|cached| cached.min(prompt_tokens.unwrap_or(0))),
        output_tokens: usage.completion_tokens.or(usage.output_tokens),
    })
    .filter(|_| prompt_tokens.is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::framing::tests::cut;

    fn read(pieces: &[&[u8]]) -> Option<(Option<u32>, Option<u32>, Option<u32>)> {
        let mut reader = UsageReader::default();
        for piece in pieces {
            reader.feed(piece);
        }
        reader.found().map(|found| (found.prompt_tokens, found.cached_tokens, found.output_tokens))
    }

    const STREAM: &str = concat!(
        "data: {\"id\":\"x\",\"choices\":[{\"delta\":{\"content\":\"the \\\"usage\\\": {\\\"prompt_tokens\\\":1}\"}}],\"usage\":null}\r\n\r\n",
        "data:{\"choices\":[{\"delta\":{\"content\":\"usage\"}}]}\r\n\r\n",
        "data: {\"choices\":[],\"usage\" : {\"prompt_tokens\":2371,\"total_tokens\":2435,\"completion_tokens\":64,",
        "\"prompt_tokens_details\":{\"cached_tokens\":2032,\"note\":\"}\\\"{\"}}}\r\n\r\ndata: [DONE]\r\n\r\n",
    );

    #[test]
    fn a_stream_cut_anywhere_gives_the_same() {
        let whole = STREAM.as_bytes();
        let right = Some((Some(2371), Some(2032), Some(64)));
        assert_eq!(read(&[whole]), right);
        for cut in 0..whole.len() {
            assert_eq!(read(&[&whole[..cut], &whole[cut..]]), right, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(read(&bytes), right);
    }

    proptest! {
        #[test]
        fn pieces_of_any_sizes_give_the_same(sizes in prop::collection::vec(1usize..40, 1..60)) {
            let pieces = cut(STREAM.as_bytes(), sizes);
            prop_assert_eq!(read(&pieces), Some((Some(2371), Some(2032), Some(64))));
        }

        #[test]
        fn no_bytes_can_break_it(pieces in prop::collection::vec(prop::collection::vec(
            prop::sample::select(b"\"usage:{}\\, 1n".to_vec()), 0..30), 0..10)) {
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let whole = pieces.concat();
            prop_assert_eq!(read(&pieces), read(&[&whole]));
        }
    }

    #[test]
    fn a_plain_answer_and_the_other_dialects_are_read() {
        let chat = br#"{"id":"c","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":null}}"#;
        assert_eq!(read(&[chat]), Some((Some(12), None, Some(3))));
        let responses = br#"data: {"response":{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}}"#;
        assert_eq!(read(&[responses]), Some((Some(5), Some(4), Some(2))));
        let messages =
            br#"{"type":"message","usage":{"input_tokens":5,"cache_read_input_tokens":1,"output_tokens":2}}"#;
        assert_eq!(read(&[messages]), Some((Some(5), Some(1), Some(2))));
    }

    #[test]
    fn no_more_is_cached_than_the_prompt_has() {
        let usage = br#"{"usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":99999}}}"#;
        assert_eq!(read(&[usage]), Some((Some(10), Some(10), None)));
    }

    #[test]
    fn what_is_not_usage_is_not_read() {
        assert_eq!(read(&[br#"{"content":"\"usage\":{\"prompt_tokens\":1}"}"#]), None);
        assert_eq!(read(&[br#"{"usage":null,"token":"usage"}"#]), None);
        assert_eq!(read(&[br#"{"usage":{"prompt_tokens":"many"}}"#]), None);
        assert_eq!(read(&[br#"{"usage":{}}"#]), None);
        let endless = [b"{\"usage\":{".as_slice(), &[b' '; 100_000]].concat();
        assert_eq!(read(&[&endless]), None);
    }

    #[test]
    fn the_last_usage_counts() {
        let text = br#"data: {"usage":{"prompt_tokens":9,"completion_tokens":1}}

data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}"#;
        assert_eq!(read(&[text]), Some((Some(9), None, Some(2))));
    }
}
