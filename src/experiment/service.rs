//! The Service experiment: P groups of prompts, each with a prefix of its own, sent in random order at a fixed concurrency
//! after one warm-up per group. What share finds its prefix cached?

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::experiment::counters::{self, Counts, Snapshot, Workers};
use crate::experiment::exchange::Client;
use crate::experiment::load::{Finished, Load, Outcome};
use crate::experiment::prompts::{Use, Writer};
use crate::experiment::stats::{self, Percentiles};
use crate::experiment::subject::Subject;

/// The two counts of cached tokens may differ by this share of all prompt tokens before it is worth a note.
const COUNTS_AGREE: f64 = 0.002;
/// How long counters may lag behind the answers; vLLM updates them just after the last event of an answer.
const COUNTERS_SETTLE: Duration = Duration::from_secs(2);

/// One point of the experiment.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Groups of prompts, P.
    pub prefixes: usize,
    /// Requests in flight.
    pub concurrency: usize,
    /// Counted requests; by default as in the study, `max(200, 20 P)`.
    pub requests: Option<usize>,
    pub seed: u64,
    /// Which of the compared targets this is: the order of groups is the same for all, the texts are each target's own,
    /// since two targets may lead to the same engines.
    pub texts: u64,
    /// Repetition: each has texts and an order of its own.
    pub run: u64,
    /// One connection for each of the `concurrency` clients rather than for each request.
    pub keep_alive: bool,
    /// After which a request counts as failed.
    pub timeout: Duration,
}

impl Settings {
    pub fn request_count(&self) -> usize {
        self.requests.unwrap_or_else(|| (20 * self.prefixes).max(200))
    }
}

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
    pub ttft_ms: Percentiles,
    pub ttft_hit_ms: Option<Percentiles>,
    pub ttft_miss_ms: Option<Percentiles>,
    pub e2e_ms: Percentiles,
    pub requests_per_s: f64,
    pub requests_by_worker: Option<BTreeMap<String, u64>>,
    pub preemptions: Option<u64>,
    /// How late timers of the load generator rang, 99th percentile: by so much may times be too long.
    pub timer_lag_ms: f64,
    /// Whatever makes a figure doubtful, in words.
    pub notes: Vec<String>,
    /// The answered requests, where they are asked for: what a comparison draws from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Row>,
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

/// Runs one point once.
///
/// # Errors
/// If the warm-up fails, no request is answered, or the engines' counters cannot be read.
pub async fn run(subject: &Subject, settings: &Settings, progress: &ProgressBar) -> Result<Figures> {
    let part = [settings.run, settings.prefixes as u64, settings.concurrency as u64];
    let writer = Writer::new(settings.seed, part, settings.texts);
    let sizes = subject.sizes;
    let prefixes: Arc<[String]> =
        (0..settings.prefixes).map(|group| writer.text(Use::Prefix, group, sizes.prefix_words)).collect();

    let already_cached = warm_up(subject, settings, &writer, &prefixes, progress).await?;
    let before = subject.workers.read().await?;
    let load = Load {
        target: subject.target.clone(),
        path: subject.template.api.path(),
        concurrency: settings.concurrency,
        keep_alive: settings.keep_alive,
        timeout: settings.timeout,
        progress: progress.clone(),
    };
    let (template, count) = (subject.template.clone(), settings.request_count());
    let finished = load
        .closed_loop(Arc::new(move |index| {
            let group = writer.draw(index, prefixes.len());
            let tail = writer.text(Use::Tail, index, sizes.tail_words);
            (index < count).then(|| template.body(&prefixes[group], &tail))
        }))
        .await;
    let answered = finished.outcomes.iter().filter(|outcome| outcome.result.is_ok()).count();
    let counted = change_since(&subject.workers, &before, answered).await?;
    let mut figures = figures(&finished, counted.as_ref(), sizes.shareable_tokens)?;
    if already_cached > 0 {
        figures.notes.push(format!(
            "{already_cached} of {} prefixes were cached before their warm-up: an earlier run had this seed; use another --seed",
            settings.prefixes
        ));
    }
    Ok(figures)
}

/// One uncounted request per group, one after another. Answers how many prefixes were cached already.
async fn warm_up(
    subject: &Subject,
    settings: &Settings,
    writer: &Writer,
    prefixes: &[String],
    progress: &ProgressBar,
) -> Result<usize> {
    let mut client = Client::new(subject.target.clone(), settings.keep_alive, settings.timeout);
    let mut already_cached = 0;
    for (group, prefix) in prefixes.iter().enumerate() {
        let tail = writer.text(Use::WarmUp, group, subject.sizes.tail_words);
        let body = subject.template.body(prefix, &tail);
        let sample = client
            .send(subject.template.api.path(), body)
            .await
            .with_context(|| format!("warm-up request {} to {}", group + 1, subject.target))?;
        // A few tokens are the chat template's, common to all prompts.
        let cached = sample.usage.cached_tokens.unwrap_or(0);
        already_cached += usize::from(2 * cached > sample.usage.prompt_tokens);
        progress.inc(1);
    }
    Ok(already_cached)
}

