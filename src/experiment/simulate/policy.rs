//! The policies that can be compared: the product's own planner, and baselines that it has to beat.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use super::fleet::{FleetSpec, Incoming, Worker};
use super::routers::{Claim, Group, Routers};
use crate::core::blocks::Chain;
use crate::core::ids::{BlockHash, WorkerId};
use crate::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};
use crate::core::shadow::{Followed, Sampling, Shadow};
use crate::experiment::workload::mix;

/// A policy by name and parameters.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum PolicyName {
    /// The planner's `random`.
    Random,
    /// The planner's `kv`.
    Kv,
    /// Workers in turn.
    RoundRobin,
    /// Fewest prompt tokens without a first token.
    LeastLoad,
    /// Fewest open requests.
    LeastRequests,
    /// Highest hash of worker and prompt head. `blocks` of the head are the key (0: as many as the workload's prefixes
    /// have); with a `bound`, workers with more than `bound` times the mean of open requests are passed over.
    Rendezvous { blocks: usize, bound: f64 },
    /// Prefix p on worker p mod workers.
    Fixed,
    /// Sees the engines' true caches and queues: least uncached + `weight` x queue, in tokens.
    Oracle { weight: f64 },
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyName::Random => write!(f, "random"),
            PolicyName::Kv => write!(f, "kv"),
            PolicyName::RoundRobin => write!(f, "round-robin"),
            PolicyName::LeastLoad => write!(f, "least-load"),
            PolicyName::LeastRequests => write!(f, "least-requests"),
            PolicyName::Rendezvous { blocks, bound } => {
                write!(f, "rendezvous")?;
                if *blocks > 0 || bound.is_finite() {
                    write!(f, ":{blocks}")?;
                }
                if bound.is_finite() { write!(f, ":{bound}") } else { Ok(()) }
            }
            PolicyName::Fixed => write!(f, "fixed"),
            PolicyName::Oracle { weight } => write!(f, "oracle:{weight}"),
        }
    }
}

impl FromStr for PolicyName {
    type Err = String;

    fn from_str(text: &str) -> Result<PolicyName, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or("");
        let mut number = |default: f64| match parts.next() {
            None => Ok(default),
            Some(part) => part
                .parse::<f64>()
                .ok()
                .filter(|number| *number >= 0.0)
                .ok_or_else(|| format!("`{part}` in policy `{text}` is not a number of at least 0")),
        };
        let policy = match name {
            "random" => PolicyName::Random,
            "kv" => PolicyName::Kv,
            "round-robin" => PolicyName::RoundRobin,
            "least-load" => PolicyName::LeastLoad,
            "least-requests" => PolicyName::LeastRequests,
            "rendezvous" => {
                PolicyName::Rendezvous { blocks: number(0.0)? as usize, bound: number(f64::INFINITY)? }
            }
            "fixed" => PolicyName::Fixed,
            "oracle" => PolicyName::Oracle { weight: number(0.5)? },
            _ => {
                return Err(format!(
                    "`{text}` is no policy: random, kv, round-robin, least-load, least-requests, \
                     rendezvous[:BLOCKS[:BOUND]], fixed, oracle[:WEIGHT]"
                ));
            }
        };
        match parts.next() {
            None => Ok(policy),
            Some(part) => Err(format!("policy `{name}` has no parameter `{part}`")),
        }
    }
}

/// How the planner comes to know prefill speeds.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SpeedKnowledge {
    /// From what it sees, as the proxy does.
    #[default]
    Learned,
    /// It is told each worker's.
    Told,
    /// Not at all: all are taken to be equally fast.
    Same,
}

/// What the planner is told and given.
#[derive(Clone, Debug, Default)]
pub struct PlannerSetup {
    pub settings: Settings,
    pub speeds: SpeedKnowledge,
    /// Engine blocks that one block of the planner's chain covers; 0 counts as 1.
    pub joined_blocks: usize,
    /// The planner is told this share of the true capacity; 0 counts as 1.
    pub capacity_share: f64,
    /// Each router has a shadow.
    pub shadow: Option<Sampling>,
    pub routers: Routers,
}

/// Where a request goes.
pub struct Placed {
    pub worker: usize,
    /// Prompt tokens that the policy believes cached there, if it has a belief.
    pub predicted: Option<f64>,
    /// The planner's claim.
    pub booking: Option<Claim>,
    pub followed: Option<Followed>,
}

