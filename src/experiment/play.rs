//! `warmroute bench play`: a workload sent over HTTP to one or several targets: a trace or a user's own requests at a pace that
//! is asked for, or a made-up one past the limits of the Service experiment. The same workloads go through `simulate`.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::experiment::compare;
use crate::experiment::figures::{Figures, Shareable};
use crate::experiment::load::{Jobs, Load};
use crate::experiment::matrix::{self, Cell};
use crate::experiment::progress::Progress;
use crate::experiment::prompts::Writer;
use crate::experiment::report::outputs::{self, Outputs};
use crate::experiment::report::page::Page;
use crate::experiment::report::{Played, Point};
use crate::experiment::scene::{self, Scene};
use crate::experiment::scribe::{Rendering, Scribe};
use crate::experiment::subject::Subject;
use crate::experiment::targets::{ReportedTarget, TargetArgs};
use crate::experiment::workload::made::{Kind, Made};
use crate::experiment::workload::{Arrivals, Workload};

#[derive(Args, Clone, Debug)]
pub struct PlayArgs {
    #[command(flatten)]
    pub at: TargetArgs,
    /// Requests to send: a trace of one of the public schemas, or JSON lines of requests in OpenAI's format; `bench import` checks
    /// such a file
    #[arg(long, value_name = "FILE", required_unless_present = "workload", conflicts_with = "workload")]
    pub trace: Option<PathBuf>,
    /// service, hot, chats, or groups:GLOBAL+GROUP (percent of the prompt that all, that a group shares)
    #[arg(long, value_name = "NAME")]
    pub workload: Option<Kind>,
    /// Only the first rows of the trace
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Sessions with equal model and tools share the head of their prompts (session traces)
    #[arg(long)]
    pub shared_heads: bool,
    /// So many times as fast as recorded, think times included [default for traces: 1]
    #[arg(long, value_name = "X")]
    pub speed: Option<f64>,
    /// Recorded times stretched so that the prompts' prefill without any cache is this share of --prefill-speed
    #[arg(long, value_name = "SHARE", requires = "prefill_speed")]
    pub load: Option<f64>,
    /// Prompt tokens that all workers together can prefill in a second
    #[arg(long, value_name = "N")]
    pub prefill_speed: Option<f64>,
    /// Open loop: requests a second (chats: conversations that begin in a second), Poisson arrivals; a point each
    #[arg(long, value_delimiter = ',', value_name = "R,..")]
    pub rate: Vec<f64>,
    #[command(flatten)]
    pub made: Made,
    /// Instead of --prefixes and --popularity: a prefix for each client of MODEL in this table of client rates, asked for as often
    /// as that client asks (hot, service)
    #[arg(long, value_name = "FILE:MODEL", conflicts_with_all = ["trace", "capacity_ratio"])]
    pub clients: Option<String>,
    /// Instead of --prefixes: volume of all shared prefixes over the KV cache of one worker, a point each; needs --metrics
    #[arg(long, value_delimiter = ',', value_name = "RATIO,..")]
    pub capacity_ratio: Vec<f64>,
    /// Runs of each point; the median counts
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub runs: u64,
    /// Fixes all requests and draws; texts of different seeds share nothing
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    #[command(flatten)]
    pub outputs: Outputs,
}

/// What `bench play --json` prints.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub targets: Vec<ReportedTarget>,
    pub seed: u64,
    pub runs: u64,
    pub keep_alive: bool,
    pub points: Vec<Point>,
}

/// Plays what the arguments say and prints what it gave to `out`.
///
/// # Errors
/// If an argument is out of range, the file has a bad line, or a target cannot be measured.
pub async fn run(args: &PlayArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    check(args)?;
    args.outputs.check()?;
    args.outputs.deliver(measure(args).await?, out)
}

fn check(args: &PlayArgs) -> Result<()> {
    let positive = |name: &str, value: f64| {
        ensure!(value > 0.0 && value.is_finite(), "{name} must be a number above 0");
        Ok(())
    };
    args.at.check()?;
    args.made.check()?;
    ensure!(args.runs > 0, "--runs must be at least 1");
    ensure!(args.rows != Some(0), "--rows must be at least 1");
    args.speed.iter().try_for_each(|&speed| positive("--speed", speed))?;
    args.load.iter().try_for_each(|&load| positive("--load", load))?;
    args.prefill_speed.iter().try_for_each(|&speed| positive("--prefill-speed", speed))?;
    args.rate.iter().try_for_each(|&rate| positive("--rate", rate))?;
    args.capacity_ratio.iter().try_for_each(|&ratio| positive("--capacity-ratio", ratio))?;
    let paces =
        [args.speed.is_some(), args.load.is_some(), !args.rate.is_empty(), !args.made.concurrency.is_empty()];
    ensure!(
        paces.into_iter().filter(|&given| given).count() <= 1,
        "only one of --speed, --load, --rate and --concurrency can set the pace"
    );
    Ok(())
}

