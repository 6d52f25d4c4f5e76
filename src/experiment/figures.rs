//! What one run showed: shares of cached tokens, times, who served, and whatever makes that doubtful.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::experiment::counters::{self, Counts, Snapshot};
use crate::experiment::load::{Finished, Outcome};
use crate::experiment::stats::{self, Percentiles};

/// The two counts of cached tokens may differ by this share of all prompt tokens before it is worth a note.
const COUNTS_AGREE: f64 = 0.002;
/// A load generator that starts one request in a hundred so late, in milliseconds, did not send what it was asked for.
const LATE_MS: f64 = 20.0;

/// What one run showed. Shares are of 1; times in milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// Answered requests, the base of all shares.
    pub requests: usize,
    pub failed: usize,
    /// Requests with any cached token.
    pub hit_share: f64,
    /// Cached tokens of the shareable ones.
    pub prefix_token_share: f64,
    /// Cached tokens of all prompt tokens, by the engines' counters.
    pub counter_token_share: Option<f64>,
    /// The same by the `usage` of the answers.
    pub usage_token_share: f64,
    /// What the proxy believed of the same, where its admin listener is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_token_share: Option<f64>,
    pub ttft_ms: Percentiles,
    pub ttft_hit_ms: Option<Percentiles>,
    pub ttft_miss_ms: Option<Percentiles>,
    pub e2e_ms: Percentiles,
    pub requests_per_s: f64,
    pub requests_by_worker: Option<BTreeMap<String, u64>>,
    pub preemptions: Option<u64>,
    /// How late timers of the load generator rang, 99th percentile: by so much may times be too long.
    pub timer_lag_ms: f64,
    /// How late requests were started that were due at a time: not in closed loops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_ms: Option<Lateness>,
    /// Whatever makes a figure doubtful, in words.
    pub notes: Vec<String>,
    /// The answered requests, where they are asked for: what a comparison draws from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Row>,
}

/// How much later than due requests were started, in milliseconds.
#[derive(Copy, Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Lateness {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    /// So late that the generator, not the target, shaped the load.
    pub is_bottleneck: bool,
}

impl Lateness {
    fn of(outcomes: &[Outcome]) -> Option<Lateness> {
        let mut late: Vec<f64> = outcomes.iter().filter_map(|one| one.late).map(milliseconds).collect();
        late.sort_by(f64::total_cmp);
        let p99 = stats::quantile(&late, 0.99)?;
        let max = late.last().copied()?;
        Some(Lateness { p50: stats::quantile(&late, 0.5)?, p99, max, is_bottleneck: p99 > LATE_MS })
    }
}

/// One answered request, in the order of starting.
#[derive(Copy, Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(from = "(usize, f64, f64, u32, u32)", into = "(usize, f64, f64, u32, u32)")]
pub struct Row {
    pub index: usize,
    pub ttft_ms: f64,
    pub e2e_ms: f64,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
}

impl From<(usize, f64, f64, u32, u32)> for Row {
    fn from((index, ttft_ms, e2e_ms, prompt_tokens, cached_tokens): (usize, f64, f64, u32, u32)) -> Row {
        Row { index, ttft_ms, e2e_ms, prompt_tokens, cached_tokens }
    }
}

impl From<Row> for (usize, f64, f64, u32, u32) {
    fn from(row: Row) -> Self {
        (row.index, row.ttft_ms, row.e2e_ms, row.prompt_tokens, row.cached_tokens)
    }
}

/// How many tokens of a prompt a cache can hold for the others.
#[derive(Copy, Clone, Debug)]
pub enum Shareable<'a> {
    /// As many of every prompt.
    All(u32),
    /// Of each request, by its place, a share: how many tokens its prompt has is the engine's word.
    Each(&'a [f64]),
    /// As many as were ever found.
    MostSeen,
}

/// What others counted during a run.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// The engines, by worker.
    pub engines: Option<Snapshot>,
    /// Share of the prompt tokens that the proxy believed cached.
    pub predicted_share: Option<f64>,
}

