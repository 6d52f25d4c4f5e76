//! `warmroute bench compare`: which differences between two reports are more than chance.
//!
//! Requests of a run depend on each other (what one leaves in a cache, the next finds), and so do those of a whole run. So
//! the bootstrap draws runs, and inside them stretches of consecutive requests, rather than single requests. Where both
//! sides sent the same requests in the same order, the same stretches are drawn on both: the luck of the draw cancels.

use std::fmt;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::experiment::figures::Row;
use crate::experiment::report::{self, Point};
use crate::experiment::stats;

/// Consecutive requests that are drawn together: longer than the number in flight, so that what they share stays together.
const STRETCH: usize = 20;
/// The chance that *any* row of a table is called a difference although there is none.
const ERROR_RATE: f64 = 0.05;
/// Drawn values beyond each end of an interval; fewer would make its ends a matter of luck.
const BEYOND: f64 = 10.0;

#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Report of `bench --json --samples`; FILE:NAME takes the points of one target or mode
    #[arg(value_name = "A.json[:NAME]")]
    pub a: Side,
    /// Report to compare with it
    #[arg(value_name = "B.json[:NAME]")]
    pub b: Side,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// A file, and which target or mode of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Side {
    pub file: PathBuf,
    pub name: Option<String>,
}

impl std::str::FromStr for Side {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Side, Self::Err> {
        Ok(match text.rsplit_once(':') {
            Some((file, name)) if !name.contains('/') => {
                Side { file: file.into(), name: Some(name.to_owned()) }
            }
            _ => Side { file: text.into(), name: None },
        })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        self.name.iter().try_for_each(|name| write!(f, ":{name}"))
    }
}

/// One figure of one point on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    pub prefixes: usize,
    pub concurrency: usize,
    pub figure: &'static str,
    pub a: f64,
    pub b: f64,
    /// Ends of the interval of `b - a`.
    pub low: f64,
    pub high: f64,
    /// The interval leaves out zero.
    pub differs: bool,
}

/// What is compared: a name and how to read it from requests.
type Figure = (&'static str, fn(&[Row], usize) -> f64);

const FIGURES: [Figure; 6] = [
    ("hit %", |rows, _| 100.0 * mean(rows, |row| f64::from(u8::from(row.cached_tokens > 0)))),
    ("cached tokens %", |rows, _| {
        100.0 * mean(rows, |row| f64::from(row.cached_tokens))
            / mean(rows, |row| f64::from(row.prompt_tokens))
    }),
    ("TTFT mean ms", |rows, _| mean(rows, |row| row.ttft_ms)),
    ("TTFT p50 ms", |rows, _| quantile(rows, 0.5)),
    ("TTFT p99 ms", |rows, _| quantile(rows, 0.99)),
    // In a closed loop the number in flight is fixed, so the rate follows from the mean time in flight.
    ("requests/s", |rows, concurrency| 1e3 * concurrency as f64 / mean(rows, |row| row.e2e_ms)),
];

fn mean(rows: &[Row], of: impl Fn(&Row) -> f64) -> f64 {
    rows.iter().map(of).sum::<f64>() / rows.len() as f64
}

fn quantile(rows: &[Row], share: f64) -> f64 {
    let mut times: Vec<f64> = rows.iter().map(|row| row.ttft_ms).collect();
    if times.is_empty() {
        return f64::NAN;
    }
    let rank = stats::rank(times.len(), share);
    *times.select_nth_unstable_by(rank, f64::total_cmp).1
}

/// Compares the two reports and prints the result to `out`.
///
/// # Errors
/// If a report cannot be read, has no requests in it, or the two have no point in common.
pub fn run(args: &CompareArgs, out: &mut (dyn Write + Send)) -> Result<()> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let pairs: Vec<(&Point, &Point)> = a
        .iter()
        .filter_map(|a| {
            let same =
                |b: &&Point| (b.prefixes, b.concurrency, &b.played) == (a.prefixes, a.concurrency, &a.played);
            let b = b.iter().find(same);
            Some((a, b?))
        })
        .collect();
    ensure!(
        !pairs.is_empty(),
        "{} and {} have no numbers of prefixes and requests in flight in common",
        args.a,
        args.b
    );
    let level = ERROR_RATE / (pairs.len() * FIGURES.len()) as f64;
    let differences: Vec<Difference> = pairs.iter().flat_map(|(a, b)| compare(a, b, level)).collect();
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &serde_json::json!({"differences": differences}))?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out, "A is {}, B is {}; intervals hold together with 95 % confidence", args.a, args.b)?;
    writeln!(out, "{}", table(&differences))?;
    if pairs.iter().any(|(a, b)| a.runs.len().min(b.runs.len()) < 3) {
        writeln!(out, "note: with fewer than three runs a side, how runs vary is hardly in the intervals")?;
    }
    if !differences.iter().any(|difference| difference.differs) {
        writeln!(out, "no difference")?;
    }
    Ok(())
}

