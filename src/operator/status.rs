//! The table that `warmroute status` prints, from what the admin listener says at `/fleet`.

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Deserialize;

use serde_json::Value;

#[derive(Deserialize)]
struct Fleet {
    mode: String,
    split: Option<Split>,
    sharing: Option<Sharing>,
    workers: Vec<Worker>,
    #[serde(default)]
    sources: Vec<Source>,
}

/// Where workers are found.
#[derive(Deserialize)]
struct Source {
    source: String,
    fault: Option<String>,
}

/// Other routers, as this one hears them.
#[derive(Deserialize)]
struct Sharing {
    line: String,
}

/// What goes by another mode.
#[derive(Deserialize)]
struct Split {
    share: f64,
    mode: String,
    by: String,
}

impl Split {
    fn in_words(&self) -> String {
        let Split { share, mode, by } = self;
        let own = if by == "workers" { ", on workers of their own" } else { "" };
        format!(" (but {} of prompts go by {mode}{own})", percent(100.0 * share))
    }
}

#[derive(Deserialize)]
struct Worker {
    name: String,
    arm: Option<String>,
    state: String,
    usable: bool,
    basis: Option<String>,
    in_flight: u64,
    requests: u64,
    hits: Hits,
    believed: Option<Believed>,
}

#[derive(Deserialize)]
struct Hits {
    predicted: u64,
    confirmed: u64,
    prompt: u64,
}

#[derive(Deserialize)]
struct Believed {
    held_tokens: u64,
    capacity_tokens: Option<u64>,
    queue_tokens: f64,
    prefill_tokens_per_s: Option<f64>,
}

/// # Errors
/// If it is no answer of `/fleet`.
pub(super) fn table(fleet: &Value) -> Result<String> {
    let Fleet { mode, split, sharing, workers, sources } =
        Fleet::deserialize(fleet).context("what came from /fleet is not of this version of warmroute")?;
    let usable = workers.iter().filter(|worker| worker.usable).count();
    let in_flight: u64 = workers.iter().map(|worker| worker.in_flight).sum();
    let all = workers.iter().fold(Hits { predicted: 0, confirmed: 0, prompt: 0 }, |sum, worker| Hits {
        predicted: sum.predicted + worker.hits.predicted,
        confirmed: sum.confirmed + worker.hits.confirmed,
        prompt: sum.prompt + worker.hits.prompt,
    });
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let arms = workers.iter().any(|worker| worker.arm.is_some());
    let mut header =
        vec!["worker", "state", "basis", "in flight", "queue", "tokens/s", "cache", "hits", "requests"];
    if arms {
        header.push("arm");
    }
    table.set_header(header);
    for column in table.column_iter_mut().skip(3).take(6) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for worker in &workers {
        let believed = worker.believed.as_ref();
        let mut row = vec![
            worker.name.clone(),
            worker.state.clone(),
            worker.basis.clone().unwrap_or_else(unknown),
            worker.in_flight.to_string(),
            believed.map_or_else(unknown, |believed| short(believed.queue_tokens)),
            believed.and_then(|believed| believed.prefill_tokens_per_s).map_or_else(unknown, short),
            believed.map_or_else(unknown, Believed::fill),
            share(worker.hits.confirmed, worker.hits.prompt),
            worker.requests.to_string(),
        ];
        if arms {
            row.push(worker.arm.clone().unwrap_or_else(unknown));
        }
        table.add_row(row);
    }
    let (confirmed, predicted) = (share(all.confirmed, all.prompt), share(all.predicted, all.prompt));
    let split = split.as_ref().map(Split::in_words).unwrap_or_default();
    let sharing = sharing.as_ref().map(|sharing| format!("sharing: {}\n", sharing.line)).unwrap_or_default();
    let faults = sources
        .iter()
        .filter_map(|Source { source, fault }| Some(format!("\n{source}: {}\n", fault.as_ref()?)));
    let faults: String = faults.collect();
    Ok(format!(
        "mode {mode}{split}, {usable} of {} workers usable, {in_flight} requests in flight, {confirmed} of prompt tokens cached \
         ({predicted} predicted)\n{sharing}\n{}\n{faults}",
        workers.len(),
        table.trim_fmt(),
    ))
}

impl Believed {
    fn fill(&self) -> String {
        match self.capacity_tokens {
            Some(capacity) => format!("{} of {}", short(self.held_tokens as f64), short(capacity as f64)),
            None => short(self.held_tokens as f64),
        }
    }
}

