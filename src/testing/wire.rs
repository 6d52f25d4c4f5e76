//! A client that writes what it is given and sees every byte of what comes back.

use std::io;
use std::net::SocketAddr;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::message::{Head, Message, Reader};
use super::soon;

/// A response.
pub type Answer = Message;

impl Message {
    pub fn status(&self) -> u16 {
        self.head.second().parse().unwrap_or(0)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One client connection.
pub struct Wire {
    reader: Reader<OwnedReadHalf>,
    write: OwnedWriteHalf,
}

impl Wire {
    pub async fn connect(to: SocketAddr) -> Wire {
        let stream = TcpStream::connect(to).await.expect("the proxy takes connections");
        Wire::of(stream)
    }

    /// On a connection that is open already.
    pub fn of(stream: TcpStream) -> Wire {
        stream.set_nodelay(true).expect("an option of the socket");
        let (read, write) = stream.into_split();
        Wire { reader: Reader::new(read), write }
    }

    /// Writes bytes as they are.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.write.write_all(bytes.as_ref()).await.expect("the connection is open");
    }

    /// Writes bytes as they are; the other side may be gone.
    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.write.write_all(bytes.as_ref()).await
    }

    /// Ends the sending side.
    pub async fn finish_sending(&mut self) {
        self.write.shutdown().await.expect("the connection is open");
    }

    /// The next response head.
    pub async fn head(&mut self) -> Option<(Head, Vec<u8>)> {
        soon("a response head", self.reader.head()).await.ok().flatten()
    }

    /// Whatever comes next; empty at the end or if the connection broke.
    pub async fn piece(&mut self) -> Vec<u8> {
        soon("more of a response", self.reader.piece()).await.unwrap_or_default()
    }

    /// The next response as a whole, or as much as came of it; `None` if nothing came.
    pub async fn answer(&mut self, method: &str) -> Option<Answer> {
        let (head, raw) = self.head().await?;
        Some(self.body(head, raw, method).await)
    }

    /// The body after a head.
    pub async fn body(&mut self, head: Head, raw: Vec<u8>, method: &str) -> Answer {
        soon("a response body", self.reader.response_body(head, raw, method)).await
    }

    /// Sends a request with a body and waits for the answer.
    pub async fn post(&mut self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        let body = body.as_ref();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: proxy.test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send([head.as_bytes(), body].concat()).await;
        self.answer("POST").await.expect("an answer")
    }

    /// Sends a request without a body and waits for the answer.
    pub async fn get(&mut self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: proxy.test\r\n\r\n")).await;
        self.answer("GET").await.expect("an answer")
    }

    /// Everything until the other side ends the connection.
    ///
    /// # Errors
    /// If the connection was broken off instead.
    pub async fn rest(&mut self) -> io::Result<Vec<u8>> {
        soon("the connection to end", async {
            let mut all = Vec::new();
            loop {
                match self.reader.piece().await? {
                    piece if piece.is_empty() => return Ok(all),
                    piece => all.extend(piece),
                }
            }
        })
        .await
    }

    /// Waits for the other side to end the connection.
    pub async fn ended(&mut self) {
        soon("the connection to end", self.reader.ended()).await;
    }

    /// Breaks the connection off.
    pub fn reset(self) {
        let socket = socket2::SockRef::from(self.write.as_ref());
        socket.set_linger(Some(std::time::Duration::ZERO)).expect("an option of the socket");
    }
}
