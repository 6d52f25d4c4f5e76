//! A client's socket, in two hands: HTTP reads and writes it by [`Socket`], while whoever serves the connection sees by
//! [`Remote`] whether the client is still there, and has it told what a plain end of the connection could not.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use super::wait::Handed;

/// The side that reads and writes. Dropped, it closes the socket.
pub struct Socket {
    stream: Arc<TcpStream>,
    shared: Arc<Shared>,
}

/// What one hand tells the other.
#[derive(Default)]
struct Shared {
    /// What is being sent ends with the connection, and has not ended yet.
    unfinished: AtomicBool,
    handed: Handed,
    /// The next write is tried whatever the system says of it.
    probe: AtomicBool,
}

/// The side that looks on.
#[derive(Clone)]
pub struct Remote {
    stream: Arc<TcpStream>,
    shared: Arc<Shared>,
}

impl Socket {
    /// What is written goes out at once: a token that waits for others to fill a packet comes late.
    ///
    /// # Errors
    /// If the connection broke.
    pub fn new(stream: TcpStream) -> io::Result<(Socket, Remote)> {
        stream.set_nodelay(true)?;
        let (stream, shared) = (Arc::new(stream), Arc::<Shared>::default());
        let remote = Remote { stream: stream.clone(), shared: shared.clone() };
        Ok((Socket { stream, shared }, remote))
    }

    /// Reads without taking.
    ///
    /// # Errors
    /// If the connection broke.
    pub async fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.peek(into).await
    }
}

impl Remote {
    /// Waits until the client has ended its side, even if bytes of its stand before that which nobody reads.
    pub async fn left(&self) {
        // Ready for "priority" is ready with urgent data, which no socket here waits for, or with the other side's end.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if self.stream.ready(Interest::PRIORITY).await.is_ok_and(|ready| ready.is_read_closed()) {
            return;
        }
        // Elsewhere only those who read notice.
        std::future::pending().await
    }

    /// What is being sent ends with the connection (HTTP/1.0): until all of it is [`finished`](Remote::finished), a close is
    /// a reset, which nobody takes for the end.
    pub fn ends_by_close(&self) {
        self.shared.unfinished.store(true, Ordering::Release);
    }

    pub fn finished(&self) {
        self.shared.unfinished.store(false, Ordering::Release);
    }

    /// What was written, and whether the client has still to take some of it, as far as more was tried.
    pub fn handed(&self) -> &Handed {
        &self.shared.handed
    }

    /// Has the next write tried although the socket is full. The system calls it writable only when a third of it is free: so a client that
    /// has taken something is told from one that has not.
    pub fn probe(&self) {
        self.shared.probe.store(true, Ordering::Relaxed);
    }

    /// The client has sent more than was read.
    pub fn has_unread(&self) -> bool {
        let socket = SockRef::from(&*self.stream);
        socket.peek(&mut [MaybeUninit::uninit()]).is_ok_and(|bytes| bytes > 0)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.shared.unfinished.load(Ordering::Acquire) {
            // If that fails the connection is broken already.
            let _ = SockRef::from(&*self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let would_block = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let (room, mut read) = (buf.remaining(), 0);
            // If there was room for more then that was all: to say so here saves the call that would be told it.
            let result = self.stream.try_io(Interest::READABLE, || {
                read = self.stream.try_read_buf(buf)?;
                if (1..room).contains(&read) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            });
            match result {
                Err(error) if would_block(&error) && read == 0 => {}
                Err(error) if !would_block(&error) => return Poll::Ready(Err(error)),
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl Socket {
    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        send: impl Fn(&TcpStream) -> io::Result<usize>,
        probe: impl Fn(&SockRef) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let Poll::Ready(ready) = self.stream.poll_write_ready(cx) else {
                if self.shared.probe.swap(false, Ordering::Relaxed)
                    && let Ok(sent) = probe(&SockRef::from(&*self.stream))
                {
                    self.shared.handed.goes_on();
                    return Poll::Ready(Ok(sent));
                }
                self.shared.handed.stands();
                return Poll::Pending;
            };
            ready?;
            match send(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    self.shared.handed.goes_on();
                    return Poll::Ready(sent);
                }
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |stream| stream.try_write(buf), |socket| socket.send(buf))
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |stream| stream.try_write_vectored(bufs), |socket| socket.send_vectored(bufs))
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn pair() -> (TcpStream, Socket, Remote) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (socket, remote) = Socket::new(listener.accept().await.unwrap().0).unwrap();
        (client, socket, remote)
    }

    #[tokio::test]
    async fn what_is_written_to_a_client_goes_out_at_once() {
        let (_client, socket, _) = pair().await;
        assert!(socket.stream.nodelay().unwrap());
    }

    static PIECE: [u8; 64 << 10] = [b'x'; 64 << 10];

    /// Writes until no more goes, and says how much that was.
    fn fill(socket: &mut Socket) -> usize {
        let mut written = 0;
        while let Some(wrote) = socket.write(&PIECE).now_or_never() {
            written += wrote.unwrap();
        }
        written
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_fills_its_socket_until_it_reads() {
        let (mut client, mut socket, remote) = pair().await;
        assert!(remote.handed().awaited().is_none());
        let written = fill(&mut socket);
        assert!(remote.handed().awaited().is_some());
        let before = remote.handed().count();
        for _ in 0..2 {
            assert!(socket.write(&PIECE).now_or_never().is_none());
            remote.probe();
        }
        assert_eq!(remote.handed().count(), before, "it was tried again");
        let (_, wrote) = tokio::join!(
            async {
                let mut taken = vec![0; written];
                client.read_exact(&mut taken).await.unwrap();
            },
            socket.write(&PIECE)
        );
        assert!(
            wrote.unwrap() > 0 && remote.handed().awaited().is_none() && remote.handed().count() > before
        );
    }

    /// Of what a client takes little by little, the system tells only after much of it.
    #[tokio::test]
    async fn a_client_that_has_taken_something_is_found_out() {
        let (mut client, mut socket, remote) = pair().await;
        let written = fill(&mut socket);
        let before = remote.handed().count();
        // So much that the system has to tell the sender of the room; a third of what the socket holds would be more.
        let mut taken = 0;
        while socket.write(&PIECE).now_or_never().is_none() && remote.handed().count() == before {
            let mut some = vec![0; PIECE.len()];
            taken += client.read(&mut some).await.unwrap();
            remote.probe();
        }
        assert!(remote.handed().count() > before && taken < written / 3, "{taken} of {written}");
    }

    #[tokio::test]
    async fn what_was_sent_and_not_read_is_seen() {
        let (mut client, mut socket, remote) = pair().await;
        assert!(!remote.has_unread());
        client.write_all(b"ab").await.unwrap();
        socket.read_exact(&mut [0]).await.unwrap();
        assert!(remote.has_unread());
        socket.read_exact(&mut [0]).await.unwrap();
        drop(client);
        assert_eq!(socket.read(&mut [0]).await.unwrap(), 0);
        assert!(!remote.has_unread(), "an end is nothing to read");
    }
}
