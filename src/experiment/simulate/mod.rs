//! `warmroute simulate`: the product's planner and the engine model in virtual time, without sockets, to judge how requests
//! are placed. Traces, hundreds of workers, seconds.
//!
//! [`args`] and [`suite`] say what to run as [`job`]s; a job makes a [`workload`](crate::experiment::workload) and
//! [`mod@run`]s it on a [`fleet`] once for each [`policy`]; [`stats`] turns what happened into figures, [`report`] prints them.
//!
//! The model is that of published comparisons of routers: prefill at 8,000 tokens a second, one request at a time, first
//! come first served, waiting for memory; decode at 40 tokens a second for each of at most 64 running requests; prompt and
//! output reserved at admission. The planner is fed as the proxy would feed it, knows each worker's capacity, and learns
//! speeds.

pub mod args;
pub mod fleet;
pub mod job;
pub mod policy;
pub mod report;
pub mod routers;
pub mod run;
pub mod stats;
pub mod suite;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use crate::experiment::workload::replay::TraceDir;
use crate::experiment::workload::schema::{self, Reading};
use args::Args;
use job::{Job, Library, Recipe};

/// Runs what `args` ask for and writes the report to `out`. Progress goes to standard error if that is a terminal.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let jobs = args.jobs()?;
    let mut library = library(&jobs, args.traces.clone(), args.rows)?;
    if let Some(path) = &args.trace {
        let reading = Reading { rows: args.rows, joined_sessions: true, ..Reading::default() };
        library.file = Some(schema::load(path, &reading)?);
    }
    let runs: usize = jobs.iter().map(|job| job.contestants.len()).sum();
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {elapsed}")?;
    let bar = ProgressBar::new(runs as u64).with_style(style);
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let rows = job::run_all(&jobs, &library, threads, &|_| bar.inc(1))?;
    bar.finish_and_clear();
    let text = match (args.json, args.csv) {
        (true, _) => report::json(&rows)?,
        (_, true) => report::csv(&rows),
        _ => report::table(&rows),
    };
    out.write_all(text.as_bytes()).context("cannot write the report")
}

fn library(jobs: &[Job], traces: Option<PathBuf>, rows: Option<usize>) -> anyhow::Result<Library> {
    let given = traces.is_some();
    let directory = traces.unwrap_or_else(|| PathBuf::from("../shared/traces"));
    let needed = jobs.iter().any(|job| matches!(job.recipe, Recipe::Trace { .. } | Recipe::Tenants { .. }));
    ensure!(
        !needed || directory.is_dir(),
        "there is no directory of traces at {}{}",
        directory.display(),
        if given { "" } else { "; name one with --traces DIR" },
    );
    Library::load(jobs, &TraceDir { path: directory, rows })
}
