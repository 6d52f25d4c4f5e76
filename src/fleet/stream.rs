//! A socket to a worker, plain or in TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::config::{Origin, WorkerTls, watch};

/// A connection to a worker. What is written goes out at once: the end of a request must not wait for its beginning to be confirmed.
///
/// # Errors
/// If it does not come about.
pub async fn connect(origin: &Origin) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((origin.host(), origin.port())).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// How connections to `https://` workers are secured. Cheap to clone.
#[derive(Clone)]
pub struct Secure {
    client: Arc<ArcSwap<ClientConfig>>,
    name: Option<ServerName<'static>>,
}

/// The authorities in force, and where they came from.
pub struct Followed {
    secure: Secure,
    config: WorkerTls,
    known: Option<Vec<u8>>,
}

impl Secure {
    /// # Errors
    /// Names the key at fault.
    pub fn new(config: &WorkerTls) -> Result<(Secure, Followed), String> {
        let name = config.name_override()?;
        let known = config.read()?;
        let client = config.client(known.as_deref())?;
        let secure = Secure { client: Arc::new(ArcSwap::from_pointee(client)), name };
        let followed = Followed { secure: secure.clone(), config: config.clone(), known };
        Ok((secure, followed))
    }

    /// # Errors
    /// If the worker's certificate is not accepted, or it does not speak TLS.
    pub async fn wrap(&self, stream: TcpStream, origin: &Origin) -> io::Result<Stream> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => origin.server_name().map_err(io::Error::other)?,
        };
        let connector = TlsConnector::from(self.client.load_full());
        Ok(Stream::Tls(Box::new(connector.connect(name, stream).await?)))
    }
}

impl Followed {
    /// Takes up other authorities as their file changes, for new connections. Runs for as long as it is polled.
    pub async fn follow(self) {
        let Followed { secure, config, known } = self;
        if known.is_none() {
            return;
        }
        let file = config.clone();
        let take = |found: Result<Option<Vec<u8>>, String>| match found
            .and_then(|authorities| config.client(authorities.as_deref()))
        {
            Ok(client) => {
                secure.client.store(Arc::new(client));
                tracing::info!("the workers' new authorities are in force");
            }
            Err(why) => {
                tracing::error!("the workers' new authorities are refused and the old ones stay: {why}");
            }
        };
        watch::follow(known, move || file.read(), take).await;
    }
}

pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }
    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_to_a_worker_goes_out_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = Origin::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        assert!(connect(&origin).await.unwrap().nodelay().unwrap());
    }
}
