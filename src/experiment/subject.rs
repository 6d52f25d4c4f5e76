//! What must be known of a target before it can be measured: its model, its engines, and whether it tells how much of a prompt
//! was cached.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::experiment::counters::{self, Belief, CacheConfig, Snapshot, Workers};
use crate::experiment::exchange::Client;
use crate::experiment::figures::Counted;
use crate::experiment::load::Finished;
use crate::experiment::prompts::{Api, Template, Text, Use, Writer};
use crate::experiment::target::Target;

/// Words of the probe that learns what the target says of its usage.
pub const PROBE_WORDS: usize = 600;
/// Block size of a vLLM that does not say its own.
const DEFAULT_BLOCK_SIZE: u32 = 16;
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
    /// Tokens that its model made of a prompt of [`PROBE_WORDS`] words.
    pub probe_tokens: u32,
    /// The cache of one of its workers.
    pub cache: CacheConfig,
    /// The mode to put the target in before each of its runs.
    pub mode: Option<ModeSwitch>,
    /// The admin listener of the warmroute that the target is, to ask what it believed.
    pub admin: Option<Target>,
}

/// What engines and proxy had counted at one time.
#[derive(Clone, Debug)]
pub struct Counters {
    engines: Snapshot,
    belief: Option<Belief>,
}

/// How long counters may lag behind the answers; vLLM updates them just after the last event of an answer.
const COUNTERS_SETTLE: Duration = Duration::from_secs(2);

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

/// How to ask.
#[derive(Clone, Debug)]
pub struct Wish {
    pub api: Api,
    /// The first that the target lists if absent.
    pub model: Option<String>,
    pub output_tokens: u32,
    pub timeout: Duration,
}

impl Subject {
    /// What has been counted so far.
    ///
    /// # Errors
    /// If a page cannot be read.
    pub async fn counters(&self) -> Result<Counters> {
        let belief = match &self.admin {
            Some(admin) => Some(Belief::read(admin).await?),
            None => None,
        };
        Ok(Counters { engines: self.workers.read().await?, belief })
    }

    /// What was counted of a run that began at `before`, once the counts have settled.
    ///
    /// # Errors
    /// If a page cannot be read, or an engine restarted.
    pub async fn counted_since(&self, before: &Counters, finished: &Finished) -> Result<Counted> {
        let answers = finished.outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok());
        let prompt_tokens: f64 = answers.clone().map(|sample| f64::from(sample.usage.prompt_tokens)).sum();
        let answered = answers.count() as f64;
        let deadline = tokio::time::Instant::now() + COUNTERS_SETTLE;
        loop {
            let now = self.counters().await?;
            let engines = counters::change(&before.engines, &now.engines)?;
            let belief = before.belief.zip(now.belief).map(|(before, now)| now.minus(before));
            let settled = self.workers.is_empty() || counters::total(&engines).finished >= answered;
            let believed = belief.is_none_or(|belief| belief.prompt_tokens >= prompt_tokens);
            if settled && believed || tokio::time::Instant::now() >= deadline {
                let engines = (!self.workers.is_empty()).then_some(engines);
                return Ok(Counted { engines, predicted_share: belief.map(Belief::share) });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

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
        let name = name.to_owned();
        Ok(Subject { name, target, workers, template, probe_tokens, cache, mode: None, admin: None })
    }

    /// Tokens of a block of its engines' caches; vLLM's default if they do not say.
    pub fn block_size(&self) -> u32 {
        self.cache.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).max(1)
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
    let body = Template { output_tokens: 2, ..template.clone() }.body(Text::Parts(head.trim(), tail.trim()));
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