impl Figures {
    /// # Errors
    /// If no request was answered.
    pub fn of(finished: &Finished, counted: &Counted, shareable: Shareable<'_>) -> Result<Figures> {
        let rows: Vec<Row> = finished.outcomes.iter().filter_map(row).collect();
        let first_failure = finished.outcomes.iter().find_map(|outcome| outcome.result.as_ref().err());
        let failed = finished.outcomes.len() - rows.len();
        let mut notes = Vec::new();
        match first_failure {
            Some(failure) if rows.is_empty() => bail!("all {failed} requests failed; the first: {failure}"),
            None if rows.is_empty() => bail!("no request was sent"),
            Some(failure) => {
                notes.push(format!("{failed} requests failed and count in no figure; the first: {failure}"));
            }
            None => {}
        }
        let count = rows.len() as f64;
        let sum = |of: &dyn Fn(&Row) -> u32| rows.iter().map(|row| f64::from(of(row))).sum::<f64>();
        let most_seen = rows.iter().map(|row| row.cached_tokens).max().unwrap_or(0);
        let can_share = |row: &Row| match shareable {
            Shareable::All(tokens) => f64::from(tokens),
            Shareable::Each(shares) => {
                shares.get(row.index).copied().unwrap_or(0.0) * f64::from(row.prompt_tokens)
            }
            Shareable::MostSeen => f64::from(most_seen),
        };
        let prompt_tokens = sum(&|row| row.prompt_tokens);
        let usage_token_share = ratio(sum(&|row| row.cached_tokens), prompt_tokens);
        let totals = counted.engines.as_ref().map(counters::total);
        if let Some(totals) = totals {
            notes.extend(disagreement(totals, usage_token_share, prompt_tokens));
        }
        let late_ms = Lateness::of(&finished.outcomes);
        notes.extend(late_ms.as_ref().and_then(lateness_note));
        let ttft = |keep: &dyn Fn(&Row) -> bool| {
            Percentiles::of(rows.iter().filter(|row| keep(row)).map(|row| row.ttft_ms).collect())
        };
        Ok(Figures {
            requests: rows.len(),
            failed,
            hit_share: ratio(sum(&|row| u32::from(row.cached_tokens > 0)), count),
            prefix_token_share: ratio(
                rows.iter().map(|row| f64::from(row.cached_tokens).min(can_share(row))).sum(),
                rows.iter().map(can_share).sum(),
            ),
            counter_token_share: totals.map(|totals| ratio(totals.hits, totals.queries)),
            usage_token_share,
            predicted_token_share: counted.predicted_share.map(rounded),
            ttft_ms: ttft(&|_| true).context("no times")?,
            ttft_hit_ms: ttft(&|row| row.cached_tokens > 0),
            ttft_miss_ms: ttft(&|row| row.cached_tokens == 0),
            e2e_ms: Percentiles::of(rows.iter().map(|row| row.e2e_ms).collect()).context("no times")?,
            requests_per_s: ratio(count, finished.wall.as_secs_f64()),
            requests_by_worker: counted.engines.as_ref().map(by_worker),
            preemptions: totals.map(|totals| totals.preemptions.max(0.0) as u64),
            timer_lag_ms: rounded(stats::quantile(&finished.lags_ms, 0.99).unwrap_or(0.0)),
            late_ms,
            notes,
            samples: rows,
        })
    }
}

fn row(outcome: &Outcome) -> Option<Row> {
    let sample = outcome.result.as_ref().ok()?;
    Some(Row {
        index: outcome.index,
        ttft_ms: milliseconds(sample.ttft),
        e2e_ms: milliseconds(sample.e2e),
        prompt_tokens: sample.usage.prompt_tokens,
        cached_tokens: sample.usage.cached_tokens.unwrap_or(0),
    })
}

fn lateness_note(late: &Lateness) -> Option<String> {
    late.is_bottleneck.then(|| {
        format!(
            "the load generator was the bottleneck: requests were started up to {:.0} ms late, one in a hundred by {:.0} ms or \
             more, so the target had less load than asked for",
            late.max, late.p99
        )
    })
}

/// Says when the engines counted something else than the answers told.
fn disagreement(totals: Counts, usage_token_share: f64, prompt_tokens: f64) -> Option<String> {
    let counter_share = ratio(totals.hits, totals.queries);
    if totals.queries < 0.99 * prompt_tokens {
        return Some(format!(
            "the engines looked up {} of {prompt_tokens} prompt tokens: --metrics does not cover all workers",
            totals.queries
        ));
    }
    if (counter_share - usage_token_share).abs() <= COUNTS_AGREE {
        return None;
    }
    let cause = match totals.preemptions > 0.0 {
        true => "requests were preempted, and each look-up counts again",
        false => "requests that wait for memory are looked up again, or others use the workers",
    };
    Some(format!(
        "the engines' counters say {:.1} % of the prompt tokens were cached, usage says {:.1} %: {cause}",
        100.0 * counter_share,
        100.0 * usage_token_share
    ))
}

fn by_worker(counted: &Snapshot) -> BTreeMap<String, u64> {
    counted.iter().map(|(worker, counts)| (worker.clone(), counts.finished.max(0.0) as u64)).collect()
}

fn ratio(part: f64, whole: f64) -> f64 {
    rounded(if whole > 0.0 { part / whole } else { 0.0 })
}

fn milliseconds(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}

