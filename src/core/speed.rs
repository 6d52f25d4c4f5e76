//! How fast workers prefill, learned from pairs of (uncached tokens, seconds until the first token), so that mixed GPUs need no
//! weights in the config. In two parts, because a worker that serves only hits sees only short prefills, in which the fixed
//! part (scheduling, network, one decode step) weighs most, and would look slow on its own:
//!
//! - [`Line`]: the whole fleet's seconds = fixed + tokens / speed, by least squares over samples that fade;
//! - [`Pace`]: how many times longer than that line one worker takes.

/// Tokens a second assumed while nothing is known: a mid-size model on one current GPU. Only ratios between workers and
/// between queue and prompt matter before the first samples, so a wrong guess costs little.
pub const UNKNOWN_TOKENS_PER_S: f64 = 8_000.0;

/// What a worker can be believed to do; samples that say otherwise are mistakes.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 50.0..=10_000_000.0;
/// Shorter prefills are all fixed part.
const MIN_TOKENS: f64 = 32.0;
/// How many samples the fleet's line remembers, and how many a worker's pace does.
const LINE_MEMORY: f64 = 512.0;
const PACE_MEMORY: f64 = 48.0;
/// Samples before either is believed.
const ENOUGH: f64 = 5.0;
/// A worker is taken to be as fast as the others while its pace differs by less than this, as a logarithm (0.3 is a third), and
/// its own pace counts in full from twice that on. Workers that are equal would otherwise draw uneven traffic by chance, and
/// the traffic by which they are measured would keep them apart: three equal engines on two cores were seen to differ by a
/// quarter either way. This is for a full memory of samples; fewer samples differ by
/// chance more, by the root of how many fewer they are.
const DOUBTFUL: f64 = 0.3;
/// How many times the mean rate the speed behind the fixed part may be. Long prompts come when a fleet is new and idle, hits when it
/// is busy, and then a line through both is nearly level: as if prefilling cost nothing.
const STEEPEST: f64 = 3.0;
/// A sample this many times slower than expected was waiting for something else (memory, other traffic).
const OUTLIER: f64 = 4.0;
/// Slow samples in a row that are no outliers any more: the worker has become slow.
const OUTLIERS_IN_A_ROW: u32 = 8;

fn plausible(tokens: f64, seconds: f64) -> bool {
    tokens >= MIN_TOKENS && seconds > 0.0 && PLAUSIBLE.contains(&(tokens / seconds))
}

/// The fleet's line.
#[derive(Copy, Clone, Debug, Default)]
pub struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    pub fn learn(&mut self, tokens: f64, seconds: f64) {
        if !plausible(tokens, seconds) {
            return;
        }
        let keep = 1.0 - 1.0 / LINE_MEMORY;
        self.weight = self.weight * keep + 1.0;
        self.x = self.x * keep + tokens;
        self.y = self.y * keep + seconds;
        self.xx = self.xx * keep + tokens * tokens;
        self.xy = self.xy * keep + tokens * seconds;
    }

    /// Fixed seconds and tokens a second; `None` until enough has been seen.
    fn fit(&self) -> Option<(f64, f64)> {
        if self.weight < ENOUGH {
            return None;
        }
        let variance = self.xx - self.x * self.x / self.weight;
        let covariance = self.xy - self.x * self.y / self.weight;
        // Prompts of about one length cannot tell the fixed part from the other: then the mean rate must do.
        let spread = variance > 0.01 * self.x * self.x / self.weight;
        let slope = covariance / variance;
        let fixed = (self.y - slope * self.x) / self.weight;
        let rate = self.x / self.y;
        if spread && covariance > 0.0 && fixed >= 0.0 {
            let speed = (1.0 / slope).min(STEEPEST * rate);
            return Some(((self.y - self.x / speed) / self.weight, speed));
        }
        Some((0.0, rate))
    }

    /// What is assumed of a worker that has shown nothing itself.
    pub fn tokens_per_s(&self) -> f64 {
        self.fit().map_or(UNKNOWN_TOKENS_PER_S, |(_, speed)| speed)
    }
}

/// One worker against the fleet's line.
#[derive(Copy, Clone, Debug, Default)]
pub struct Pace {
    weight: f64,
    actual: f64,
    expected: f64,
    slow_in_a_row: u32,
    verdict: Verdict,
}

