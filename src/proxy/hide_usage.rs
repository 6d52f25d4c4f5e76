//! The option `feedback.ask_for_usage`, on the way back: the event with the usage, which the client did not ask for, is taken
//! out of the stream, and what vLLM moves into that event is put back where it would have been: without usage, it is the last
//! event of the answer that tells the `system_fingerprint`.
//!
//! An event is passed on when it is whole. vLLM writes each in one piece, so that this holds nothing up; only the one that ends
//! the answer waits for the next, which follows at once.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use memchr::{memchr2, memmem};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::error::Abrupt;
use super::relay::{Cut, Relay};
use super::watch::Watch;

/// Longest event that is held until it is whole; a longer one is passed on as it comes. What is looked for is short.
const LONGEST: usize = 64 << 10;

/// Follows one stream of events.
#[derive(Default)]
pub struct HideUsage {
    lines: Lines,
    /// As much as has come of an event that is not whole.
    partial: BytesMut,
    /// The rest of the event under way goes out as it comes.
    passing: bool,
    /// The answer's last event, held for the fingerprint.
    ending: Option<Bytes>,
    /// What was last decided of an event; a line feed may still follow.
    dropped: bool,
}

/// A relayed stream of events without the usage. The length is open whatever the worker said of it.
pub struct WithoutUsage {
    relay: Relay,
    hide: HideUsage,
    /// What comes behind the rest of what was held.
    behind: Option<Option<Result<Frame<Bytes>, Cut>>>,
}

impl WithoutUsage {
    pub fn new(relay: Relay) -> WithoutUsage {
        WithoutUsage { relay, hide: HideUsage::default(), behind: None }
    }

    pub fn failure(&self) -> Option<Abrupt> {
        self.relay.failure()
    }

    pub(super) fn watch(&self) -> &Watch {
        self.relay.watch()
    }

    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if let Some(behind) = self.behind.take() {
            return Poll::Ready(behind);
        }
        loop {
            let (shown, behind) = match ready!(self.relay.poll_frame(cx)).map(|got| got.map(Frame::into_data))
            {
                Some(Ok(Ok(data))) => (self.hide.feed(data), None),
                Some(Ok(Err(trailers))) => (self.hide.finish(), Some(Some(Ok(trailers)))),
                Some(Err(cut)) => (self.hide.finish(), Some(Some(Err(cut)))),
                None => (self.hide.finish(), Some(None)),
            };
            match behind {
                Some(behind) if shown.is_empty() => return Poll::Ready(behind),
                None if shown.is_empty() => {}
                behind => {
                    self.behind = behind;
                    return Poll::Ready(Some(Ok(Frame::data(shown))));
                }
            }
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.behind.is_none() && !self.hide.holds_anything() && self.relay.is_end_stream()
    }
}

/// What goes out.
type Kept = SmallVec<[Bytes; 4]>;

impl HideUsage {
    /// Takes the next piece and gives what goes to the client now: mostly the piece itself.
    pub fn feed(&mut self, mut piece: Bytes) -> Bytes {
        let mut kept = Kept::new();
        if self.lines.owes_line_feed(&piece) {
            let line_feed = piece.split_to(1);
            match &mut self.ending {
                _ if self.dropped => {}
                Some(ending) => *ending = join([std::mem::take(ending), line_feed]),
                None => kept.push(line_feed),
            }
        }
        while !piece.is_empty() {
            let Some(end) = self.lines.event_end(&piece) else {
                self.hold(piece, &mut kept);
                break;
            };
            let rest = piece.split_to(end);
            if std::mem::take(&mut self.passing) {
                self.dropped = false;
                kept.push(rest);
            } else if self.partial.is_empty() {
                self.judge(rest, &mut kept);
            } else {
                self.partial.extend_from_slice(&rest);
                let event = self.partial.split().freeze();
                self.judge(event, &mut kept);
            }
        }
        join(kept)
    }

