//! The named suites: each table of `benches/README.md` is one of them.

use std::fmt;

use clap::ValueEnum;

use super::fleet::{Change, FleetSpec};
use super::job::{Contestant, Job, Recipe};
use super::policy::{PlannerSetup, PolicyName, SpeedKnowledge};
use crate::experiment::workload::popularity::Popularity;
use crate::experiment::workload::replay::TraceName;
use crate::experiment::workload::shared::{Groups, Hot, Service, Shape, WarmUp};

/// Usable KV cache of a worker of the Service experiment: 584 blocks of 16 tokens.
pub const SERVICE_CAPACITY: u64 = 9_344;
/// The same with four times the room, for hot prefixes.
pub const HOT_CAPACITY: u64 = 37_448;
/// KV cache of a worker in the replays of traces: 1,024 blocks of 512 tokens.
pub const TRACE_CAPACITY: u64 = 524_288;

/// A named set of jobs.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum SuiteName {
    /// Every trace at load 0.8
    Traces,
    /// The Service experiment as published: any cached token is a hit
    Published,
    /// The Service experiment against four prefixes fixed to each worker, warm, three shapes
    Service,
    /// Hot prefixes on 8 workers, five popularities, loads 0.8 and 2.0
    Hot,
    /// More than fits, more than can be computed
    Overload,
    /// Small workloads that break routers: groups that share 95, 20, or 65 and 33 percent of their prompts
    Six,
    /// Four workers at speed 1, two at 0.4
    Speeds,
    /// Zipf(1.0) over 200 prefixes
    Zipf,
    /// Prefixes as hot as the clients of production models
    Tenants,
    /// Prompts of very different lengths
    Lengths,
    /// A worker restarts, another joins
    Changes,
    /// The planner is told a wrong capacity
    Capacity,
}

impl fmt::Display for SuiteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => write!(f, "{}", value.get_name()),
            None => Ok(()),
        }
    }
}

impl SuiteName {
    /// The suite's jobs with seeds 1 to `seeds`.
    pub fn jobs(self, seeds: u64) -> Vec<Job> {
        let cases = match self {
            SuiteName::Traces => traces(),
            SuiteName::Published => published(),
            SuiteName::Service => service(),
            SuiteName::Hot => hot(),
            SuiteName::Overload => overload(),
            SuiteName::Six => six(),
            SuiteName::Speeds => speeds(),
            SuiteName::Zipf => zipf(),
            SuiteName::Tenants => tenants(),
            SuiteName::Lengths => lengths(),
            SuiteName::Changes => changes(),
            SuiteName::Capacity => capacity(),
        };
        let job = |(recipe, fleet, contestants): Case| {
            let seeded = move |seed| Job {
                recipe: recipe.clone(),
                fleet: fleet.clone(),
                seed,
                contestants: contestants.clone(),
            };
            (1..=seeds).map(seeded)
        };
        cases.into_iter().flat_map(job).collect()
    }
}

type Case = (Recipe, FleetSpec, Vec<Contestant>);

const ORACLES: [PolicyName; 2] = [PolicyName::Oracle { weight: 1.0 }, PolicyName::Oracle { weight: 0.5 }];
const HASH: PolicyName = PolicyName::Rendezvous { blocks: 0, bound: f64::INFINITY };
const BOUNDED_HASH: PolicyName = PolicyName::Rendezvous { blocks: 0, bound: 1.25 };

fn by(policies: &[PolicyName]) -> Vec<Contestant> {
    policies.iter().map(|&policy| policy.into()).collect()
}

/// The policies of most tables.
fn usual() -> Vec<Contestant> {
    let [oracle, half] = ORACLES;
    by(&[PolicyName::Random, PolicyName::LeastLoad, HASH, BOUNDED_HASH, oracle, half, PolicyName::Kv])
}

