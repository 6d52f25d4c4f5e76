//! TLS towards clients: the handshake, and the certificate, which is exchanged while running when its files are.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::socket::Socket;
use crate::config::tls::{self, Pair, Tls};
use crate::config::watch;

/// The first byte of a TLS handshake (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;

/// The certificate in force, with its key.
#[derive(Debug)]
struct Identity(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

/// What takes connections in TLS. Cheap to clone.
#[derive(Clone)]
pub struct Acceptor {
    acceptor: TlsAcceptor,
    identity: Arc<Identity>,
}

/// The files that the certificate in force came from.
pub struct Followed {
    config: Tls,
    known: Pair,
}

/// How a client has begun.
pub enum Begun {
    Secure(Box<TlsStream<Socket>>),
    /// In another protocol: plain HTTP, most likely.
    Plain(Socket),
}

impl Acceptor {
    /// # Errors
    /// If the files cannot be used; names the key.
    pub fn new(config: &Tls) -> Result<(Acceptor, Followed), String> {
        let known = config.read()?;
        let identity = Arc::new(Identity(ArcSwap::from_pointee(config.identity(&known)?)));
        let mut server = ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(|error: Error| format!("tls: {error}"))?
            .with_no_client_auth()
            .with_cert_resolver(identity.clone());
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(server));
        Ok((Acceptor { acceptor, identity }, Followed { config: config.clone(), known }))
    }

    /// Makes the handshake.
    ///
    /// # Errors
    /// If it fails, or the client has ended.
    pub async fn accept(&self, socket: Socket) -> io::Result<Begun> {
        let mut first = [0];
        match socket.peek(&mut first).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ if first[0] == HANDSHAKE => Ok(Begun::Secure(Box::new(self.acceptor.accept(socket).await?))),
            _ => Ok(Begun::Plain(socket)),
        }
    }

    /// Takes up new certificates as their files change, once both files have been the same for two looks and belong together:
    /// they are seldom written in one step. Connections that are open keep theirs. Runs for as long as it is polled.
    pub async fn follow(self, Followed { config, known }: Followed) {
        let files = config.clone();
        let take = |found: Result<Pair, String>| match found.and_then(|pair| config.identity(&pair)) {
            Ok(identity) => {
                self.identity.0.store(Arc::new(identity));
                tracing::info!(certificate = %config.certificate.display(), "the new certificate is in force");
            }
            Err(why) => {
                tracing::error!("the new certificate is refused and the old one stays in force: {why}")
            }
        };
        watch::follow(known, move || files.read(), take).await;
    }
}

/// Whether HTTP/2 was agreed on.
pub fn agreed_http2(stream: &TlsStream<Socket>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(b"h2")
}
