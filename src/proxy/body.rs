//! Reads a request body under its cap, and under the one that all bodies have together. The bytes that are read here are the
//! bytes that are sent on.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use prometheus::IntGauge;
use tokio::time::timeout;

use super::error::ProxyError;

/// Room made in advance for a body, whatever length the client promises.
const FIRST_ROOM: usize = 1 << 20;
/// How long the rest of a refused body is read and thrown away, so that the client gets to read why instead of a reset.
const LINGER: Duration = Duration::from_secs(10);

/// The limits on bodies.
pub struct Caps {
    /// Of one.
    pub each: usize,
    /// Of all that are held at once.
    pub all: usize,
    /// Between two pieces.
    pub idle: Option<Duration>,
}

/// Counts the bytes of a body for as long as they are held.
#[derive(Debug)]
pub struct Held {
    all: IntGauge,
    bytes: i64,
}

impl Held {
    pub fn none(all: &IntGauge) -> Held {
        Held { all: all.clone(), bytes: 0 }
    }

    /// Counts more bytes, if all that are held then are no more than `most`. What came, not what was promised: a promise
    /// takes no memory.
    fn grow(&mut self, more: usize, most: usize) -> bool {
        let more = i64::try_from(more).unwrap_or(i64::MAX);
        self.all.add(more);
        self.bytes += more;
        usize::try_from(self.all.get()).is_ok_and(|held| held <= most)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.sub(self.bytes);
    }
}

/// Reads the whole body. One that came in a single piece is not copied. A client that `waits` (`Expect: 100-continue`) is
/// told to go on by the first read.
///
/// # Errors
/// Larger than its cap, or promised to be; no room left for all; no byte for too long; or the client left.
pub async fn read(
    mut body: Incoming,
    waits: bool,
    caps: &Caps,
    held: &mut Held,
) -> Result<Bytes, ProxyError> {
    let &Caps { each: limit, all, idle } = caps;
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let promised = body.size_hint().exact().unwrap_or(0);
    if promised > limit as u64 {
        if !waits {
            linger(body, limit);
        }
        return Err(ProxyError::BodyTooLarge { limit });
    }
    let promised = usize::try_from(promised).unwrap_or(limit);
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(piece) = next_piece(&mut body, idle).await? {
        if first.len() + rest.len() + piece.len() > limit {
            linger(body, limit);
            return Err(ProxyError::BodyTooLarge { limit });
        }
        if !held.grow(piece.len(), all) {
            linger(body, limit);
            return Err(ProxyError::NoRoom { limit: all });
        }
        if first.is_empty() && rest.is_empty() {
            first = piece;
            continue;
        }
        if rest.is_empty() {
            rest.reserve(promised.min(FIRST_ROOM).max(first.len() + piece.len()));
            rest.extend_from_slice(&std::mem::take(&mut first));
        } else if rest.capacity() < promised && rest.len() + piece.len() > rest.capacity() {
            // So much has come that the promise can be trusted; grown by doubling, it would be copied and held in part twice.
            rest.reserve(promised - rest.len());
        }
        rest.extend_from_slice(&piece);
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}

/// The next data; trailers of a request mean nothing to an engine and are left out.
async fn next_piece(body: &mut Incoming, idle: Option<Duration>) -> Result<Option<Bytes>, ProxyError> {
    loop {
        let next = match idle {
            None => body.frame().await,
            Some(idle) => within(idle, body.frame()).await.ok_or(ProxyError::BodyStalled(idle))?,
        };
        match next {
            None => return Ok(None),
            Some(Err(error)) => return Err(ProxyError::BodyBroken(error)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// As `timeout`, with no timer for what is there at the second look: hyper has most bodies in hand, and hands them over by then.
async fn within<F: Future + Unpin>(limit: Duration, mut wanted: F) -> Option<F::Output> {
    let mut looked = false;
    let soon = poll_fn(|cx| match wanted.poll_unpin(cx) {
        Poll::Ready(found) => Poll::Ready(Some(found)),
        Poll::Pending if looked => Poll::Ready(None),
        Poll::Pending => {
            looked = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    });
    match soon.await {
        Some(found) => Some(found),
        None => timeout(limit, wanted).await.ok(),
    }
}

/// Reads on for a while, as much again as a body may have.
fn linger(mut body: Incoming, mut room: usize) {
    tokio::spawn(timeout(LINGER, async move {
        while let Some(Ok(frame)) = body.frame().await {
            let read = frame.data_ref().map_or(0, Bytes::len);
            match room.checked_sub(read) {
                Some(left) => room = left,
                None => return,
            }
        }
    }));
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_does_not_come_is_waited_for_no_longer_than_the_limit() {
        let limit = Duration::from_secs(3);
        let begun = Instant::now();
        assert_eq!(within(limit, pending::<()>()).await, None);
        assert_eq!(begun.elapsed().as_secs(), 3);
        assert_eq!(within(limit, ready(1)).await, Some(1));
        let late = Box::pin(async {
            tokio::time::sleep(limit / 2).await;
            2
        });
        assert_eq!(within(limit, late).await, Some(2));
    }
}
