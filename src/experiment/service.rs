//! The Service experiment: P groups of prompts, each with a prefix of its own, sent in random order at a fixed concurrency
//! after one warm-up per group. What share finds its prefix cached?

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::experiment::exchange::Client;
use crate::experiment::figures::{Figures, Shareable};
use crate::experiment::load::{Job, Load};
use crate::experiment::progress::Progress;
use crate::experiment::prompts::{Text, Use, Writer};
use crate::experiment::sizing::Sizes;
use crate::experiment::subject::Subject;

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
    pub sizes: Sizes,
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

    /// Of the progress: a warm-up request is alone in flight, and so takes the time of as many as else share it.
    pub fn units(&self) -> u64 {
        (self.request_count() + self.prefixes * self.concurrency) as u64
    }
}

/// Runs one point once.
///
/// # Errors
/// If the warm-up fails, no request is answered, or the engines' counters cannot be read.
pub async fn run(subject: &Subject, settings: &Settings, progress: &Progress) -> Result<Figures> {
    let part = [settings.run, settings.prefixes as u64, settings.concurrency as u64];
    let writer = Writer::new(settings.seed, part, settings.texts);
    let sizes = settings.sizes;
    let prefixes: Arc<[String]> =
        (0..settings.prefixes).map(|group| writer.text(Use::Prefix, group, sizes.prefix_words)).collect();

    let already_cached = warm_up(subject, settings, &writer, &prefixes, progress).await?;
    let before = subject.counters().await?;
    let load = Load {
        target: subject.target.clone(),
        keep_alive: settings.keep_alive,
        timeout: settings.timeout,
        progress: progress.clone(),
    };
    let (template, count) = (subject.template.clone(), settings.request_count());
    let jobs = move |index| {
        (index < count).then(|| {
            let group = writer.draw(index, prefixes.len());
            let tail = writer.text(Use::Tail, index, sizes.tail_words);
            Job { path: template.api.path(), body: template.body(Text::Parts(&prefixes[group], &tail)) }
        })
    };
    let finished = load.closed_loop(settings.concurrency, 0, Arc::new(jobs)).await;
    let counted = subject.counted_since(&before, &finished).await?;
    // Without a tokenizer to ask, the most that was ever cached is what can be.
    let shareable = sizes.shareable_tokens.map_or(Shareable::MostSeen, Shareable::All);
    let mut figures = Figures::of(&finished, &counted, shareable)?;
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
    progress: &Progress,
) -> Result<usize> {
    let mut client = Client::new(subject.target.clone(), settings.keep_alive, settings.timeout);
    let mut already_cached = 0;
    for (group, prefix) in prefixes.iter().enumerate() {
        let tail = writer.text(Use::WarmUp, group, settings.sizes.tail_words);
        let body = subject.template.body(Text::Parts(prefix, &tail));
        let sample = client
            .send(subject.template.api.path(), body)
            .await
            .with_context(|| format!("warm-up request {} to {}", group + 1, subject.target))?;
        // A few tokens are the chat template's, common to all prompts.
        let cached = sample.usage.cached_tokens.unwrap_or(0);
        already_cached += usize::from(2 * cached > sample.usage.prompt_tokens);
        progress.inc(settings.concurrency as u64);
    }
    Ok(already_cached)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_study_sends_twenty_a_prefix_and_at_least_two_hundred() {
        let settings = |prefixes, requests| Settings {
            prefixes,
            concurrency: 8,
            requests,
            seed: 1,
            texts: 0,
            sizes: Sizes { prefix_words: 1, tail_words: 1, shareable_tokens: None },
            run: 0,
            keep_alive: false,
            timeout: Duration::from_secs(1),
        };
        assert_eq!(settings(2, None).request_count(), 200);
        assert_eq!(settings(24, None).request_count(), 480);
        assert_eq!(settings(24, Some(7)).request_count(), 7);
    }
}
