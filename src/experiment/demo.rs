//! `warmroute demo`: what prefix routing is worth, shown on one machine. Simulated vLLM workers, the proxy and the load
//! generator run in one process and talk over real loopback sockets; every figure is measured in that run.
//!
//! A point takes a minute because the workers take their time, not because the machine is busy. So the runs of all points
//! go side by side, each with workers and a proxy of its own.

use std::any::Any;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures_util::future::BoxFuture;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::config::{self, Config, Mode};
use crate::engine::http::{self, EngineConfig, Fleet};
use crate::experiment::compare;
use crate::experiment::counters::Workers;
use crate::experiment::figures::Figures;
use crate::experiment::progress::Progress;
use crate::experiment::prompts::Api;
use crate::experiment::published::{PREFIXES_A_WORKER, routed_formula, service_formula};
use crate::experiment::report::outputs::{self, Outputs};
use crate::experiment::report::page::Page;
use crate::experiment::report::{self, Point, p50_p99, percent};
use crate::experiment::service::{self, Settings};
use crate::experiment::sizing::{Sizes, Wanted};
use crate::experiment::subject::{Subject, Wish};
use crate::experiment::target::Target;

/// Requests in flight in all runs that go side by side, and such runs. More would make the machine the bottleneck of the times
/// measured: eight requests in flight move about 700 tokens a second from a worker through the proxy to the client.
const IN_FLIGHT: usize = 96;
const SIDE_BY_SIDE: usize = 12;
/// The modes compared, in the order of the table.
const MODES: [Mode; 2] = [Mode::Random, Mode::Kv];

#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// Simulated workers
    #[arg(long, default_value_t = 6, value_name = "N")]
    pub workers: usize,
    /// Speed of each worker as a share of the usual; the last one counts for the rest
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "S,..")]
    pub speeds: Vec<f64>,
    /// Requests in flight
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub concurrency: usize,
    /// Numbers of shared prefixes, a row each
    #[arg(long, value_delimiter = ',', default_value = "2,7,12,24", value_name = "P,..")]
    pub prefixes: Vec<usize>,
    /// Runs of each point; the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub runs: u64,
    /// Requests of a run [default: 20 a prefix, at least 200]
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Fixes all requests and their order
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    #[command(flatten)]
    pub outputs: Outputs,
}

/// A proxy that runs until this is dropped.
pub struct Proxy {
    /// Where clients connect.
    pub clients: SocketAddr,
    /// Where the operator connects.
    pub admin: SocketAddr,
    /// Ends it when dropped.
    pub running: Box<dyn Any + Send + Sync>,
}

/// Starts the proxy with a config; handed in by the floor above, where the proxy is put together.
pub type StartProxy = Arc<dyn Fn(Config) -> BoxFuture<'static, Result<Proxy>> + Send + Sync>;

/// What `demo --json` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    pub workers: usize,
    /// Of each worker, as a share of the usual.
    pub speeds: Vec<f64>,
    pub concurrency: usize,
    pub runs: u64,
    pub seed: u64,
    /// KV cache of a worker, in tokens.
    pub worker_tokens: u64,
    pub prompt_tokens: u32,
    /// Tokens of a prompt that a cache can hold for its group.
    pub shareable_tokens: Option<u32>,
    pub output_tokens: u32,
    /// How long all of it took.
    pub elapsed_s: f64,
    pub points: Vec<Point>,
}

/// Runs the demo and prints it to `out`.
///
/// # Errors
/// If an argument is out of range, or workers, proxy or load fail.
pub async fn run(args: &DemoArgs, start_proxy: StartProxy, out: &mut (dyn Write + Send)) -> Result<()> {
    ensure!((1..=1000).contains(&args.workers), "--workers must be from 1 to 1000");
    ensure!(args.speeds.iter().all(|&s| s > 0.0 && s.is_finite()), "--speeds must be above 0");
    ensure!(args.concurrency > 0, "--concurrency must be at least 1");
    ensure!(!args.prefixes.is_empty() && !args.prefixes.contains(&0), "--prefixes must all be at least 1");
    ensure!(args.runs > 0, "--runs must be at least 1");
    ensure!(args.requests != Some(0), "--requests must be at least 1");
    args.outputs.check()?;
    args.outputs.deliver(measure(args, start_proxy).await?, out)
}

