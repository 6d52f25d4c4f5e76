//! `warmroute bench import`: checks a file of requests and tells, before anything is deployed, what routing by prefix could be
//! worth on it: how much prompts share, what one cache without limit would find, and what caches of real sizes would.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::experiment::report::{percent, table};
use crate::experiment::trace::TraceError;
use crate::experiment::workload::replay::{Pace, Trace};
use crate::experiment::workload::schema::{self, Reading, Schema, Times};
use crate::experiment::workload::working_set::WorkingSet;
use crate::experiment::workload::{Arrivals, Request, Workload};

/// Bad lines that are told one by one.
const TOLD: usize = 10;
/// Tokens a second of an answer, to tell when the next turn of a session comes: what the simulator takes, too.
const ANSWER_SPEED: f64 = 40.0;

#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    /// JSON lines, plain or gzip'd: a trace of one of the public schemas, or requests in OpenAI's format
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Workers to think of
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub workers: usize,
    /// Only the first rows
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Sessions with equal model and tools share the head of their prompts (session traces)
    #[arg(long)]
    pub shared_heads: bool,
    /// Draws which worker a Service sends a request to, and when sessions start that do not tell
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// What `bench import --json` prints. Shares are of all prompt tokens.
#[derive(Debug, Serialize)]
pub struct Imported {
    pub schema: &'static str,
    /// Good ones.
    pub rows: usize,
    /// Lines that could not be used: the first of them in words.
    pub bad_rows: usize,
    pub bad: Vec<String>,
    /// Of a block: the grain at which prompts are compared.
    pub block_tokens: u32,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Seconds from the first to the last request, where the file tells.
    pub span_s: Option<f64>,
    pub sessions: Option<usize>,
    /// Tokens of full blocks over those of different ones: how often a block is asked for in the mean.
    pub sharing_ratio: f64,
    /// Requests that begin as an earlier one did, by a block or more.
    pub requests_sharing: f64,
    /// One cache without limit, requests in the order of the file.
    pub ceiling: f64,
    pub workers: usize,
    pub curve: Vec<CurvePoint>,
}

/// The same requests on caches of one size.
#[derive(Copy, Clone, Debug, Serialize)]
pub struct CurvePoint {
    /// KV cache of a worker.
    pub worker_tokens: u64,
    /// One worker gets all requests.
    pub one_worker: f64,
    /// Each worker gets its part at random.
    pub service: f64,
    /// The workers' caches as if they were one: about the most that routing can find.
    pub routed: f64,
}

/// Reads the file and prints what it is worth to `out`.
///
/// # Errors
/// If the file cannot be read, is of no known schema, or has a bad line: after the report, so that both are seen.
pub fn run(args: &ImportArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    ensure!(args.workers > 0, "--workers must be at least 1");
    ensure!(args.rows != Some(0), "--rows must be at least 1");
    let imported = import(args)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &imported)?;
        writeln!(out)?;
    } else {
        print(args, &imported, out)?;
    }
    if imported.bad_rows > 0 {
        let more = imported.bad_rows - imported.bad.len();
        let rest = if more > 0 { format!("\nand {more} more") } else { String::new() };
        bail!(
            "{} bad lines, which a replay would stop at:\n{}{rest}",
            imported.bad_rows,
            imported.bad.join("\n")
        );
    }
    Ok(())
}

fn import(args: &ImportArgs) -> Result<Imported> {
    let schema = Schema::of(&args.file)?;
    let reading = Reading { rows: args.rows, shared_heads: args.shared_heads, ..Reading::default() };
    let (mut bad, mut bad_rows) = (Vec::new(), 0);
    let loaded = schema::load_all(&args.file, schema, &reading, &mut |error| {
        bad_rows += 1;
        if bad.len() < TOLD {
            bad.push(error.to_string());
        }
        Ok(())
    });
    let trace = match loaded {
        Err(TraceError::Empty { .. }) if bad_rows > 0 => {
            bail!("{}: no good line of {bad_rows}:\n{}", args.file.display(), bad.join("\n"))
        }
        loaded => loaded?,
    };
    let all = WorkingSet::of(&trace.requests, trace.block_tokens);
    let full: u64 = trace.requests.iter().map(|request| request.blocks.chain().len() as u64).sum();
    let (span_s, sessions) = match &trace.times {
        Times::Recorded(times) => (Some((times[times.len() - 1] - times[0]) / 1e3), None),
        Times::Think { think, .. } => (None, Some(think.iter().filter(|pause| pause.is_none()).count())),
        Times::Unknown => (None, None),
    };
    Ok(Imported {
        schema: schema.as_str(),
        rows: trace.requests.len(),
        bad_rows,
        bad,
        block_tokens: trace.block_tokens,
        prompt_tokens: all.prompt_tokens,
        output_tokens: trace.requests.iter().map(|request| u64::from(request.output_tokens)).sum(),
        span_s,
        sessions,
        sharing_ratio: (full * u64::from(trace.block_tokens)) as f64 / all.distinct_tokens.max(1) as f64,
        requests_sharing: all.requests_with_hits as f64 / trace.requests.len() as f64,
        ceiling: all.ceiling(),
        workers: args.workers,
        curve: curve(args, &trace),
    })
}

