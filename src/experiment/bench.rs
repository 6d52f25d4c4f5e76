//! `warmroute bench`: the Service experiment against any OpenAI-compatible target, or several of them in turns.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::experiment::compare::{self, CompareArgs};
use crate::experiment::import::{self, ImportArgs};
use crate::experiment::matrix::{self, Cell, Journal, Measured};
use crate::experiment::play::{self, PlayArgs};
use crate::experiment::progress::Progress;
use crate::experiment::published::PREFIXES_A_WORKER;
use crate::experiment::report::Point;
use crate::experiment::report::outputs::{self, Outputs};
use crate::experiment::report::page::Page;
use crate::experiment::service::{self, Settings};
use crate::experiment::sizing::{Sizes, Wanted};
use crate::experiment::subject::Subject;
use crate::experiment::targets::{self, ReportedTarget, TargetArgs};

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
    /// Check a file of requests, and say what routing by prefix could be worth on it
    Import(ImportArgs),
    /// Send a trace, your own requests, or a made-up workload
    Play(Box<PlayArgs>),
}

#[derive(Args, Clone, Debug)]
pub struct MeasureArgs {
    #[command(flatten)]
    pub at: TargetArgs,
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
    /// Tokens that prompts of a group share and a cache can hold
    #[arg(long, default_value_t = 2032, value_name = "N")]
    pub prefix_tokens: u32,
    /// Tokens of a whole prompt
    #[arg(long, default_value_t = 2371, value_name = "N")]
    pub prompt_tokens: u32,
    /// Tokens to generate
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub output_tokens: u32,
    /// Remember finished runs in this file, and go on from it after an interruption
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,
    #[command(flatten)]
    pub outputs: Outputs,
}

/// What `bench --json` prints.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub targets: Vec<ReportedTarget>,
    pub seed: u64,
    pub runs: u64,
    pub keep_alive: bool,
    pub output_tokens: u32,
    /// In words.
    #[serde(skip)]
    prompts: String,
    /// Prompts of this experiment that the cache of one worker holds, if the engines say how large it is.
    pub prefixes_a_worker: Option<f64>,
    pub points: Vec<Point>,
}

impl outputs::Measured for Report {
    fn page(&self) -> Page<'_> {
        let one = |target: &ReportedTarget| format!("{} = {} ({})", target.name, target.url, target.model);
        let connections = if self.keep_alive { "kept connections" } else { "a new one for each request" };
        Page {
            title: "Service experiment".to_owned(),
            facts: vec![
                ("targets", self.targets.iter().map(one).collect::<Vec<_>>().join(", ")),
                ("connections", connections.to_owned()),
                ("prompts", self.prompts.clone()),
                ("answers", format!("{} tokens", self.output_tokens)),
                ("runs", format!("{} of each point; the median of each figure", self.runs)),
                ("seed", self.seed.to_string()),
            ],
            points: &self.points,
            versus: compare::within(&self.points),
            prefixes_a_worker: self.prefixes_a_worker,
        }
    }

    fn points_mut(&mut self) -> &mut [Point] {
        &mut self.points
    }

    fn print(&self, page: &Page<'_>, out: &mut dyn Write) -> Result<()> {
        let targets: Vec<String> =
            self.targets.iter().map(|target| format!("{} ({})", target.name, target.url)).collect();
        writeln!(
            out,
            "Service experiment on {}: {} run(s) a point, the median of each figure; {}",
            targets.join(", "),
            self.runs,
            if self.keep_alive { "kept connections" } else { "a new connection for each request" }
        )?;
        write!(out, "{}", page.text())?;
        Ok(())
    }
}

/// Does what the arguments say and prints it to `out`.
///
/// # Errors
/// If an argument is out of range or a target cannot be measured: each error names the flag, the address or the engine's
/// flag to change.
pub async fn run(args: &BenchArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    match &args.command {
        Some(BenchCommand::Compare(args)) => compare::run(args, out),
        Some(BenchCommand::Import(args)) => import::run(args, out),
        Some(BenchCommand::Play(args)) => play::run(args, out).await,
        None => run_measure(&args.measure, out).await,
    }
}

