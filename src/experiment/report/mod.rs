//! What an experiment leaves: points as JSON, and tables for people.

pub mod charts;
mod figures;
pub mod outputs;
pub mod page;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::{Deserialize, Serialize};

use crate::experiment::figures::Figures;
use crate::experiment::published;
use crate::experiment::stats::{self, Percentiles};

/// One point: how requests were routed, at which load, and what that gave. Each figure is the median over the runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// `random`, `kv`, or the label that a measured target was given.
    pub mode: String,
    /// Workers behind the target, if known.
    pub workers: Option<usize>,
    /// 0 where they are not known.
    pub prefixes: usize,
    /// Requests in flight; 0 where requests come at times of their own.
    pub concurrency: usize,
    #[serde(flatten)]
    pub median: Figures,
    /// Share of hits that was published for this point behind a Service.
    pub published_hit_share: Option<f64>,
    /// What was played, where it is not the Service experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub played: Option<Played>,
    /// The figures of each run.
    pub runs: Vec<Figures>,
}

/// A workload of a report.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Played {
    /// By which it is named.
    pub workload: String,
    /// Share of its prompt tokens that one cache without limit finds.
    pub ceiling: f64,
}

impl Point {
    /// `None` without runs. Counts that cannot be averaged (requests by worker) are those of the run whose share of hits is
    /// the median. `is_study`: workers and prompts have the study's sizes, so that its figures can stand beside.
    pub fn of(
        mode: &str,
        workers: Option<usize>,
        prefixes: usize,
        concurrency: usize,
        runs: Vec<Figures>,
        is_study: bool,
    ) -> Option<Point> {
        let median = median_figures(&runs)?;
        let published = workers.filter(|_| is_study);
        let published = published.and_then(|w| published::service_hit_share(w, prefixes, concurrency));
        Some(Point {
            mode: mode.to_owned(),
            workers,
            prefixes,
            concurrency,
            median,
            published_hit_share: published,
            played: None,
            runs,
        })
    }

    /// Forgets the single requests, which make a report large.
    pub fn drop_samples(&mut self) {
        self.runs.iter_mut().for_each(|run| run.samples = Vec::new());
    }

    /// Requests of the busiest worker over the mean.
    pub fn worst_share_of_mean(&self) -> Option<f64> {
        let counts = self.median.requests_by_worker.as_ref()?;
        let mean = counts.values().sum::<u64>() as f64 / counts.len() as f64;
        Some(*counts.values().max()? as f64 / mean)
    }
}

fn median_figures(runs: &[Figures]) -> Option<Figures> {
    let hit_shares: Vec<f64> = runs.iter().map(|run| run.hit_share).collect();
    let middle = &runs[stats::median_index(&hit_shares)?];
    let over = |pick: fn(&Figures) -> f64| stats::median(runs.iter().map(pick).collect());
    let times = |pick: fn(&Figures) -> Option<Percentiles>| {
        Percentiles::median(&runs.iter().filter_map(pick).collect::<Vec<_>>())
    };
    let mut notes: Vec<String> = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        notes.extend(run.notes.iter().map(|note| format!("run {}: {note}", number + 1)));
    }
    Some(Figures {
        requests: middle.requests,
        failed: runs.iter().map(|run| run.failed).sum(),
        hit_share: over(|run| run.hit_share)?,
        prefix_token_share: over(|run| run.prefix_token_share)?,
        counter_token_share: stats::median(runs.iter().filter_map(|run| run.counter_token_share).collect()),
        usage_token_share: over(|run| run.usage_token_share)?,
        predicted_token_share: stats::median(
            runs.iter().filter_map(|run| run.predicted_token_share).collect(),
        ),
        ttft_ms: times(|run| Some(run.ttft_ms))?,
        ttft_hit_ms: times(|run| run.ttft_hit_ms),
        ttft_miss_ms: times(|run| run.ttft_miss_ms),
        e2e_ms: times(|run| Some(run.e2e_ms))?,
        requests_per_s: over(|run| run.requests_per_s)?,
        requests_by_worker: middle.requests_by_worker.clone(),
        preemptions: middle.preemptions,
        timer_lag_ms: over(|run| run.timer_lag_ms)?,
        late_ms: middle.late_ms,
        notes,
        samples: Vec::new(),
    })
}

/// A table in the project's dress: no lines between rows, figures to the right.
pub fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> Table {
    plain_table(&header, rows.into_iter().map(Vec::from).collect())
}

