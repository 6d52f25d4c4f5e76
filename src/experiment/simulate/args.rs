//! The command line of `warmroute simulate`: a named suite, or one workload with parameters.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;

use super::fleet::{Change, FleetSpec, TimingModel};
use super::job::{Contestant, Job, Recipe};
use super::policy::{PlannerSetup, PolicyName, SpeedKnowledge};
use super::routers::Routers;
use super::suite::{SERVICE_CAPACITY, SuiteName, TRACE_CAPACITY};
use crate::core::shadow::Sampling;
use crate::experiment::workload::made::{Kind, Made};
use crate::experiment::workload::shared::{Groups, Hot, Service, WarmUp};

/// Judge placement policies in virtual time: simulated workers, no sockets.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A named set of workloads, fleets and policies; each table of benches/README.md is one
    #[arg(long, value_enum, conflicts_with_all = [
        "workload", "trace", "workers", "capacity_tokens", "load", "spread", "speeds", "timing", "planner_speeds", "planner_blocks", "shadow",
        "routers", "restart", "join", "rows",
    ])]
    pub suite: Vec<SuiteName>,
    /// service, hot, chats, groups:GLOBAL+GROUP (percent of the prompt that all, that a group shares), or a trace: conversation,
    /// synthetic, sessions, sessions-shared, miniswe, magagent, azure-code, azure-chat
    #[arg(long)]
    pub workload: Vec<Kind>,
    /// A file of requests, as `bench import` checks; its times are stretched to the load
    #[arg(long, value_name = "FILE", conflicts_with = "suite")]
    pub trace: Option<PathBuf>,
    /// random, kv, round-robin, least-load, least-requests, `rendezvous[:BLOCKS[:BOUND]]`, fixed, `oracle[:WEIGHT]`; with a
    /// suite, only those of its policies
    #[arg(long, value_delimiter = ',')]
    pub policy: Vec<PolicyName>,
    /// Workers
    #[arg(long, value_delimiter = ',', default_value = "8")]
    pub workers: Vec<usize>,
    /// KV cache of a worker, in tokens [default: 9344 for service, 37448 for hot and groups, 524288 for traces]
    #[arg(long)]
    pub capacity_tokens: Option<u64>,
    /// Prefill work without any cache over the fleet's capacity (open loops)
    #[arg(long, value_delimiter = ',', default_value = "0.8")]
    pub load: Vec<f64>,
    #[command(flatten)]
    pub made: Made,
    /// Spread arrivals of `conversation` within the 3 seconds to which they are rounded
    #[arg(long)]
    pub spread: bool,
    /// Speed of each worker, as a share of 8,000 prompt and 40 output tokens a second; the last counts for the rest
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub speeds: Vec<f64>,
    /// How the engines spend time
    #[arg(long, value_enum, default_value = "serial")]
    pub timing: TimingModel,
    /// How the planner comes to know speeds
    #[arg(long, value_enum, default_value = "learned")]
    pub planner_speeds: SpeedKnowledge,
    /// Engine blocks in one block of the planner's chain
    #[arg(long, default_value_t = 1)]
    pub planner_blocks: usize,
    /// A shadow follows `kv` and `random`: what the other one would have hit, and a cache without end
    #[arg(long)]
    pub shadow: bool,
    /// It holds one block in so many (1, or a power of two from 4 to 512) [default: by the size of the caches]
    #[arg(long, requires = "shadow", value_parser = sampling)]
    pub shadow_one_in: Option<usize>,
    /// Routers before the fleet, each with beliefs of its own; a request comes to any of them. `random` and `kv` only
    #[arg(long, default_value_t = 1)]
    pub routers: usize,
    /// Seconds after which a router hears what the others have placed [default: never]
    #[arg(long, value_name = "SECONDS", requires = "routers")]
    pub sharing_delay: Option<f64>,
    /// WORKER@TIME+DOWN: worker (from 0) restarts after TIME seconds, and is gone for DOWN seconds
    #[arg(long)]
    pub restart: Vec<String>,
    /// A cold worker joins after so many seconds
    #[arg(long)]
    pub join: Vec<f64>,
    /// Seeds 1 to N
    #[arg(long, default_value_t = 3)]
    pub seeds: u64,
    /// Where the traces are [default: ../shared/traces]
    #[arg(long)]
    pub traces: Option<PathBuf>,
    /// Only the first rows of each trace
    #[arg(long)]
    pub rows: Option<usize>,
    /// Print every run as JSON
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,
    /// Print every run as CSV
    #[arg(long)]
    pub csv: bool,
}

