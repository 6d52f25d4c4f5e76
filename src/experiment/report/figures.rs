//! Which charts a report has, and what is in them.

use super::Point;
use super::charts::{BarChart, Line, LineChart, Mark, Paint};
use crate::experiment::stats::Percentiles;

/// All charts of a report.
#[derive(Debug, Default)]
pub struct Charts {
    pub lines: Vec<LineChart>,
    pub bars: Vec<BarChart>,
}

/// The charts that `points` are enough for: no line without at least two points.
pub fn charts(points: &[Point], prefixes_a_worker: Option<f64>) -> Charts {
    let all = All { points };
    let mut charts = Charts::default();
    for concurrency in all.concurrencies() {
        charts.lines.extend(hits(&all, concurrency, prefixes_a_worker));
        charts.lines.extend(beliefs(&all, concurrency));
        charts.lines.extend(ttft_by_prefixes(&all, concurrency));
        charts.lines.extend(throughput(&all, concurrency));
    }
    for prefixes in all.prefixes() {
        charts.lines.extend(ttft_by_concurrency(&all, prefixes));
    }
    charts.bars.extend(workers(&all));
    if charts.lines.is_empty() {
        charts.bars.extend(of_each(&all));
    }
    charts
}

/// In words: requests in flight, or that they come at times of their own.
fn flight(concurrency: usize) -> String {
    match concurrency {
        0 => "open loop".to_owned(),
        some => format!("{some} in flight"),
    }
}

struct All<'a> {
    points: &'a [Point],
}

impl All<'_> {
    fn modes(&self) -> Vec<&str> {
        let mut modes: Vec<&str> = Vec::new();
        for point in self.points {
            if !modes.contains(&point.mode.as_str()) {
                modes.push(&point.mode);
            }
        }
        modes
    }

    fn distinct(&self, of: fn(&Point) -> usize) -> Vec<usize> {
        let mut values: Vec<usize> = self.points.iter().map(of).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    fn concurrencies(&self) -> Vec<usize> {
        self.distinct(|point| point.concurrency)
    }

    fn prefixes(&self) -> Vec<usize> {
        self.distinct(|point| point.prefixes)
    }

    /// A line for each mode, over the points that `keep`s, in the order of `x`.
    fn lines(
        &self,
        mark: Mark,
        label: &str,
        keep: impl Fn(&Point) -> bool,
        x: fn(&Point) -> usize,
        y: impl Fn(&Point) -> Option<f64>,
    ) -> Vec<Line> {
        let line = |(nth, mode): (usize, &str)| {
            let mut points: Vec<(f64, f64)> = self
                .points
                .iter()
                .filter(|point| point.mode == mode && keep(point))
                .filter_map(|point| Some((x(point) as f64, y(point)?)))
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let name = if label.is_empty() { mode.to_owned() } else { format!("{mode}, {label}") };
            Line { name, paint: Paint::Series(nth as u8), mark, points }
        };
        let lines = self.modes().into_iter().enumerate().map(line);
        lines.filter(|line| !line.points.is_empty()).collect()
    }
}

/// `None` if there is nothing to join by a line.
fn chart(title: String, x_label: &'static str, y_label: &'static str, lines: Vec<Line>) -> Option<LineChart> {
    let joins = lines.iter().any(|line| line.points.len() > 1);
    joins.then_some(LineChart { title, x_label, y_label, y_max: None, lines })
}

fn hits(all: &All<'_>, concurrency: usize, prefixes_a_worker: Option<f64>) -> Option<LineChart> {
    let here = |point: &Point| point.concurrency == concurrency;
    let percent = |point: &Point| Some(100.0 * point.median.hit_share);
    let mut lines = all.lines(Mark::Solid, "", here, |point| point.prefixes, percent);
    let most = all.prefixes().last().copied().unwrap_or(1);
    if let Some(holds) = prefixes_a_worker {
        let formula = |name: String, workers: f64| {
            let share = |prefixes: usize| 100.0 * (workers * holds / prefixes as f64).min(1.0);
            let points = (1..=most).map(|prefixes| (prefixes as f64, share(prefixes))).collect();
            Line { name, paint: Paint::Reference, mark: Mark::Thin, points }
        };
        lines.push(formula(format!("formula, Service: min(1, {holds:.2}/P)"), 1.0));
        let workers = all.points.iter().filter_map(|point| point.workers).max();
        if let Some(workers) = workers.filter(|&workers| workers > 1) {
            let name = format!("bound, routed: min(1, {workers} x {holds:.2}/P)");
            lines.push(formula(name, workers as f64));
        }
    }
    let mut published: Vec<(f64, f64)> = all
        .points
        .iter()
        .filter(|point| here(point))
        .filter_map(|point| Some((point.prefixes as f64, 100.0 * point.published_hit_share?)))
        .collect();
    published.dedup();
    if !published.is_empty() {
        let name = "published, Service".to_owned();
        lines.push(Line { name, paint: Paint::Reference, mark: Mark::Rings, points: published });
    }
    let title = format!("Requests with a cached prefix, {}", flight(concurrency));
    let chart = chart(title, "prefixes", "hits %", lines)?;
    Some(LineChart { y_max: Some(105.0), ..chart })
}

