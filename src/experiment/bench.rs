//! `warmroute bench`: the Service experiment against any OpenAI-compatible target, or several of them in turns.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::experiment::compare::{self, CompareArgs};
use crate::experiment::counters::Workers;
use crate::experiment::matrix::{self, Cell, Journal, Measured};
use crate::experiment::prompts::Api;
use crate::experiment::published::PREFIXES_A_WORKER;
use crate::experiment::report::page::{self, Page};
use crate::experiment::report::{self, Point};
use crate::experiment::service::{self, Settings};
use crate::experiment::subject::{ModeSwitch, Subject, Wish};
use crate::experiment::target::Target;

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// What `bench` does besides measuring.
#[derive(Subcommand, Clone, Debug)]
pub enum BenchCommand {
    /// Say which differences between two reports are more than chance
    Compare(CompareArgs),
}

#[derive(Args, Clone, Debug)]
pub struct MeasureArgs {
    /// What to measure: http://HOST:PORT of a proxy, a Service or an engine. Repeat as NAME=URL to compare several: they
    /// take turns
    #[arg(long = "target", value_name = "[NAME=]URL", required = true)]
    pub targets: Vec<Named>,
    /// An engine behind the target, for its /metrics; repeat for each of them. NAME= says behind which target
    #[arg(long, value_name = "[NAME=]URL")]
    pub metrics: Vec<Named>,
    /// Admin listener of the warmroute that the target is: its modes random and kv are compared, in turns
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
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
    /// Requests in flight, a point each
    #[arg(long, value_delimiter = ',', default_value = "8", value_name = "N,..")]
    pub concurrency: Vec<usize>,
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
    /// Remember finished runs in this file, and go on from it after an interruption
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
    /// With --json, add every single request, which `bench compare` needs
    #[arg(long, requires = "json")]
    pub samples: bool,
    /// Leave a report in this file: .html with charts, .md or .json (with every single request); may be repeated
    #[arg(long = "report", value_name = "FILE")]
    pub reports: Vec<PathBuf>,
}

/// A URL that may carry a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    pub name: Option<String>,
    pub url: String,
}

impl std::str::FromStr for Named {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Named, Self::Err> {
        Ok(match text.split_once('=') {
            // An `=` further on belongs to the URL.
            Some((name, url)) if !name.contains(['/', ':', '?']) => {
                Named { name: Some(name.to_owned()), url: url.to_owned() }
            }
            _ => Named { name: None, url: text.to_owned() },
        })
    }
}

/// What `bench --json` prints.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub targets: Vec<ReportedTarget>,
    pub seed: u64,
    pub runs: u64,
    pub keep_alive: bool,
    pub output_tokens: u32,
    /// Prompts of this experiment that the cache of one worker holds, if the engines say how large it is.
    pub prefixes_a_worker: Option<f64>,
    pub points: Vec<Point>,
}

impl Report {
    fn page(&self, args: &MeasureArgs) -> Page<'_> {
        let one = |target: &ReportedTarget| format!("{} = {} ({})", target.name, target.url, target.model);
        let connections = if self.keep_alive { "kept connections" } else { "a new one for each request" };
        Page {
            title: "Service experiment".to_owned(),
            facts: vec![
                ("targets", self.targets.iter().map(one).collect::<Vec<_>>().join(", ")),
                ("connections", connections.to_owned()),
                (
                    "prompts",
                    format!("about {} tokens, {} shared by a group", args.prompt_tokens, args.prefix_tokens),
                ),
                ("answers", format!("{} tokens", self.output_tokens)),
                ("runs", format!("{} of each point; the median of each figure", self.runs)),
                ("seed", self.seed.to_string()),
            ],
            points: &self.points,
            prefixes_a_worker: self.prefixes_a_worker,
        }
    }
}

/// One target of a report.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReportedTarget {
    /// As in its points' `mode`.
    pub name: String,
    pub url: String,
    pub model: String,
    /// Tokens of a prompt that a cache can hold for its group; absent if the target has no `/tokenize`.
    pub shareable_tokens: Option<u32>,
}

/// Does what the arguments say and prints it to `out`.
///
/// # Errors
/// If an argument is out of range or a target cannot be measured: each error names the flag, the address or the engine's
/// flag to change.
pub async fn run(args: &BenchArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    match &args.command {
        Some(BenchCommand::Compare(args)) => compare::run(args, out),
        None => run_measure(&args.measure, out).await,
    }
}

