//! After a switch of protocols (websockets for `/v1/realtime`): the client's socket and the worker's are joined, and bytes go
//! both ways until one side ends.

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};

use super::place::Placed;
use crate::fleet::connection::Tunnel;

/// A worker's side that waits for its client's, with the request's place at the worker.
pub struct Tunnelled {
    pub worker: Tunnel,
    pub placed: Box<Placed>,
}

impl Tunnelled {
    /// Joins it with the client's socket, of which `early` was read already, until either side ends.
    ///
    /// # Errors
    /// If either side breaks.
    pub async fn join(self, mut client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes) -> io::Result<()> {
        let Tunnelled { mut worker, placed } = self;
        client.write_all(&worker.early).await?;
        client.flush().await?;
        worker.stream.write_all(&early).await?;
        worker.stream.flush().await?;
        let (up, down) = copy_bidirectional(&mut client, &mut worker.stream).await?;
        tracing::debug!(worker = %placed.worker.url, up, down, "a tunnel has ended");
        Ok(())
    }
}