async fn measure(args: &PlayArgs) -> Result<Report> {
    // Before anything is asked of a target: a bad line should not cost a wait.
    let trace = args.trace.as_deref().map(|path| scene::load(path, args)).transpose()?;
    let subjects = args.at.learn(1).await?;
    let points = subjects.unless_interrupted(play_all(args, trace, &subjects.list)).await;
    subjects.restore().await?;
    Ok(Report {
        points: points?,
        targets: subjects.list.iter().map(ReportedTarget::of).collect(),
        seed: args.seed,
        runs: args.runs,
        keep_alive: args.at.keep_alive,
    })
}

async fn play_all(args: &PlayArgs, trace: Option<scene::Loaded>, subjects: &[Subject]) -> Result<Vec<Point>> {
    let scenes = match trace {
        Some(trace) => scene::of_trace(args, trace)?,
        None => scene::made(args, subjects[0].cache.tokens())?,
    };
    let mut renderings = Vec::new();
    for subject in subjects {
        renderings.push(Rendering::learn(subject).await?);
    }
    let numbers: Vec<usize> = (0..scenes.len()).collect();
    let cells = matrix::order(subjects.len(), &numbers, &[0], args.runs);
    let mut workloads = Vec::new();
    for scene in &scenes {
        workloads.push(scene.make(args.seed)?);
    }
    workloads.iter().try_for_each(|workload| end_in_time(&workload.arrivals))?;
    let units = |cell: &Cell| workloads[cell.prefixes].requests.len() as u64;
    let progress = Progress::new(cells.iter().map(units).sum());
    let mut done: Vec<(Cell, Figures)> = Vec::new();
    for cell in &cells {
        let (scene, subject) = (&scenes[cell.prefixes], &subjects[cell.target]);
        progress.set_message(format!(
            "{}, {}, run {} of {}",
            subject.name,
            scene.label,
            cell.run + 1,
            args.runs
        ));
        let stage =
            Stage { args, cell: *cell, subject, rendering: renderings[cell.target], progress: &progress };
        let workload = if cell.run == 0 {
            workloads[cell.prefixes].clone()
        } else {
            scene.make(args.seed + cell.run)?
        };
        let figures = stage
            .play(&workload, subjects.len())
            .await
            .with_context(|| format!("{}: {}, run {}", subject.name, scene.label, cell.run + 1))?;
        done.push((*cell, figures));
    }
    progress.finish();
    Ok(points(&scenes, &workloads, subjects, &cells, &done))
}

/// Refuses times that nobody waits for: mostly they are a unit or a sign gone wrong.
fn end_in_time(arrivals: &Arrivals) -> Result<()> {
    const MOST_DAYS: f64 = 30.0;
    let mut due: Box<dyn Iterator<Item = f64>> = match arrivals {
        Arrivals::Closed { .. } => return Ok(()),
        Arrivals::Open(at) => Box::new(at.iter().copied()),
        Arrivals::Sessions { starts, .. } => Box::new(starts.iter().map(|&(at, _)| at)),
    };
    let late = due.find(|at| !at.is_finite() || *at > MOST_DAYS * 86_400.0);
    match late {
        Some(at) => bail!(
            "a request is due {at:.0} s after the first one, later than {MOST_DAYS} days: look at the file's times, --speed, --load \
             or --rate"
        ),
        None => Ok(()),
    }
}

/// One run of one workload on one target.
struct Stage<'a> {
    args: &'a PlayArgs,
    cell: Cell,
    subject: &'a Subject,
    rendering: Rendering,
    progress: &'a Progress,
}

