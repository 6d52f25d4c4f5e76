//! A client that sees every byte, so that framing and order can be compared.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Nothing here takes that long unless it hangs.
pub const BOUND: Duration = Duration::from_secs(20);

/// A response as it came.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// Lower-case names and values, in order.
    pub headers: Vec<(String, String)>,
    /// The pieces of a chunked body, or the whole of another.
    pub chunks: Vec<String>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn body(&self) -> String {
        self.chunks.concat()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body()).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The JSON of each event but `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let texts = self.chunks.iter().filter_map(|chunk| chunk.strip_prefix("data: ")?.strip_suffix("\n\n"));
        texts.filter(|text| *text != "[DONE]").map(|text| serde_json::from_str(text).unwrap()).collect()
    }

    /// Reads what `bytes` say, whole.
    pub fn parse(bytes: &[u8], head_only: bool) -> Response {
        let text = std::str::from_utf8(bytes).unwrap();
        let text = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
        let mut lines = head.split("\r\n");
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|status| status.parse().ok());
        let header =
            |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
        let headers: Vec<_> = lines.filter_map(header).collect();
        let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let chunks = match (head_only, chunked) {
            (true, _) => Vec::new(),
            (false, true) => chunks(body),
            (false, false) => vec![body.to_owned()],
        };
        Response { status: status.unwrap(), headers, chunks }
    }
}

fn chunks(mut body: &str) -> Vec<String> {
    let mut chunks = Vec::new();
    loop {
        let (size, rest) = body.split_once("\r\n").unwrap_or_else(|| panic!("cut in a chunk: {body:?}"));
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            assert_eq!(rest, "\r\n", "nothing follows the last chunk");
            return chunks;
        }
        chunks.push(rest[..size].to_owned());
        body = rest[size..].strip_prefix("\r\n").unwrap();
    }
}

/// Sends `request` on a connection of its own and reads until the server closes.
pub async fn exchange(address: SocketAddr, request: &[u8]) -> Response {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        Response::parse(&bytes, request.starts_with(b"HEAD "))
    };
    timeout(BOUND, exchange).await.expect("answers in time")
}

pub fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    request_with(method, path, "connection: close\r\n", body)
}

pub fn request_with(method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    exchange(address, &request("POST", path, &body.to_string())).await
}

pub async fn get(address: SocketAddr, path: &str) -> Response {
    exchange(address, &request("GET", path, "")).await
}

/// The value of a metric without labels of its own, by its name in front of the labels.
pub async fn metric(address: SocketAddr, name: &str) -> f64 {
    let page = get(address, "/metrics").await.body();
    let line = page.lines().find(|line| line.split(['{', ' ']).next() == Some(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

/// Polls until `name` is `value`.
pub async fn until_metric(address: SocketAddr, name: &str, value: f64) {
    let poll = async {
        while metric(address, name).await != value {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(BOUND, poll).await.unwrap_or_else(|_| panic!("{name} never became {value}"));
}