/// One run of one point.
#[derive(Copy, Clone, Debug)]
struct Run {
    prefixes: usize,
    mode: Mode,
    number: u64,
}

async fn measure(args: &DemoArgs, start_proxy: StartProxy) -> Result<Report> {
    let started = Instant::now();
    // All fleets are alike: what holds for the prompts of one holds for all.
    let learned =
        Arc::new(Stage::start(vec![worker_config(1.0)], Mode::Random, &start_proxy).await?.subject().await?);
    let sizes = learned.1;

    // The longest first, so that none of them is left alone at the end.
    let mut prefixes = args.prefixes.clone();
    prefixes.sort_unstable();
    prefixes.reverse();
    let runs: Vec<Run> = prefixes
        .iter()
        .flat_map(|&prefixes| (0..args.runs).map(move |number| (prefixes, number)))
        .flat_map(|(prefixes, number)| MODES.map(|mode| Run { prefixes, mode, number }))
        .collect();
    let progress = Progress::new(runs.iter().map(|run| settings(args, run, sizes).units()).sum());
    let turns = Arc::new(Semaphore::new((IN_FLIGHT / args.concurrency).clamp(1, SIDE_BY_SIDE)));
    let mut going = JoinSet::new();
    for run in runs {
        let (turns, progress) = (Arc::clone(&turns), progress.clone());
        let (start_proxy, learned) = (Arc::clone(&start_proxy), Arc::clone(&learned));
        let (settings, workers) = (settings(args, &run, sizes), fleet(args));
        going.spawn(async move {
            let _turn = turns.acquire_owned().await?;
            let figures = one_run(run, workers, &settings, &learned.0, &start_proxy, &progress)
                .await
                .with_context(|| format!("{}, {} prefixes", run.mode.as_str(), run.prefixes))?;
            anyhow::Ok((run, figures))
        });
    }
    let mut done: Vec<(Run, Figures)> = Vec::new();
    while let Some(ended) = going.join_next().await {
        done.push(ended.context("a run broke down")??);
    }
    progress.finish();
    done.sort_by_key(|(run, _)| run.number);
    let worker = worker_config(1.0);
    Ok(Report {
        workers: args.workers,
        speeds: (0..args.workers).map(|worker| speed_of(args, worker)).collect(),
        concurrency: args.concurrency,
        runs: args.runs,
        seed: args.seed,
        worker_tokens: u64::from(worker.engine.num_blocks) * u64::from(worker.engine.block_size),
        prompt_tokens: PROMPTS.prompt_tokens,
        shareable_tokens: sizes.shareable_tokens,
        output_tokens: OUTPUT_TOKENS,
        elapsed_s: started.elapsed().as_secs_f64(),
        points: points(args, &done),
    })
}

/// The study's prompts and answers.
const PROMPTS: Wanted = Wanted { shared_tokens: 2032, prompt_tokens: 2371 };
const OUTPUT_TOKENS: u32 = 64;
/// After which a request has failed.
const TIMEOUT: Duration = Duration::from_secs(120);

fn settings(args: &DemoArgs, run: &Run, sizes: Sizes) -> Settings {
    Settings {
        prefixes: run.prefixes,
        concurrency: args.concurrency,
        requests: args.requests,
        seed: args.seed,
        // Both modes get the very same requests: no two runs have a worker in common.
        texts: 0,
        sizes,
        run: run.number,
        keep_alive: false,
        timeout: TIMEOUT,
    }
}

async fn one_run(
    run: Run,
    workers: Vec<EngineConfig>,
    settings: &Settings,
    learned: &Subject,
    start_proxy: &StartProxy,
    progress: &Progress,
) -> Result<Figures> {
    let stage = Stage::start(workers, run.mode, start_proxy).await?;
    let (target, workers) = stage.addresses().await?;
    let admin = Some(Target::resolve(&format!("http://{}", stage.proxy.admin)).await?);
    let subject = Subject { target, workers, admin, ..learned.clone() };
    service::run(&subject, settings, progress).await
}

/// Workers and the proxy before them; dropped, they end.
struct Stage {
    fleet: http::Running,
    proxy: Proxy,
}