fn plain_table(header: &[&str], rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|title| Cell::new(title).set_alignment(CellAlignment::Right)));
    for row in rows {
        table.add_row(row.iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right)));
    }
    table
}

/// A share as per cent with one decimal; `-` if there is none.
pub fn percent(share: impl Into<Option<f64>>) -> String {
    share.into().map_or_else(|| "-".to_owned(), |share| format!("{:.1}", 100.0 * share))
}

/// p50/p99 in whole milliseconds; `-` if there are none.
pub fn p50_p99(times: impl Into<Option<Percentiles>>) -> String {
    times.into().map_or_else(|| "-".to_owned(), |times| format!("{:.0}/{:.0}", times.p50, times.p99))
}

/// A column of a table with a row a point.
struct Column {
    title: &'static str,
    cell: fn(&Point) -> String,
    /// The column is there if it has something to say of any point.
    says: fn(&Point) -> bool,
}

const fn column(title: &'static str, cell: fn(&Point) -> String) -> Column {
    Column { title, cell, says: |_| true }
}

const fn column_if(title: &'static str, says: fn(&Point) -> bool, cell: fn(&Point) -> String) -> Column {
    Column { title, cell, says }
}

const WORKLOAD: &str = "workload";

const COLUMNS: [Column; 19] = [
    column_if(WORKLOAD, is_played, |point| {
        point.played.as_ref().map_or_else(String::new, |played| played.workload.clone())
    }),
    column("mode", |point| point.mode.clone()),
    column_if("prefixes", |point| point.prefixes > 0, |point| point.prefixes.to_string()),
    column_if("conc.", |point| point.concurrency > 0, |point| point.concurrency.to_string()),
    column("requests", |point| point.median.requests.to_string()),
    column("hit %", |point| percent(point.median.hit_share)),
    column_if(
        "prefix\ntokens %",
        |point| !is_played(point),
        |point| percent(point.median.prefix_token_share),
    ),
    column_if("of the\nceiling %", is_played, |point| percent(point.median.prefix_token_share)),
    column_if("ceiling %", is_played, |point| percent(point.played.as_ref().map(|played| played.ceiling))),
    column("all tokens %\n(usage)", |point| percent(point.median.usage_token_share)),
    column_if(
        "all tokens %\n(counters)",
        |point| point.median.counter_token_share.is_some(),
        |point| percent(point.median.counter_token_share),
    ),
    column_if(
        "predicted %\n(proxy)",
        |point| point.median.predicted_token_share.is_some(),
        |point| percent(point.median.predicted_token_share),
    ),
    column("TTFT ms\np50/p99", |point| p50_p99(point.median.ttft_ms)),
    column("of hits\np50/p90", |point| p50_p90(point.median.ttft_hit_ms)),
    column("of misses\np50/p90", |point| p50_p90(point.median.ttft_miss_ms)),
    column("e2e ms\np50/p99", |point| p50_p99(point.median.e2e_ms)),
    column("req/s", |point| format!("{:.2}", point.median.requests_per_s)),
    column_if(
        "busiest\n/mean",
        |point| point.worst_share_of_mean().is_some(),
        |point| point.worst_share_of_mean().map_or_else(|| "-".to_owned(), |worst| format!("{worst:.2}")),
    ),
    column_if(
        "late ms\np50/p99",
        |point| point.median.late_ms.is_some(),
        |point| {
            point
                .median
                .late_ms
                .map_or_else(|| "-".to_owned(), |late| format!("{:.1}/{:.1}", late.p50, late.p99))
        },
    ),
];

fn is_played(point: &Point) -> bool {
    point.played.is_some()
}

/// p50/p90 in whole milliseconds; `-` if there are none.
fn p50_p90(times: Option<Percentiles>) -> String {
    times.map_or_else(|| "-".to_owned(), |times| format!("{:.0}/{:.0}", times.p50, times.p90))
}

/// The columns that say something of `points`: their titles, and a row a point.
fn sheet(points: &[Point]) -> (Vec<&'static str>, Vec<Vec<String>>) {
    // A workload that all rows have is in the heading.
    let differ = points.windows(2).any(|pair| pair[0].played != pair[1].played);
    let columns: Vec<&Column> = COLUMNS
        .iter()
        .filter(|column| points.iter().any(column.says) && (differ || column.title != WORKLOAD))
        .collect();
    let row = |point: &Point| columns.iter().map(|column| (column.cell)(point)).collect();
    (columns.iter().map(|column| column.title).collect(), points.iter().map(row).collect())
}