async fn run_measure(args: &MeasureArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    check(args)?;
    page::check(&args.reports)?;
    let mut report = measure(args).await?;
    page::write(&args.reports, &report.page(args), &report)?;
    if !args.samples {
        report.points.iter_mut().for_each(Point::drop_samples);
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    let targets: Vec<String> =
        report.targets.iter().map(|target| format!("{} ({})", target.name, target.url)).collect();
    writeln!(
        out,
        "Service experiment on {}: {} run(s) a point, the median of each figure; {}",
        targets.join(", "),
        report.runs,
        if report.keep_alive { "kept connections" } else { "a new connection for each request" }
    )?;
    writeln!(out, "{}", report::points_table(&report.points))?;
    for note in report::notes(&report.points) {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

fn check(args: &MeasureArgs) -> Result<()> {
    let positive = |numbers: &[usize]| !numbers.is_empty() && !numbers.contains(&0);
    ensure!(positive(&args.prefixes), "--prefixes must all be at least 1");
    ensure!(positive(&args.concurrency), "--concurrency must be at least 1");
    ensure!(args.runs > 0, "--runs must be at least 1");
    ensure!(args.output_tokens > 0, "--output-tokens must be at least 1");
    ensure!(args.requests != Some(0), "--requests must be at least 1");
    let names = names(args)?;
    ensure!(args.admin.is_none() || names.len() == 1, "--admin compares the modes of one --target");
    for named in &args.metrics {
        if let Some(name) = named.name.as_ref().filter(|name| !names.contains(name)) {
            bail!("--metrics {name}={}: no --target is called `{name}`", named.url);
        }
    }
    Ok(())
}

/// The targets' names, all different.
fn names(args: &MeasureArgs) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for target in &args.targets {
        let name = match &target.name {
            Some(name) => name.clone(),
            None if args.targets.len() == 1 => "target".to_owned(),
            None => bail!("--target {}: of several targets each needs a name, as NAME=URL", target.url),
        };
        ensure!(!names.contains(&name), "--target {name}=..: two targets are called `{name}`");
        names.push(name);
    }
    Ok(names)
}

async fn measure(args: &MeasureArgs) -> Result<Report> {
    let subjects = learn(args).await?;
    let Some(admin) = &args.admin else { return measure_all(args, subjects).await };
    let before = ModeSwitch::now(Target::resolve(admin).await?).await?;
    let in_modes = ["random", "kv"].map(|mode| Subject {
        name: mode.to_owned(),
        mode: Some(ModeSwitch { mode: mode.to_owned(), ..before.clone() }),
        ..subjects[0].clone()
    });
    let report = measure_all(args, in_modes.into()).await;
    before.enter().await?;
    report
}

async fn measure_all(args: &MeasureArgs, subjects: Vec<Subject>) -> Result<Report> {
    let cells = matrix::order(subjects.len(), &args.prefixes, &args.concurrency, args.runs);
    let (mut journal, mut measured) = match &args.journal {
        Some(path) => {
            let (journal, measured) = Journal::open(path, &fingerprint(args)?)?;
            (Some(journal), measured)
        }
        None => (None, Vec::new()),
    };
    let settings: Vec<Settings> = cells.iter().map(|cell| settings_of(args, cell)).collect();
    let requests = settings.iter().map(|cell| cell.request_count() + cell.prefixes).sum::<usize>();
    let progress = progress_bar(requests as u64);
    for (cell, settings) in cells.iter().zip(&settings) {
        if measured.iter().any(|done| done.cell == *cell) {
            progress.inc((settings.request_count() + settings.prefixes) as u64);
            progress.reset_eta();
            continue;
        }
        let subject = &subjects[cell.target];
        progress.set_message(format!(
            "{}, {} prefixes, {} in flight, run {} of {}",
            subject.name,
            cell.prefixes,
            cell.concurrency,
            cell.run + 1,
            args.runs
        ));
        if let Some(mode) = &subject.mode {
            mode.enter().await?;
        }
        let figures = service::run(subject, settings, &progress)
            .await
            .with_context(|| format!("{}: {} prefixes, run {}", subject.name, cell.prefixes, cell.run + 1))?;
        let done = Measured { cell: *cell, figures };
        if let Some(journal) = &mut journal {
            journal.record(&done)?;
        }
        measured.push(done);
    }
    progress.finish_and_clear();
    let worker_tokens = subjects[0].cache.tokens();
    let prefixes_a_worker = worker_tokens.map(|tokens| tokens as f64 / f64::from(args.prompt_tokens));
    Ok(Report {
        points: points(&subjects, &cells, &measured, is_study(args, prefixes_a_worker)),
        prefixes_a_worker,
        targets: subjects.into_iter().map(ReportedTarget::of).collect(),
        seed: args.seed,
        runs: args.runs,
        keep_alive: args.keep_alive,
        output_tokens: args.output_tokens,
    })
}

impl ReportedTarget {
    fn of(subject: Subject) -> ReportedTarget {
        ReportedTarget {
            name: subject.name,
            url: subject.target.to_string(),
            model: subject.template.model,
            shareable_tokens: subject.sizes.shareable_tokens,
        }
    }
}

fn settings_of(args: &MeasureArgs, cell: &Cell) -> Settings {
    Settings {
        prefixes: cell.prefixes,
        concurrency: cell.concurrency,
        requests: args.requests,
        seed: args.seed,
        texts: cell.target as u64,
        run: cell.run,
        keep_alive: args.keep_alive,
        timeout: Duration::from_secs(args.timeout),
    }
}

/// The points in the order of their first run, each with all its runs.
fn points(subjects: &[Subject], cells: &[Cell], measured: &[Measured], is_study: bool) -> Vec<Point> {
    let firsts = cells.iter().filter(|cell| cell.run == 0);
    let point = |first: &Cell| {
        let mut runs: Vec<&Measured> =
            measured.iter().filter(|done| Cell { run: 0, ..done.cell } == *first).collect();
        runs.sort_by_key(|done| done.cell.run);
        let subject = &subjects[first.target];
        let workers = (!subject.workers.is_empty()).then(|| subject.workers.len());
        let figures = runs.into_iter().map(|done| done.figures.clone()).collect();
        Point::of(&subject.name, workers, first.prefixes, first.concurrency, figures, is_study)
    };
    firsts.filter_map(point).collect()
}

/// Whether prompts and workers have the sizes of the published study, so that its figures can stand beside.
fn is_study(args: &MeasureArgs, prefixes_a_worker: Option<f64>) -> bool {
    let prompts = (args.prefix_tokens, args.prompt_tokens, args.output_tokens) == (2032, 2371, 64);
    prompts && prefixes_a_worker.is_some_and(|holds| (holds / PREFIXES_A_WORKER - 1.0).abs() < 0.02)
}

/// Everything that changes what is measured, in one line: a journal goes on only under the same.
fn fingerprint(args: &MeasureArgs) -> Result<String> {
    let urls = |named: &[Named]| -> Vec<String> {
        named.iter().map(|one| format!("{}={}", one.name.as_deref().unwrap_or(""), one.url)).collect()
    };
    let settings = serde_json::json!({
        "targets": urls(&args.targets), "metrics": urls(&args.metrics), "model": args.model,
        "admin": args.admin, "api": args.api.path(), "prefixes": args.prefixes, "concurrency": args.concurrency,
        "requests": args.requests, "seed": args.seed, "keep_alive": args.keep_alive,
        "prefix_tokens": args.prefix_tokens, "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
    });
    Ok(settings.to_string())
}

/// A bar on a terminal's standard error, nothing elsewhere.
pub fn progress_bar(requests: u64) -> ProgressBar {
    let bar = ProgressBar::new(requests);
    match ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {eta} left  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

async fn learn(args: &MeasureArgs) -> Result<Vec<Subject>> {
    let wish = Wish {
        api: args.api,
        model: args.model.clone(),
        prefix_tokens: args.prefix_tokens,
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens,
        timeout: Duration::from_secs(args.timeout),
    };
    let mut subjects = Vec::new();
    for (name, named) in names(args)?.iter().zip(&args.targets) {
        let mut target = Target::resolve(&named.url).await?;
        for line in &args.headers {
            target = target.with_header(line)?;
        }
        let behind = args.metrics.iter().filter(|page| page.name.as_ref().is_none_or(|of| of == name));
        let urls: Vec<String> = behind.map(|page| page.url.clone()).collect();
        let workers = Workers::resolve(&urls).await?;
        subjects.push(Subject::learn(name, target, workers, &wish).await?);
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_at_the_first_equals_sign_of_a_plain_word() {
        for (text, name, url) in [
            ("http://a:1", None, "http://a:1"),
            ("kv=http://a:1", Some("kv"), "http://a:1"),
            ("http://a:1/?x=y", None, "http://a:1/?x=y"),
            ("a:1", None, "a:1"),
        ] {
            let named: Named = text.parse().unwrap();
            assert_eq!((named.name.as_deref(), named.url.as_str()), (name, url));
        }
    }
}
