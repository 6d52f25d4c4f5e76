//! A worker as it is named in the config, in one spelling whatever was typed.

use std::fmt;
use std::net::IpAddr;

use serde::de::Deserializer;
use serde::{Deserialize, Serialize, Serializer};
use tokio_rustls::rustls::pki_types::ServerName;

use super::scalar;

/// Where a worker listens. Two spellings of one place are equal: the host is lower-case and the port always given.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Origin {
    https: bool,
    host: String,
    port: u16,
}

impl Origin {
    /// Reads `http://host:port` or `https://host:port`. The error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Origin, String> {
        let refuse =
            |why: &str| Err(format!("`{text}` is not a worker's address: {why}, as in http://10.0.0.7:8000"));
        let Some((https, rest)) = split_scheme(text) else {
            return refuse("write it with its scheme");
        };
        let uri: http::Uri = match format!("http://{}", rest.trim_end_matches('/')).parse() {
            Ok(uri) => uri,
            Err(_) => return refuse("write a scheme, a host and a port up to 65535"),
        };
        let authority = match uri.authority() {
            Some(authority) if uri.path() == "/" && uri.query().is_none() && !rest.contains('#') => authority,
            _ => return refuse("write it without a path or query"),
        };
        if authority.as_str().contains('@') {
            return refuse("write it without user and password");
        }
        let host = authority.host().to_ascii_lowercase();
        match authority.as_str().rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
            None => Ok(Origin { https, host, port: if https { 443 } else { 80 } }),
            Some((_, port)) => match port.parse() {
                Ok(port) if port > 0 && !host.is_empty() => Ok(Origin { https, host, port }),
                _ => refuse("the port is a number from 1 to 65535"),
            },
        }
        .and_then(|origin| match origin.https.then(|| origin.server_name()) {
            Some(Err(why)) => refuse(&why),
            Some(Ok(_)) | None => Ok(origin),
        })
    }

    /// At an IP address. `port` is not 0.
    pub fn at(https: bool, address: IpAddr, port: u16) -> Origin {
        let host = match address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        Origin { https, host, port }
    }

    /// Is spoken to in TLS.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// The host as a certificate names it.
    ///
    /// # Errors
    /// If it is a name that no certificate can have.
    pub fn server_name(&self) -> Result<ServerName<'static>, String> {
        ServerName::try_from(self.host().to_owned())
            .map_err(|_| format!("`{}` is not a name that a certificate can have", self.host()))
    }

    /// Host name or IP address, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `host:port`, as in a `Host` header.
    pub fn authority(&self) -> String {
        match (self.https, self.port) {
            (false, 80) | (true, 443) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }

    /// As short as it can be told from others, for labels: `host:port`, as in a `Host` header, or `https://host:port`.
    pub fn label(&self) -> String {
        if self.https { self.to_string() } else { self.authority() }
    }
}

/// Whether the scheme is `https`, and what follows.
fn split_scheme(text: &str) -> Option<(bool, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let https = scheme.eq_ignore_ascii_case("https");
    (https || scheme.eq_ignore_ascii_case("http")).then_some((https, rest))
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.https { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}", self.host, self.port)
    }
}

impl Serialize for Origin {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Origin {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Origin, D::Error> {
        scalar::checked(from, Origin::parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_place_are_one() {
        for text in ["http://Worker-1:80", "HTTP://worker-1/", "http://worker-1"] {
            let origin = Origin::parse(text).unwrap();
            assert_eq!(origin.to_string(), "http://worker-1:80", "{text}");
            assert_eq!(origin.authority(), "worker-1", "{text}");
        }
        for text in ["https://Worker-1:443", "HTTPS://worker-1/", "https://worker-1"] {
            let origin = Origin::parse(text).unwrap();
            assert_eq!(origin.to_string(), "https://worker-1:443", "{text}");
            assert_eq!(origin.authority(), "worker-1", "{text}");
        }
        assert!(Origin::parse("https://[::1]:8000").unwrap().server_name().is_ok());
        let six = Origin::parse("http://[::1]:8000").unwrap();
        assert_eq!((six.host(), six.port(), six.authority()), ("::1", 8000, "[::1]:8000".to_owned()));
        assert_eq!(Origin::parse("http://[::1]").unwrap().port(), 80);
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason() {
        for (text, reason) in [
            ("worker-1:8000", "scheme"),
            ("ftp://worker-1:8000", "scheme"),
            ("https://worker..1:8000", "certificate"),
            ("http://worker-1:8000/v1", "without a path"),
            ("http://worker-1:8000?x", "without a path"),
            ("http://worker-1:8000#x", "without a path"),
            ("http://me:secret@worker-1:8000", "without user"),
            ("http://worker-1:0", "from 1 to 65535"),
            ("http://worker-1:99999", "65535"),
            ("http://worker-1:", "from 1 to 65535"),
            ("http://:8000", "port"),
            ("http://", "port"),
            ("", "scheme"),
        ] {
            let error = Origin::parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
