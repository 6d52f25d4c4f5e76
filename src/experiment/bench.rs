//! `warmroute bench`: the Service experiment against any OpenAI-compatible target.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::Value;

use crate::experiment::counters::Workers;
use crate::experiment::exchange::Client;
use crate::experiment::prompts::{Api, Template, Use, Writer};
use crate::experiment::report::{self, Point};
use crate::experiment::service::{self, Settings, Subject};
use crate::experiment::sizing::{self, DEFAULT_BLOCK_SIZE, Sizes, Wanted};
use crate::experiment::target::Target;

/// Words of the probe that learns what the target says of its usage.
const PROBE_WORDS: usize = 600;
/// The same probe may meet a worker that has not seen it, and older engines leave a count of zero out: it is sent this
/// often before the target is taken not to say `cached_tokens` at all.
const PROBES: usize = 20;

#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// What to measure: http://HOST:PORT of a proxy, a Service or an engine
    #[arg(long, value_name = "URL")]
    pub target: String,
    /// An engine behind the target, for its /metrics; repeat for each of them
    #[arg(long, value_name = "URL")]
    pub metrics: Vec<String>,
    /// Name of this way of routing in the report
    #[arg(long, default_value = "target", value_name = "NAME")]
    pub label: String,
    /// Model to ask for [default: the first that the target lists]
    #[arg(long)]
    pub model: Option<String>,
    /// Endpoint to use
    #[arg(long, value_enum, default_value_t = Api::Chat)]
    pub api: Api,
    /// Header for every request, as "NAME: VALUE"; may be repeated
    #[arg(long = "header", value_name = "LINE")]
    pub headers: Vec<String>,
    /// Numbers of shared prefixes, a point each
    #[arg(long, value_delimiter = ',', default_value = "2,7,12,24", value_name = "P,..")]
    pub prefixes: Vec<usize>,
    /// Requests in flight
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub concurrency: usize,
    /// Requests of a run [default: 20 a prefix, at least 200]
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Runs of each point; the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub runs: u64,
    /// Fixes all requests and their order; texts of different seeds share nothing
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Keep connections instead of opening one for each request
    #[arg(long)]
    pub keep_alive: bool,
    /// Tokens that prompts of a group share and a cache can hold
    #[arg(long, default_value_t = 2032, value_name = "N")]
    pub prefix_tokens: u32,
    /// Tokens of a whole prompt
    #[arg(long, default_value_t = 2371, value_name = "N")]
    pub prompt_tokens: u32,
    /// Tokens to generate
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub output_tokens: u32,
    /// Seconds after which a request counts as failed
    #[arg(long, default_value_t = 300, value_name = "S")]
    pub timeout: u64,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// What `bench --json` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    pub target: String,
    pub model: String,
    pub seed: u64,
    pub runs: u64,
    pub keep_alive: bool,
    pub output_tokens: u32,
    /// Tokens of a prompt that a cache can hold for its group; absent if the target has no `/tokenize`.
    pub shareable_tokens: Option<u32>,
    pub points: Vec<Point>,
}

/// Runs the experiment and prints it to `out`.
///
/// # Errors
/// If the target cannot be measured: each error names the address, the flag or the engine's flag to change.
pub async fn run(args: &BenchArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    ensure!(args.concurrency > 0, "--concurrency must be at least 1");
    ensure!(args.runs > 0, "--runs must be at least 1");
    ensure!(args.output_tokens > 0, "--output-tokens must be at least 1");
    ensure!(args.requests != Some(0), "--requests must be at least 1");
    ensure!(args.prefixes.iter().all(|&prefixes| prefixes > 0), "--prefixes must all be at least 1");
    let report = measure(args).await?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(
        out,
        "Service experiment on {}: {} run(s) a point, the median of each figure; {}",
        report.target,
        report.runs,
        if report.keep_alive { "kept connections" } else { "a new connection for each request" }
    )?;
    writeln!(out, "{}", report::points_table(&report.points))?;
    for note in report::notes(&report.points) {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

async fn measure(args: &BenchArgs) -> Result<Report> {
    let subject = learn(args).await?;
    let point_settings = |prefixes| Settings {
        prefixes,
        concurrency: args.concurrency,
        requests: args.requests,
        seed: args.seed,
        keep_alive: args.keep_alive,
        timeout: Duration::from_secs(args.timeout),
    };
    let all: Vec<Settings> = args.prefixes.iter().map(|&prefixes| point_settings(prefixes)).collect();
    let a_run: usize = all.iter().map(|point| point.request_count() + point.prefixes).sum();
    let progress = progress_bar(a_run as u64 * args.runs);
    let mut points = Vec::new();
    for settings in &all {
        let mut runs = Vec::new();
        for run in 0..args.runs {
            progress.set_message(format!("{} prefixes, run {}", settings.prefixes, run + 1));
            runs.push(service::run(&subject, settings, run, &progress).await?);
        }
        let workers = (!subject.workers.is_empty()).then(|| subject.workers.len());
        points.extend(Point::of(&args.label, workers, settings.prefixes, settings.concurrency, runs));
    }
    progress.finish_and_clear();
    Ok(Report {
        target: subject.target.to_string(),
        model: subject.template.model,
        seed: args.seed,
        runs: args.runs,
        keep_alive: args.keep_alive,
        output_tokens: args.output_tokens,
        shareable_tokens: subject.sizes.shareable_tokens,
        points,
    })
}

/// A bar on a terminal's standard error, nothing elsewhere.
pub fn progress_bar(requests: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {eta} left  {msg}");
    let bar = ProgressBar::new(requests);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Everything that must be known of a target before it can be measured.
async fn learn(args: &BenchArgs) -> Result<Subject> {
    let mut target = Target::resolve(&args.target).await?;
    for line in &args.headers {
        target = target.with_header(line)?;
    }
    let workers = Workers::resolve(&args.metrics).await?;
    workers.read().await?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&target).await?,
    };
    let template = Template { api: args.api, model, output_tokens: args.output_tokens };
    let timeout = Duration::from_secs(args.timeout);
    let probe_tokens = require_cached_tokens(&target, &template, args.seed, timeout).await?;
    let block_size = workers.cache_config().await?.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).max(1);
    let wanted = Wanted { shared_tokens: args.prefix_tokens, prompt_tokens: args.prompt_tokens, block_size };
    let sizes: Sizes = match sizing::by_tokenizer(&target, &template, wanted).await? {
        Some(sizes) => sizes,
        None => sizing::by_probe(PROBE_WORDS, probe_tokens, wanted),
    };
    Ok(Subject { target, workers, template, sizes })
}

/// The id of the first model that the target lists.
pub async fn first_model(target: &Target) -> Result<String> {
    let (status, text) = target.get("/v1/models").await?;
    let id = || Some(serde_json::from_str::<Value>(&text).ok()?["data"][0]["id"].as_str()?.to_owned());
    match (status.is_success(), id()) {
        (true, Some(id)) => Ok(id),
        _ => bail!("{target}/v1/models: status {status}, no model listed; name one with --model"),
    }
}

/// Makes sure that answers tell how many prompt tokens were cached; the prompt tokens of the probe.
async fn require_cached_tokens(
    target: &Target,
    template: &Template,
    seed: u64,
    timeout: Duration,
) -> Result<u32> {
    let text = Writer::new(seed, [u64::MAX; 3]).text(Use::Probe, 0, PROBE_WORDS);
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
