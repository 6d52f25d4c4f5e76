//! The command line: one subcommand per thing the binary can do, and as few flags as that needs. The rest is in the config.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;

use crate::app::{self, Ended};
use crate::config::watch::Source;
use crate::config::{Config, Log, LogFormat};
use crate::engine::http::{EngineArgs, Fleet};
use crate::experiment::bench::{self, BenchArgs};
use crate::experiment::demo::{self, DemoArgs, StartProxy};
use crate::experiment::simulate;
use crate::lifecycle::{Stop, Urgency};
use crate::operator::{self, ExplainArgs, ModeArgs, StatusArgs, WorkersArgs};
use crate::threads::Threads;

/// Routes each LLM request to the vLLM worker whose KV cache is already warm.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy.
    Serve {
        /// The config file; config/warmroute.yaml shows every key.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Check a config file and print what it comes to, defaults included and secrets left out.
    Check {
        /// The config file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show a running proxy's workers and what is believed of them.
    Status(StatusArgs),
    /// Tell a running proxy's mode, or switch it.
    Mode(ModeArgs),
    /// Say where a running proxy would send a request, and why.
    Explain(ExplainArgs),
    /// Drain a worker of a running proxy, or undo it.
    Workers(WorkersArgs),
    /// Run simulated vLLM workers and print their addresses, one a line.
    Engine(EngineArgs),
    /// Show what prefix routing is worth, on simulated workers in this process.
    Demo(DemoArgs),
    /// Measure any OpenAI-compatible target, or compare several.
    Bench(BenchArgs),
    /// Judge placement in virtual time, without sockets.
    Simulate(simulate::args::Args),
}

const NO_RUNTIME: &str = "the runtime cannot start";

/// The exit code of a proxy that had to cut requests on its way out.
const CUT: u8 = 3;

/// Does what the command line says.
///
/// # Errors
/// With the message for the user.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    raise_open_files();
    match cli.command {
        Command::Check { config } => {
            let yaml = Config::load(&config)?.to_yaml();
            io::stdout().write_all(yaml.as_bytes()).context("standard output")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Demo(args) => {
            let start: StartProxy = Arc::new(|config| Box::pin(start_proxy(config)));
            runtime()?.block_on(demo::run(&args, start, &mut io::stdout()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench(args) => {
            runtime()?.block_on(bench::run(&args, &mut io::stdout()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Status(args) => told(operator::status(&args, &mut io::stdout())),
        Command::Mode(args) => told(operator::mode(&args, &mut io::stdout())),
        Command::Explain(args) => told(operator::explain(&args, &mut io::stdout())),
        Command::Workers(args) => told(operator::workers(&args, &mut io::stdout())),
        Command::Engine(args) => runtime()?.block_on(run_engines(&args)),
        Command::Simulate(args) => {
            simulate::run(&args, &mut io::stdout())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Serve { config: file } => {
            let (config, file) = Source::load(file)?;
            start_log(&config.log);
            tell_open_files(config.limits.connections);
            // This one thread does all but to serve clients, and that too on a single CPU: what an operator asks for, or workers tell, is no
            // request's business.
            let own = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let ended = own.context(NO_RUNTIME)?.block_on(async {
                let stop = Stop::default();
                stop.on_signals().context("signal handlers")?;
                let threads = Threads::one_a_cpu().context("the threads that serve clients")?;
                let bound = app::build(config)?.on(threads);
                anyhow::Ok(bound.run(stop, Some(file)).await)
            })?;
            Ok(match ended {
                Ended::Drained => ExitCode::SUCCESS,
                Ended::Cut => ExitCode::from(CUT),
            })
        }
    }
}

fn told(asking: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(asking)?;
    Ok(ExitCode::SUCCESS)
}

/// The first signal lets answers in flight end, a second one does not.
async fn run_engines(args: &EngineArgs) -> anyhow::Result<ExitCode> {
    let stop = Stop::default();
    stop.on_signals().context("signal handlers")?;
    let fleet = Fleet::bind(args.configs().map_err(anyhow::Error::msg)?).await?;
    let addresses: String = fleet.addresses().iter().map(|address| format!("http://{address}\n")).collect();
    io::stdout().write_all(addresses.as_bytes()).context("standard output")?;
    tokio::select! {
        () = fleet.run(stop.at_least(Urgency::Drain)) => {}
        () = stop.at_least(Urgency::Now) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// The proxy as `demo` wants it: in this process, ended by dropping it.
async fn start_proxy(config: Config) -> anyhow::Result<demo::Proxy> {
    let bound = app::build(config)?;
    let (clients, admin) = (bound.client_address()?, bound.admin_address()?);
    let mut running = JoinSet::new();
    running.spawn(bound.run(Stop::default(), None));
    Ok(demo::Proxy { clients, admin, running: Box::new(running) })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context(NO_RUNTIME)
}

/// Takes all the open files that the system allows: a connection at each side of a request needs one, and the usual soft
/// limit of 1024 is there for programs that use `select`.
fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Refused where the hard limit is no real one; what was allowed before is then still allowed.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Says how many open files are allowed, and whether they are too few.
fn tell_open_files(connections: usize) {
    let wanted = (connections as u64).saturating_mul(2);
    match getrlimit(Resource::Nofile).current {
        Some(allowed) if allowed < wanted => tracing::warn!(
            allowed,
            wanted,
            "too few open files are allowed for limits.connections and as many to the workers: raise ulimit -n"
        ),
        Some(allowed) => tracing::info!(allowed, "open files"),
        None => {}
    }
}

/// Starts the log on standard error.
fn start_log(log: &Log) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::prelude::*;

    let filter: Targets = log.level.parse().unwrap_or_default();
    // They log each answer that they cannot read, for as long as such come; what matters of them is told by `fleet::discovery` and
    // `peers::reach`, at a bounded pace.
    let quiet = [
        ("kube_client", LevelFilter::OFF),
        ("hickory_net", LevelFilter::ERROR),
        ("hickory_proto", LevelFilter::ERROR),
        ("hickory_resolver", LevelFilter::ERROR),
        ("redis", LevelFilter::OFF),
    ];
    let unnamed = quiet.into_iter().filter(|(target, _)| !log.level.contains(target));
    let filter = unnamed.fold(filter, |filter, (target, most)| filter.with_target(target, most));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    // Colours are for eyes only, and not for those of who says `NO_COLOR`.
    let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let registry = tracing_subscriber::registry();
    match log.format {
        LogFormat::Text => registry.with(lines.with_ansi(ansi).with_filter(filter)).init(),
        LogFormat::Json => registry.with(lines.json().with_filter(filter)).init(),
    }
}
