//! Condensing measurements: exact percentiles of a sample, and the median of repeated runs.

use serde::{Deserialize, Serialize};

/// The percentiles that reports give, in the unit of what was measured (milliseconds in reports).
#[derive(Copy, Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Percentiles {
    /// `None` for an empty sample. Exact: all values are kept, since an experiment has hundreds or thousands of requests.
    pub fn of(mut values: Vec<f64>) -> Option<Percentiles> {
        values.sort_by(f64::total_cmp);
        let at = |share| quantile(&values, share);
        Some(Percentiles { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)? })
    }

    /// Percentile by percentile, the median over runs.
    pub fn median(runs: &[Percentiles]) -> Option<Percentiles> {
        let over = |pick: fn(&Percentiles) -> f64| median(runs.iter().map(pick).collect());
        Some(Percentiles { p50: over(|p| p.p50)?, p90: over(|p| p.p90)?, p99: over(|p| p.p99)? })
    }
}

/// The smallest value that at least `share` of the sorted values do not exceed (nearest rank, no interpolation).
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    sorted.get(rank(sorted.len(), share)).copied()
}

/// Where that value stands among `count` sorted ones.
pub fn rank(count: usize, share: f64) -> usize {
    ((share * count as f64).ceil() as usize).saturating_sub(1)
}

/// The middle value; of an even number of values, the mean of the middle two.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// Which of `values` is nearest to their median: the run that stands for all where a figure cannot be averaged.
pub fn median_index(values: &[f64]) -> Option<usize> {
    let middle = median(values.to_vec())?;
    (0..values.len()).min_by(|&a, &b| (values[a] - middle).abs().total_cmp(&(values[b] - middle).abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(Percentiles::of(hundred), Some(Percentiles { p50: 50.0, p90: 90.0, p99: 99.0 }));
        assert_eq!(Percentiles::of(vec![7.0]), Some(Percentiles { p50: 7.0, p90: 7.0, p99: 7.0 }));
        assert_eq!(Percentiles::of(Vec::new()), None);
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
        assert_eq!(median_index(&[0.9, 0.1, 0.5]), Some(2));
        assert_eq!(median_index(&[]), None);
    }
}
