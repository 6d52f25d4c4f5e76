//! What the planner believes comes back to what the engines do when it was told wrong, or when others use the engines too. The
//! engine model and the planner in virtual time: no sockets, no clock, the same numbers on every machine.

#![expect(clippy::unwrap_used, reason = "in a test, what goes wrong should fail on the spot")]

use std::collections::HashMap;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use warmroute::core::blocks::Chain;
use warmroute::core::booking::{Booking, Finished};
use warmroute::core::ids::{BlockHash, Time, WorkerId};
use warmroute::core::planner::{Ask, Planner, Policy, Settings, WorkerSpec};
use warmroute::engine::model::{Engine, Event, Spec, What, Work};

const WORKERS: usize = 4;
/// Usable tokens of one worker: four prompts.
const CAPACITY: u64 = 9_344;
const BLOCK: u32 = 16;
const PREFIX_BLOCKS: u64 = 125;
const TAIL_BLOCKS: u64 = 19;
const PROMPT: u32 = (PREFIX_BLOCKS + TAIL_BLOCKS) as u32 * BLOCK;
const OUTPUT: u32 = 32;
/// Requests in flight, of our own and as many of others'.
const CLIENTS: usize = 6;

#[derive(Copy, Clone)]
struct Scenario {
    /// What the planner is told of the capacity, as a multiple of the truth; `None`: nothing.
    told: Option<u64>,
    /// As many requests again go to workers drawn at random, past the planner.
    bypass: bool,
    prefixes: u64,
    learn: bool,
    policy: Policy,
    /// All caches are emptied after so many requests.
    reset_after: Option<usize>,
    /// KV blocks of an engine.
    blocks: u32,
}

impl Scenario {
    const PLAIN: Scenario = Scenario {
        told: Some(1),
        bypass: false,
        prefixes: 28,
        learn: true,
        policy: Policy::Kv,
        reset_after: None,
        blocks: 585,
    };
}

/// One answered request: tokens.
#[derive(Copy, Clone, Debug)]
struct Answer {
    predicted: f64,
    confirmed: f64,
}

struct Live {
    own: Option<(f64, Booking)>,
    cached: u32,
}

struct Run {
    scenario: Scenario,
    planner: Arc<Planner>,
    ids: Vec<WorkerId>,
    engines: Vec<Engine>,
    live: Vec<HashMap<usize, Live>>,
    random: StdRng,
    serial: u64,
    answers: Vec<Answer>,
    forgotten: usize,
}

impl Run {
    fn new(scenario: Scenario, seed: u64) -> Run {
        let planner = Planner::new(Settings { learn_trust: scenario.learn, ..Settings::default() });
        let ids = (0..WORKERS as u64).map(|key| {
            planner.add_worker(WorkerSpec {
                key,
                capacity_tokens: scenario.told.map(|times| times * CAPACITY),
                engine_block_tokens: BLOCK,
                prefill_speed: None,
            })
        });
        let ids = ids.collect();
        Run {
            scenario,
            ids,
            planner,
            engines: (0..WORKERS)
                .map(|_| Engine::new(Spec { num_blocks: scenario.blocks, ..Spec::default() }).unwrap())
                .collect(),
            live: (0..WORKERS).map(|_| HashMap::new()).collect(),
            random: StdRng::seed_from_u64(seed),
            serial: 0,
            answers: Vec::new(),
            forgotten: 0,
        }
    }

