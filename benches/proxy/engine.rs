//! Workers without latency: what they cost is not measured, so they answer every prompt with the same bytes, an event a write.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time, for who sends an event and who gets it.
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// Events of a stream.
pub const EVENTS: usize = 64;
/// Tokens of a worker's cache, as its page tells.
const BLOCKS: usize = 65_536;

/// Starts a worker on a thread of its own.
pub fn start() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answers = Arc::new(Answers::new());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answers = Arc::clone(&answers);
            std::thread::spawn(move || serve(stream, &answers));
        }
    });
    address
}

struct Answers {
    words: String,
    stream_head: Vec<u8>,
    events: Vec<Vec<u8>>,
    metrics: Vec<u8>,
    models: Vec<u8>,
    empty: Vec<u8>,
}

/// An answer whose length is said.
fn with_length(kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

impl Answers {
    /// To a prompt of so many bytes: four are a token.
    fn chat(&self, bytes: usize) -> Vec<u8> {
        let (words, prompt) = (&self.words, bytes / 4);
        let chat = format!(
            r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"{words}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":64}}}}"#,
            prompt + 64
        );
        with_length("application/json", &chat)
    }

    fn new() -> Answers {
        let words = "every answer takes a few words ".repeat(8);
        let chunk = |data: String| format!("{:x}\r\n{data}\r\n", data.len()).into_bytes();
        let event = |at: usize| {
            chunk(format!(
                "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word{at}\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
            ))
        };
        let mut events: Vec<Vec<u8>> = (0..EVENTS).map(event).collect();
        events.push([chunk("data: [DONE]\n\n".to_owned()), b"0\r\n\r\n".to_vec()].concat());
        let page = format!("vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"{BLOCKS}\"}} 1\n");
        Answers {
            words,
            stream_head:
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    .to_vec(),
            events,
            metrics: with_length("text/plain", &page),
            models: with_length(
                "application/json",
                r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#,
            ),
            empty: with_length("text/plain", ""),
        }
    }

    /// A stream of which an event comes each `pace`, and says when it was sent.
    fn write_paced(&self, pace: Duration, to: &mut TcpStream) -> std::io::Result<()> {
        to.write_all(&self.stream_head)?;
        for at in 0..EVENTS {
            std::thread::sleep(pace);
            let data = format!("data: {{\"at\":{at},\"sent\":{}}}\n\n", now_ns());
            to.write_all(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes())?;
        }
        to.write_all(b"0\r\n\r\n")
    }

    fn write(&self, head: &str, bytes: usize, streams: bool, to: &mut TcpStream) -> std::io::Result<()> {
        if head.starts_with("GET /metrics") {
            return to.write_all(&self.metrics);
        }
        if head.starts_with("GET /v1/models") {
            return to.write_all(&self.models);
        }
        if !head.starts_with("POST") {
            return to.write_all(&self.empty);
        }
        if !streams {
            return to.write_all(&self.chat(bytes));
        }
        to.write_all(&self.stream_head)?;
        self.events.iter().try_for_each(|event| to.write_all(event))
    }
}

/// Request after request, until the other end closes.
fn serve(mut stream: TcpStream, answers: &Answers) {
    let _ = stream.set_nodelay(true);
    let (mut held, mut buffer) = (Vec::new(), vec![0; 128 << 10]);
    while let Some((head, body)) = next(&mut stream, &mut held, &mut buffer) {
        let streams = body.windows(13).take(64).any(|window| window == br#""stream":true"#);
        let written = match pace(&body) {
            Some(pace) => answers.write_paced(pace, &mut stream),
            None => answers.write(&head, body.len(), streams, &mut stream),
        };
        if written.is_err() {
            return;
        }
    }
}

/// The milliseconds between events that a body asks for.
fn pace(body: &[u8]) -> Option<Duration> {
    let start = String::from_utf8_lossy(&body[..body.len().min(64)]).into_owned();
    let (digits, _) = start.split_once(r#""pace":"#)?.1.split_once(',')?;
    digits.parse().ok().map(Duration::from_millis)
}

/// Head and body of the next request; bodies come with a length or in chunks.
fn next(stream: &mut TcpStream, held: &mut Vec<u8>, buffer: &mut [u8]) -> Option<(String, Vec<u8>)> {
    let mut read = |held: &mut Vec<u8>| {
        let length = stream.read(buffer).ok().filter(|length| *length > 0)?;
        held.extend_from_slice(&buffer[..length]);
        Some(())
    };
    let end = loop {
        match held.windows(4).position(|window| window == b"\r\n\r\n") {
            Some(at) => break at + 4,
            None => read(held)?,
        }
    };
    let head = String::from_utf8_lossy(&held[..end]).to_ascii_lowercase().replacen("post", "POST", 1);
    let head = head.replacen("get", "GET", 1);
    let length =
        head.split("\r\n").find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let length: usize = length.unwrap_or(0);
    while held.len() < end + length {
        read(held)?;
    }
    let body = held[end..end + length].to_vec();
    held.drain(..end + length);
    Some((head, body))
}