    /// What is still held, when the stream has come to its end.
    pub fn finish(&mut self) -> Bytes {
        let partial = self.partial.split().freeze();
        join(self.ending.take().into_iter().chain([partial]))
    }

    pub fn holds_anything(&self) -> bool {
        self.ending.is_some() || !self.partial.is_empty()
    }

    fn hold(&mut self, piece: Bytes, kept: &mut Kept) {
        if !self.passing && self.partial.len() + piece.len() > LONGEST {
            self.passing = true;
            kept.extend(self.ending.take());
            kept.push(self.partial.split().freeze());
        }
        if self.passing {
            kept.push(piece);
        } else {
            self.partial.extend_from_slice(&piece);
        }
    }

    fn judge(&mut self, event: Bytes, kept: &mut Kept) {
        let kind = Kind::of(&event);
        self.dropped = matches!(kind, Kind::Usage { .. });
        match (kind, self.ending.take()) {
            (Kind::Usage { fingerprint: Some(print) }, Some(ending)) => kept.push(stamp(&ending, &print)),
            (Kind::Usage { .. }, ending) => kept.extend(ending),
            (Kind::Ending, ending) => {
                kept.extend(ending);
                self.ending = Some(event);
            }
            (Kind::Other, ending) => {
                kept.extend(ending);
                kept.push(event);
            }
        }
    }
}

fn join(pieces: impl IntoIterator<Item = Bytes>) -> Bytes {
    let mut pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
    let first = pieces.next().unwrap_or_default();
    let Some(second) = pieces.next() else { return first };
    let mut joined = BytesMut::from(first);
    joined.extend_from_slice(&second);
    pieces.for_each(|piece| joined.extend_from_slice(&piece));
    joined.freeze()
}

/// What an event is.
enum Kind {
    /// The usage of the whole answer, and nothing else.
    Usage {
        /// As it is spelt.
        fingerprint: Option<String>,
    },
    /// Ends a choice, and tells no fingerprint.
    Ending,
    Other,
}

#[derive(Deserialize)]
struct Chunk<'e> {
    choices: Vec<Choice>,
    #[serde(borrow)]
    usage: Option<&'e RawValue>,
    #[serde(borrow)]
    system_fingerprint: Option<&'e RawValue>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<IgnoredAny>,
}

impl Kind {
    fn of(event: &[u8]) -> Kind {
        // Nearly every event brings a token: a look at the two keys that matter spares reading it.
        if memmem::find(event, b"\"usage\"").is_none() && !ends_a_choice(event) {
            return Kind::Other;
        }
        let Some(chunk) = data(event).and_then(|data| serde_json::from_slice::<Chunk>(data).ok()) else {
            return Kind::Other;
        };
        let told = chunk.usage.is_some_and(|usage| usage.get().starts_with('{'));
        let ends = chunk.choices.iter().any(|choice| choice.finish_reason.is_some());
        match chunk.system_fingerprint {
            print if chunk.choices.is_empty() && told => {
                Kind::Usage { fingerprint: print.map(|print| print.get().to_owned()) }
            }
            None if ends => Kind::Ending,
            _ => Kind::Other,
        }
    }
}

/// A finish reason that is not null. An unescaped quote is never inside a string.
fn ends_a_choice(event: &[u8]) -> bool {
    const KEY: &[u8] = b"\"finish_reason\"";
    memmem::find_iter(event, KEY).any(|at| {
        let value = event[at + KEY.len()..].iter().find(|byte| !matches!(byte, b':' | b' ' | b'\t'));
        value.is_some_and(|first| *first != b'n')
    })
}

/// The value of an event's data line, if it has one only.
fn data(event: &[u8]) -> Option<&[u8]> {
    let lines = event.split(|byte| matches!(byte, b'\n' | b'\r'));
    let mut values = lines.filter_map(|line| line.strip_prefix(b"data:"));
    values.next().filter(|_| values.next().is_none())
}

