//! Tokens and latencies by model, bounded: clients choose the names.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, Registry};
use serde::Serialize;

use super::catalogue as c;
use super::{Label, Predicted};
use crate::config::Mode;

/// Model names that get series of their own; the rest are counted under `other`.
pub(super) const MODEL_SERIES: usize = 32;
/// Longest model name that gets a series of its own: as long as a name on the usual hub may be.
pub(super) const MODEL_NAME_BYTES: usize = 96;

struct Families {
    tokens: [IntCounterVec; 5],
    latencies: [HistogramVec; 3],
}

/// Numbers of all models.
pub struct Models {
    families: Arc<Families>,
    known: RwLock<HashMap<Box<str>, Arc<ModelMetrics>>>,
    other: Arc<ModelMetrics>,
}

/// Numbers of one model. Series come into being when they are first asked for: most models see one mode only.
pub struct ModelMetrics {
    name: Box<str>,
    families: Arc<Families>,
    arms: [Arm; Mode::VALUES.len()],
}

#[derive(Default)]
struct Arm {
    tokens: OnceLock<TokenMetrics>,
    latencies: [OnceLock<LatencyMetrics>; Predicted::VALUES.len()],
}

/// Token counts of one model by one mode.
pub struct TokenMetrics {
    /// `usage.prompt_tokens`.
    pub prompt: IntCounter,
    /// Prompt tokens that the planner believed to be cached.
    pub predicted_cached: IntCounter,
    /// Prompt tokens that the worker said were cached.
    pub confirmed_cached: IntCounter,
    /// `usage.prompt_tokens` of those answers that told `cached_tokens`: what `confirmed_cached` is a share of.
    pub confirmed_prompt: IntCounter,
    /// Generated tokens.
    pub output: IntCounter,
}

/// Latencies of one model by one mode, of predicted hits or of predicted misses. Seconds.
pub struct LatencyMetrics {
    pub first_token: Histogram,
    pub per_output_token: Histogram,
    pub duration: Histogram,
}

impl Models {
    pub(super) fn register(registry: &Registry) -> Models {
        let families = Arc::new(Families {
            tokens: [
                c::PROMPT_TOKENS,
                c::PREDICTED_CACHED,
                c::CONFIRMED_CACHED,
                c::CONFIRMED_PROMPT,
                c::OUTPUT_TOKENS,
            ]
            .map(|family| family.counters(registry)),
            latencies: [c::TTFT, c::PER_TOKEN, c::DURATION].map(|family| family.histograms(registry)),
        });
        Models {
            known: RwLock::default(),
            other: Arc::new(ModelMetrics::named("other", &families)),
            families,
        }
    }

    /// The numbers of `model`. To be asked only of models that a worker has answered for.
    pub fn of(&self, model: &str) -> Arc<ModelMetrics> {
        if let Some(metrics) = self.known.read().get(model) {
            return metrics.clone();
        }
        if model.len() > MODEL_NAME_BYTES {
            return self.other.clone();
        }
        let mut known = self.known.write();
        if known.len() >= MODEL_SERIES && !known.contains_key(model) {
            return self.other.clone();
        }
        let made = || {
            let name = if model.is_empty() { "default" } else { model };
            Arc::new(ModelMetrics::named(name, &self.families))
        };
        known.entry(model.into()).or_insert_with(made).clone()
    }
}

impl ModelMetrics {
    fn named(name: &str, families: &Arc<Families>) -> ModelMetrics {
        ModelMetrics { name: name.into(), families: families.clone(), arms: Default::default() }
    }

    pub fn tokens(&self, mode: Mode) -> &TokenMetrics {
        self.arms[mode.index()].tokens.get_or_init(|| {
            let labels = [&*self.name, Label::as_str(mode)];
            let of = |family: &IntCounterVec| family.with_label_values(&labels);
            let [prompt, predicted_cached, confirmed_cached, confirmed_prompt, output] =
                self.families.tokens.each_ref().map(of);
            TokenMetrics { prompt, predicted_cached, confirmed_cached, confirmed_prompt, output }
        })
    }

    pub fn latencies(&self, mode: Mode, predicted: Predicted) -> &LatencyMetrics {
        self.arms[mode.index()].latencies[predicted.index()].get_or_init(|| {
            let labels = [&*self.name, predicted.as_str(), Label::as_str(mode)];
            let of = |family: &HistogramVec| family.with_label_values(&labels);
            let [first_token, per_output_token, duration] = self.families.latencies.each_ref().map(of);
            LatencyMetrics { first_token, per_output_token, duration }
        })
    }
}

/// Sums over all models.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TokenTotals {
    pub prompt: u64,
    pub predicted_cached: u64,
    pub confirmed_cached: u64,
    pub confirmed_prompt: u64,
    pub output: u64,
}

impl Models {
    fn each(&self, mut take: impl FnMut(&ModelMetrics)) {
        self.known.read().values().for_each(|model| take(model));
        take(&self.other);
    }

    /// Tokens of all models that went by `mode`.
    pub fn token_totals(&self, mode: Mode) -> TokenTotals {
        let mut sum = TokenTotals::default();
        self.each(|model| {
            let Some(tokens) = model.arms[mode.index()].tokens.get() else { return };
            sum.prompt += tokens.prompt.get();
            sum.predicted_cached += tokens.predicted_cached.get();
            sum.confirmed_cached += tokens.confirmed_cached.get();
            sum.confirmed_prompt += tokens.confirmed_prompt.get();
            sum.output += tokens.output.get();
        });
        sum
    }

    /// Upper bounds of the buckets of [`Models::first_tokens`], seconds.
    pub fn first_token_bounds(&self) -> &'static [f64] {
        c::TTFT_BUCKETS
    }

    /// First tokens of all models in all modes that came up to each bound, and the last: all of them.
    pub fn first_tokens(&self, predicted: Predicted) -> Vec<u64> {
        use prometheus::core::Metric;

        let mut sum = vec![0; c::TTFT_BUCKETS.len() + 1];
        self.each(|model| {
            for arm in &model.arms {
                let Some(latencies) = arm.latencies[predicted.index()].get() else { continue };
                let metric = latencies.first_token.metric();
                let histogram = metric.get_histogram();
                let counts = histogram.get_bucket().iter().map(|bucket| bucket.cumulative_count());
                for (sum, count) in sum.iter_mut().zip(counts.chain([histogram.get_sample_count()])) {
                    *sum += count;
                }
            }
        });
        sum
    }
}