/// What a worker's samples and the config say of its speed.
#[derive(Copy, Clone, Debug, Default)]
pub struct Verdict {
    told: Option<f64>,
    learned: Option<Slower>,
}

/// How much slower than the fleet's line a worker is, and by how much it may seem so by chance, as logarithms.
#[derive(Copy, Clone, Debug)]
struct Slower {
    seen: f64,
    doubtful: f64,
    /// As far as it is certain, as a factor of the line's speed.
    factor: f64,
}

impl Pace {
    /// A speed from the config counts until enough samples contradict it.
    pub fn told(tokens_per_s: Option<f64>) -> Pace {
        let mut pace = Pace::default();
        pace.tell(tokens_per_s);
        pace
    }

    /// The config has been edited; what was learned stays.
    pub fn tell(&mut self, tokens_per_s: Option<f64>) {
        self.verdict.told = tokens_per_s.filter(|speed| PLAUSIBLE.contains(speed));
    }

    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    pub fn learn(&mut self, line: &Line, tokens: f64, seconds: f64) {
        let Some((fixed, speed)) = line.fit().filter(|_| plausible(tokens, seconds)) else { return };
        let expected = fixed + tokens / speed;
        if self.is_outlier(seconds, expected) {
            return;
        }
        let keep = 1.0 - 1.0 / PACE_MEMORY;
        self.weight = self.weight * keep + 1.0;
        self.actual = self.actual * keep + seconds;
        self.expected = self.expected * keep + expected;
        self.verdict.learned = self.judge();
    }

    fn judge(&self) -> Option<Slower> {
        if self.weight < ENOUGH {
            return None;
        }
        let seen = (self.actual / self.expected).ln();
        let doubtful = DOUBTFUL * (PACE_MEMORY / self.weight).sqrt();
        let certain = (seen.abs() / doubtful - 1.0).clamp(0.0, 1.0);
        Some(Slower { seen, doubtful, factor: (-seen * certain).exp() })
    }

    fn is_outlier(&mut self, seconds: f64, expected: f64) -> bool {
        let usual = if self.weight < ENOUGH { 1.0 } else { self.actual / self.expected };
        if seconds > OUTLIER * usual * expected && self.slow_in_a_row < OUTLIERS_IN_A_ROW {
            self.slow_in_a_row += 1;
            return true;
        }
        self.slow_in_a_row = 0;
        false
    }
}