fn traces() -> Vec<Case> {
    let rows: [(TraceName, &[usize]); 8] = [
        (TraceName::Conversation, &[4, 8, 16, 64]),
        (TraceName::Synthetic, &[8, 16]),
        (TraceName::Sessions, &[4, 8, 16, 64]),
        (TraceName::SessionsShared, &[8, 16]),
        (TraceName::Miniswe, &[8]),
        (TraceName::Magagent, &[8]),
        (TraceName::AzureCode, &[8]),
        (TraceName::AzureChat, &[8]),
    ];
    let each = |(name, sizes): (TraceName, &'static [usize])| {
        let fleet = |&workers: &usize| FleetSpec::of(workers, TRACE_CAPACITY);
        let recipe = Recipe::Trace { name, load: 0.8, spread: false };
        sizes.iter().map(move |workers| (recipe.clone(), fleet(workers), usual()))
    };
    rows.into_iter().flat_map(each).collect()
}

fn closed(shape: Shape, prefixes: u32, clients: usize, requests: usize, warm_up: WarmUp) -> Recipe {
    let popularity = Popularity::Uniform;
    Recipe::Service(Service { shape, prefixes, clients, requests, warm_up, popularity })
}

fn published() -> Vec<Case> {
    let case = |workers: usize, prefixes: u32| {
        let requests = (20 * prefixes as usize).max(200);
        let recipe = closed(Shape::SERVICE, prefixes, 8, requests, WarmUp::EachPrefix);
        let policies = by(&[PolicyName::Random, HASH, ORACLES[1], PolicyName::Kv]);
        (recipe, FleetSpec::of(workers, SERVICE_CAPACITY), policies)
    };
    [6, 3].iter().flat_map(|&workers| [2, 7, 12, 24].map(|prefixes| case(workers, prefixes))).collect()
}

fn service() -> Vec<Case> {
    let policies = || by(&[PolicyName::LeastLoad, PolicyName::Fixed, ORACLES[0], ORACLES[1], PolicyName::Kv]);
    let mut cases = Vec::new();
    for shape in [Shape::SERVICE, Shape::ROUND, Shape::REAL] {
        for (workers, prefixes) in [(6, 24), (3, 12)] {
            for clients in [4, 8, 16] {
                let recipe = closed(shape, prefixes, clients, 1300, WarmUp::First(100));
                cases.push((recipe, FleetSpec::of(workers, SERVICE_CAPACITY), policies()));
            }
        }
    }
    cases
}

fn open(prefixes: u32, popularity: Popularity, load: f64) -> Recipe {
    Recipe::Hot(Hot { shape: Shape::SERVICE, prefixes, popularity, load, requests: 4000 })
}

fn hot() -> Vec<Case> {
    let columns = [
        Popularity::Uniform,
        Popularity::Zipf(0.8),
        Popularity::Zipf(1.2),
        Popularity::Hot(0.5),
        Popularity::Hot(0.8),
    ];
    let case = |(popularity, load)| (open(96, popularity, load), FleetSpec::of(8, HOT_CAPACITY), usual());
    [0.8, 2.0].iter().flat_map(|&load| columns.clone().map(|column| (column, load))).map(case).collect()
}

fn overload() -> Vec<Case> {
    let fleet = || FleetSpec::of(16, HOT_CAPACITY);
    let mut cases: Vec<Case> =
        [0.8, 2.0].map(|load| (open(384, Popularity::Uniform, load), fleet(), usual())).into_iter().collect();
    for load in [1.2, 1.5] {
        let recipe = Recipe::Trace { name: TraceName::Conversation, load, spread: false };
        cases.push((recipe, FleetSpec::of(16, TRACE_CAPACITY), usual()));
    }
    cases
}

fn six() -> Vec<Case> {
    let mut cases = Vec::new();
    for (global, group) in [(0, 95), (0, 20), (65, 33)] {
        for clients in [1, 4, 32] {
            let groups = Groups { global, group, groups: 16, requests_each: 20, clients };
            cases.push((Recipe::Groups(groups), FleetSpec::of(4, HOT_CAPACITY), usual()));
        }
    }
    cases
}