/// Doubling sizes, from the first that holds the longest request to the one from which one worker finds everything.
fn curve(args: &ImportArgs, trace: &Trace) -> Vec<CurvePoint> {
    let requests = in_order_of_time(trace, args.seed);
    let all = WorkingSet::of(&requests, trace.block_tokens);
    let service = WorkingSet::split(&requests, trace.block_tokens, args.workers, args.seed);
    let enough = all.tokens_for(1.0);
    let longest =
        requests.iter().map(|one| u64::from(one.prompt_tokens) + u64::from(one.output_tokens)).max();
    let mut curve = Vec::new();
    let mut worker_tokens = longest.unwrap_or(1).next_power_of_two();
    loop {
        curve.push(CurvePoint {
            worker_tokens,
            one_worker: all.share_at(worker_tokens),
            service: service.share_at(worker_tokens),
            routed: all.share_at(worker_tokens.saturating_mul(args.workers as u64)),
        });
        if worker_tokens >= enough {
            return curve;
        }
        worker_tokens *= 2;
    }
}

/// The requests as they come: sessions, which a file has one after another, side by side.
fn in_order_of_time(trace: &Trace, seed: u64) -> Vec<Request> {
    let Ok(Workload { arrivals: Arrivals::Sessions { starts, think }, .. }) =
        trace.paced(Pace::Speed(1.0), seed)
    else {
        return trace.requests.to_vec();
    };
    let mut timed: Vec<(f64, usize)> = Vec::with_capacity(think.len());
    for (start, first) in starts {
        let (mut at, mut index) = (start, first as usize);
        loop {
            timed.push((at, index));
            at += f64::from(trace.requests[index].output_tokens) / ANSWER_SPEED;
            index += 1;
            let Some(pause) = think.get(index).copied().flatten() else { break };
            at += pause;
        }
    }
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    timed.into_iter().map(|(_, index)| trace.requests[index].clone()).collect()
}

fn print(args: &ImportArgs, imported: &Imported, out: &mut dyn Write) -> Result<()> {
    let mean = |tokens: u64| tokens as f64 / imported.rows as f64;
    writeln!(out, "{}: {}, {} requests", args.file.display(), imported.schema, imported.rows)?;
    writeln!(
        out,
        "prompts      {:.2} M tokens, {:.0} in the mean; answers {:.0} in the mean",
        imported.prompt_tokens as f64 / 1e6,
        mean(imported.prompt_tokens),
        mean(imported.output_tokens)
    )?;
    if imported.schema == Schema::Bodies.as_str() {
        writeln!(
            out,
            "             by their bytes, four a token: a tokenizer counts otherwise, and the sizes below shift with that. An access log with \
             `blocks` has the engines' counts"
        )?;
    }
    if let Some(span) = imported.span_s {
        writeln!(out, "time         {span:.0} s, {:.2} requests/s", imported.rows as f64 / span.max(1e-9))?;
    }
    if let Some(sessions) = imported.sessions {
        writeln!(
            out,
            "sessions     {sessions}, {:.1} requests each",
            imported.rows as f64 / sessions as f64
        )?;
    }
    writeln!(
        out,
        "sharing      a block of {} tokens is asked for {:.2} times in the mean; {} % of the requests begin as an earlier one",
        imported.block_tokens,
        imported.sharing_ratio,
        percent(imported.requests_sharing)
    )?;
    writeln!(
        out,
        "ceiling      {} % of the prompt tokens, by one cache without limit, requests in the order of the file",
        percent(imported.ceiling)
    )?;
    let header = ["KV tokens\na worker", "one worker\nhits %", "Service\nhits %", "routed\nhits %"];
    let row = |point: &CurvePoint| {
        [
            point.worker_tokens.to_string(),
            percent(point.one_worker),
            percent(point.service),
            percent(point.routed),
        ]
    };
    writeln!(out, "{}", table(header, imported.curve.iter().map(row).collect()))?;
    writeln!(
        out,
        "hits are cached tokens of all prompt tokens. Service: {} workers, each request to one at random. routed: the same\n\
         workers as if their caches were one, about the most that routing can find. Requests one at a time, in the order of their times.",
        imported.workers
    )?;
    writeln!(out, "{}", reading(imported))?;
    Ok(())
}

/// The table in words.
fn reading(imported: &Imported) -> String {
    if imported.ceiling < 0.01 {
        return "Prompts share next to nothing: routing by prefix cannot help, only balancing can."
            .to_owned();
    }
    let gain = |point: &CurvePoint| point.routed - point.service;
    match imported.curve.iter().max_by(|a, b| gain(a).total_cmp(&gain(b))) {
        Some(best) if gain(best) >= 0.01 => format!(
            "Routing can help most where a worker has about {} tokens of KV cache: {} % of the prompt tokens behind a Service, up \
             to {} % routed.",
            best.worker_tokens,
            percent(best.service),
            percent(best.routed)
        ),
        _ => "A Service finds nearly all that can be found: routing by prefix adds little.".to_owned(),
    }
}