/// The table of `bench`: a row a point.
pub fn points_table(points: &[Point]) -> Table {
    let (header, rows) = sheet(points);
    plain_table(&header, rows)
}

/// Lag of timers that is worth a note: well above what an idle machine shows, and a tenth of a prefill.
const NOTED_LAG_MS: f64 = 10.0;

/// The notes of all points, each with its point's name.
pub fn notes(points: &[Point]) -> Vec<String> {
    let mut notes = Vec::new();
    let lag = points.iter().map(|point| point.median.timer_lag_ms).fold(0.0, f64::max);
    if lag > NOTED_LAG_MS {
        notes.push(format!(
            "this machine was busy: one timer in a hundred rang {lag:.0} ms late or more, and times may be too long by as \
             much"
        ));
    }
    for point in points {
        let place = match &point.played {
            Some(played) => format!("{}, {}", point.mode, played.workload),
            None => format!("{}, {} prefixes", point.mode, point.prefixes),
        };
        notes.extend(point.median.notes.iter().map(|note| format!("{place}, {note}")));
    }
    notes
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    pub(crate) fn figures(hit_share: f64, p50: f64, by_worker: [u64; 2]) -> Figures {
        let times = Percentiles { p50, p90: 2.0 * p50, p99: 3.0 * p50 };
        Figures {
            requests: 200,
            failed: 0,
            hit_share,
            prefix_token_share: hit_share,
            counter_token_share: None,
            usage_token_share: hit_share / 2.0,
            predicted_token_share: None,
            ttft_ms: times,
            ttft_hit_ms: Some(times),
            ttft_miss_ms: None,
            e2e_ms: times,
            requests_per_s: 9.0,
            requests_by_worker: Some(BTreeMap::from([
                ("a".into(), by_worker[0]),
                ("b".into(), by_worker[1]),
            ])),
            preemptions: None,
            timer_lag_ms: 1.0,
            late_ms: None,
            notes: vec!["odd".into()],
            samples: Vec::new(),
        }
    }

    #[test]
    fn a_point_is_the_median_of_its_runs_figure_by_figure() {
        let runs = vec![figures(0.9, 10.0, [1, 3]), figures(0.5, 30.0, [2, 2]), figures(0.6, 20.0, [3, 1])];
        let point = Point::of("random", Some(6), 24, 8, runs, true).unwrap();
        assert_eq!(point.median.hit_share, 0.6);
        assert_eq!(point.median.ttft_ms.p99, 60.0);
        assert_eq!(point.published_hit_share, Some(0.175));
        assert_eq!(point.median.requests_by_worker.as_ref().unwrap()["a"], 3, "of the median run");
        assert_eq!(point.worst_share_of_mean(), Some(1.5));
        assert_eq!(notes(&[point])[1], "random, 24 prefixes, run 2: odd");
        assert!(Point::of("random", None, 2, 8, Vec::new(), true).is_none());
    }

    #[test]
    fn a_column_is_there_if_it_says_something() {
        let point = |workload: &str| Point {
            played: Some(Played { workload: workload.into(), ceiling: 0.5 }),
            ..Point::of("kv", None, 0, 0, vec![figures(0.5, 10.0, [1, 1])], false).unwrap()
        };
        let has = |points: &[Point], title: &str| sheet(points).0.contains(&title);
        let service = [Point::of("kv", None, 2, 8, vec![figures(0.5, 10.0, [1, 1])], false).unwrap()];
        assert!(has(&service, "prefixes") && has(&service, "conc.") && !has(&service, "ceiling %"));
        let (same, others) = ([point("a"), point("a")], [point("a"), point("b")]);
        assert!(has(&same, "ceiling %") && !has(&same, "conc.") && !has(&same, WORKLOAD));
        assert!(has(&others, WORKLOAD));
        assert!(sheet(&others).1.iter().all(|row| row.len() == sheet(&others).0.len()));
    }

    #[test]
    fn json_has_the_fields_flat() {
        let point = Point::of("kv", Some(6), 7, 4, vec![figures(1.0, 10.0, [1, 1])], true).unwrap();
        let json = serde_json::to_value(&point).unwrap();
        for field in [
            "mode",
            "workers",
            "prefixes",
            "concurrency",
            "requests",
            "hit_share",
            "prefix_token_share",
            "counter_token_share",
            "usage_token_share",
            "ttft_ms",
            "ttft_hit_ms",
            "ttft_miss_ms",
            "requests_per_s",
            "requests_by_worker",
            "published_hit_share",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["ttft_ms"]["p90"], 20.0);
        assert!(json["published_hit_share"].is_null());
    }
}
