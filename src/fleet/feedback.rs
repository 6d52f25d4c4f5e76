//! What the workers' answers teach: how many bytes of prompt a token stands for and how long answers are, per model.

use std::collections::HashMap;

use parking_lot::RwLock;

/// Models that are learned apart; further ones share the default, since clients choose the names.
const MODELS: usize = 256;
/// Weight of one answer's length. About fifty answers make half of the estimate.
const WEIGHT: f64 = 1.0 / 64.0;
/// Prompt tokens over which bytes per token are learned: by tokens, so that many short prompts, which are mostly chat template, say no more
/// than they are long.
const MEMORY_TOKENS: f64 = 100_000.0;
/// Prompt tokens that weigh as much as the guess that comes before all answers.
const GUESSED_TOKENS: f64 = 64.0;
/// Tokens expected of an answer before any was seen, and where the request does not bound it.
const OUTPUT_TOKENS: f64 = 128.0;
/// Plausible bytes per token; outside of it, the bytes counted here are not those that were tokenized (images, templates).
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.25..=64.0;

/// Longest answer that is learned, in tokens: as long as any context today. More is a slip of the engine.
const LONGEST_OUTPUT: u32 = 1 << 20;

/// The estimates for one model.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Estimate {
    pub bytes_per_token: f64,
    pub output_tokens: f64,
}

/// What one model's answers have told, the past fading.
struct Told {
    bytes: f64,
    tokens: f64,
    output_tokens: f64,
}

impl Told {
    fn estimate(&self) -> Estimate {
        Estimate { bytes_per_token: self.bytes / self.tokens, output_tokens: self.output_tokens }
    }
}

/// Estimates by model, bounded in number.
pub struct Feedback {
    default: Estimate,
    models: RwLock<HashMap<Box<str>, Told>>,
}

impl Feedback {
    pub fn new(bytes_per_token: f64) -> Feedback {
        let default = Estimate { bytes_per_token, output_tokens: OUTPUT_TOKENS };
        Feedback { default, models: RwLock::default() }
    }

    pub fn estimate(&self, model: &str) -> Estimate {
        self.models.read().get(model).map_or(self.default, Told::estimate)
    }

    /// A worker said that a prompt of `bytes` had `prompt_tokens`, and its answer `output_tokens`.
    pub fn learn(&self, model: &str, bytes: u64, prompt_tokens: u32, output_tokens: Option<u32>) {
        let ratio = bytes as f64 / f64::from(prompt_tokens.max(1));
        let mut models = self.models.write();
        if !models.contains_key(model) {
            if models.len() >= MODELS {
                return;
            }
            let Estimate { bytes_per_token, output_tokens } = self.default;
            let guess =
                Told { bytes: bytes_per_token * GUESSED_TOKENS, tokens: GUESSED_TOKENS, output_tokens };
            models.insert(model.into(), guess);
        }
        let Some(told) = models.get_mut(model) else { return };
        if PLAUSIBLE.contains(&ratio) {
            let keep = (-f64::from(prompt_tokens) / MEMORY_TOKENS).exp();
            told.bytes = keep * told.bytes + bytes as f64;
            told.tokens = keep * told.tokens + f64::from(prompt_tokens.max(1));
        }
        if let Some(tokens) = output_tokens.filter(|tokens| *tokens <= LONGEST_OUTPUT) {
            told.output_tokens += WEIGHT * (f64::from(tokens) - told.output_tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_learned_apart_and_follows_its_answers() {
        let feedback = Feedback::new(4.0);
        feedback.learn("a", 3_000, 1_000, Some(10));
        assert!(
            (feedback.estimate("a").bytes_per_token - 3.0).abs() < 0.1,
            "one answer is worth more than the guess"
        );
        assert_eq!(feedback.estimate("b").bytes_per_token, 4.0);
        for _ in 0..1_000 {
            feedback.learn("a", 2_000, 1_000, Some(10));
        }
        let estimate = feedback.estimate("a");
        assert!((estimate.bytes_per_token - 2.0).abs() < 0.01, "{estimate:?}");
        assert!((estimate.output_tokens - 10.0).abs() < 0.01, "{estimate:?}");
    }

    /// A greeting is mostly chat template: 20 tokens for 40 bytes.
    #[test]
    fn short_prompts_say_little_of_long_ones() {
        let feedback = Feedback::new(4.0);
        feedback.learn("a", 40, 20, None);
        assert!(feedback.estimate("a").bytes_per_token > 3.0);
        for _ in 0..200 {
            (0..5).for_each(|_| feedback.learn("a", 40, 20, None));
            feedback.learn("a", 4_000, 1_000, None);
        }
        let learned = feedback.estimate("a").bytes_per_token;
        assert!((learned - 4_200.0 / 1_100.0).abs() < 0.02, "{learned}");
    }

    #[test]
    fn what_cannot_be_is_not_learned_and_models_are_bounded() {
        let feedback = Feedback::new(4.0);
        feedback.learn("a", 8_000_000, 1_000, None);
        assert_eq!(feedback.estimate("a").bytes_per_token, 4.0);
        let before = feedback.estimate("a").output_tokens;
        feedback.learn("a", 2_000, 1_000, Some(u32::MAX));
        assert_eq!(feedback.estimate("a").output_tokens, before);
        for n in 0..10_000 {
            feedback.learn(&n.to_string(), 2_000, 1_000, None);
        }
        assert_eq!(feedback.models.read().len(), MODELS);
    }
}
