//! The published Service study that the experiment repeats, and its formula.

/// Prefixes that one worker of the study could hold: 9,362 tokens of KV cache over 2,371-token prompts.
pub const PREFIXES_A_WORKER: f64 = 3.95;

/// Share of requests with any cached token behind a Service as published: workers, prefixes, share. Concurrency 8, the
/// median of three runs.
const PUBLISHED: [(usize, usize, f64); 8] = [
    (6, 2, 0.950),
    (6, 7, 0.555),
    (6, 12, 0.321),
    (6, 24, 0.175),
    (3, 2, 0.980),
    (3, 7, 0.595),
    (3, 12, 0.338),
    (3, 24, 0.169),
];

/// The published share of hits behind a Service; `None` where the study has no point.
pub fn service_hit_share(workers: usize, prefixes: usize, concurrency: usize) -> Option<f64> {
    let found = PUBLISHED.iter().find(|&&(w, p, _)| (w, p) == (workers, prefixes))?;
    (concurrency == 8).then_some(found.2)
}

/// What a Service leaves of the hits by the study's formula: every worker sees every prefix, so more workers do not help.
pub fn service_formula(prefixes: usize) -> f64 {
    (PREFIXES_A_WORKER / prefixes as f64).min(1.0)
}

/// What routing by prefix can reach by the same formula: the fleet holds `workers` times as many prefixes.
pub fn routed_formula(workers: usize, prefixes: usize) -> f64 {
    (workers as f64 * PREFIXES_A_WORKER / prefixes as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_points_of_the_study_have_a_published_figure() {
        assert_eq!(service_hit_share(6, 24, 8), Some(0.175));
        assert_eq!(service_hit_share(3, 7, 8), Some(0.595));
        assert_eq!(service_hit_share(6, 24, 4), None);
        assert_eq!(service_hit_share(5, 24, 8), None);
    }

    #[test]
    fn formulas() {
        assert_eq!(service_formula(2), 1.0);
        assert!((service_formula(24) - 0.1646).abs() < 1e-3);
        assert!((routed_formula(6, 24) - 0.9875).abs() < 1e-3);
        assert_eq!(routed_formula(6, 12), 1.0);
    }
}
