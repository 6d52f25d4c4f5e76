//! What a run measured, and the figures drawn from it.

use serde::Serialize;

use crate::core::shadow::Share;

/// One measured request that was answered. Times in seconds.
#[derive(Copy, Clone, Debug)]
pub struct Served {
    pub worker: usize,
    pub group: u32,
    pub arrived: f64,
    pub first_token: f64,
    pub ended: f64,
    pub prompt_tokens: u32,
    /// Of the prompt, known to be shared; 0 if that is not known.
    pub shared_tokens: u32,
    pub cached_tokens: u32,
    /// Cached tokens as the policy believed when it placed the request.
    pub predicted: Option<f64>,
    /// What a shadow said of it: under the other policy, and in a cache without end.
    pub shadow: Option<[Share; 2]>,
}

/// All that was measured in one run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub served: Vec<Served>,
    /// Measured requests that were not answered: broken streams, no worker, too large for one.
    pub failed: u64,
    /// Requests sent again because their worker went away before their first token.
    pub retried: u64,
    workers: usize,
}

impl Outcome {
    pub fn new(workers: usize) -> Outcome {
        Outcome { served: Vec::new(), failed: 0, retried: 0, workers }
    }

    pub fn add(&mut self, served: Served) {
        self.served.push(served);
    }

    /// One more worker is there.
    pub fn join(&mut self) {
        self.workers += 1;
    }

    /// The figures. `ceiling` is the token hit share of one cache without limit.
    pub fn figures(&self, ceiling: f64) -> Figures {
        let served = &self.served;
        let sum = |of: &dyn Fn(&Served) -> f64| served.iter().map(of).sum::<f64>();
        let prompt = sum(&|one| f64::from(one.prompt_tokens)).max(1.0);
        let shared = sum(&|one| f64::from(one.shared_tokens));
        let of_shared = sum(&|one| f64::from(one.cached_tokens.min(one.shared_tokens)));
        let token_hit_share = sum(&|one| f64::from(one.cached_tokens)) / prompt;
        let believed = served.iter().all(|one| one.predicted.is_some()) && !served.is_empty();
        let error = |one: &Served| one.predicted.map_or(0.0, |said| said - f64::from(one.cached_tokens));
        let began = served.iter().map(|one| one.arrived).fold(f64::INFINITY, f64::min);
        let ended = served.iter().map(|one| one.ended).fold(0.0, f64::max);
        Figures {
            requests: served.len() as u64,
            failed: self.failed,
            retried: self.retried,
            token_hit_share,
            request_hit_share: sum(&|one| f64::from(u8::from(one.cached_tokens > 0))) / self.count(),
            prefix_hit_share: (shared > 0.0).then(|| of_shared / shared),
            ceiling,
            share_of_bound: (ceiling > 0.0).then(|| token_hit_share / ceiling),
            ttft_s: Spread::of(served.iter().map(|one| one.first_token - one.arrived)),
            e2e_s: Spread::of(served.iter().map(|one| one.ended - one.arrived)),
            throughput: if ended > began { served.len() as f64 / (ended - began) } else { 0.0 },
            imbalance: self.imbalance(),
            affinity: self.affinity(),
            prediction_error: believed.then(|| sum(&|one| error(one).abs()) / prompt),
            prediction_bias: believed.then(|| sum(&error) / prompt),
            shadow_hit_share: self.shadowed(0),
            ideal_hit_share: self.shadowed(1),
            requests_by_worker: self.by_worker(),
        }
    }

    fn shadowed(&self, which: usize) -> Option<f64> {
        let shares = || self.served.iter().filter_map(|one| Some(one.shadow?[which]));
        let prompt: f64 = shares().map(|share| share.prompt).sum();
        (prompt > 0.0).then(|| shares().map(|share| share.cached).sum::<f64>() / prompt)
    }

    fn count(&self) -> f64 {
        self.served.len().max(1) as f64
    }

    fn by_worker(&self) -> Vec<u64> {
        let mut counts = vec![0; self.workers];
        self.served.iter().for_each(|one| counts[one.worker] += 1);
        counts
    }

    fn imbalance(&self) -> f64 {
        let most = self.by_worker().into_iter().max().unwrap_or(0);
        most as f64 * self.workers as f64 / self.count()
    }