fn unknown() -> String {
    "–".to_owned()
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { unknown() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// As short as it can be: `25 %`, `2.5 %`.
fn percent(value: f64) -> String {
    format!("{} %", (value * 1e3).round() / 1e3)
}

/// Three digits: `812`, `9.34k`, `11.2k`, `1.20M`.
fn short(value: f64) -> String {
    match value {
        ..1e3 => format!("{value:.0}"),
        ..1e4 => format!("{:.2}k", value / 1e3),
        ..1e5 => format!("{:.1}k", value / 1e3),
        ..1e6 => format!("{:.0}k", value / 1e3),
        ..1e7 => format!("{:.2}M", value / 1e6),
        ..1e8 => format!("{:.1}M", value / 1e6),
        _ => format!("{:.0}M", value / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn says_what_is_known_and_leaves_a_dash_for_the_rest() {
        let fleet = json!({"mode": "kv", "workers": [
            {"name": "10.0.0.1:8000", "state": "up", "usable": true, "basis": "calibrated", "in_flight": 3, "requests": 1200,
             "hits": {"predicted": 900, "confirmed": 865, "prompt": 1000},
             "believed": {"held_tokens": 9120, "capacity_tokens": 9344, "queue_tokens": 2320.0, "prefill_tokens_per_s": 25_000.0}},
            {"name": "10.0.0.2:8000", "state": "draining", "usable": false, "basis": null, "in_flight": 0, "requests": 0,
             "hits": {"predicted": 0, "confirmed": 0, "prompt": 0}, "believed": null},
        ]});
        let text = table(&fleet).unwrap();
        assert!(text.starts_with(
            "mode kv, 1 of 2 workers usable, 3 requests in flight, 86.5 % of prompt tokens cached (90.0 % predicted)\n"
        ));
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        assert!(
            rows.contains(&vec![
                "10.0.0.1:8000",
                "up",
                "calibrated",
                "3",
                "2.32k",
                "25.0k",
                "9.12k of 9.34k",
                "86.5 %",
                "1200"
            ]),
            "{text}"
        );
        assert!(
            rows.contains(&vec!["10.0.0.2:8000", "draining", "–", "0", "–", "–", "–", "–", "0"]),
            "{text}"
        );
    }

    #[test]
    fn what_is_wrong_with_sources_is_told() {
        let fault = "the API server answers 403: no";
        let fleet = json!({"mode": "kv", "workers": [], "sources": [
            {"source": "kubernetes:a", "workers": 2, "fault": null},
            {"source": "kubernetes:b", "workers": null, "fault": fault},
        ]});
        let text = table(&fleet).unwrap();
        assert!(text.ends_with(&format!("\nkubernetes:b: {fault}\n")), "{text}");
        assert!(!text.contains("kubernetes:a"), "{text}");
    }

    #[test]
    fn how_sharing_stands_is_told_where_there_is_some() {
        let of = |sharing: Value| table(&json!({"mode": "kv", "sharing": sharing, "workers": []})).unwrap();
        let text = of(json!({"line": "2 others (a, b), 12 ms behind, 0 dropped", "others": 2}));
        assert_eq!(text.lines().nth(1), Some("sharing: 2 others (a, b), 12 ms behind, 0 dropped"));
        assert!(!of(Value::Null).contains("sharing"));
    }

    #[test]
    fn a_split_is_told_and_whose_workers_are_whose() {
        let worker = |name: &str, arm: Value| {
            json!({"name": name, "arm": arm, "state": "up", "usable": true, "basis": "blind", "in_flight": 0, "requests": 7,
                   "hits": {"predicted": 0, "confirmed": 0, "prompt": 0}, "believed": null})
        };
        let split = |by: &str| json!({"share": 0.125, "mode": "random", "by": by, "root_blocks": 1});
        let of = |by: &str, arm: Value| {
            table(&json!({"mode": "kv", "split": split(by), "workers": [worker("a:1", arm)]})).unwrap()
        };
        let by_prefix = of("prefix", Value::Null);
        assert!(
            by_prefix.starts_with("mode kv (but 12.5 % of prompts go by random), 1 of 1 workers"),
            "{by_prefix}"
        );
        assert!(!by_prefix.contains("arm"), "{by_prefix}");
        let by_workers = of("workers", json!("random"));
        assert!(
            by_workers
                .starts_with("mode kv (but 12.5 % of prompts go by random, on workers of their own), 1 of 1"),
            "{by_workers}"
        );
        assert!(by_workers.trim_end().ends_with("random") && by_workers.contains("arm"), "{by_workers}");
    }

    #[test]
    fn another_servers_answer_is_no_table() {
        assert!(table(&json!({"mode": "kv"})).is_err());
    }
}
