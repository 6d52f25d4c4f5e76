//! Certificates made for one test.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// An authority of its own, and a folder for what it issues.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    pub folder: TempDir,
}

/// A certificate and its key, in PEM.
pub struct Issued {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Authority { issuer: Issuer::new(params, key), pem, folder: TempDir::new().expect("a folder") }
    }

    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_until(names, 4096)
    }

    /// A certificate that ends with the year.
    pub fn issue_until(&self, names: &[&str], year: i32) -> Issued {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 12, 31);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Issued { certificate, key: key.serialize_pem() }
    }

    /// Writes a file into the folder.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("room for it");
        path
    }

    /// The authority's own certificate.
    pub fn pem(&self) -> &str {
        &self.pem
    }
}