impl Verdict {
    /// Tokens a second by this worker's own samples or the config, where the fleet's line says `typical`; `None` while neither
    /// samples nor config say anything.
    pub fn speed(&self, typical: f64) -> Option<f64> {
        let Some(slower) = self.learned else { return self.told };
        // What was told stands until samples contradict it.
        let contradicted = |told: &f64| ((typical / told).ln() - slower.seen).abs() > 2.0 * slower.doubtful;
        if let Some(told) = self.told.filter(|told| !contradicted(told)) {
            return Some(told);
        }
        Some((typical * slower.factor).clamp(*PLAUSIBLE.start(), *PLAUSIBLE.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One fleet line and some workers, each `slower` times as slow, fed with prefills of these lengths in turn.
    fn learned(workers: &[(f64, &[f64])]) -> Vec<f64> {
        let mut line = Line::default();
        let mut paces = vec![Pace::default(); workers.len()];
        for at in 0..200 {
            for ((slower, lengths), pace) in workers.iter().zip(&mut paces) {
                let tokens = lengths[at % lengths.len()];
                let seconds = slower * (0.029 + tokens / 30_000.0);
                line.learn(tokens, seconds);
                pace.learn(&line, tokens, seconds);
            }
        }
        paces
            .iter()
            .map(|pace| pace.verdict().speed(line.tokens_per_s()).expect("two hundred samples"))
            .collect()
    }

    fn near(actual: f64, wanted: f64) {
        assert!((actual / wanted - 1.0).abs() < 0.02, "{actual} should be near {wanted}");
    }

    #[test]
    fn serving_only_hits_does_not_look_slow() {
        let speeds = learned(&[(1.0, &[339.0]), (1.0, &[2371.0]), (1.0, &[339.0, 2371.0])]);
        for speed in speeds {
            near(speed, 30_000.0);
        }
    }

    #[test]
    fn a_small_difference_is_taken_for_chance() {
        let mixed: &[f64] = &[300.0, 2000.0, 4000.0, 900.0, 2500.0];
        let speeds = learned(&[(1.0, mixed), (1.1, mixed)]);
        assert_eq!(speeds[0], speeds[1]);
    }

    #[test]
    fn a_handful_of_samples_must_differ_by_more() {
        let mut line = Line::default();
        let (mut few, mut many) = (Pace::default(), Pace::default());
        for at in 0..600 {
            line.learn(1000.0, 0.1);
            if at >= 590 {
                few.learn(&line, 1000.0, 0.19);
            }
            many.learn(&line, 1000.0, 0.19);
        }
        let typical = line.tokens_per_s();
        assert_eq!(few.verdict().speed(typical), Some(typical));
        near(many.verdict().speed(typical).expect("six hundred samples"), typical / 1.9);
    }

    #[test]
    fn slow_workers_are_told_from_fast_ones() {
        let mixed: &[f64] = &[300.0, 2000.0, 4000.0, 900.0, 2500.0];
        let speeds = learned(&[(1.0, mixed), (1.0, mixed), (1.0, mixed), (2.5, mixed)]);
        near(speeds[0] / speeds[1], 1.0);
        assert!((1.8..=2.5).contains(&(speeds[0] / speeds[3])), "{speeds:?}");
    }

    #[test]
    fn short_prefills_under_load_do_not_make_long_ones_free() {
        let mut line = Line::default();
        (0..7).for_each(|_| line.learn(2300.0, 0.100));
        (0..80).for_each(|_| line.learn(300.0, 0.099));
        let rate = (7.0 * 2300.0 + 80.0 * 300.0) / (7.0 * 0.100 + 80.0 * 0.099);
        assert!((1.0..=3.0).contains(&(line.tokens_per_s() / rate)), "{}", line.tokens_per_s() / rate);
    }

    #[test]
    fn one_length_only_gives_the_mean_rate() {
        let speed = learned(&[(1.0, &[2000.0])])[0];
        near(speed, 2000.0 / (0.029 + 2000.0 / 30_000.0));
    }

    #[test]
    fn the_config_counts_until_samples_do() {
        let line = Line::default();
        assert_eq!(Pace::told(Some(1_000.0)).verdict().speed(line.tokens_per_s()), Some(1_000.0));
        assert_eq!(Pace::told(Some(f64::NAN)).verdict().speed(line.tokens_per_s()), None);
        assert_eq!(line.tokens_per_s(), UNKNOWN_TOKENS_PER_S);
    }

    #[test]
    fn what_the_config_says_stands_until_samples_contradict_it() {
        let mut line = Line::default();
        let (mut right, mut wrong) = (Pace::told(Some(5_000.0)), Pace::told(Some(40_000.0)));
        for _ in 0..100 {
            line.learn(1000.0, 0.1);
            right.learn(&line, 1000.0, 0.21);
            wrong.learn(&line, 1000.0, 0.2);
        }
        assert_eq!(right.verdict().speed(line.tokens_per_s()), Some(5_000.0));
        near(wrong.verdict().speed(line.tokens_per_s()).expect("a hundred samples"), 5_000.0);
    }

    #[test]
    fn a_stall_is_no_slowness_but_lasting_slowness_is() {
        let mut line = Line::default();
        let mut pace = Pace::default();
        let feed = |line: &mut Line, pace: &mut Pace, seconds: f64| {
            line.learn(1000.0, 0.1);
            pace.learn(line, 1000.0, seconds);
        };
        (0..20).for_each(|_| feed(&mut line, &mut pace, 0.1));
        feed(&mut line, &mut pace, 10.0);
        near(pace.verdict().speed(line.tokens_per_s()).expect("known"), 10_000.0);
        (0..200).for_each(|_| feed(&mut line, &mut pace, 1.0));
        near(pace.verdict().speed(line.tokens_per_s()).expect("known"), 1_000.0);
    }

    #[test]
    fn nonsense_is_ignored() {
        let mut line = Line::default();
        let mut pace = Pace::default();
        for (tokens, seconds) in
            [(1e9, 1.0), (1000.0, 0.0), (1000.0, -1.0), (f64::NAN, 1.0), (1000.0, f64::NAN), (1.0, 1.0)]
        {
            for _ in 0..10 {
                line.learn(tokens, seconds);
                pace.learn(&line, tokens, seconds);
            }
        }
        assert_eq!(
            (line.tokens_per_s(), pace.verdict().speed(line.tokens_per_s())),
            (UNKNOWN_TOKENS_PER_S, None)
        );
    }
}