impl Stage {
    async fn start(workers: Vec<EngineConfig>, mode: Mode, start_proxy: &StartProxy) -> Result<Stage> {
        let fleet = Fleet::start(workers).await?;
        let proxy =
            start_proxy(proxy_config(fleet.addresses(), mode)?).await.context("cannot start the proxy")?;
        wait_until_ready(&proxy).await?;
        Ok(Stage { fleet, proxy })
    }

    async fn addresses(&self) -> Result<(Target, Workers)> {
        let urls: Vec<String> = self.fleet.addresses().iter().map(|at| format!("http://{at}")).collect();
        let target = Target::resolve(&format!("http://{}", self.proxy.clients)).await?;
        Ok((target, Workers::resolve(&urls).await?))
    }

    async fn subject(&self) -> Result<(Subject, Sizes)> {
        let (target, workers) = self.addresses().await?;
        let wish = Wish { api: Api::Chat, model: None, output_tokens: OUTPUT_TOKENS, timeout: TIMEOUT };
        let subject = Subject::learn("demo", target, workers, &wish).await?;
        let sizes = Sizes::find(&subject, PROMPTS).await?;
        Ok((subject, sizes))
    }
}

async fn wait_until_ready(proxy: &Proxy) -> Result<()> {
    let admin = Target::resolve(&format!("http://{}", proxy.admin)).await?;
    let ready = async {
        while !admin.get("/readyz").await?.0.is_success() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(10), ready).await.context("the proxy does not become ready")?
}

/// The study's worker: 585 blocks of 16 tokens, of which vLLM keeps one for itself.
fn worker_config(speed: f64) -> EngineConfig {
    let usual = EngineConfig::default();
    EngineConfig { enable_prompt_tokens_details: true, engine: usual.engine.clone().at_speed(speed), ..usual }
}

fn fleet(args: &DemoArgs) -> Vec<EngineConfig> {
    (0..args.workers).map(|worker| worker_config(speed_of(args, worker))).collect()
}

fn speed_of(args: &DemoArgs, worker: usize) -> f64 {
    args.speeds.get(worker).or(args.speeds.last()).copied().unwrap_or(1.0)
}

/// The product's defaults, on any free loopback ports.
fn proxy_config(workers: &[SocketAddr], mode: Mode) -> Result<Config> {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let worker = |at: &SocketAddr| {
        let url = config::Origin::parse(&format!("http://{at}")).map_err(anyhow::Error::msg)?;
        anyhow::Ok(config::Worker { url, capacity_tokens: None, prefill_speed: None })
    };
    let fixed = workers.iter().map(worker).collect::<Result<Vec<_>>>()?;
    let workers = config::Workers { fixed, ..config::Workers::default() };
    Ok(Config { listen: any, admin: any, mode, workers, ..Config::default() })
}

fn points(args: &DemoArgs, done: &[(Run, Figures)]) -> Vec<Point> {
    let point = |prefixes: usize, mode: Mode| {
        let of_point = done.iter().filter(|(run, _)| (run.prefixes, run.mode) == (prefixes, mode));
        let figures = of_point.map(|(_, figures)| figures.clone()).collect();
        let is_study = args.speeds.iter().all(|&speed| speed == 1.0);
        Point::of(mode.as_str(), Some(args.workers), prefixes, args.concurrency, figures, is_study)
    };
    args.prefixes
        .iter()
        .flat_map(|&prefixes| MODES.iter().filter_map(move |&mode| point(prefixes, mode)))
        .collect()
}

impl outputs::Measured for Report {
    fn points_mut(&mut self) -> &mut [Point] {
        &mut self.points
    }

    fn print(&self, _: &Page<'_>, out: &mut dyn Write) -> Result<()> {
        print(self, out)
    }

