//! What must be known of a target before it can be measured: its model, its engines, how many words make a prompt of the
//! wanted size, and whether it tells how much of a prompt was cached.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::experiment::counters::{CacheConfig, Workers};
use crate::experiment::exchange::Client;
use crate::experiment::prompts::{Api, Template, Use, Writer};
use crate::experiment::sizing::{self, DEFAULT_BLOCK_SIZE, Sizes, Wanted};
use crate::experiment::target::Target;

/// Words of the probe that learns what the target says of its usage.
const PROBE_WORDS: usize = 600;
/// The same probe may meet a worker that has not seen it, and older engines leave a count of zero out: it is sent this
/// often before the target is taken not to say `cached_tokens` at all.
const PROBES: usize = 20;

/// What is measured, and with which prompts.
#[derive(Clone, Debug)]
pub struct Subject {
    /// By which reports name it.
    pub name: String,
    pub target: Target,
    /// The engines behind the target; may be empty, then nothing is known of their counters.
    pub workers: Workers,
    pub template: Template,
    pub sizes: Sizes,
    /// The cache of one of its workers.
    pub cache: CacheConfig,
    /// The mode to put the target in before each of its runs.
    pub mode: Option<ModeSwitch>,
}

/// A mode of a warmroute, and its admin listener, where that is switched.
#[derive(Clone, Debug)]
pub struct ModeSwitch {
    pub admin: Target,
    pub mode: String,
}

impl ModeSwitch {
    /// The mode that the proxy is in.
    ///
    /// # Errors
    /// If `admin` is no admin listener of a warmroute.
    pub async fn now(admin: Target) -> Result<ModeSwitch> {
        let (status, text) = admin.get("/mode").await?;
        let mode = || Some(serde_json::from_str::<Value>(&text).ok()?["mode"].as_str()?.to_owned());
        match (status.is_success(), mode()) {
            (true, Some(mode)) => Ok(ModeSwitch { admin, mode }),
            _ => bail!("{admin}/mode: status {status}; --admin wants the admin listener of a warmroute"),
        }
    }

    /// Switches the proxy to this mode.
    ///
    /// # Errors
    /// If it refuses.
    pub async fn enter(&self) -> Result<()> {
        let (status, text) = self.admin.put("/mode", &self.mode).await?;
        ensure!(status.is_success(), "PUT {}/mode: status {status}: {text}", self.admin);
        Ok(())
    }
}

/// How to ask, and for prompts of which sizes.
#[derive(Clone, Debug)]
pub struct Wish {
    pub api: Api,
    /// The first that the target lists if absent.
    pub model: Option<String>,
    pub prefix_tokens: u32,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    pub timeout: Duration,
}

impl Subject {
    /// Asks the target and its engines.
    ///
    /// # Errors
    /// If they cannot be measured; each error names the address, the flag or the engine's flag to change.
    pub async fn learn(name: &str, target: Target, workers: Workers, wish: &Wish) -> Result<Subject> {
        workers.read().await?;
        let model = match &wish.model {
            Some(model) => model.clone(),
            None => first_model(&target).await?,
        };
        let template = Template { api: wish.api, model, output_tokens: wish.output_tokens };
        let probe_tokens = require_cached_tokens(&target, &template, wish.timeout).await?;
        let cache = workers.cache_config().await?;
        let block_size = cache.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).max(1);
        let wanted =
            Wanted { shared_tokens: wish.prefix_tokens, prompt_tokens: wish.prompt_tokens, block_size };
        let sizes: Sizes = match sizing::by_tokenizer(&target, &template, wanted).await? {
            Some(sizes) => sizes,
            None => sizing::by_probe(PROBE_WORDS, probe_tokens, wanted),
        };
        Ok(Subject { name: name.to_owned(), target, workers, template, sizes, cache, mode: None })
    }
}

/// The id of the first model that the target lists.
async fn first_model(target: &Target) -> Result<String> {
    let (status, text) = target.get("/v1/models").await?;
    let id = || Some(serde_json::from_str::<Value>(&text).ok()?["data"][0]["id"].as_str()?.to_owned());
    match (status.is_success(), id()) {
        (true, Some(id)) => Ok(id),
        _ => bail!("{target}/v1/models: status {status}, no model listed; name one with --model"),
    }
}

/// Makes sure that answers tell how many prompt tokens were cached; the prompt tokens of the probe.
async fn require_cached_tokens(target: &Target, template: &Template, timeout: Duration) -> Result<u32> {
    let text = Writer::new(u64::MAX, [u64::MAX; 3], 0).text(Use::Probe, 0, PROBE_WORDS);
    let (head, tail) = text.split_at(text.len() / 2);
    let body = Template { output_tokens: 2, ..template.clone() }.body(head.trim(), tail.trim());
    for _ in 0..PROBES {
        let mut client = Client::new(target.clone(), false, timeout);
        let sample = client
            .send(template.api.path(), body.clone())
            .await
            .with_context(|| format!("{target} cannot be measured"))?;
        if sample.usage.cached_tokens.is_some() {
            return Ok(sample.usage.prompt_tokens);
        }
    }
    bail!(
        "{target}: the answers' usage lacks prompt_tokens_details.cached_tokens, also for a prompt sent {PROBES} times; \
         start every vLLM worker with --enable-prompt-tokens-details"
    )
}