/// To six decimals: more is noise, and so few come back from JSON unchanged.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::exchange::{Failure, Sample};
    use crate::experiment::sse::Usage;

    fn answered(index: usize, ttft_ms: u64, cached_tokens: u32) -> Outcome {
        let usage = Usage { prompt_tokens: 2371, output_tokens: 64, cached_tokens: Some(cached_tokens) };
        let ttft = Duration::from_millis(ttft_ms);
        Outcome { index, result: Ok(Sample { ttft, e2e: ttft * 10, usage }), late: None }
    }

    fn counted(hits: f64, queries: f64, preemptions: f64) -> Counted {
        let counts = Counts { hits, queries, finished: 4.0, preemptions };
        Counted { engines: Some(Snapshot::from([("w0".to_owned(), counts)])), predicted_share: None }
    }

    fn four() -> Finished {
        let outcomes =
            vec![answered(0, 100, 0), answered(1, 40, 2032), answered(2, 60, 1016), answered(3, 110, 0)];
        Finished { outcomes, wall: Duration::from_secs(2), lags_ms: Vec::new() }
    }

    #[test]
    fn a_hit_is_any_cached_token_and_shares_are_of_tokens() {
        let figures = Figures::of(&four(), &counted(3048.0, 9484.0, 0.0), Shareable::All(2032)).unwrap();
        assert_eq!(figures.hit_share, 0.5);
        assert_eq!(figures.prefix_token_share, 3048.0 / 8128.0);
        assert_eq!(figures.usage_token_share, 0.321383);
        assert_eq!(figures.counter_token_share, Some(figures.usage_token_share));
        assert_eq!(figures.ttft_hit_ms.unwrap().p99, 60.0);
        assert_eq!(figures.ttft_miss_ms.unwrap().p50, 100.0);
        assert_eq!(figures.e2e_ms.p50, 600.0);
        assert_eq!(figures.requests_per_s, 2.0);
        assert_eq!(figures.requests_by_worker.unwrap()["w0"], 4);
        assert_eq!(figures.notes, Vec::<String>::new());
    }

    /// What a file's bodies have of tokens is an estimate; that must not show in what was found of them.
    #[test]
    fn what_could_be_shared_is_a_part_of_what_the_engine_counted() {
        let shares = [0.0, 2032.0 / 2371.0, 1016.0 / 2371.0, 1016.0 / 2371.0];
        let figures = Figures::of(&four(), &Counted::default(), Shareable::Each(&shares)).unwrap();
        assert_eq!(
            figures.prefix_token_share, 0.75,
            "one of three parts of equal length was missed, the first twice as long"
        );
    }

    #[test]
    fn says_when_the_two_counts_disagree_and_why() {
        for (counts, cause) in [
            (counted(3048.0, 20_000.0, 3.0), "preempted"),
            (counted(3048.0, 20_000.0, 0.0), "others use the workers"),
            (counted(1000.0, 4_000.0, 0.0), "does not cover all workers"),
        ] {
            let notes = Figures::of(&four(), &counts, Shareable::All(2032)).unwrap().notes;
            assert!(notes.len() == 1 && notes[0].contains(cause), "{notes:?}");
        }
    }

    #[test]
    fn failures_are_left_out_and_told() {
        let mut finished = four();
        finished.outcomes[0].result = Err(Failure::Incomplete("`data: [DONE]`"));
        let figures = Figures::of(&finished, &Counted::default(), Shareable::MostSeen).unwrap();
        assert_eq!((figures.requests, figures.failed), (3, 1));
        assert!(figures.notes[0].contains("[DONE]"), "{:?}", figures.notes);
        assert_eq!(figures.counter_token_share, None);
        assert_eq!(figures.prefix_token_share, 0.5, "of the most that was cached");

        let outcomes = vec![Outcome { index: 0, late: None, result: Err(Failure::Incomplete("any output")) }];
        let none = Finished { outcomes, wall: Duration::from_secs(1), lags_ms: Vec::new() };
        assert!(
            Figures::of(&none, &Counted::default(), Shareable::MostSeen)
                .unwrap_err()
                .to_string()
                .contains("any output")
        );
    }

    #[test]
    fn a_late_generator_is_told() {
        let late = |milliseconds: u64| {
            let mut finished = four();
            finished.outcomes.iter_mut().for_each(|one| one.late = Some(Duration::from_millis(milliseconds)));
            Figures::of(&finished, &Counted::default(), Shareable::All(2032)).unwrap()
        };
        let (soon, slow) = (late(2), late(300));
        assert_eq!((soon.late_ms.unwrap().p99, soon.notes.len()), (2.0, 0));
        assert!(
            slow.late_ms.unwrap().is_bottleneck && slow.notes[0].contains("bottleneck"),
            "{:?}",
            slow.notes
        );
        assert_eq!(Figures::of(&four(), &Counted::default(), Shareable::MostSeen).unwrap().late_ms, None);
    }
}
