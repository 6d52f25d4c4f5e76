//! Server-sent events as an OpenAI-compatible server streams them: cutting the byte stream into events, and reading of each
//! event the few things that are measured.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// Cuts bytes that arrive in pieces of any size into the data of events.
#[derive(Debug, Default)]
pub struct Events {
    pending: Vec<u8>,
    /// How far `pending` has been searched for the end of a line.
    searched: usize,
    data: Vec<u8>,
}

impl Events {
    pub fn push(&mut self, piece: &[u8]) {
        self.pending.extend_from_slice(piece);
    }

    /// The data of the next complete event; of several `data:` lines, joined by line feeds as the standard has it. Events
    /// without data (comments, bare `event:` lines) are passed over.
    pub fn next_event(&mut self) -> Option<Vec<u8>> {
        let mut start = 0;
        let event = loop {
            let from = self.searched.max(start);
            let Some(end) = memchr::memchr(b'\n', &self.pending[from..]).map(|at| from + at) else {
                self.searched = self.pending.len();
                break None;
            };
            let line = self.pending[start..end].strip_suffix(b"\r").unwrap_or(&self.pending[start..end]);
            if let Some(value) = line.strip_prefix(b"data:") {
                if !self.data.is_empty() {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            }
            let dispatch = line.is_empty() && !self.data.is_empty();
            start = end + 1;
            self.searched = start;
            if dispatch {
                break Some(std::mem::take(&mut self.data));
            }
        };
        self.pending.drain(..start);
        self.searched -= start;
        event
    }
}

/// Token counts that the server states at the end of an answer.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Absent where the server does not say. vLLM says it only with `--enable-prompt-tokens-details`, and older versions
    /// leave it out when it is 0.
    pub cached_tokens: Option<u32>,
}

/// What one event of a streamed answer tells.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// It carries generated output: text, reasoning, a tool call, or the end of a choice. A chunk that only announces the
    /// role does not count.
    pub output: bool,
    pub usage: Option<Usage>,
    /// The server's message, if the event is an error: status 200 has already gone out by then.
    pub error: Option<String>,
    /// `[DONE]`.
    pub done: bool,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(default)]
    usage: Option<RawUsage>,
    #[serde(default)]
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(default)]
    tool_calls: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct RawUsage {
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    #[serde(default)]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

impl RawUsage {
    fn usage(self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.completion_tokens,
            cached_tokens: self.prompt_tokens_details.and_then(|details| details.cached_tokens),
        }
    }
}

impl Choice<'_> {
    fn has_output(&self) -> bool {
        let said = |text: &Option<Cow<str>>| text.as_deref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| {
            said(&delta.content)
                || said(&delta.reasoning)
                || said(&delta.reasoning_content)
                || delta.tool_calls.is_some()
        });
        delta || said(&self.text) || self.finish_reason.is_some()
    }
}

/// Reads the data of one event; `None` if it is not what an OpenAI-compatible server sends.
pub fn read(data: &[u8]) -> Option<Told> {
    if data == b"[DONE]" {
        return Some(Told { done: true, ..Told::default() });
    }
    let chunk: Chunk = serde_json::from_slice(data).ok()?;
    let error = chunk.error.map(|error| match error.get("message").and_then(|message| message.as_str()) {
        Some(message) => message.to_owned(),
        None => error.to_string(),
    });
    let output = chunk.choices.iter().any(Choice::has_output);
    Some(Told { output, usage: chunk.usage.map(RawUsage::usage), error, done: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        ": hello\r\n\r\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        "event: chunk\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"caf\\u00e9\"},\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":36,\"total_tokens\":44,\"completion_tokens\":8,",
        "\"prompt_tokens_details\":{\"cached_tokens\":32,\"created_cache_tokens\":0}}}\r\n\r\n",
        "data:[DONE]\n\n",
    );

    fn events_in_pieces_of(size: usize) -> Vec<Vec<u8>> {
        let mut events = Events::default();
        let mut seen = Vec::new();
        for piece in STREAM.as_bytes().chunks(size) {
            events.push(piece);
            seen.extend(std::iter::from_fn(|| events.next_event()));
        }
        seen
    }

    #[test]
    fn pieces_of_any_size_give_the_same_events() {
        let whole = events_in_pieces_of(STREAM.len());
        assert_eq!(whole.len(), 4);
        for size in 1..STREAM.len() {
            assert_eq!(events_in_pieces_of(size), whole, "pieces of {size}");
        }
    }

    #[test]
    fn tells_role_output_usage_and_end_apart() {
        let told: Vec<Told> =
            events_in_pieces_of(7).iter().map(|event| read(event).expect("readable")).collect();
        assert_eq!(told[0], Told::default(), "a role alone is no output");
        assert!(told[1].output);
        let usage = Usage { prompt_tokens: 36, output_tokens: 8, cached_tokens: Some(32) };
        assert_eq!(told[2].usage, Some(usage));
        assert!(!told[2].output);
        assert!(told[3].done);
    }

    #[test]
    fn several_data_lines_are_one_event() {
        let mut events = Events::default();
        events.push(b"data: a\ndata: b\n\n");
        assert_eq!(events.next_event().unwrap(), b"a\nb");
        assert_eq!(events.next_event(), None);
    }

    #[test]
    fn reads_completions_reasoning_and_ends() {
        for (data, output) in [
            (r#"{"choices":[{"text":"x"}]}"#, true),
            (r#"{"choices":[{"text":""}]}"#, false),
            (r#"{"choices":[{"text":"","finish_reason":"length"}]}"#, true),
            (r#"{"choices":[{"delta":{"reasoning":"hm"}}]}"#, true),
            (r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, true),
            (r#"{"choices":[{"delta":{"content":null}}],"usage":null}"#, false),
        ] {
            assert_eq!(read(data.as_bytes()).expect(data).output, output, "{data}");
        }
    }

    #[test]
    fn an_error_inside_the_stream_is_told() {
        let told =
            read(br#"{"error": {"message": "EngineCore encountered an issue", "code": 500}}"#).unwrap();
        assert_eq!(told.error.as_deref(), Some("EngineCore encountered an issue"));
        assert_eq!(read(br#"{"error": "plain"}"#).unwrap().error.as_deref(), Some("\"plain\""));
        assert_eq!(read(b"not json"), None);
    }

    #[test]
    fn usage_without_details_has_no_cached_tokens() {
        for details in ["", r#","prompt_tokens_details":null"#, r#","prompt_tokens_details":{}"#] {
            let data = format!(r#"{{"choices":[],"usage":{{"prompt_tokens":3{details}}}}}"#);
            assert_eq!(read(data.as_bytes()).unwrap().usage.unwrap().cached_tokens, None, "{data}");
        }
    }
}