    /// Sorted rather than counted by group and worker: a million groups on a thousand workers have a billion of such counts.
    fn affinity(&self) -> Option<f64> {
        let mut went: Vec<(u32, usize)> = self.served.iter().map(|one| (one.group, one.worker)).collect();
        went.sort_unstable();
        let (mut groups, mut at_favourites) = (0_u64, 0);
        for group in went.chunk_by(|one, next| one.0 == next.0) {
            groups += 1;
            at_favourites += group.chunk_by(|one, next| one == next).map(<[_]>::len).max().unwrap_or(0);
        }
        (groups > 1).then(|| at_favourites as f64 / self.count())
    }
}

/// The figures of one run; shares are 0 to 1, times in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Measured and answered.
    pub requests: u64,
    pub failed: u64,
    pub retried: u64,
    /// Cached of all prompt tokens.
    pub token_hit_share: f64,
    /// Requests with any cached token.
    pub request_hit_share: f64,
    /// Cached of the tokens that prompts are made to share; absent where only the trace knows.
    pub prefix_hit_share: Option<f64>,
    /// `token_hit_share` of one cache without limit.
    pub ceiling: f64,
    /// `token_hit_share` of that.
    pub share_of_bound: Option<f64>,
    pub ttft_s: Spread,
    pub e2e_s: Spread,
    /// Answered requests a second, from the first arrival to the last answer.
    pub throughput: f64,
    /// Most requests on a worker over the mean.
    pub imbalance: f64,
    /// Share of the requests that went to their group's favourite worker; absent without groups.
    pub affinity: Option<f64>,
    /// Predicted less true cached tokens, absolute, over all prompt tokens; absent for policies without a belief.
    pub prediction_error: Option<f64>,
    /// The same with its sign: above 0, the policy believed too much.
    pub prediction_bias: Option<f64>,
    /// `token_hit_share` of the planner's other policy, and of a cache without end, as a shadow says; absent without one.
    pub shadow_hit_share: Option<f64>,
    pub ideal_hit_share: Option<f64>,
    pub requests_by_worker: Vec<u64>,
}

/// Mean and percentiles (nearest rank), in seconds.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.collect();
        if values.is_empty() {
            return Spread::default();
        }
        values.sort_by(f64::total_cmp);
        let rank = |share: f64| values[((values.len() as f64 * share).ceil() as usize).max(1) - 1];
        Spread {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: rank(0.5),
            p90: rank(0.9),
            p99: rank(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(worker: usize, group: u32, cached_tokens: u32) -> Served {
        Served {
            worker,
            group,
            arrived: 1.0,
            first_token: 2.0,
            ended: 5.0,
            prompt_tokens: 100,
            shared_tokens: 80,
            cached_tokens,
            predicted: Some(50.0),
            shadow: None,
        }
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let spread = Spread::of((1..=100).map(f64::from));
        assert_eq!(spread, Spread { mean: 50.5, p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Spread::of([7.0].into_iter()), Spread { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0 });
        assert_eq!(Spread::of(std::iter::empty()), Spread::default());
    }

    #[test]
    fn shares_and_spread_over_workers() {
        let mut outcome = Outcome::new(2);
        for one in [served(0, 1, 80), served(0, 1, 0), served(1, 1, 40), served(0, 2, 90)] {
            outcome.add(one);
        }
        let figures = outcome.figures(0.7);
        assert!((figures.token_hit_share - 210.0 / 400.0).abs() < 1e-12);
        assert_eq!(figures.request_hit_share, 0.75);
        assert_eq!(figures.prefix_hit_share, Some(200.0 / 320.0));
        assert_eq!(figures.share_of_bound, Some(210.0 / 400.0 / 0.7));
        assert_eq!(figures.imbalance, 1.5);
        assert_eq!(figures.affinity, Some(0.75));
        assert_eq!(figures.prediction_error, Some((30.0 + 50.0 + 10.0 + 40.0) / 400.0));
        assert_eq!(figures.prediction_bias, Some((-30.0 + 50.0 + 10.0 - 40.0) / 400.0));
        assert_eq!(figures.throughput, 1.0);
        assert_eq!(figures.requests_by_worker, [3, 1]);
    }

    #[test]
    fn an_empty_run_has_figures() {
        let figures = Outcome::new(1).figures(0.0);
        assert_eq!((figures.requests, figures.token_hit_share, figures.share_of_bound), (0, 0.0, None));
    }
}