/// Cached tokens as the proxy predicted them beside what answers confirmed.
fn beliefs(all: &All<'_>, concurrency: usize) -> Option<LineChart> {
    let here =
        |point: &Point| point.concurrency == concurrency && point.median.predicted_token_share.is_some();
    let confirmed = |point: &Point| Some(100.0 * point.median.usage_token_share);
    let predicted = |point: &Point| point.median.predicted_token_share.map(|share| 100.0 * share);
    let mut lines = all.lines(Mark::Solid, "confirmed", here, |point| point.prefixes, confirmed);
    lines.extend(all.lines(Mark::Dashed, "predicted", here, |point| point.prefixes, predicted));
    chart(
        format!("Cached tokens, predicted and confirmed, {}", flight(concurrency)),
        "prefixes",
        "% of prompts",
        lines,
    )
}

/// Where there is nothing to join by a line: shares and times of each target, for each workload.
fn of_each(all: &All<'_>) -> Vec<BarChart> {
    let series = |values: fn(&Point) -> Vec<f64>| {
        let one = |(nth, point): (usize, &Point)| {
            let name = match &point.played {
                Some(played) if all.points.len() > all.modes().len() => {
                    format!("{}, {}", point.mode, played.workload)
                }
                _ => point.mode.clone(),
            };
            (name, Paint::Series(nth as u8), values(point))
        };
        all.points.iter().enumerate().map(one).collect::<Vec<_>>()
    };
    let groups = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let shares = BarChart {
        title: "Cached tokens of all prompt tokens".to_owned(),
        x_label: "counted by",
        y_label: "%",
        groups: groups(&["answers", "engines", "proxy, predicted"]),
        series: series(|point| {
            let figures = &point.median;
            let shares =
                [Some(figures.usage_token_share), figures.counter_token_share, figures.predicted_token_share];
            shares.map(|share| 100.0 * share.unwrap_or(0.0)).into()
        }),
    };
    let times = BarChart {
        title: "Time to first token".to_owned(),
        x_label: "of hits, of misses, of all",
        y_label: "ms",
        groups: groups(&["hit p50", "hit p90", "miss p50", "miss p90", "all p50", "all p99"]),
        series: series(|point| {
            let (hits, misses, of_all) =
                (point.median.ttft_hit_ms, point.median.ttft_miss_ms, point.median.ttft_ms);
            let both = |times: Option<Percentiles>| times.map_or([0.0; 2], |times| [times.p50, times.p90]);
            [both(hits), both(misses), [of_all.p50, of_all.p99]].concat()
        }),
    };
    if all.points.is_empty() { Vec::new() } else { vec![shares, times] }
}

fn ttft_by_prefixes(all: &All<'_>, concurrency: usize) -> Vec<LineChart> {
    let here = |point: &Point| point.concurrency == concurrency;
    let p50 = |point: &Point| Some(point.median.ttft_ms.p50);
    let p99 = |point: &Point| Some(point.median.ttft_ms.p99);
    let mut overall = all.lines(Mark::Solid, "p50", here, |point| point.prefixes, p50);
    overall.extend(all.lines(Mark::Dashed, "p99", here, |point| point.prefixes, p99));
    let overall = chart(format!("Time to first token, {}", flight(concurrency)), "prefixes", "ms", overall);
    let one = |name: &str, pick: fn(Percentiles) -> f64| {
        let of_hits = move |point: &Point| point.median.ttft_hit_ms.map(pick);
        let of_misses = move |point: &Point| point.median.ttft_miss_ms.map(pick);
        let mut lines = all.lines(Mark::Solid, "hits", here, |point| point.prefixes, of_hits);
        lines.extend(all.lines(Mark::Dashed, "misses", here, |point| point.prefixes, of_misses));
        let title = format!("Time to first token, {name} of hits and misses, {}", flight(concurrency));
        chart(title, "prefixes", "ms", lines)
    };
    let by_hit = [one("p50", |times| times.p50), one("p90", |times| times.p90)];
    overall.into_iter().chain(by_hit.into_iter().flatten()).collect()
}