/// The event with the fingerprint as its object's last member.
fn stamp(event: &Bytes, print: &str) -> Bytes {
    let end = memchr::memrchr(b'}', event).unwrap_or(event.len());
    let member = format!(",\"system_fingerprint\":{print}");
    join([event.slice(..end), Bytes::from(member), event.slice(end..)])
}

/// Follows the lines of a stream as far as to know where an event ends: with a blank line. Lines end with a line feed, a
/// carriage return, or both.
struct Lines {
    /// Nothing has come of the line under way.
    blank: bool,
    after_return: bool,
    /// An event ended with the last byte of a piece, a carriage return.
    owes: bool,
}

impl Default for Lines {
    fn default() -> Self {
        Lines { blank: true, after_return: false, owes: false }
    }
}

impl Lines {
    /// Whether `piece` begins with the second half of the line end that the last event ended with.
    fn owes_line_feed(&mut self, piece: &[u8]) -> bool {
        std::mem::take(&mut self.owes) && piece.first() == Some(&b'\n')
    }

    /// Where in `piece`, which goes on from the last one, the event ends.
    fn event_end(&mut self, piece: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(length) = memchr2(b'\n', b'\r', &piece[at..]) {
            let end = at + length;
            self.blank &= length == 0;
            let second_half = piece[end] == b'\n' && length == 0 && self.after_return;
            self.after_return = piece[end] == b'\r';
            at = end + 1;
            if second_half {
                continue;
            }
            if std::mem::replace(&mut self.blank, true) {
                let line_feed = self.after_return && piece.get(at) == Some(&b'\n');
                self.owes = self.after_return && at == piece.len();
                self.after_return = false;
                return Some(at + usize::from(line_feed));
            }
        }
        if at < piece.len() {
            self.blank = false;
            self.after_return = false;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::framing::tests::cut;

    fn hide(pieces: &[&[u8]]) -> String {
        let mut hide = HideUsage::default();
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&hide.feed(Bytes::copy_from_slice(piece)));
        }
        out.extend_from_slice(&hide.finish());
        String::from_utf8(out).unwrap()
    }