async fn run_measure(args: &MeasureArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    check(args)?;
    args.outputs.check()?;
    args.outputs.deliver(measure(args).await?, out)
}

fn check(args: &MeasureArgs) -> Result<()> {
    let positive = |numbers: &[usize]| !numbers.is_empty() && !numbers.contains(&0);
    ensure!(positive(&args.prefixes), "--prefixes must all be at least 1");
    ensure!(positive(&args.concurrency), "--concurrency must be at least 1");
    ensure!(args.runs > 0, "--runs must be at least 1");
    ensure!(args.output_tokens > 0, "--output-tokens must be at least 1");
    ensure!(args.requests != Some(0), "--requests must be at least 1");
    args.at.check()
}

async fn measure(args: &MeasureArgs) -> Result<Report> {
    let subjects = args.at.learn(args.output_tokens).await?;
    let report = subjects.unless_interrupted(measure_all(args, &subjects.list)).await;
    subjects.restore().await?;
    report
}

async fn measure_all(args: &MeasureArgs, subjects: &[Subject]) -> Result<Report> {
    let wanted = Wanted { shared_tokens: args.prefix_tokens, prompt_tokens: args.prompt_tokens };
    let mut sizes = Vec::new();
    for subject in subjects {
        sizes.push(Sizes::find(subject, wanted).await?);
    }
    let cells = matrix::order(subjects.len(), &args.prefixes, &args.concurrency, args.runs);
    let (mut journal, mut measured) = match &args.journal {
        Some(path) => {
            let (journal, measured) = Journal::open(path, &fingerprint(args)?)?;
            (Some(journal), measured)
        }
        None => (None, Vec::new()),
    };
    let settings: Vec<Settings> =
        cells.iter().map(|cell| settings_of(args, cell, sizes[cell.target])).collect();
    let progress = Progress::new(settings.iter().map(Settings::units).sum());
    for (cell, settings) in cells.iter().zip(&settings) {
        if measured.iter().any(|done| done.cell == *cell) {
            progress.skip(settings.units());
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
    progress.finish();
    let worker_tokens = subjects[0].cache.tokens();
    let prefixes_a_worker = worker_tokens.map(|tokens| tokens as f64 / f64::from(args.prompt_tokens));
    let target = |(subject, sizes): (&Subject, &Sizes)| ReportedTarget {
        shareable_tokens: sizes.shareable_tokens,
        ..ReportedTarget::of(subject)
    };
    let reported = subjects.iter().zip(&sizes).map(target).collect();
    Ok(Report {
        points: points(subjects, &cells, &measured, is_study(args, prefixes_a_worker)),
        prompts: format!("about {} tokens, {} shared by a group", args.prompt_tokens, args.prefix_tokens),
        prefixes_a_worker,
        targets: reported,
        seed: args.seed,
        runs: args.runs,
        keep_alive: args.at.keep_alive,
        output_tokens: args.output_tokens,
    })
}

fn settings_of(args: &MeasureArgs, cell: &Cell, sizes: Sizes) -> Settings {
    Settings {
        prefixes: cell.prefixes,
        concurrency: cell.concurrency,
        requests: args.requests,
        seed: args.seed,
        texts: cell.target as u64,
        sizes,
        run: cell.run,
        keep_alive: args.at.keep_alive,
        timeout: args.at.timeout(),
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
    let settings = serde_json::json!({
        "targets": targets::shown(&args.at.targets), "metrics": targets::shown(&args.at.metrics),
        "model": args.at.model, "admin": args.at.admin, "api": args.at.api.path(), "prefixes": args.prefixes, "concurrency": args.concurrency,
        "requests": args.requests, "seed": args.seed, "keep_alive": args.at.keep_alive,
        "prefix_tokens": args.prefix_tokens, "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
    });
    Ok(settings.to_string())
}
