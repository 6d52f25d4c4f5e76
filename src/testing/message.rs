//! HTTP/1.1 messages read byte by byte, with nothing normalised: what a test compares is what was on the wire.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// A head as it was sent.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Head {
    /// The first line without its end.
    pub start: String,
    /// Names as sent, and values.
    pub headers: Vec<(String, String)>,
}

impl Head {
    fn parse(raw: &[u8]) -> Head {
        let text = String::from_utf8_lossy(raw);
        let mut lines = text.split("\r\n").filter(|line| !line.is_empty());
        let start = lines.next().unwrap_or_default().to_owned();
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        Head { start, headers }
    }

    /// All values of a header, whatever the case of its name.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let same = |(key, _): &&(String, String)| key.eq_ignore_ascii_case(name);
        self.headers.iter().filter(same).map(|(_, value)| value.as_str()).collect()
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }

    /// The request's target, or the response's status as text.
    pub fn second(&self) -> &str {
        self.start.split(' ').nth(1).unwrap_or_default()
    }

    fn is_chunked(&self) -> bool {
        self.get("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
    }

    fn length(&self) -> Option<usize> {
        self.get("content-length")?.parse().ok()
    }
}

/// A message as it was sent.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Message {
    pub head: Head,
    /// Without chunk framing.
    pub body: Vec<u8>,
    /// The sizes of the chunks, if the body came in chunks.
    pub chunks: Vec<usize>,
    pub trailers: Vec<(String, String)>,
    /// Every byte, framing included.
    pub raw: Vec<u8>,
    /// The body came to its end as framed; else the connection ended before.
    pub complete: bool,
    /// Of a request: whoever sent it had ended the connection before it was looked at.
    pub left: bool,
}

/// Reads messages from a stream, keeping what comes early.
pub struct Reader<R> {
    stream: R,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub fn new(stream: R) -> Reader<R> {
        Reader { stream, buffer: Vec::new() }
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> io::Result<bool> {
        self.buffer.reserve(16 << 10);
        Ok(self.stream.read_buf(&mut self.buffer).await? > 0)
    }

    /// Whatever comes next, unframed; empty at the end.
    pub async fn piece(&mut self) -> io::Result<Vec<u8>> {
        if self.buffer.is_empty() {
            self.more().await?;
        }
        Ok(std::mem::take(&mut self.buffer))
    }

    /// Waits until the other side has ended the connection; what it sends meanwhile is kept.
    pub async fn ended(&mut self) {
        while matches!(self.more().await, Ok(true)) {}
    }

    /// Takes from the buffer up to and with `end`.
    async fn through(&mut self, end: &[u8]) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return Ok(Some(self.buffer.drain(..at + end.len()).collect()));
            }
            if !self.more().await? {
                return Ok(None);
            }
        }
    }

    /// As many bytes as asked for, or as there are.
    async fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < length && self.more().await? {}
        let length = length.min(self.buffer.len());
        Ok(self.buffer.drain(..length).collect())
    }

    /// The next head; `None` if the connection ended before one began.
    ///
    /// # Errors
    /// If the connection broke.
    pub async fn head(&mut self) -> io::Result<Option<(Head, Vec<u8>)>> {
        Ok(self.through(b"\r\n\r\n").await?.map(|raw| (Head::parse(&raw), raw)))
    }

    /// The next request.
    ///
    /// # Errors
    /// If the connection broke before its head was complete.
    pub async fn request(&mut self) -> io::Result<Option<Message>> {
        let Some((head, raw)) = self.head().await? else { return Ok(None) };
        let mut message = Message { head, raw, ..Message::default() };
        if message.head.is_chunked() {
            self.chunked(&mut message).await;
        } else {
            let length = message.head.length().unwrap_or(0);
            self.sized(&mut message, length).await;
        }
        Ok(Some(message))
    }

    /// The body of a response to a request with `method`. A connection that breaks leaves it incomplete.
    pub async fn response_body(&mut self, head: Head, raw: Vec<u8>, method: &str) -> Message {
        let mut message = Message { head, raw, ..Message::default() };
        let status = message.head.second().to_owned();
        if method == "HEAD" || status == "204" || status == "304" || status.starts_with('1') {
            message.complete = true;
        } else if message.head.is_chunked() {
            self.chunked(&mut message).await;
        } else if let Some(length) = message.head.length() {
            self.sized(&mut message, length).await;
        } else {
            // Framed by the end of the connection.
            while let Ok(true) = self.more().await {}
            message.body = std::mem::take(&mut self.buffer);
            message.raw.extend_from_slice(&message.body);
            message.complete = true;
        }
        message
    }

    async fn sized(&mut self, message: &mut Message, length: usize) {
        if let Ok(body) = self.exactly(length).await {
            message.complete = body.len() == length;
            message.raw.extend_from_slice(&body);
            message.body = body;
        }
    }

    async fn chunked(&mut self, message: &mut Message) {
        while let Ok(Some(line)) = self.through(b"\r\n").await {
            message.raw.extend_from_slice(&line);
            let text = String::from_utf8_lossy(&line);
            let Ok(size) = usize::from_str_radix(text.trim().split(';').next().unwrap_or(""), 16) else {
                return;
            };
            if size == 0 {
                return self.trailers(message).await;
            }
            let Ok(piece) = self.exactly(size + 2).await else { return };
            message.raw.extend_from_slice(&piece);
            message.body.extend_from_slice(&piece[..piece.len().min(size)]);
            if piece.len() < size + 2 {
                return;
            }
            message.chunks.push(size);
        }
    }

    async fn trailers(&mut self, message: &mut Message) {
        while let Ok(Some(line)) = self.through(b"\r\n").await {
            message.raw.extend_from_slice(&line);
            let text = String::from_utf8_lossy(&line);
            match text.trim().split_once(':') {
                None => {
                    message.complete = true;
                    return;
                }
                Some((name, value)) => message.trailers.push((name.to_owned(), value.trim().to_owned())),
            }
        }
    }
}