/// What the same requests did on two targets of one report.
#[derive(Clone, Debug)]
pub struct Versus {
    pub a: String,
    pub b: String,
    /// The workload, or the number of prefixes.
    pub place: String,
    pub differences: Vec<Difference>,
}

/// The first target of a report against each of the others, point by point: what a layer in between costs, or a mode is worth. Each
/// interval holds with 95 % confidence by itself. Needs the single requests, a hundred of each run.
pub fn within(points: &[Point]) -> Vec<Versus> {
    // A few stretches say nothing of how they vary.
    let has_samples = |point: &&Point| point.runs.iter().all(|run| run.samples.len() >= 5 * STRETCH);
    let Some(first) = points.first().map(|point| &point.mode) else { return Vec::new() };
    let mut all = Vec::new();
    for a in points.iter().filter(|point| point.mode == *first).filter(has_samples) {
        let is_like = |b: &&Point| {
            b.mode != *first
                && (b.prefixes, b.concurrency, &b.played) == (a.prefixes, a.concurrency, &a.played)
        };
        for b in points.iter().filter(is_like).filter(has_samples) {
            let place = match &a.played {
                Some(played) => played.workload.clone(),
                None => format!("{} prefixes, {} in flight", a.prefixes, a.concurrency),
            };
            let differences = compare(a, b, ERROR_RATE);
            all.push(Versus { a: a.mode.clone(), b: b.mode.clone(), place, differences });
        }
    }
    all
}

