//! The settings of one simulated worker. `Default` is the one place where their defaults are.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::model::{BadSpec, Spec};

/// One worker. Names follow vLLM's options where there is one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Port 0: any free one.
    pub listen: SocketAddr,
    /// The served model's name.
    pub model: String,
    /// Names of LoRA adapters that are served too; each has a cache namespace of its own.
    pub lora_modules: Vec<String>,
    /// Longest prompt and answer together, in tokens. Default: what the KV cache can hold.
    pub max_model_len: Option<u32>,
    /// Token ids are below this. At least 1,000.
    pub vocab_size: u32,
    /// If set, paths under /v1 want it as a bearer token.
    pub api_key: Option<ApiKey>,
    /// Whether `usage` tells cached tokens. Off in vLLM unless asked for, so off here.
    pub enable_prompt_tokens_details: bool,
    /// Whether every response has an `x-request-id`.
    pub enable_request_id_headers: bool,
    /// Requests in flight beyond this get a 503. Default: no limit.
    pub max_num_queued_reqs: Option<usize>,
    /// Tokens of a chat answer whose request sets no limit; it then ends with `stop`.
    pub answer_tokens: u32,
    /// Model seconds that pass in a real second, above 0. Everything that `/metrics` tells is in model seconds, except
    /// `process_start_time_seconds` and the `_created` times.
    pub time_scale: f64,
    /// How long an idle connection stays open after a response, in seconds; uvicorn's 5.
    pub keep_alive_seconds: f64,
    /// The worker itself: cache, speeds, scheduler. `token_events` is always on.
    pub engine: Spec,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            model: "warmroute-sim".to_owned(),
            lora_modules: Vec::new(),
            max_model_len: None,
            vocab_size: 151_936,
            api_key: None,
            enable_prompt_tokens_details: false,
            enable_request_id_headers: false,
            max_num_queued_reqs: None,
            answer_tokens: 128,
            time_scale: 1.0,
            keep_alive_seconds: 5.0,
            engine: Spec::default(),
        }
    }
}

/// A secret: shown neither by `Debug` nor when a config is written out.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    pub fn new(key: impl Into<String>) -> ApiKey {
        ApiKey(key.into())
    }

    pub(super) fn is(&self, given: &str) -> bool {
        self.0 == given
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(set)")
    }
}

impl Serialize for ApiKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("(set)")
    }
}

/// Why an [`EngineConfig`] is refused.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("engine.{0}")]
    Engine(#[from] BadSpec),
    #[error("`{key}` must be {must}, got {got}")]
    Range { key: &'static str, must: &'static str, got: f64 },
    #[error(
        "`max_model_len` is {asked}, but the KV cache holds {fits} tokens (`engine.num_blocks`, less one, times `engine.block_size`)"
    )]
    MaxModelLen { asked: u32, fits: u64 },
    #[error("`model` and `lora_modules` need names")]
    NoName,
}

impl EngineConfig {
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.engine.check()?;
        let positive = |key, got: f64| {
            let good = got > 0.0 && got.is_finite();
            if good { Ok(()) } else { Err(ConfigError::Range { key, must: "a number above 0", got }) }
        };
        positive("time_scale", self.time_scale)?;
        positive("keep_alive_seconds", self.keep_alive_seconds)?;
        positive("answer_tokens", f64::from(self.answer_tokens))?;
        if self.vocab_size < 1000 {
            let got = f64::from(self.vocab_size);
            return Err(ConfigError::Range { key: "vocab_size", must: "at least 1000", got });
        }
        if self.model.is_empty() || self.lora_modules.iter().any(String::is_empty) {
            return Err(ConfigError::NoName);
        }
        let (asked, fits) = (self.max_model_len(), self.cache_tokens());
        if asked < 2 || u64::from(asked) > fits {
            return Err(ConfigError::MaxModelLen { asked, fits });
        }
        Ok(())
    }

    /// Tokens that the KV cache can hold.
    pub fn cache_tokens(&self) -> u64 {
        u64::from(self.engine.usable_blocks()) * u64::from(self.engine.block_size)
    }

    pub(super) fn max_model_len(&self) -> u32 {
        self.max_model_len.unwrap_or(self.cache_tokens().min(1 << 30) as u32)
    }

    pub(super) fn keep_alive(&self) -> Duration {
        Duration::from_secs_f64(self.keep_alive_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_good_and_the_key_stays_secret() {
        let config = EngineConfig { api_key: Some(ApiKey::new("sekret")), ..EngineConfig::default() };
        config.check().unwrap();
        assert!(!format!("{config:?}").contains("sekret"));
        assert!(!serde_yaml::to_string(&config).unwrap().contains("sekret"));
    }

    #[test]
    fn bad_settings_are_named() {
        let mut config = EngineConfig { max_model_len: Some(9345), ..EngineConfig::default() };
        assert!(
            config
                .check()
                .unwrap_err()
                .to_string()
                .contains("`max_model_len` is 9345, but the KV cache holds 9344")
        );
        config = EngineConfig { time_scale: 0.0, ..EngineConfig::default() };
        assert_eq!(config.check().unwrap_err().to_string(), "`time_scale` must be a number above 0, got 0");
        config = EngineConfig::default();
        config.engine.num_blocks = 1;
        assert_eq!(config.check().unwrap_err().to_string(), "engine.`num_blocks` must be at least 2, got 1");
        assert!(
            serde_yaml::from_str::<EngineConfig>("blocks: 3").unwrap_err().to_string().contains("blocks")
        );
    }
}
