//! What lets an operator try and understand routing: the shadow, the split, and decisions that explain themselves.

use serde::{Deserialize, Serialize};

use super::scalar;
use crate::core::shadow::Sampling;

/// The traffic played under the mode that it does not go by, for the metrics.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shadow {
    /// Its models of the workers' caches hold one block in so many. off: there is no shadow.
    #[serde(with = "sampling")]
    pub one_in: Option<Sampling>,
}

impl Default for Shadow {
    fn default() -> Self {
        Shadow { one_in: Some(Sampling::Auto) }
    }
}

mod sampling {
    use serde::{Deserializer, Serializer};

    use super::{Sampling, scalar};

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Sampling>, D::Error> {
        scalar::checked(from, |text| match text {
            "off" | "false" => Ok(None),
            "auto" => Ok(Some(Sampling::Auto)),
            text => match text.parse().ok().and_then(Sampling::one_in) {
                Some(sampling) => Ok(Some(sampling)),
                None => Err(format!(
                    "`{text}` is not auto, off, 1, or a power of two from 4 to {}",
                    Sampling::MOST
                )),
            },
        })
    }

    pub fn serialize<S: Serializer>(sampling: &Option<Sampling>, to: S) -> Result<S::Ok, S::Error> {
        match sampling {
            None => to.serialize_str("off"),
            Some(Sampling::Auto) => to.serialize_str("auto"),
            Some(Sampling::OneIn(one_in)) => to.serialize_u64(*one_in as u64),
        }
    }
}

/// A share of the traffic goes by the other mode.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Split {
    /// How much of it. 0: none.
    #[serde(deserialize_with = "scalar::share")]
    pub share: f64,
    pub by: SplitBy,
    /// How many blocks of a prompt are the root by which requests are told apart.
    #[serde(deserialize_with = "scalar::count")]
    pub root_blocks: usize,
}

impl Default for Split {
    fn default() -> Self {
        Split { share: 0.0, by: SplitBy::Prefix, root_blocks: 1 }
    }
}

/// How the two arms are kept apart.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// Prompts with one root go by one mode, on all workers.
    Prefix,
    /// As `prefix`, and each arm has its share of the workers for itself.
    Workers,
}

/// Decisions that can be looked at.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Explain {
    /// The last ones that are kept for `GET /decisions`.
    #[serde(deserialize_with = "kept")]
    pub keep: usize,
    /// Answers say in a header where they come from and why.
    pub header: bool,
}

/// Each holds the price of every worker.
const MOST_KEPT: usize = 1024;

fn kept<'de, D: serde::Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    scalar::checked(from, |text| match text.parse() {
        Ok(keep) if keep <= MOST_KEPT => Ok(keep),
        _ => Err(format!("`{text}` is not a whole number from 0 to {MOST_KEPT}")),
    })
}

impl Default for Explain {
    fn default() -> Self {
        Explain { keep: 64, header: false }
    }
}
