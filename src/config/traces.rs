//! `log.traces`: where spans of requests go.

use serde::{Deserialize, Serialize};

use super::{Origin, scalar};

/// OpenTelemetry traces over OTLP.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Traces {
    /// The collector: `http://`, host and port, where it takes OTLP over HTTP.
    #[serde(with = "collector")]
    pub to: Option<String>,
    /// Of the requests that come without a trace context, the share that begins one.
    #[serde(deserialize_with = "scalar::share")]
    pub share: f64,
}

impl Default for Traces {
    fn default() -> Self {
        Traces { to: None, share: 1.0 }
    }
}

fn checked(text: &str) -> Result<String, String> {
    let origin = Origin::parse(text)?;
    if !origin.to_string().starts_with("http://") {
        return Err(format!("`{text}` asks for TLS, which spans are not sent in; write http://"));
    }
    Ok(origin.to_string())
}

mod collector {
    use serde::{Deserializer, Serializer};

    use super::scalar;

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
        scalar::checked(from, |text| match text {
            "off" | "false" => Ok(None),
            text => super::checked(text).map(Some),
        })
    }

    pub fn serialize<S: Serializer>(to: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(to.as_deref().unwrap_or("off"))
    }
}
