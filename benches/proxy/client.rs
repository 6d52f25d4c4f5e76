//! A client of the bench's own, for what wrk cannot do: so many requests, so many a second, and when each event of a stream comes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::engine::now_ns;

pub struct Client {
    stream: TcpStream,
    held: Vec<u8>,
}

/// A chat of so many bytes that begins like no other one.
pub fn distinct(serial: u64, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes);
    let mut state = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while text.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.push_str(&format!("{state:016x} "));
    }
    text.truncate(bytes);
    format!(r#"{{"model":"m","stream":false,"messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

impl Client {
    pub fn of(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Client { stream, held: Vec::new() }
    }

    fn send(&mut self, body: &str) {
        let length = body.len();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(request.as_bytes()).unwrap();
        self.held.clear();
    }

    fn read(&mut self) {
        let mut buffer = [0; 16 << 10];
        let read = self.stream.read(&mut buffer).unwrap();
        assert!(read > 0, "the answer broke off");
        self.held.extend_from_slice(&buffer[..read]);
    }

    /// One request with an answer whose length is said.
    pub fn ask(&mut self, body: &str) {
        self.send(body);
        let end = loop {
            match memchr::memmem::find(&self.held, b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => self.read(),
            }
        };
        let head = String::from_utf8_lossy(&self.held[..end]).to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let length: usize = length.expect("an answer whose length is said");
        while self.held.len() < end + length {
            self.read();
        }
    }

    /// One stream of which an event comes each `pace`; how many nanoseconds each was on its way.
    pub fn listen(&mut self, pace: Duration) -> Vec<u64> {
        const SENT: &[u8] = b"\"sent\":";
        self.send(&format!(r#"{{"model":"m","stream":true,"pace":{},"messages":[]}}"#, pace.as_millis()));
        let mut under_way = Vec::new();
        let mut seen = 0;
        while !self.held.ends_with(b"0\r\n\r\n") {
            self.read();
            let now = now_ns();
            while let Some(at) = memchr::memmem::find(&self.held[seen..], SENT) {
                let digits = &self.held[seen + at + SENT.len()..];
                let Some(end) = digits.iter().position(|byte| !byte.is_ascii_digit()) else { break };
                let sent: u64 = std::str::from_utf8(&digits[..end]).unwrap().parse().unwrap();
                under_way.push(now.saturating_sub(sent));
                seen += at + SENT.len() + end;
            }
        }
        under_way
    }
}

/// So many distinct prompts over so many connections.
pub fn fill(address: SocketAddr, from: u64, count: u64, bytes: usize, connections: u64) {
    std::thread::scope(|scope| {
        for connection in 0..connections {
            scope.spawn(move || {
                let mut client = Client::of(address);
                for serial in (from + connection..from + count).step_by(connections as usize) {
                    client.ask(&distinct(serial, bytes));
                }
            });
        }
    });
}

/// Prompts of so many bytes, so many a second, for so long.
pub fn steadily(address: SocketAddr, bytes: usize, a_second: u32, time: Duration) {
    let bodies: Vec<String> = (0..4).map(|serial| distinct(serial, bytes)).collect();
    let mut client = Client::of(address);
    let begun = Instant::now();
    for at in 0.. {
        let due = begun + Duration::from_secs(1) * at / a_second;
        if due > begun + time {
            break;
        }
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        client.ask(&bodies[at as usize % bodies.len()]);
    }
}