/// A policy at work on one fleet.
pub enum Router {
    Planned(Box<Planned>),
    Own { name: PolicyName, turn: usize },
}

/// The product's planner, fed as the proxy would feed it.
pub struct Planned {
    group: Group,
    policy: Policy,
    setup: PlannerSetup,
    block_tokens: u32,
    ids: Vec<WorkerId>,
}

impl Router {
    /// For the workers that `fleet` starts with.
    pub fn new(name: PolicyName, setup: &PlannerSetup, fleet: &FleetSpec, block_tokens: u32) -> Router {
        let policy = match name {
            PolicyName::Random => Policy::Random,
            PolicyName::Kv => Policy::Kv,
            _ => return Router::Own { name, turn: 0 },
        };
        let learn_speed = setup.settings.learn_speed && setup.speeds == SpeedKnowledge::Learned;
        let planner = || Planner::new(Settings { learn_speed, ..setup.settings.clone() });
        let shadow = |_: &Planner| Some(Shadow::new(setup.shadow?, &setup.settings));
        let group = Group::new(setup.routers, planner, shadow);
        let planned = Planned { group, policy, setup: setup.clone(), block_tokens, ids: Vec::new() };
        let mut router = Router::Planned(Box::new(planned));
        (0..fleet.workers).for_each(|worker| router.joined(worker, fleet));
        router
    }

    /// Worker number `worker` is there; workers join in the order of their numbers.
    pub fn joined(&mut self, worker: usize, fleet: &FleetSpec) {
        let Router::Planned(planned) = self else { return };
        let Planned { group, setup, block_tokens, ids, .. } = &mut **planned;
        group.sync_soon();
        let share = if setup.capacity_share > 0.0 { setup.capacity_share } else { 1.0 };
        let spec = WorkerSpec {
            key: mix(worker as u64),
            capacity_tokens: Some((fleet.capacity_tokens as f64 * share) as u64),
            engine_block_tokens: *block_tokens,
            prefill_speed: match setup.speeds {
                SpeedKnowledge::Told => Some(fleet.prefill_speed(worker)),
                SpeedKnowledge::Learned | SpeedKnowledge::Same => None,
            },
        };
        // All hear of the same workers in the same order, so that one has the same place everywhere.
        let places: Vec<WorkerId> =
            group.planners().iter().map(|planner| planner.add_worker(spec.clone())).collect();
        ids.push(places[0]);
    }

    /// The worker lost its cache and its requests.
    pub fn restarted(&mut self, worker: usize) {
        if let Router::Planned(planned) = self {
            for planner in planned.group.planners() {
                planner.forget(planned.ids[worker]);
            }
            planned.group.sync_soon();
        }
    }

    /// Picks a worker; `None` if none is up.
    pub fn place(&mut self, asked: &Incoming<'_>, fleet: &[Worker], random: &mut StdRng) -> Option<Placed> {
        match self {
            Router::Planned(planned) => {
                let up = (0..fleet.len()).filter(|&worker| fleet[worker].up);
                let eligible: Vec<WorkerId> = up.map(|worker| planned.ids[worker]).collect();
                planned.group.scrape(asked.now, &planned.ids, fleet);
                planned.place(asked, &eligible, random)
            }
            Router::Own { name, turn } => {
                let worker = pick(*name, turn, asked, fleet, random)?;
                Some(Placed { worker, predicted: None, booking: None, followed: None })
            }
        }
    }
}

impl Planned {
    fn place(&mut self, asked: &Incoming<'_>, eligible: &[WorkerId], random: &mut StdRng) -> Option<Placed> {
        let ask = ask(asked, self.setup.joined_blocks.max(1));
        let drawn = random.next_u64();
        let by = match self.group.planners().len() {
            1 => 0,
            count => random.random_range(0..count),
        };
        let (decision, booking, followed) =
            self.group.plan(by, &ask, eligible, self.policy, asked.now, drawn)?;
        let worker = self.ids.iter().position(|id| *id == decision.worker)?;
        let predicted = Some(decision.predicted_cached_tokens);
        Some(Placed { worker, predicted, booking: Some(booking), followed })
    }
}