impl Stage<'_> {
    async fn play(&self, workload: &Workload, targets: usize) -> Result<Figures> {
        if let Some(mode) = &self.subject.mode {
            mode.enter().await?;
        }
        let jobs = self.jobs(workload, targets);
        let load = Load {
            target: self.subject.target.clone(),
            keep_alive: self.args.at.keep_alive,
            timeout: self.args.at.timeout(),
            progress: self.progress.clone(),
        };
        if let Arrivals::Closed { warm_up, .. } = workload.arrivals
            && warm_up > 0
        {
            let (jobs, until) = (Arc::clone(&jobs), warm_up);
            load.closed_loop(1, 0, Arc::new(move |index| if index < until { jobs(index) } else { None }))
                .await;
        }
        let before = self.subject.counters().await?;
        let finished = load.play(jobs, &workload.arrivals).await;
        let counted = self.subject.counted_since(&before, &finished).await?;
        Figures::of(&finished, &counted, Shareable::Each(&workload.reusable_shares()))
    }

    fn jobs(&self, workload: &Workload, targets: usize) -> Jobs {
        let Cell { target, prefixes: scene, run, .. } = self.cell;
        let scribe = Scribe {
            template: self.subject.template.clone(),
            rendering: self.rendering,
            writer: Writer::new(self.args.seed, [run, scene as u64, u64::MAX], target as u64),
            block_tokens: workload.block_tokens,
            engine_block: self.subject.block_size(),
            model: self.args.at.model.clone(),
            salted: targets > 1 || self.args.runs > 1,
        };
        let requests = Arc::clone(&workload.requests);
        Arc::new(move |index| requests.get(index).map(|request| scribe.job(request, index)))
    }
}

fn points(
    scenes: &[Scene],
    workloads: &[Workload],
    subjects: &[Subject],
    cells: &[Cell],
    done: &[(Cell, Figures)],
) -> Vec<Point> {
    let point = |first: &Cell| {
        let mut runs: Vec<&(Cell, Figures)> =
            done.iter().filter(|(cell, _)| Cell { run: 0, ..*cell } == *first).collect();
        runs.sort_by_key(|(cell, _)| cell.run);
        let (scene, subject) = (&scenes[first.prefixes], &subjects[first.target]);
        let workers = (!subject.workers.is_empty()).then(|| subject.workers.len());
        let figures = runs.into_iter().map(|(_, figures)| figures.clone()).collect();
        let mut point = Point::of(&subject.name, workers, scene.prefixes, scene.concurrency, figures, false)?;
        if point.median.usage_token_share > workloads[first.prefixes].ceiling() + 0.02 {
            point.median.notes.push(
                "more was cached than these requests can have left: the engines had met them before; reset their caches"
                    .to_owned(),
            );
        }
        let played = Played { workload: scene.label.clone(), ceiling: workloads[first.prefixes].ceiling() };
        Some(Point { played: Some(played), ..point })
    };
    cells.iter().filter(|cell| cell.run == 0).filter_map(point).collect()
}

impl Report {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let one = |target: &ReportedTarget| format!("{} = {} ({})", target.name, target.url, target.model);
        let connections = if self.keep_alive { "kept" } else { "a new one for each request" };
        vec![
            ("targets", self.targets.iter().map(one).collect::<Vec<_>>().join(", ")),
            ("connections", connections.to_owned()),
            ("runs", format!("{} of each point; the median of each figure", self.runs)),
            ("seed", self.seed.to_string()),
        ]
    }
}

impl outputs::Measured for Report {
    fn page(&self) -> Page<'_> {
        let mut workloads: Vec<&str> =
            self.points.iter().filter_map(|point| Some(point.played.as_ref()?.workload.as_str())).collect();
        workloads.dedup();
        let title = match workloads[..] {
            [one] => one.to_owned(),
            _ => "Workloads".to_owned(),
        };
        let versus = compare::within(&self.points);
        Page { title, facts: self.facts(), points: &self.points, versus, prefixes_a_worker: None }
    }

    fn points_mut(&mut self) -> &mut [Point] {
        &mut self.points
    }

    fn print(&self, page: &Page<'_>, out: &mut dyn Write) -> Result<()> {
        writeln!(out, "{}", page.title)?;
        for (word, value) in &page.facts {
            writeln!(out, "{word}: {value}")?;
        }
        write!(out, "{}", page.text())?;
        Ok(())
    }
}

/// Refuses a workload that needs more than its name.
///
/// # Errors
/// In words.
pub(super) fn kind(args: &PlayArgs) -> Result<Kind> {
    match args.workload {
        Some(Kind::Trace(name)) => bail!("--workload {}: traces are played by --trace FILE", name.as_str()),
        Some(kind) => Ok(kind),
        None => bail!("name a --workload or a --trace"),
    }
}
