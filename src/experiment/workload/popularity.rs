//! How often each of several prefixes is asked for.

use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngExt};

/// How requests spread over prefixes.
#[derive(Clone, Debug, PartialEq)]
pub enum Popularity {
    /// All alike.
    Uniform,
    /// The k-th most popular in proportion to 1 / k^exponent.
    Zipf(f64),
    /// One prefix has this share of all requests, the others share the rest alike.
    Hot(f64),
    /// In proportion to these, by a name.
    Weights(String, Vec<f64>),
}

impl Popularity {
    /// The weight of each of `count` prefixes; `Weights` has its own count.
    fn weights(&self, count: usize) -> Vec<f64> {
        let rest = |share: f64| (1.0 - share) / count.saturating_sub(1).max(1) as f64;
        match self {
            Popularity::Uniform => vec![1.0; count],
            Popularity::Zipf(exponent) => (1..=count).map(|k| (k as f64).powf(-exponent)).collect(),
            Popularity::Hot(share) => {
                (0..count).map(|k| if k == 0 { *share } else { rest(*share) }).collect()
            }
            Popularity::Weights(_, weights) => weights.clone(),
        }
    }

    /// A sampler over `count` prefixes (at least 1).
    pub fn over(&self, count: usize) -> Sampler {
        let mut sum = 0.0;
        let add = |weight| {
            sum += weight;
            sum
        };
        Sampler { cumulative: self.weights(count).into_iter().map(add).collect() }
    }
}

impl fmt::Display for Popularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Popularity::Uniform => write!(f, "uniform"),
            Popularity::Zipf(exponent) => write!(f, "zipf:{exponent}"),
            Popularity::Hot(share) => write!(f, "hot:{share}"),
            Popularity::Weights(name, _) => write!(f, "{name}"),
        }
    }
}

impl FromStr for Popularity {
    type Err = String;

    fn from_str(text: &str) -> Result<Popularity, String> {
        let wrong =
            || format!("`{text}` is no popularity: uniform, zipf:EXPONENT (0 to 10), or hot:SHARE (0 to 1)");
        let (name, value) = text.split_once(':').unwrap_or((text, ""));
        let number = |most: f64| match value.parse::<f64>() {
            Ok(number) if (0.0..=most).contains(&number) => Ok(number),
            _ => Err(wrong()),
        };
        match name {
            "uniform" if value.is_empty() => Ok(Popularity::Uniform),
            "zipf" => Ok(Popularity::Zipf(number(10.0)?)),
            "hot" => Ok(Popularity::Hot(number(1.0)?)),
            _ => Err(wrong()),
        }
    }
}

/// Draws prefixes.
#[derive(Clone, Debug)]
pub struct Sampler {
    cumulative: Vec<f64>,
}

impl Sampler {
    pub fn draw(&self, random: &mut impl Rng) -> u32 {
        let all = self.cumulative.last().copied().unwrap_or(0.0);
        let mark = random.random::<f64>() * all;
        let at = self.cumulative.partition_point(|&up_to| up_to <= mark);
        at.min(self.cumulative.len().saturating_sub(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn shares(popularity: &str, count: usize) -> Vec<f64> {
        let sampler = popularity.parse::<Popularity>().unwrap().over(count);
        let mut random = StdRng::seed_from_u64(5);
        let mut seen = vec![0.0; count];
        (0..20_000).for_each(|_| seen[sampler.draw(&mut random) as usize] += 1.0 / 20_000.0);
        seen
    }

    #[test]
    fn shares_are_as_named() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 0.015, "{a} is not {b}");
        shares("uniform", 10).into_iter().for_each(|share| near(share, 0.1));
        let hot = shares("hot:0.5", 11);
        near(hot[0], 0.5);
        near(hot[7], 0.05);
        let zipf = shares("zipf:1", 4);
        near(zipf[0], 12.0 / 25.0);
        near(zipf[3], 3.0 / 25.0);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for text in ["", "zipf", "zipf:x", "zipf:-1", "hot:2", "hot:nan", "uniform:1", "cold"] {
            assert!(text.parse::<Popularity>().unwrap_err().contains("no popularity"), "{text}");
        }
    }
}
