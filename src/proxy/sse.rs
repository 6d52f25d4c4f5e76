//! Watches a stream of server-sent events go by: when the engine's first token comes, whether the engine says in the stream
//! that it has failed, and how something may be added where the stream breaks off.

use memchr::memchr2;

/// Events that open a stream of `/v1/responses` or `/v1/messages` before any token.
const OPENINGS: &[&[u8]] =
    &[b"response.created", b"response.in_progress", b"response.queued", b"message_start", b"ping"];
/// Events that say that the answer has failed.
const FAILURES: &[&[u8]] = &[b"error", b"response.failed"];
/// How vLLM's own error begins in a stream of chat or completions.
const ERROR: &[u8] = b"{\"error\"";
/// How one of these ends.
const DONE: &[u8] = b"[DONE]";
/// As much of a line as is looked at.
const LOOK: usize = 48;

/// What a piece of a stream has brought.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// The first token: true once in a stream. Comments (`: keep-alive`) and openings are none.
    pub first_token: bool,
    /// The engine's word that it has failed.
    pub failure: bool,
}

/// Follows the lines of one stream.
#[derive(Default)]
pub struct Events {
    /// The beginning of the line that is coming in.
    line: Vec<u8>,
    /// That line has been judged.
    judged: bool,
    /// The event that the lines belong to is an opening.
    opening: bool,
    /// Lines have come since the last blank one.
    in_event: bool,
    /// The last byte was a carriage return.
    after_return: bool,
    token_seen: bool,
    done: bool,
}

impl Events {
    /// Takes the next piece.
    pub fn feed(&mut self, piece: &[u8]) -> Seen {
        let mut seen = Seen::default();
        let mut rest = piece;
        while let [first, ..] = rest {
            if *first == b'\n' && !self.after_return && self.line.is_empty() {
                self.end_event();
                rest = &rest[1..];
                continue;
            }
            let end = memchr2(b'\n', b'\r', rest);
            let text = &rest[..end.unwrap_or(rest.len())];
            if !text.is_empty() {
                self.after_return = false;
                if end.is_some() && self.line.is_empty() {
                    // A whole line, as nearly all are: judged where it lies.
                    self.judge(&text[..text.len().min(LOOK)], true, &mut seen);
                    self.next_line();
                    self.after_return = rest[text.len()] == b'\r';
                    rest = &rest[text.len() + 1..];
                    continue;
                }
                let room = LOOK - self.line.len();
                self.line.extend_from_slice(&text[..text.len().min(room)]);
                self.judge_line(false, &mut seen);
            }
            let Some(end) = end else { break };
            self.end_line(rest[end], &mut seen);
            rest = &rest[end + 1..];
        }
        seen
    }