/// `kv` once for each way of knowing speeds.
fn by_speed_knowledge() -> impl Iterator<Item = Contestant> {
    use SpeedKnowledge::{Learned, Same, Told};
    [(Learned, ""), (Told, "(speeds told)"), (Same, "(speeds taken as equal)")].into_iter().map(
        |(speeds, label)| {
            let setup = PlannerSetup { speeds, ..PlannerSetup::default() };
            Contestant { policy: PolicyName::Kv, setup, label }
        },
    )
}

fn speeds() -> Vec<Case> {
    let slow =
        |capacity| FleetSpec { speeds: vec![1.0, 1.0, 1.0, 1.0, 0.4, 0.4], ..FleetSpec::of(6, capacity) };
    let contestants = || -> Vec<Contestant> {
        by(&[PolicyName::Random, PolicyName::LeastLoad]).into_iter().chain(by_speed_knowledge()).collect()
    };
    let conversation = Recipe::Trace { name: TraceName::Conversation, load: 0.8, spread: false };
    vec![
        (open(24, Popularity::Uniform, 2.0), slow(HOT_CAPACITY), contestants()),
        (open(72, Popularity::Zipf(1.0), 2.0), slow(HOT_CAPACITY), contestants()),
        (closed(Shape::SERVICE, 24, 8, 1300, WarmUp::First(100)), slow(SERVICE_CAPACITY), contestants()),
        (conversation, slow(TRACE_CAPACITY), contestants()),
    ]
}

fn zipf() -> Vec<Case> {
    let case = |load| (open(200, Popularity::Zipf(1.0), load), FleetSpec::of(8, HOT_CAPACITY), usual());
    vec![case(0.8), case(2.0)]
}

fn tenants() -> Vec<Case> {
    let models = ["deepseek-r1", "m-large", "m-mid", "m-small", "mm-image"];
    let recipe = |model| Recipe::Tenants { model, load: 1.0, requests: 4000 };
    models.iter().map(|&model| (recipe(model), FleetSpec::of(8, HOT_CAPACITY), usual())).collect()
}

fn lengths() -> Vec<Case> {
    let shape = Shape {
        prefix: 1024,
        prompt: "1100-16000".parse().unwrap_or(Shape::SERVICE.prompt),
        ..Shape::SERVICE
    };
    let hot = |load| {
        Recipe::Hot(Hot { shape, prefixes: 48, popularity: Popularity::Zipf(0.8), load, requests: 4000 })
    };
    let fleet = || FleetSpec::of(8, 4 * HOT_CAPACITY);
    vec![(hot(0.8), fleet(), usual()), (hot(1.0), fleet(), usual())]
}

fn changes() -> Vec<Case> {
    let changes = vec![Change::Restart { at: 20.0, worker: 3, down: 10.0 }, Change::Join { at: 40.0 }];
    let fleet = FleetSpec { changes, ..FleetSpec::of(8, HOT_CAPACITY) };
    vec![(open(96, Popularity::Zipf(0.8), 1.0), fleet, usual())]
}

fn capacity() -> Vec<Case> {
    let told = [(0.5, "(told half)"), (1.0, ""), (2.0, "(told twice)"), (4.0, "(told four times)")];
    let contestants = || -> Vec<Contestant> {
        let kv = |(capacity_share, label)| {
            let setup = PlannerSetup { capacity_share, ..PlannerSetup::default() };
            Contestant { policy: PolicyName::Kv, setup, label }
        };
        told.map(kv).into()
    };
    let trace = |name| Recipe::Trace { name, load: 0.8, spread: false };
    vec![
        (trace(TraceName::Sessions), FleetSpec::of(8, TRACE_CAPACITY), contestants()),
        (trace(TraceName::Conversation), FleetSpec::of(8, TRACE_CAPACITY), contestants()),
        (open(96, Popularity::Uniform, 2.0), FleetSpec::of(8, HOT_CAPACITY), contestants()),
        (
            closed(Shape::SERVICE, 24, 8, 1300, WarmUp::First(100)),
            FleetSpec::of(6, SERVICE_CAPACITY),
            contestants(),
        ),
    ]
}
