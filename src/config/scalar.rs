//! Scalars that are checked while they are read, so that an error knows the key and the line it is on.
//!
//! Durations are written as `4s` or `1m 30s`, sizes as `64MiB` or a bare number of bytes. Where a timer can be switched off
//! it is written `off`.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::time::Duration;

use bytesize::ByteSize;
use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;

/// Runs a scalar of any YAML type through a parser *inside* the visitor: only errors raised there are given a line by the
/// YAML reader.
struct Checked<T, F> {
    parse: F,
    kind: PhantomData<T>,
}

impl<T, F: FnOnce(&str) -> Result<T, String>> Visitor<'_> for Checked<T, F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a single value")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text.trim()).map_err(E::custom)
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<T, E> {
        self.visit_str(if truth { "true" } else { "false" })
    }
    fn visit_unit<E: de::Error>(self) -> Result<T, E> {
        self.visit_str("")
    }
}

/// Reads one scalar and checks it with `parse`.
pub fn checked<'de, D, T>(from: D, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
{
    from.deserialize_any(Checked { parse, kind: PhantomData })
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| format!("`{text}` is not a duration; write a number and a unit, as in 4s or 500ms"))
}

pub fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("must be longer than zero".to_owned()),
        duration => Ok(duration),
    }
}

/// `#[serde(with = ..)]` for a duration above zero.
pub mod duration {
    use super::*;

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        checked(from, parse_positive_duration)
    }
    pub fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*duration))
    }
}

/// `#[serde(with = ..)]` for a duration that may be zero.
pub mod duration_or_zero {
    use super::*;

    pub use super::duration::serialize;
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        checked(from, parse_duration)
    }
}

/// `#[serde(with = ..)]` for a timer that can be switched off.
pub mod timer {
    use super::*;

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        checked(from, |text| match text {
            // A YAML 1.1 reader may have turned the word into a boolean already.
            "off" | "false" => Ok(None),
            text => parse_positive_duration(text)
                .map(Some)
                .map_err(|error| format!("{error}; `off` switches this timer off")),
        })
    }
    pub fn serialize<S: Serializer>(timer: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match timer {
            Some(duration) => super::duration::serialize(duration, to),
            None => to.serialize_str("off"),
        }
    }
}

/// `#[serde(with = ..)]` for a limit that can be switched off.
pub mod limit {
    use super::*;

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
        checked(from, |text| match text {
            "off" | "false" => Ok(None),
            text => {
                parse_count(text).map(Some).map_err(|error| format!("{error}; `off` switches this limit off"))
            }
        })
    }
    pub fn serialize<S: Serializer>(limit: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
        match limit {
            Some(limit) => to.serialize_u64(*limit as u64),
            None => to.serialize_str("off"),
        }
    }
}

/// `#[serde(with = ..)]` for a number of bytes above zero.
pub mod size {
    use super::*;

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
        checked(from, |text| match text.parse::<ByteSize>().map(|size| usize::try_from(size.as_u64())) {
            Ok(Ok(0)) => Err("must be more than zero".to_owned()),
            Ok(Ok(bytes)) => Ok(bytes),
            _ => Err(format!("`{text}` is not a size; write a number of bytes or a unit, as in 64MiB")),
        })
    }
    pub fn serialize<S: Serializer>(bytes: &usize, to: S) -> Result<S::Ok, S::Error> {
        let bytes = *bytes as u64;
        for (unit, name) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
            if bytes.is_multiple_of(unit) {
                return to.collect_str(&format_args!("{}{name}", bytes / unit));
            }
        }
        to.serialize_u64(bytes)
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be more than zero".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err(format!("`{text}` is not a whole number")),
    }
}

/// `#[serde(deserialize_with = ..)]` for a whole number above zero.
pub fn count<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    checked(from, parse_count)
}

/// `#[serde(deserialize_with = ..)]` for a number that retries may be measured by: tower's budget takes no more.
pub fn budget_ratio<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    checked(from, |text| match text.parse::<f64>() {
        Ok(number) if (0.0..=1000.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be a number from 0 to 1000".to_owned()),
        Err(_) => Err(format!("`{text}` is not a number")),
    })
}

/// `#[serde(deserialize_with = ..)]` for a share.
pub fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    checked(from, |text| match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be a number from 0 to 1".to_owned()),
        Err(_) => Err(format!("`{text}` is not a number")),
    })
}

/// `#[serde(deserialize_with = ..)]` for retries a second: tower's budget counts them over its window in 32 bits.
pub fn budget_reserve<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    checked(from, |text| match text.parse::<usize>() {
        Ok(number) if number <= 1_000_000 => Ok(number),
        Ok(_) => Err("must be a whole number from 0 to 1000000".to_owned()),
        Err(_) => Err(format!("`{text}` is not a whole number")),
    })
}

/// `#[serde(deserialize_with = ..)]` for a whole number above zero, or nothing.
pub fn optional_count<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    checked(from, |text| if text.is_empty() { Ok(None) } else { parse_count(text).map(Some) })
}

fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        Ok(_) => Err("must be a number above zero".to_owned()),
        Err(_) => Err(format!("`{text}` is not a number")),
    }
}

/// `#[serde(deserialize_with = ..)]` for a finite number above zero.
pub fn positive<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    checked(from, parse_positive)
}

/// `#[serde(deserialize_with = ..)]` for a finite number above zero, or nothing.
pub fn optional_positive<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    checked(from, |text| if text.is_empty() { Ok(None) } else { parse_positive(text).map(Some) })
}

/// `#[serde(deserialize_with = ..)]` for a finite number that is not negative.
pub fn not_negative<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    checked(from, |text| match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) => Err("must be a number of zero or more".to_owned()),
        Err(_) => Err(format!("`{text}` is not a number")),
    })
}

/// `#[serde(deserialize_with = ..)]` for an address to listen on. Port 0 is allowed: the system picks one, and the log tells.
pub fn listen<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    checked(from, |text| {
        text.parse().map_err(|_| {
            format!("`{text}` is not an address to listen on; write an IP address and a port up to 65535, as in 0.0.0.0:8080")
        })
    })
}