/// The table of [`within`]: its titles, and a row a figure.
pub fn versus_sheet(all: &[Versus]) -> ([&'static str; 6], Vec<[String; 6]>) {
    let row = |versus: &Versus, one: &Difference| {
        let figure = |value: f64| format!("{value:.2}");
        [
            format!("{} against {}: {}", versus.b, versus.a, versus.place),
            one.figure.to_owned(),
            figure(one.a),
            figure(one.b),
            format!("{:+.2}", one.b - one.a),
            match one.differs {
                true => format!("{:+.2} to {:+.2}", one.low, one.high),
                false => "no difference".to_owned(),
            },
        ]
    };
    let rows = all.iter().flat_map(|versus| versus.differences.iter().map(move |one| row(versus, one)));
    (["the same requests", "figure", "first", "second", "difference", "95 % interval"], rows.collect())
}

#[derive(Deserialize)]
struct Report {
    points: Vec<Point>,
}

fn read(side: &Side) -> Result<Vec<Point>> {
    let text =
        fs::read_to_string(&side.file).with_context(|| format!("cannot read {}", side.file.display()))?;
    let report: Report = serde_json::from_str(&text)
        .with_context(|| format!("{} is no report of bench or demo", side.file.display()))?;
    let names: Vec<&str> = report.points.iter().map(|point| point.mode.as_str()).collect();
    if side.name.is_none() && names.windows(2).any(|pair| pair[0] != pair[1]) {
        bail!("{}: it has several targets; say which as FILE:NAME", side.file.display());
    }
    let points: Vec<Point> = report
        .points
        .into_iter()
        .filter(|point| side.name.as_ref().is_none_or(|name| *name == point.mode))
        .collect();
    ensure!(!points.is_empty(), "{side}: no points of that name");
    let bare = |point: &Point| point.runs.iter().any(|run| run.samples.is_empty());
    ensure!(!points.iter().any(bare), "{side}: the report has no single requests; make it with --samples");
    Ok(points)
}

/// All figures of one point; each interval leaves out `level` of the drawn values.
fn compare(a: &Point, b: &Point, level: f64) -> Vec<Difference> {
    let runs = |point: &Point| point.runs.iter().map(|run| run.samples.clone()).collect::<Vec<_>>();
    let (runs_a, runs_b) = (runs(a), runs(b));
    let rounds = (2.0 * BEYOND / level).ceil() as usize;
    // Fixed, so that the same two reports always compare alike.
    let mut rng = StdRng::seed_from_u64(1);
    let mut drawn = vec![Vec::with_capacity(rounds); FIGURES.len()];
    let is_paired = same_requests(&runs_a, &runs_b);
    for _ in 0..rounds {
        let picks_a = Picks::draw(&runs_a, &mut rng);
        let rows_a = picks_a.rows(&runs_a);
        let rows_b = match is_paired {
            true => picks_a.rows(&runs_b),
            false => Picks::draw(&runs_b, &mut rng).rows(&runs_b),
        };
        for ((_, figure), values) in FIGURES.iter().zip(&mut drawn) {
            values.push(figure(&rows_b, b.concurrency) - figure(&rows_a, a.concurrency));
        }
    }
    let (all_a, all_b) = (runs_a.concat(), runs_b.concat());
    FIGURES
        .iter()
        .zip(drawn)
        // In an open loop the rate is what was asked for.
        .filter(|((name, _), _)| a.concurrency > 0 || *name != "requests/s")
        .map(|((name, figure), mut values)| {
            values.sort_by(f64::total_cmp);
            let end = |share: f64| stats::quantile(&values, share).unwrap_or(f64::NAN);
            let (low, high) = (end(level / 2.0), end(1.0 - level / 2.0));
            Difference {
                prefixes: a.prefixes,
                concurrency: a.concurrency,
                figure: name,
                a: figure(&all_a, a.concurrency),
                b: figure(&all_b, b.concurrency),
                low,
                high,
                differs: low > 0.0 || high < 0.0,
            }
        })
        .collect()
}

/// Both sides have the same runs of the same requests, so that one drawing can serve both.
fn same_requests(a: &[Vec<Row>], b: &[Vec<Row>]) -> bool {
    let key = |runs: &[Vec<Row>]| -> Vec<Vec<(usize, u32)>> {
        runs.iter().map(|run| run.iter().map(|row| (row.index, row.prompt_tokens)).collect()).collect()
    };
    key(a) == key(b)
}

/// One drawing: runs, and of each the starts of stretches.
struct Picks(Vec<(usize, Vec<usize>)>);

impl Picks {
    fn draw(runs: &[Vec<Row>], rng: &mut StdRng) -> Picks {
        let pick = |_| {
            let run = rng.random_range(0..runs.len());
            let length = runs[run].len();
            let starts = (0..length.div_ceil(STRETCH)).map(|_| rng.random_range(0..length)).collect();
            (run, starts)
        };
        Picks((0..runs.len()).map(pick).collect())
    }

    /// Stretches go on at the beginning where they run over the end, so that each request is as likely as any other.
    fn rows(&self, runs: &[Vec<Row>]) -> Vec<Row> {
        let stretch = |(run, starts): &(usize, Vec<usize>)| {
            let rows = &runs[*run];
            starts
                .iter()
                .flat_map(|&start| (start..start + STRETCH).map(|at| rows[at % rows.len()]))
                .take(rows.len())
                .collect::<Vec<_>>()
        };
        self.0.iter().flat_map(stretch).collect()
    }
}

fn table(differences: &[Difference]) -> comfy_table::Table {
    let rows = differences.iter().map(|one| {
        let figure = |value: f64| format!("{value:.1}");
        [
            one.prefixes.to_string(),
            one.concurrency.to_string(),
            one.figure.to_owned(),
            figure(one.a),
            figure(one.b),
            format!("{:+.1}", one.b - one.a),
            format!("{:+.1} to {:+.1}", one.low, one.high),
            if one.differs { "differs" } else { "no difference" }.to_owned(),
        ]
    });
    report::table(["prefixes", "conc.", "figure", "A", "B", "B - A", "interval", ""], rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::report::tests::figures;

    /// Three runs of 100 requests: hits with the given chance take `hit_ms`, misses 100 ms, both with some noise.
    fn point(seed: u64, hit_chance: f64, hit_ms: f64) -> Point {
        let mut rng = StdRng::seed_from_u64(seed);
        let runs = (0..3)
            .map(|_| {
                let mut run = figures(0.5, 10.0, [1, 1]);
                run.samples = (0..100)
                    .map(|index| {
                        let is_hit = rng.random_bool(hit_chance);
                        let ttft_ms = if is_hit { hit_ms } else { 100.0 } + rng.random_range(0.0..10.0);
                        let cached_tokens = if is_hit { 2032 } else { 0 };
                        Row {
                            index,
                            ttft_ms,
                            e2e_ms: rng.random_range(800.0..900.0),
                            prompt_tokens: 2371,
                            cached_tokens,
                        }
                    })
                    .collect();
                run
            })
            .collect();
        Point::of("kv", Some(6), 7, 8, runs, true).unwrap()
    }

    fn verdicts(a: &Point, b: &Point) -> Vec<(&'static str, bool)> {
        let level = ERROR_RATE / FIGURES.len() as f64;
        compare(a, b, level).iter().map(|one| (one.figure, one.differs)).collect()
    }

    #[test]
    fn targets_of_one_report_are_held_against_the_first() {
        let named =
            |name: &str, seed: u64, hit_ms: f64| Point { mode: name.into(), ..point(seed, 0.5, hit_ms) };
        let all = within(&[named("direct", 1, 10.0), named("through", 1, 14.0), named("twice", 1, 10.0)]);
        let names: Vec<_> = all.iter().map(|versus| (versus.a.as_str(), versus.b.as_str())).collect();
        assert_eq!(names, [("direct", "through"), ("direct", "twice")]);
        let mean = |versus: &Versus| {
            versus.differences.iter().find(|one| one.figure == "TTFT mean ms").cloned().unwrap()
        };
        let through = mean(&all[0]);
        assert!(through.differs && through.low > 1.0 && through.high < 3.0, "half of them hit: {through:?}");
        assert!(!mean(&all[1]).differs);
        let (header, rows) = versus_sheet(&all);
        assert_eq!(header.len(), rows[0].len());
        assert!(within(&[named("alone", 1, 10.0)]).is_empty());
    }

    #[test]
    fn chance_is_no_difference() {
        let mut false_alarms = 0;
        for seed in 0..6 {
            let (a, b) = (point(2 * seed, 0.5, 40.0), point(2 * seed + 1, 0.5, 40.0));
            false_alarms += usize::from(verdicts(&a, &b).iter().any(|(_, differs)| *differs));
        }
        assert!(false_alarms <= 1, "{false_alarms} of 6 comparisons of equals");
    }

    #[test]
    fn what_differs_is_told_and_the_rest_is_not() {
        let verdicts = verdicts(&point(1, 0.5, 40.0), &point(2, 0.98, 40.0));
        let told: Vec<&str> =
            verdicts.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
        for name in ["hit %", "cached tokens %", "TTFT mean ms", "TTFT p50 ms"] {
            assert!(told.contains(&name), "{name} not in {told:?}");
        }
        assert!(!told.contains(&"requests/s"), "the whole takes as long on both sides");
    }

    #[test]
    fn a_report_compared_with_itself_has_intervals_of_nothing() {
        let a = point(1, 0.5, 40.0);
        for difference in compare(&a, &a, 0.01) {
            assert_eq!((difference.low, difference.high), (0.0, 0.0), "{}", difference.figure);
        }
    }

    #[test]
    fn a_side_may_name_its_target() {
        let side = |text: &str| text.parse::<Side>().unwrap();
        assert_eq!(side("a.json:kv"), Side { file: "a.json".into(), name: Some("kv".into()) });
        assert_eq!(side("x/a.json"), Side { file: "x/a.json".into(), name: None });
        assert_eq!(side("a.json:kv").to_string(), "a.json:kv");
    }
}