    /// A prompt of one of the prefixes and a tail that nobody else has.
    fn prompt(&mut self) -> Arc<[BlockHash]> {
        self.serial += 1;
        let prefix = self.random.random_range(0..self.scenario.prefixes);
        let blocks = (0..PREFIX_BLOCKS).map(|at| (prefix << 20) | at);
        let own = (0..TAIL_BLOCKS).map(|at| (1 << 60) | (self.serial << 10) | at);
        blocks.chain(own).map(|id| BlockHash(id.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    }

    fn send(&mut self, own: bool, now: Time) {
        let blocks = self.prompt();
        let (worker, own) = match own {
            false => (self.random.random_range(0..WORKERS), None),
            true => {
                let ask = Ask {
                    chain: Chain::even(blocks.clone(), 0),
                    block_tokens: f64::from(BLOCK),
                    prompt_tokens: f64::from(PROMPT),
                    output_tokens: f64::from(OUTPUT),
                    streams: true,
                };
                let draw = self.random.next_u64();
                let planned = self.planner.plan(&ask, &self.ids, self.scenario.policy, now, draw);
                let (decision, mut booking) = planned.unwrap();
                booking.commit(now);
                let worker = self.ids.iter().position(|id| *id == decision.worker).unwrap();
                (worker, Some((decision.predicted_cached_tokens, booking)))
            }
        };
        let work = Work { blocks, prompt_tokens: PROMPT, output_tokens: OUTPUT };
        let id = self.engines[worker].submit(work, now).unwrap();
        self.live[worker].insert(id.slot(), Live { own, cached: 0 });
    }

    fn heard(&mut self, worker: usize, event: Event) {
        let live = self.live[worker].get_mut(&event.request.slot()).unwrap();
        match event.what {
            What::Admitted { cached_tokens } => live.cached = cached_tokens,
            What::FirstToken => {
                if let Some((_, booking)) = &mut live.own {
                    booking.first_token(event.at);
                }
            }
            What::Finished => {
                let live = self.live[worker].remove(&event.request.slot()).unwrap();
                let own = live.own.is_some();
                if let Some((predicted, booking)) = live.own {
                    let finished = Finished {
                        prompt_tokens: Some(PROMPT),
                        cached_tokens: Some(live.cached),
                        output_tokens: Some(OUTPUT),
                    };
                    self.forgotten += usize::from(booking.finish(finished, event.at).is_some());
                    self.answers.push(Answer { predicted, confirmed: f64::from(live.cached) });
                }
                if self.scenario.reset_after == Some(self.answers.len()) && own {
                    // As after a restart at the same address, without a sign of it.
                    self.reset_all();
                }
                self.send(own, event.at);
            }
            What::Token | What::Preempted => {}
        }
    }

    /// New engines take the place of the old ones; what was in flight there is served again.
    fn reset_all(&mut self) {
        for worker in 0..WORKERS {
            if self.live[worker].is_empty() {
                assert!(self.engines[worker].reset_prefix_cache());
            } else {
                let blocks = self.scenario.blocks;
                self.engines[worker] = Engine::new(Spec { num_blocks: blocks, ..Spec::default() }).unwrap();
                self.live[worker].clear();
            }
        }
    }

    fn run(mut self, requests: usize) -> Run {
        for _ in 0..CLIENTS {
            self.send(true, Time(0.0));
            if self.scenario.bypass {
                self.send(false, Time(0.0));
            }
        }
        let mut events = Vec::new();
        while self.answers.len() < requests {
            let due =
                self.engines.iter().enumerate().filter_map(|(at, engine)| Some((engine.next_event()?, at)));
            let (at, worker) = due.min_by(|a, b| a.0.0.total_cmp(&b.0.0)).unwrap();
            self.engines[worker].advance(at, &mut events);
            for event in std::mem::take(&mut events) {
                if self.live[worker].contains_key(&event.request.slot()) {
                    self.heard(worker, event);
                }
            }
            while self.live.iter().map(HashMap::len).sum::<usize>() < CLIENTS {
                self.send(true, at);
            }
        }
        self
    }
}

/// By how much predictions are wrong in all, as a share of the prompt tokens.
fn bias(answers: &[Answer]) -> f64 {
    let error: f64 = answers.iter().map(|answer| answer.predicted - answer.confirmed).sum();
    error / (answers.len() as f64 * f64::from(PROMPT))
}

/// By how much each is wrong, whichever way.
fn error(answers: &[Answer]) -> f64 {
    let error: f64 = answers.iter().map(|answer| (answer.predicted - answer.confirmed).abs()).sum();
    error / (answers.len() as f64 * f64::from(PROMPT))
}

fn hits(answers: &[Answer]) -> f64 {
    let confirmed: f64 = answers.iter().map(|answer| answer.confirmed).sum();
    confirmed / (answers.len() as f64 * f64::from(PROMPT))
}

/// The answers from the five hundredth on, of four runs.
fn late(scenario: Scenario) -> Vec<Answer> {
    (1..=4).flat_map(|seed| Run::new(scenario, seed).run(800).answers.split_off(500)).collect()
}

#[test]
fn a_capacity_told_four_times_too_large_is_corrected() {
    let wrong = Scenario { told: Some(4), ..Scenario::PLAIN };
    let unlearned = late(Scenario { learn: false, ..wrong });
    assert!(error(&unlearned) > 0.3, "what there is to learn: {}", error(&unlearned));
    let learned = late(wrong);
    assert!(error(&learned) < 0.1, "{}", error(&learned));
    let random = late(Scenario { policy: Policy::Random, ..wrong });
    assert!(hits(&learned) > 2.0 * hits(&random), "{} against {}", hits(&learned), hits(&random));
}

#[test]
fn a_capacity_that_nobody_tells_is_found() {
    let learned = late(Scenario { told: None, ..Scenario::PLAIN });
    assert!(error(&learned) < 0.1, "{}", error(&learned));
}

/// What others will bring and push out cannot be known of a single request, but what to expect of many can.
#[test]
fn half_of_the_traffic_past_the_planner_is_allowed_for() {
    let bypass = Scenario { bypass: true, prefixes: 16, ..Scenario::PLAIN };
    let unlearned = late(Scenario { learn: false, ..bypass });
    let learned = late(bypass);
    assert!(bias(&unlearned) > 0.1, "what there is to learn: {}", bias(&unlearned));
    assert!(bias(&learned).abs() < 0.1, "{}", bias(&learned));
    assert!(error(&learned) < error(&unlearned) + 0.02, "{} {}", error(&learned), error(&unlearned));
    let random = late(Scenario { policy: Policy::Random, ..bypass });
    assert!(hits(&learned) > 1.5 * hits(&random), "{} against {}", hits(&learned), hits(&random));
}

#[test]
fn learning_costs_nothing_where_all_is_known() {
    let known = late(Scenario { learn: false, prefixes: 16, ..Scenario::PLAIN });
    let learned = late(Scenario { prefixes: 16, ..Scenario::PLAIN });
    assert!(error(&learned) < 0.05, "{}", error(&learned));
    assert!(hits(&learned) > hits(&known) - 0.03, "{} against {}", hits(&learned), hits(&known));
}

#[test]
fn engines_that_lose_their_caches_are_found_out_by_their_answers() {
    let fits = Scenario { prefixes: 32, blocks: 3_501, told: Some(6), ..Scenario::PLAIN };
    let undisturbed = Run::new(fits, 1).run(400);
    assert_eq!(undisturbed.forgotten, 0);
    let reset = Run::new(Scenario { reset_after: Some(200), ..fits }, 1).run(600);
    assert!((1..=WORKERS).contains(&reset.forgotten), "{}", reset.forgotten);
    let after = &reset.answers[500..];
    assert!(error(after) < 0.1, "{}", error(after));
    assert!(hits(after) > hits(&undisturbed.answers[300..]) - 0.1, "{}", hits(after));
}