    /// What must come before an event that is added here, so that it begins on a line of its own.
    pub fn lead(&self) -> &'static str {
        match (self.line.is_empty(), self.in_event) {
            (true, false) => "",
            (true, true) => "\n",
            (false, _) => "\n\n",
        }
    }

    /// The stream has told its own end: nothing may come behind that.
    pub fn is_done(&self) -> bool {
        self.done
    }

    fn end_line(&mut self, end: u8, seen: &mut Seen) {
        // A line feed after a carriage return belongs to it.
        let second_half = end == b'\n' && std::mem::take(&mut self.after_return) && self.line.is_empty();
        self.after_return = end == b'\r';
        if second_half {
            return;
        }
        if self.line.is_empty() {
            return self.end_event();
        }
        self.judge_line(true, seen);
        self.next_line();
    }

    /// After an empty line.
    fn end_event(&mut self) {
        self.in_event = false;
        self.opening = false;
    }

    /// After a line that was not empty.
    fn next_line(&mut self) {
        self.in_event = true;
        self.line.clear();
        self.judged = false;
    }

    fn judge_line(&mut self, whole: bool, seen: &mut Seen) {
        let line = std::mem::take(&mut self.line);
        self.judge(&line, whole, seen);
        self.line = line;
    }

    /// Judges the line as soon as enough of it is there.
    fn judge(&mut self, line: &[u8], whole: bool, seen: &mut Seen) {
        if self.judged || !(whole || line.len() == LOOK) {
            // A data line is clear once its value has begun; an event's name only when it has ended.
            let clear = line.strip_prefix(b"data:").is_some_and(|value| value.len() > ERROR.len());
            if self.judged || !clear {
                return;
            }
        }
        self.judged = true;
        if let Some(name) = line.strip_prefix(b"event:") {
            self.opening = OPENINGS.contains(&name.trim_ascii());
            seen.failure |= FAILURES.contains(&name.trim_ascii());
        } else if let Some(value) = line.strip_prefix(b"data:") {
            self.done |= value.trim_ascii() == DONE;
            if value.trim_ascii_start().starts_with(ERROR) {
                seen.failure = true;
                // What follows is the end of it (`[DONE]`), not a token.
                self.token_seen = true;
            } else if !self.opening && !self.token_seen {
                self.token_seen = true;
                seen.first_token = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a stream whole and byte by byte, which must come to the same, and says what was seen of it.
    fn seen(stream: &str) -> (usize, bool, &'static str) {
        let fed = |pieces: Vec<&[u8]>| {
            let mut events = Events::default();
            let all: Vec<Seen> = pieces.into_iter().map(|piece| events.feed(piece)).collect();
            let tokens = all.iter().filter(|seen| seen.first_token).count();
            (tokens, all.iter().any(|seen| seen.failure), events.lead())
        };
        let whole = fed(vec![stream.as_bytes()]);
        assert_eq!(whole, fed(stream.as_bytes().chunks(1).collect()), "{stream:?}");
        for cut in 0..stream.len() {
            let (one, two) = stream.as_bytes().split_at(cut);
            assert_eq!(whole, fed(vec![one, two]), "{stream:?} cut at {cut}");
        }
        whole
    }

    #[test]
    fn comments_and_openings_are_no_token() {
        assert_eq!(seen(": keep-alive\n\n: data: no\n\n").0, 0);
        assert_eq!(seen("event: message_start\r\ndata: {}\r\n\r\nevent: ping\r\ndata: {}\r\n\r\n").0, 0);
        assert_eq!(
            seen("event: response.created\ndata: {}\n\nevent: response.output_text.delta\ndata: {}\n\n").0,
            1
        );
    }

    #[test]
    fn data_with_and_without_a_space_counts_once() {
        for stream in [
            "data: {}\n\n",
            "data:{}\r\n\r\n",
            ": hi\r\rdata: {}\r\r",
            "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n",
        ] {
            assert_eq!(seen(stream), (1, false, ""), "{stream:?}");
        }
        assert_eq!(seen("data: {\"choices\":[{\"delta\":").0, 1, "a long line counts before its end");
    }

    #[test]
    fn an_engines_own_word_of_failure_is_no_token() {
        for stream in [
            "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\"}}\n\ndata: [DONE]\n\n",
            "data:{\"error\":{}}\r\n\r\n",
            "event: error\ndata: {\"type\":\"error\"}\n\n",
            "event: response.failed\ndata: {}\n\n",
        ] {
            assert!(seen(stream).1, "{stream:?}");
        }
        assert_eq!(seen("data: {\"error\": {}}\n\n").0, 0);
        assert_eq!(
            seen("data: {\"choices\":[{\"delta\":{\"content\":\"data: {\\\"error\\\"\"}}]}\n\n"),
            (1, false, "")
        );
    }

    #[test]
    fn what_is_added_begins_on_a_line_of_its_own() {
        for (stream, lead) in [
            ("", ""),
            ("data: {}\n\n", ""),
            ("data: {}\r\n\r\n", ""),
            ("data: {}\r\r", ""),
            ("data: {}\n", "\n"),
            ("data: {}\r\n", "\n"),
            ("data: {}\r", "\n"),
            ("data: {\"choices\":[{\"del", "\n\n"),
            (": keep-alive", "\n\n"),
        ] {
            assert_eq!(seen(stream).2, lead, "{stream:?}");
        }
    }

    #[test]
    fn a_line_longer_than_what_is_looked_at_costs_no_memory() {
        let mut events = Events::default();
        events.feed(&[b'x'; 100_000]);
        assert_eq!(events.line.len(), LOOK);
    }
}
