//! Watches a stream of server-sent events go by, for the moment when the engine's first token comes. Comments (`: keep-alive`)
//! and the events that an engine sends before it has done anything do not count.

/// Events that open a stream of `/v1/responses` or `/v1/messages` before any token.
const OPENINGS: &[&[u8]] =
    &[b"response.created", b"response.in_progress", b"response.queued", b"message_start", b"ping"];
/// As much of a line as is looked at.
const LOOK: usize = 48;

/// Follows the lines of one stream until its first token.
#[derive(Default)]
pub struct FirstToken {
    /// The beginning of the line that is coming in.
    line: Vec<u8>,
    /// The event that the lines belong to is an opening.
    opening: bool,
    seen: bool,
}

impl FirstToken {
    /// Takes the next piece; true once, with the piece in which the first token came.
    pub fn feed(&mut self, piece: &[u8]) -> bool {
        if self.seen {
            return false;
        }
        for byte in piece {
            if *byte == b'\n' || *byte == b'\r' {
                self.end_line();
            } else if self.line.len() < LOOK {
                self.line.push(*byte);
                // A data line counts as soon as it has begun: the event is there.
                if self.line == b"data:" && !self.opening {
                    self.seen = true;
                    return true;
                }
            }
        }
        false
    }

    fn end_line(&mut self) {
        if let Some(name) = self.line.strip_prefix(b"event:") {
            self.opening = OPENINGS.contains(&name.trim_ascii());
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of the byte with which the first token was noticed.
    fn noticed_at(stream: &str) -> Option<usize> {
        let mut first = FirstToken::default();
        stream.bytes().position(|byte| first.feed(&[byte]))
    }

    #[test]
    fn comments_and_openings_are_no_token() {
        assert_eq!(noticed_at(": keep-alive\n\n: data: no\n\n"), None);
        let responses =
            "event: response.created\ndata: {}\n\nevent: response.output_text.delta\ndata: {}\n\n";
        assert_eq!(noticed_at(responses), responses.rfind("data:").map(|at| at + 4));
        let messages = "event: message_start\r\ndata: {}\r\n\r\nevent: ping\r\ndata: {}\r\n\r\n";
        assert_eq!(noticed_at(messages), None);
    }

    #[test]
    fn data_with_and_without_a_space_counts_once() {
        for stream in ["data: {}\n\n", "data:{}\r\n\r\n", ": hi\r\n\r\ndata: {}\n\n"] {
            assert_eq!(noticed_at(stream), stream.find("data:").map(|at| at + 4), "{stream}");
        }
        let mut first = FirstToken::default();
        assert!(first.feed(b"data: 1\n\ndata: 2\n\n"));
        assert!(!first.feed(b"data: 3\n\n"));
    }

    #[test]
    fn a_line_longer_than_what_is_looked_at_costs_no_memory() {
        let mut first = FirstToken::default();
        first.feed(&[b'x'; 100_000]);
        assert_eq!(first.line.len(), LOOK);
    }
}