impl Args {
    /// The jobs asked for.
    pub fn jobs(&self) -> anyhow::Result<Vec<Job>> {
        ensure!(self.seeds > 0, "--seeds must be at least 1");
        if !self.suite.is_empty() {
            let mut jobs: Vec<Job> = self.suite.iter().flat_map(|suite| suite.jobs(self.seeds)).collect();
            if !self.policy.is_empty() {
                let asked = |contestant: &Contestant| self.policy.contains(&contestant.policy);
                jobs.iter_mut().for_each(|job| job.contestants.retain(asked));
            }
            return Ok(jobs);
        }
        if self.workload.is_empty() && self.trace.is_none() {
            let suites: Vec<String> =
                SuiteName::value_variants().iter().map(|suite| suite.to_string()).collect();
            bail!("name a --workload, a --trace or a --suite; suites: {}", suites.join(", "));
        }
        self.check()?;
        let mut jobs = Vec::new();
        for kind in self.workload.iter().map(Some).chain(self.trace.iter().map(|_| None)) {
            for &workers in &self.workers {
                let fleet = self.fleet(kind, workers)?;
                for recipe in kind.map_or_else(|| self.recipes_of_file(), |kind| self.recipes(*kind)) {
                    for seed in 1..=self.seeds {
                        let contestants = self.contestants(kind);
                        jobs.push(Job { recipe: recipe.clone(), fleet: fleet.clone(), seed, contestants });
                    }
                }
            }
        }
        Ok(jobs)
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.workers.iter().all(|&n| (1..=4096).contains(&n)), "--workers must be 1 to 4096");
        ensure!(self.load.iter().all(|&load| load > 0.0 && load.is_finite()), "--load must be above 0");
        ensure!(self.speeds.iter().all(|&s| s > 0.0 && s.is_finite()), "--speeds must be above 0");
        self.made.check()?;
        ensure!(self.join.iter().all(|&at| at >= 0.0 && at.is_finite()), "--join must be at least 0");
        ensure!(self.rows != Some(0), "--rows must be at least 1");
        ensure!((1..=64).contains(&self.routers), "--routers must be 1 to 64");
        let delay = |delay: f64| delay >= 0.0 && delay.is_finite();
        ensure!(self.sharing_delay.is_none_or(delay), "--sharing-delay must be at least 0");
        Ok(())
    }

    /// `kind` is `None` for a file.
    fn fleet(&self, kind: Option<&Kind>, workers: usize) -> anyhow::Result<FleetSpec> {
        let usual = match kind {
            Some(Kind::Service) => SERVICE_CAPACITY,
            Some(Kind::Hot | Kind::Chats | Kind::Groups { .. }) => 4 * SERVICE_CAPACITY,
            Some(Kind::Trace(_)) | None => TRACE_CAPACITY,
        };
        let mut changes: Vec<Change> = self.join.iter().map(|&at| Change::Join { at }).collect();
        for text in &self.restart {
            let change =
                restart(text).with_context(|| format!("--restart {text}: WORKER@TIME+DOWN is needed"))?;
            ensure!(
                matches!(change, Change::Restart { worker, .. } if worker < workers),
                "--restart {text}: no such worker"
            );
            changes.push(change);
        }
        let capacity_tokens = self.capacity_tokens.unwrap_or(usual);
        Ok(FleetSpec { workers, capacity_tokens, speeds: self.speeds.clone(), changes, timing: self.timing })
    }

    fn recipes(&self, kind: Kind) -> Vec<Recipe> {
        let made = &self.made;
        let shape = made.shape();
        let popularity = || made.popularity.clone();
        let concurrencies = made.concurrencies();
        match kind {
            Kind::Service => self.each(&made.prefixes, concurrencies, |prefixes, clients| {
                let requests = made.requests.unwrap_or(1300);
                let warm_up = WarmUp::First(100.min(requests / 2));
                Recipe::Service(Service {
                    shape,
                    prefixes,
                    clients,
                    requests,
                    warm_up,
                    popularity: popularity(),
                })
            }),
            Kind::Hot => self.each(&made.prefixes, &self.load, |prefixes, load| {
                let requests = made.requests.unwrap_or(4000);
                Recipe::Hot(Hot { shape, prefixes, popularity: popularity(), load, requests })
            }),
            Kind::Chats => {
                self.each(&[()], &self.load, |(), load| Recipe::Chats { chats: made.chats(200), load })
            }
            Kind::Groups { global, group } => self.each(&[()], concurrencies, |(), clients| {
                Recipe::Groups(Groups { global, group, groups: 16, requests_each: 20, clients })
            }),
            Kind::Trace(name) => {
                let loads = if name.scales() { &self.load[..] } else { &self.load[..1] };
                let recipe = |(), load| Recipe::Trace { name, load, spread: self.spread };
                self.each(&[()], loads, recipe)
            }
        }
    }

    fn recipes_of_file(&self) -> Vec<Recipe> {
        self.each(&[()], &self.load, |(), load| Recipe::File { load, spread: self.spread })
    }

    fn each<A: Copy, B: Copy>(&self, a: &[A], b: &[B], recipe: impl Fn(A, B) -> Recipe) -> Vec<Recipe> {
        a.iter().flat_map(|&a| b.iter().map(move |&b| (a, b))).map(|(a, b)| recipe(a, b)).collect()
    }

    fn contestants(&self, kind: Option<&Kind>) -> Vec<Contestant> {
        let usual = ["random", "least-load", "rendezvous", "oracle:1", "oracle:0.5", "kv"];
        let fixed = matches!(kind, Some(Kind::Service)).then_some(PolicyName::Fixed);
        let policies = match self.policy.is_empty() {
            true => usual.iter().filter_map(|name| name.parse().ok()).chain(fixed).collect(),
            false => self.policy.clone(),
        };
        let setup = PlannerSetup {
            speeds: self.planner_speeds,
            joined_blocks: self.planner_blocks,
            shadow: self.shadow.then(|| self.shadow_one_in.map_or(Sampling::Auto, Sampling::OneIn)),
            routers: Routers { count: self.routers, delay: self.sharing_delay },
            ..Default::default()
        };
        policies.into_iter().map(|policy| Contestant { policy, setup: setup.clone(), label: "" }).collect()
    }
}

