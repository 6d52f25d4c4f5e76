//! The body of a worker's response, bound to the connection that it comes over.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

use super::connection::{Connection, Fault, Pool, Tunnel};
use super::framing::{Framing, Piece};

/// Read to its end, it gives the connection back to the pool; dropped before, it closes it. What has come at once is one piece,
/// whatever pieces the worker made of it: a stream whose client is slower than its worker costs by the byte, not by the event.
pub struct Answer {
    framing: Framing,
    /// The connection can be used again.
    keeps: bool,
    /// What was read of it in advance.
    ahead: Option<Bytes>,
    connection: Option<Box<Connection>>,
    pool: Pool,
}

impl Answer {
    pub(super) fn new(framing: Framing, keeps: bool, connection: Box<Connection>, pool: Pool) -> Answer {
        let mut answer = Answer { framing, keeps, ahead: None, connection: Some(connection), pool };
        answer.notice_end();
        answer
    }

    /// After a switch of protocols: nothing of it is a body.
    pub(super) fn switched(connection: Box<Connection>, pool: Pool) -> Answer {
        Answer { framing: Framing::Length(0), keeps: false, ahead: None, connection: Some(connection), pool }
    }

    /// The whole response has been taken.
    pub fn is_over(&self) -> bool {
        self.connection.is_none() && self.ahead.is_none()
    }

    /// Ends it here, and with it the connection.
    pub fn close(&mut self) {
        self.connection = None;
        self.ahead = None;
        self.framing = Framing::Length(0);
    }

    /// After a switch of protocols: the socket.
    pub fn into_tunnel(self) -> Option<Tunnel> {
        Some(self.connection?.into_tunnel())
    }

    /// Reads the whole body in advance if it is promised to be no longer than `limit`, else `None`; it can still be taken as if it had
    /// not been read.
    ///
    /// # Errors
    /// If it broke off. Then nothing of it is left.
    pub async fn peek(&mut self, limit: u64) -> Result<Option<Bytes>, Fault> {
        if !self.framing.left().is_some_and(|length| (1..=limit).contains(&length)) {
            return Ok(None);
        }
        let mut whole = BytesMut::new();
        while let Some(frame) = self.frame().await {
            whole.extend_from_slice(frame?.data_ref().map_or(b"", |data| data));
        }
        self.ahead = Some(whole.freeze());
        Ok(self.ahead.clone())
    }

    fn notice_end(&mut self) {
        if self.framing.is_over()
            && let Some(connection) = self.connection.take()
            && self.keeps
            && connection.is_even()
        {
            self.pool.put(connection);
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, Fault>> {
        let Some(connection) = &mut self.connection else { return Poll::Ready(Ok(None)) };
        // A request that was answered before it was written goes on; if it cannot, the answer may still come.
        let _ = connection.poll_send(cx);
        loop {
            match self.framing.take(&mut connection.read)? {
                Piece::Data(data) => return Poll::Ready(Ok(Some(Frame::data(data)))),
                Piece::Trailers(trailers) => return Poll::Ready(Ok(Some(Frame::trailers(trailers)))),
                Piece::Over => return Poll::Ready(Ok(None)),
                Piece::Starved => {}
            }
            match connection.poll_read(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(Ok(_)) if self.framing == Framing::UntilClose => {
                    self.framing = Framing::Length(0);
                    return Poll::Ready(Ok(None));
                }
                Poll::Ready(Ok(_)) => return Poll::Ready(Err(Fault::Closed)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        if let Some(ahead) = self.ahead.take() {
            return Poll::Ready(Some(Ok(Frame::data(ahead))));
        }
        let piece = std::task::ready!(self.poll_piece(cx));
        match piece {
            Ok(_) => self.notice_end(),
            Err(_) => self.close(),
        }
        Poll::Ready(piece.transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_none() && self.framing.is_over()
    }

    fn size_hint(&self) -> SizeHint {
        let ahead = self.ahead.as_ref().map(|ahead| ahead.len() as u64);
        ahead.or(self.framing.left()).map(SizeHint::with_exact).unwrap_or_default()
    }
}