    fn page(&self) -> Page<'_> {
        Page {
            title: "Routing by prefix against a Service, on simulated vLLM workers".to_owned(),
            facts: vec![
                (
                    "workers",
                    format!("{} simulated, {} tokens of KV cache each", self.workers, self.worker_tokens),
                ),
                ("speeds", self.speeds.iter().map(f64::to_string).collect::<Vec<_>>().join(", ")),
                ("in flight", format!("{}, a new connection for each request", self.concurrency)),
                (
                    "prompts",
                    format!(
                        "{} tokens, {} shared by a group",
                        self.prompt_tokens,
                        self.shareable_tokens.unwrap_or_default()
                    ),
                ),
                ("answers", format!("{} tokens", self.output_tokens)),
                ("runs", format!("{} of each point; the median of each figure", self.runs)),
                ("seed", self.seed.to_string()),
                ("random", "this proxy, a worker drawn for each connection, as a Service does".to_owned()),
                ("kv", "this proxy, each request to the worker that has its prefix".to_owned()),
            ],
            points: &self.points,
            versus: compare::within(&self.points),
            prefixes_a_worker: Some(PREFIXES_A_WORKER),
        }
    }
}

fn print(report: &Report, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{} simulated vLLM workers with {} tokens of KV cache each, {} requests in flight, a new connection for each.\n\
         Prompts of {} tokens begin with one of P prefixes ({} tokens can come from a cache); {} tokens are generated.\n\
         Median of {} run(s), real sockets, {:.0} s in all.",
        report.workers,
        report.worker_tokens,
        report.concurrency,
        report.prompt_tokens,
        report.shareable_tokens.unwrap_or_default(),
        report.output_tokens,
        report.runs,
        report.elapsed_s
    )?;
    let pairs: Vec<(&Point, &Point)> =
        report.points.chunks(MODES.len()).filter_map(|pair| Some((pair.first()?, pair.get(1)?))).collect();
    writeln!(out, "{}", report::table(HEADER, pairs.iter().map(|(random, kv)| row(random, kv)).collect()))?;
    writeln!(out, "{LEGEND}")?;
    if let Some((random, kv)) = pairs.iter().max_by_key(|(random, _)| random.prefixes) {
        writeln!(out, "{}", reading(random, kv))?;
    }
    for note in report::notes(&report.points) {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

const HEADER: [&str; 10] = [
    "P\nprefixes",
    "hits %\nformula",
    "hits %\npublished",
    "hits %\nrandom",
    "hits %\nkv",
    "hits %\nbound",
    "TTFT ms\nrandom",
    "TTFT ms\nkv",
    "req/s\nrandom",
    "req/s\nkv",
];

const LEGEND: &str = "\
hits       requests that found any token of their prompt cached
formula    min(1, 3.95/P): a worker holds 3.95 prefixes, and behind a Service each worker sees all P
published  measured by the study on vLLM behind a Kubernetes Service, where it has the point
random     this proxy, a worker drawn for each connection, as a Service does
kv         this proxy, each request to the worker that has its prefix
bound      min(1, W x 3.95/P): what W workers hold together, one copy of each prefix
TTFT       time to first token, p50/p99";

fn row(random: &Point, kv: &Point) -> [String; 10] {
    let workers = random.workers.unwrap_or_default();
    let prefixes = random.prefixes;
    let speed = |point: &Point| format!("{:.1}", point.median.requests_per_s);
    [
        prefixes.to_string(),
        percent(service_formula(prefixes)),
        percent(random.published_hit_share),
        percent(random.median.hit_share),
        percent(kv.median.hit_share),
        percent(routed_formula(workers, prefixes)),
        p50_p99(random.median.ttft_ms),
        p50_p99(kv.median.ttft_ms),
        speed(random),
        speed(kv),
    ]
}

/// The last row in words.
fn reading(random: &Point, kv: &Point) -> String {
    let change = |of: f64, to: f64| 100.0 * (to / of - 1.0);
    format!(
        "\nWith {} prefixes, routing by prefix finds {} % instead of {} % of the requests' prefixes cached: TTFT p50 {:.0} -> \
         {:.0} ms,\n{:+.0} % requests per second. The busiest worker got {} times the mean.",
        kv.prefixes,
        percent(kv.median.hit_share),
        percent(random.median.hit_share),
        random.median.ttft_ms.p50,
        kv.median.ttft_ms.p50,
        change(random.median.requests_per_s, kv.median.requests_per_s),
        kv.worst_share_of_mean().map_or_else(|| "?".to_owned(), |worst| format!("{worst:.2}")),
    )
}