/// What the proxy would ask of the planner.
fn ask(asked: &Incoming<'_>, joined: usize) -> Ask {
    let hashes: Arc<[BlockHash]> = match joined {
        1 => asked.chain.clone(),
        // A block's hash covers all before it, so the last of each group stands for the group.
        _ => asked.chain.iter().skip(joined - 1).step_by(joined).copied().collect(),
    };
    Ask {
        chain: Chain::even(hashes, u64::from(asked.prompt_tokens) * 4),
        block_tokens: f64::from(asked.block_tokens) * joined as f64,
        prompt_tokens: f64::from(asked.prompt_tokens),
        output_tokens: f64::from(asked.output_tokens),
        streams: true,
    }
}

/// The baselines.
fn pick(
    name: PolicyName,
    turn: &mut usize,
    asked: &Incoming<'_>,
    fleet: &[Worker],
    random: &mut StdRng,
) -> Option<usize> {
    let up: Vec<usize> = (0..fleet.len()).filter(|&worker| fleet[worker].up).collect();
    if up.is_empty() {
        return None;
    }
    match name {
        PolicyName::RoundRobin => {
            *turn += 1;
            Some(up[(*turn - 1) % up.len()])
        }
        PolicyName::Fixed => Some(up[asked.group as usize % up.len()]),
        PolicyName::LeastRequests => least(&up, random, |worker| (f64::from(fleet[worker].open), 0)),
        PolicyName::LeastLoad => {
            least(&up, random, |worker| (fleet[worker].waiting_tokens as f64, fleet[worker].open))
        }
        PolicyName::Rendezvous { blocks, bound } => Some(rendezvous(asked, blocks, bound, &up, fleet)),
        PolicyName::Oracle { weight } => least(&up, random, |worker| {
            let engine = &fleet[worker].engine;
            let cached = engine.cached_tokens(asked.chain, asked.prompt_tokens);
            let uncached = f64::from(asked.prompt_tokens - cached);
            (uncached + weight * engine.uncached_tokens(asked.now) as f64, fleet[worker].open)
        }),
        PolicyName::Random | PolicyName::Kv => Some(up[random.random_range(0..up.len())]),
    }
}

/// The worker with the least cost; ties are drawn.
fn least(up: &[usize], random: &mut StdRng, cost: impl Fn(usize) -> (f64, u32)) -> Option<usize> {
    let mut best: Option<((f64, u32), usize)> = None;
    let mut ties = 0u32;
    for &worker in up {
        let cost = cost(worker);
        if best.is_none_or(|(least, _)| cost < least) {
            (best, ties) = (Some((cost, worker)), 1);
        } else if best.is_some_and(|(least, _)| cost == least) {
            ties += 1;
            if random.random_range(0..ties) == 0 {
                best = Some((cost, worker));
            }
        }
    }
    best.map(|(_, worker)| worker)
}

fn rendezvous(asked: &Incoming<'_>, blocks: usize, bound: f64, up: &[usize], fleet: &[Worker]) -> usize {
    let blocks = if blocks == 0 { asked.key_blocks } else { blocks };
    let last = blocks.min(asked.chain.len());
    let key = if last == 0 { 0 } else { asked.chain[last - 1].0 };
    let mut order: Vec<usize> = up.to_vec();
    order.sort_by_key(|&worker| std::cmp::Reverse(mix(key ^ mix(worker as u64))));
    let open: u32 = up.iter().map(|&worker| fleet[worker].open).sum();
    let most = (bound * f64::from(open + 1) / up.len() as f64).ceil();
    let fits = |worker: &&usize| f64::from(fleet[**worker].open) < most;
    *order.iter().find(fits).unwrap_or(&order[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for name in [
            "random",
            "kv",
            "round-robin",
            "least-load",
            "least-requests",
            "rendezvous",
            "rendezvous:3",
            "rendezvous:0:1.25",
            "fixed",
            "oracle:0.5",
            "oracle:1",
        ] {
            assert_eq!(name.parse::<PolicyName>().unwrap().to_string(), name);
        }
        assert_eq!("oracle".parse::<PolicyName>().unwrap(), PolicyName::Oracle { weight: 0.5 });
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (name, what) in [
            ("best", "no policy"),
            ("oracle:x", "`x`"),
            ("oracle:-1", "`-1`"),
            ("kv:1", "`kv` has no parameter `1`"),
            ("oracle:1:2", "no parameter `2`"),
        ] {
            let error = name.parse::<PolicyName>().unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