fn throughput(all: &All<'_>, concurrency: usize) -> Option<LineChart> {
    let here = |point: &Point| point.concurrency == concurrency;
    let speed = |point: &Point| Some(point.median.requests_per_s);
    let lines = all.lines(Mark::Solid, "", here, |point| point.prefixes, speed);
    chart(format!("Throughput, {}", flight(concurrency)), "prefixes", "requests/s", lines)
}

fn ttft_by_concurrency(all: &All<'_>, prefixes: usize) -> Option<LineChart> {
    let here = |point: &Point| point.prefixes == prefixes;
    let p50 = |point: &Point| Some(point.median.ttft_ms.p50);
    let p99 = |point: &Point| Some(point.median.ttft_ms.p99);
    let mut lines = all.lines(Mark::Solid, "p50", here, |point| point.concurrency, p50);
    lines.extend(all.lines(Mark::Dashed, "p99", here, |point| point.concurrency, p99));
    chart(format!("Time to first token, {prefixes} prefixes"), "requests in flight", "ms", lines)
}

/// How evenly the workers were used where there were most prefixes, busiest first.
fn workers(all: &All<'_>) -> Option<BarChart> {
    let prefixes = *all.prefixes().last()?;
    let concurrency = *all.concurrencies().last()?;
    let mut series = Vec::new();
    for (nth, mode) in all.modes().into_iter().enumerate() {
        let of_mode = |point: &&Point| {
            (point.mode.as_str(), point.prefixes, point.concurrency) == (mode, prefixes, concurrency)
        };
        let counts =
            all.points.iter().find(of_mode).and_then(|point| point.median.requests_by_worker.as_ref());
        if let Some(counts) = counts {
            let mut counts: Vec<f64> = counts.values().map(|&count| count as f64).collect();
            counts.sort_by(|a, b| b.total_cmp(a));
            series.push((mode.to_owned(), Paint::Series(nth as u8), counts));
        }
    }
    let most = series.iter().map(|(_, _, counts)| counts.len()).max().filter(|&workers| workers > 1)?;
    let title = match prefixes {
        0 => format!("Requests by worker, {}", flight(concurrency)),
        some => format!("Requests by worker, {some} prefixes, {}", flight(concurrency)),
    };
    Some(BarChart {
        title,
        x_label: "worker, busiest first",
        y_label: "requests",
        groups: (1..=most).map(|worker| worker.to_string()).collect(),
        series,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::report::tests::figures;

    fn point(mode: &str, prefixes: usize, concurrency: usize) -> Point {
        let run = figures(0.5, 10.0 * prefixes as f64, [3, 1]);
        Point::of(mode, Some(6), prefixes, concurrency, vec![run], true).unwrap()
    }

    fn titles(points: &[Point]) -> Vec<String> {
        let Charts { lines, bars } = charts(points, Some(3.95));
        lines.into_iter().map(|chart| chart.title).chain(bars.into_iter().map(|chart| chart.title)).collect()
    }

    #[test]
    fn a_single_point_has_no_lines() {
        let titles = titles(&[point("kv", 24, 8)]);
        // The formula is a line in itself; the workers are bars.
        assert_eq!(titles.len(), 2, "{titles:?}");
    }

    #[test]
    fn a_matrix_has_charts_over_both_axes() {
        let points: Vec<Point> = ["random", "kv"]
            .into_iter()
            .flat_map(|mode| [(7, 4), (7, 8), (2, 4), (2, 8)].map(|(p, c)| point(mode, p, c)))
            .collect();
        let all = titles(&points);
        for wanted in
            ["hits and misses, 4 in flight", "Throughput, 8", "first token, 7 prefixes", "by worker"]
        {
            assert!(all.iter().any(|title| title.contains(wanted)), "{wanted} not in {all:?}");
        }
        let hits = &charts(&points, Some(3.95)).lines[0];
        let names: Vec<&str> = hits.lines.iter().map(|line| line.name.as_str()).collect();
        assert_eq!(names[..2], ["random", "kv"]);
        assert!(names[2].contains("min(1, 3.95/P)") && names[3].contains("6 x 3.95"));
        assert_eq!(
            hits.lines[0].points,
            [(2.0, 50.0), (7.0, 50.0)],
            "in order, whatever the order of points"
        );
    }
}