    const TOKEN: &str = r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"\"usage\":{} \"finish_reason\":\"x\""},"finish_reason":null}]}"#;
    const ENDING: &str = r#"data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
    const STAMPED: &str = r#"data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"system_fingerprint":"v\"1"}"#;
    const USAGE: &str = r#"data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"details":{"x":"}\n"}},"system_fingerprint":"v\"1"}"#;
    const DONE: &str = "data: [DONE]";

    fn stream(events: &[&str], end: &str) -> String {
        events.iter().map(|event| format!("{event}{end}{end}")).collect()
    }

    #[test]
    fn the_usage_goes_and_the_fingerprint_stays_wherever_the_stream_is_cut() {
        for end in ["\n", "\r\n", "\r"] {
            for (sent, expected) in [
                ([TOKEN, ENDING, USAGE, DONE].as_slice(), [TOKEN, STAMPED, DONE].as_slice()),
                (&[TOKEN, ENDING, DONE], &[TOKEN, ENDING, DONE]),
                (&[TOKEN, STAMPED, USAGE], &[TOKEN, STAMPED]),
                (&[USAGE, TOKEN, ENDING], &[TOKEN, ENDING]),
                (&[ENDING, TOKEN, USAGE, DONE], &[ENDING, TOKEN, DONE]),
                (
                    &[": ping", TOKEN, ": \"usage\"", ENDING, ENDING, USAGE],
                    &[": ping", TOKEN, ": \"usage\"", ENDING, STAMPED],
                ),
            ] {
                let (sent, expected) = (stream(sent, end), stream(expected, end));
                let whole = sent.as_bytes();
                assert_eq!(hide(&[whole]), expected);
                assert_eq!(hide(&whole.chunks(1).collect::<Vec<_>>()), expected, "byte by byte");
                for cut in 0..whole.len() {
                    assert_eq!(hide(&[&whole[..cut], &whole[cut..]]), expected, "{end:?} cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn what_only_looks_like_usage_passes() {
        for event in [
            r#"data: {"choices":[],"usage":null}"#,
            r#"data: {"choices":[]}"#,
            r#"data: {"choices":[{"index":0}],"usage":{"prompt_tokens":1}}"#,
            r#"data: {"usage":{"prompt_tokens":1}}"#,
            r#"data: {"error":{"message":"\"usage\"","usage":{}}}"#,
            r#"data: {"choices":[],"usage":{"prompt_tokens":1}"#,
            "data: {\"choices\":[],\ndata: \"usage\":{}}",
            "event: usage",
            "\"usage\"",
        ] {
            let text = stream(&[TOKEN, event, DONE], "\n");
            assert_eq!(hide(&[text.as_bytes()]), text);
        }
    }

    #[test]
    fn whole_events_are_not_copied_and_nothing_waits_but_the_end() {
        let mut hide = HideUsage::default();
        let piece = Bytes::from(stream(&[TOKEN], "\n"));
        assert_eq!(hide.feed(piece.clone()).as_ptr(), piece.as_ptr());
        assert_eq!(hide.feed(Bytes::from(stream(&[ENDING], "\n"))), "");
        assert!(hide.holds_anything());
        assert_eq!(hide.finish(), stream(&[ENDING], "\n"));
        assert!(!hide.holds_anything());
    }

    #[test]
    fn an_event_without_end_is_not_held_for_ever() {
        let mut hide = HideUsage::default();
        hide.feed(Bytes::from_static(b"data: "));
        let long = Bytes::from(vec![b'x'; LONGEST]);
        assert_eq!(hide.feed(long).len(), LONGEST + 6);
        assert_eq!(hide.feed(Bytes::from_static(b"more")), "more");
        assert_eq!(hide.feed(Bytes::from(format!("\n\n{USAGE}\n\n{DONE}"))), "\n\n");
        assert_eq!(hide.finish(), DONE);
    }

    /// What a real vLLM 0.32 sent when asked for usage, through here, against what it sent when not asked.
    #[test]
    fn captured_answers_come_out_as_if_usage_had_not_been_asked_for() {
        let captured = |name: &str| {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm");
            let text = std::fs::read_to_string(folder.join(name)).unwrap();
            let body = text.split_once("\r\n\r\n").unwrap().1;
            let id = text.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap();
            let events = body.split_inclusive("\r\n").filter(|line| line.len() > 8);
            events.map(|chunk| chunk.trim_end_matches("\r\n")).collect::<String>().replace(id, "ID")
        };
        for (asked, plain) in [
            ("chat_stream_include_usage.resp", "chat_stream.resp"),
            ("completion_stream_include_usage.resp", "completion_stream.resp"),
        ] {
            let asked = captured(asked);
            assert!(asked.contains("cached_tokens"));
            assert_eq!(hide(&[asked.as_bytes()]), captured(plain));
        }
    }

    proptest! {
        #[test]
        fn any_events_in_any_pieces_come_to_the_same(
            picks in prop::collection::vec(0usize..8, 0..12),
            sizes in prop::collection::vec(1usize..60, 1..80),
        ) {
            let lines = [TOKEN, ENDING, STAMPED, USAGE, DONE, ": \r", "\n", "event: x\r\ndata: y"];
            let text: String = picks.iter().enumerate().map(|(at, pick)| {
                format!("{}{}", lines[*pick], ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"][at % 4])
            }).collect();
            let pieces = cut(text.as_bytes(), sizes);
            let whole = hide(&[text.as_bytes()]);
            prop_assert_eq!(&hide(&pieces), &whole);
            prop_assert!(!whole.contains("prompt_tokens"));
        }
    }
}