/// The engines' counts of a run with `answered` requests, once they have settled; `None` if no engine is known.
async fn change_since(workers: &Workers, before: &Snapshot, answered: usize) -> Result<Option<Snapshot>> {
    if workers.is_empty() {
        return Ok(None);
    }
    let deadline = tokio::time::Instant::now() + COUNTERS_SETTLE;
    loop {
        let change = counters::change(before, &workers.read().await?)?;
        let settled = counters::total(&change).finished >= answered as f64;
        if settled || tokio::time::Instant::now() >= deadline {
            return Ok(Some(change));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn figures(finished: &Finished, counted: Option<&Snapshot>, shareable: Option<u32>) -> Result<Figures> {
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
    // Without a tokenizer to ask, the most that was ever cached is what can be.
    let shareable = shareable.or_else(|| rows.iter().map(|row| row.cached_tokens).max()).unwrap_or(0);
    let prompt_tokens = sum(&|row| row.prompt_tokens);
    let usage_token_share = ratio(sum(&|row| row.cached_tokens), prompt_tokens);
    let totals = counted.map(counters::total);
    if let Some(totals) = totals {
        notes.extend(disagreement(totals, usage_token_share, prompt_tokens));
    }
    let ttft = |keep: &dyn Fn(&Row) -> bool| {
        Percentiles::of(rows.iter().filter(|row| keep(row)).map(|row| row.ttft_ms).collect())
    };
    Ok(Figures {
        requests: rows.len(),
        failed,
        hit_share: ratio(sum(&|row| u32::from(row.cached_tokens > 0)), count),
        prefix_token_share: ratio(sum(&|row| row.cached_tokens.min(shareable)), count * f64::from(shareable)),
        counter_token_share: totals.map(|totals| ratio(totals.hits, totals.queries)),
        usage_token_share,
        ttft_ms: ttft(&|_| true).context("no times")?,
        ttft_hit_ms: ttft(&|row| row.cached_tokens > 0),
        ttft_miss_ms: ttft(&|row| row.cached_tokens == 0),
        e2e_ms: Percentiles::of(rows.iter().map(|row| row.e2e_ms).collect()).context("no times")?,
        requests_per_s: ratio(count, finished.wall.as_secs_f64()),
        requests_by_worker: counted.map(by_worker),
        preemptions: totals.map(|totals| totals.preemptions.max(0.0) as u64),
        timer_lag_ms: rounded(stats::quantile(&finished.lags_ms, 0.99).unwrap_or(0.0)),
        notes,
        samples: rows,
    })
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
        Outcome { index, result: Ok(Sample { ttft, e2e: ttft * 10, usage }) }
    }

    fn counted(hits: f64, queries: f64, preemptions: f64) -> Snapshot {
        let counts = Counts { hits, queries, finished: 4.0, preemptions };
        Snapshot::from([("w0".to_owned(), counts)])
    }

    fn four() -> Finished {
        let outcomes =
            vec![answered(0, 100, 0), answered(1, 40, 2032), answered(2, 60, 1016), answered(3, 110, 0)];
        Finished { outcomes, wall: Duration::from_secs(2), lags_ms: Vec::new() }
    }

    #[test]
    fn a_hit_is_any_cached_token_and_shares_are_of_tokens() {
        let figures = figures(&four(), Some(&counted(3048.0, 9484.0, 0.0)), Some(2032)).unwrap();
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

    #[test]
    fn says_when_the_two_counts_disagree_and_why() {
        for (counts, cause) in [
            (counted(3048.0, 20_000.0, 3.0), "preempted"),
            (counted(3048.0, 20_000.0, 0.0), "others use the workers"),
            (counted(1000.0, 4_000.0, 0.0), "does not cover all workers"),
        ] {
            let notes = figures(&four(), Some(&counts), Some(2032)).unwrap().notes;
            assert!(notes.len() == 1 && notes[0].contains(cause), "{notes:?}");
        }
    }

    #[test]
    fn failures_are_left_out_and_told() {
        let mut finished = four();
        finished.outcomes[0].result = Err(Failure::Incomplete("`data: [DONE]`"));
        let figures = figures(&finished, None, None).unwrap();
        assert_eq!((figures.requests, figures.failed), (3, 1));
        assert!(figures.notes[0].contains("[DONE]"), "{:?}", figures.notes);
        assert_eq!(figures.counter_token_share, None);
        assert_eq!(figures.prefix_token_share, 0.5, "of the most that was cached");

        let outcomes = vec![Outcome { index: 0, result: Err(Failure::Incomplete("any output")) }];
        let none = Finished { outcomes, wall: Duration::from_secs(1), lags_ms: Vec::new() };
        assert!(super::figures(&none, None, None).unwrap_err().to_string().contains("any output"));
    }

    #[test]
    fn the_study_sends_twenty_a_prefix_and_at_least_two_hundred() {
        let settings = |prefixes, requests| Settings {
            prefixes,
            concurrency: 8,
            requests,
            seed: 1,
            texts: 0,
            run: 0,
            keep_alive: false,
            timeout: Duration::from_secs(1),
        };
        assert_eq!(settings(2, None).request_count(), 200);
        assert_eq!(settings(24, None).request_count(), 480);
        assert_eq!(settings(24, Some(7)).request_count(), 7);
    }
}