fn sampling(text: &str) -> Result<usize, String> {
    let one_in = text.parse().map_err(|_| "not a number".to_owned())?;
    Sampling::one_in(one_in)
        .map(|_| one_in)
        .ok_or_else(|| "not 1, 4, 8, 16, 32, 64, 128, 256 or 512".to_owned())
}

fn restart(text: &str) -> Option<Change> {
    let (worker, rest) = text.split_once('@')?;
    let (at, down) = rest.split_once('+')?;
    let time = |text: &str| text.parse::<f64>().ok().filter(|time| *time >= 0.0 && time.is_finite());
    Some(Change::Restart { at: time(at)?, worker: worker.parse().ok()?, down: time(down)? })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn jobs(line: &str) -> anyhow::Result<Vec<Job>> {
        let words = std::iter::once("simulate").chain(line.split_whitespace());
        Cli::try_parse_from(words)?.args.jobs()
    }

    #[test]
    fn lists_multiply() {
        let jobs =
            jobs("--workload service --prefixes 7,24 --concurrency 4,8 --workers 3,6 --policy kv,random")
                .unwrap();
        assert_eq!((jobs.len(), jobs[0].contestants.len()), (24, 2));
        assert_eq!(jobs[0].fleet.capacity_tokens, SERVICE_CAPACITY);
    }

    #[test]
    fn errors_name_the_flag() {
        for (line, what) in [
            ("", "--suite"),
            ("--workload nonsense", "no workload"),
            ("--workload groups:80+30", "at most 100"),
            ("--workload hot --load 0", "--load"),
            ("--workload hot --workers 0", "--workers"),
            ("--workload hot --speeds 0", "--speeds"),
            ("--workload hot --seeds 0", "--seeds"),
            ("--workload hot --popularity cold", "no popularity"),
            ("--workload hot --prompt-tokens 9-3", "FROM-TO"),
            ("--workload hot --policy best", "no policy"),
            ("--workload hot --restart 1@5", "WORKER@TIME+DOWN"),
            ("--workload hot --restart 8@5+1", "no such worker"),
            ("--suite six --workload hot", "cannot be used"),
            ("--suite six --workers 4", "cannot be used"),
            ("--workload hot --routers 0", "--routers"),
            ("--workload hot --routers 2 --sharing-delay=-1", "--sharing-delay"),
        ] {
            let error = format!("{:#}", jobs(line).unwrap_err());
            assert!(error.contains(what), "{line}: {error}");
        }
    }
}
