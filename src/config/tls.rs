//! Certificates and keys, as the config names them. They are read and checked here, so that what is wrong with them is told
//! with the key that names the file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

/// `tls:` what clients are shown.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificate and those between it and its authority, in PEM.
    pub certificate: PathBuf,
    /// The certificate's private key, in PEM.
    pub key: PathBuf,
}

/// `workers.tls:` how workers with an `https://` address are known to be who they say.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerTls {
    /// The authorities that may have signed their certificates, in PEM; the public ones if absent.
    pub ca: Option<PathBuf>,
    /// The name that their certificates must have; the host of their address if absent.
    pub server_name: Option<String>,
    /// Takes any certificate: whoever sits between the proxy and a worker can read and change what passes.
    pub skip_verification: bool,
}

/// The two files of [`Tls`] as they were found.
#[derive(Clone, PartialEq)]
pub struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// # Errors
/// Names the key.
pub fn read(key: &str, path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{key}: {} cannot be read: {error}", path.display()))
}

/// At least one certificate.
///
/// # Errors
/// Names the key, and says what else is in the file.
pub fn certificates(key: &str, path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    match CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>() {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{key}: {} holds no certificate in PEM", path.display())),
        Err(error) => Err(format!("{key}: {} is not PEM: {error}", path.display())),
    }
}

impl Tls {
    /// Reads both files.
    ///
    /// # Errors
    /// Names the key of the one that cannot be read.
    pub fn read(&self) -> Result<Pair, String> {
        let certificate = read("tls.certificate", &self.certificate)?;
        Ok(Pair { certificate, key: read("tls.key", &self.key)? })
    }

    /// What clients are shown, if certificate and key can be used and belong together.
    ///
    /// # Errors
    /// Names the key of the file at fault. Nothing of the files is in it.
    pub fn identity(&self, pair: &Pair) -> Result<CertifiedKey, String> {
        let chain = certificates("tls.certificate", &self.certificate, &pair.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&pair.key)
            .map_err(|_| format!("tls.key: {} holds no private key in PEM", self.key.display()))?;
        CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                let (certificate, key) = (self.certificate.display(), self.key.display());
                format!("tls.key: {key} is not the key of tls.certificate: {certificate}")
            }
            Error::InvalidCertificate(error) => {
                format!("tls.certificate: {} cannot be used: {error:?}", self.certificate.display())
            }
            error => format!("tls.key: {} cannot be used: {error}", self.key.display()),
        })
    }
}

impl WorkerTls {
    /// Reads the file of authorities; `None` if none is named.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(&self) -> Result<Option<Vec<u8>>, String> {
        self.ca.as_ref().map(|path| read(CA, path)).transpose()
    }

    /// How connections to workers are made, with the authorities that were read.
    ///
    /// # Errors
    /// Names the key at fault.
    pub fn client(&self, authorities: Option<&[u8]>) -> Result<ClientConfig, String> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("workers.tls: {error}"))?;
        self.name_override()?;
        let named = self.ca.as_deref().zip(authorities);
        let mut config = match (named, self.skip_verification) {
            (Some(_), true) => {
                return Err(
                    "workers.tls.skip_verification: with it, workers.tls.ca would mean nothing".to_owned()
                );
            }
            (None, true) => {
                builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody(provider())))
            }
            (Some((path, pem)), false) => builder.with_root_certificates(trusted(path, pem)?),
            (None, false) => {
                let public = webpki_roots::TLS_SERVER_ROOTS.iter().cloned();
                builder.with_root_certificates(RootCertStore::from_iter(public))
            }
        }
        .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    /// The name that stands for every worker's own.
    ///
    /// # Errors
    /// If it is none that a certificate can have.
    pub fn name_override(&self) -> Result<Option<ServerName<'static>>, String> {
        let Some(name) = &self.server_name else { return Ok(None) };
        match ServerName::try_from(name.clone()) {
            Ok(name) => Ok(Some(name)),
            Err(_) => {
                Err(format!("workers.tls.server_name: `{name}` is not a name that a certificate can have"))
            }
        }
    }
}

const CA: &str = "workers.tls.ca";

fn trusted(path: &Path, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for authority in certificates(CA, path, pem)? {
        store.add(authority).map_err(|error| {
            format!("{CA}: {} holds a certificate that cannot be used: {error}", path.display())
        })?;
    }
    Ok(store)
}

/// Takes any certificate, as `workers.tls.skip_verification` says; only that the other side has its key is still checked.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
