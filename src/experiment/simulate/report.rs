//! The rows of a simulation as a table (means over seeds), CSV or JSON.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::job::Row;

/// Every row as it is: `{"rows": [...]}`.
pub fn json(rows: &[Row]) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Report<'a> {
        rows: &'a [Row],
    }
    serde_json::to_string_pretty(&Report { rows }).map(|text| text + "\n")
}

/// Every row as it is, one a line under a header. Absent figures are empty.
pub fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "workload,policy,workers,capacity_tokens,load,seed,requests,failed,retried,token_hit_share,request_hit_share,\
         prefix_hit_share,ceiling,share_of_bound,ttft_mean_s,ttft_p50_s,ttft_p90_s,ttft_p99_s,e2e_mean_s,e2e_p50_s,\
         e2e_p90_s,e2e_p99_s,throughput,imbalance,affinity,prediction_error,prediction_bias,shadow_hit_share,\
         ideal_hit_share\n",
    );
    let maybe = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
    for Row { workload, policy, workers, capacity_tokens, load, seed, figures } in rows {
        let (ttft, e2e) = (figures.ttft_s, figures.e2e_s);
        let fields = [
            workload.clone(),
            policy.clone(),
            workers.to_string(),
            capacity_tokens.to_string(),
            maybe(*load),
            seed.to_string(),
            figures.requests.to_string(),
            figures.failed.to_string(),
            figures.retried.to_string(),
            figures.token_hit_share.to_string(),
            figures.request_hit_share.to_string(),
            maybe(figures.prefix_hit_share),
            figures.ceiling.to_string(),
            maybe(figures.share_of_bound),
            ttft.mean.to_string(),
            ttft.p50.to_string(),
            ttft.p90.to_string(),
            ttft.p99.to_string(),
            e2e.mean.to_string(),
            e2e.p50.to_string(),
            e2e.p90.to_string(),
            e2e.p99.to_string(),
            figures.throughput.to_string(),
            figures.imbalance.to_string(),
            maybe(figures.affinity),
            maybe(figures.prediction_error),
            maybe(figures.prediction_bias),
            maybe(figures.shadow_hit_share),
            maybe(figures.ideal_hit_share),
        ];
        text.push_str(&fields.join(","));
        text.push('\n');
    }
    text
}

/// A column: its name and how to read it from a row; `None` leaves the cell empty.
type Column = (&'static str, fn(&Row) -> Option<f64>, usize);

/// The columns behind the names, percentages first. The number is that of decimals.
const COLUMNS: [Column; 17] = [
    ("token hit %", |row| Some(row.figures.token_hit_share * 100.0), 1),
    ("of bound %", |row| row.figures.share_of_bound.map(|share| share * 100.0), 1),
    ("prefix hit %", |row| row.figures.prefix_hit_share.map(|share| share * 100.0), 1),
    ("any hit %", |row| Some(row.figures.request_hit_share * 100.0), 1),
    ("TTFT mean s", |row| Some(row.figures.ttft_s.mean), 3),
    ("p50", |row| Some(row.figures.ttft_s.p50), 3),
    ("p90", |row| Some(row.figures.ttft_s.p90), 3),
    ("p99", |row| Some(row.figures.ttft_s.p99), 3),
    ("end mean s", |row| Some(row.figures.e2e_s.mean), 2),
    ("end p99", |row| Some(row.figures.e2e_s.p99), 2),
    ("req/s", |row| Some(row.figures.throughput), 2),
    ("imbalance", |row| Some(row.figures.imbalance), 2),
    ("affinity", |row| row.figures.affinity, 2),
    ("belief error %", |row| row.figures.prediction_error.map(|share| share * 100.0), 1),
    ("other would %", |row| row.figures.shadow_hit_share.map(|share| share * 100.0), 1),
    ("ideal %", |row| row.figures.ideal_hit_share.map(|share| share * 100.0), 1),
    ("lost", |row| Some(row.figures.failed as f64).filter(|failed| *failed > 0.0), 0),
];

/// Means over seeds, one line for each workload, fleet and policy, in the order of the rows.
pub fn table(rows: &[Row]) -> String {
    let key = |row: &Row| {
        let load = row.load.map_or(String::new(), |load| load.to_string());
        [row.workload.clone(), row.workers.to_string(), load, row.policy.clone()]
    };
    let mut groups: Vec<([String; 4], u64, Vec<&Row>)> = Vec::new();
    for row in rows {
        let (key, capacity) = (key(row), row.capacity_tokens);
        match groups.iter_mut().find(|(other, room, _)| (other, *room) == (&key, capacity)) {
            Some((_, _, group)) => group.push(row),
            None => groups.push((key, capacity, vec![row])),
        }
    }
    let used: Vec<&Column> =
        COLUMNS.iter().filter(|(_, read, _)| rows.iter().any(|row| read(row).is_some())).collect();
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = ["workload", "workers", "KV/worker", "load", "policy", "seeds"];
    table.set_header(names.into_iter().chain(used.iter().map(|(name, ..)| *name)));
    for ([workload, workers, load, policy], capacity, group) in &groups {
        let head = [workload, workers, &capacity.to_string(), load, policy, &group.len().to_string()]
            .map(String::clone);
        table.add_row(head.into_iter().chain(used.iter().map(|column| mean(column, group))));
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        if ![0, 4].contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string() + "\n"
}

fn mean((_, read, decimals): &Column, rows: &[&Row]) -> String {
    let values: Vec<f64> = rows.iter().filter_map(|row| read(row)).collect();
    match values.len() {
        0 => String::new(),
        count => format!("{:.decimals$}", values.iter().sum::<f64>() / count as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::Outcome;
    use super::*;

    fn row(policy: &str, seed: u64) -> Row {
        let mut figures = Outcome::new(2).figures(0.5);
        figures.ttft_s.mean = seed as f64;
        Row {
            workload: "w".into(),
            policy: policy.into(),
            workers: 2,
            capacity_tokens: 160,
            load: Some(0.8),
            seed,
            figures,
        }
    }

    #[test]
    fn the_table_has_means_over_seeds() {
        let text = table(&[row("a", 1), row("b", 1), row("a", 2)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[2].contains("1.500") && lines[2].contains("| a"), "{text}");
        assert!(!text.contains("belief error"), "a column without figures is left out: {text}");
    }

    #[test]
    fn csv_has_as_many_fields_as_names() {
        let text = csv(&[row("a", 1)]);
        let mut lines = text.lines().map(|line| line.split(',').count());
        assert_eq!(lines.next(), lines.next());
    }

    #[test]
    fn json_rows_have_the_promised_keys() {
        let value: serde_json::Value = serde_json::from_str(&json(&[row("a", 1)]).unwrap()).unwrap();
        let row = &value["rows"][0];
        for key in [
            "workload",
            "policy",
            "workers",
            "capacity_tokens",
            "load",
            "seed",
            "token_hit_share",
            "ceiling",
            "imbalance",
        ] {
            assert!(!row[key].is_null(), "{key}");
        }
        for key in ["mean", "p50", "p90", "p99"] {
            assert!(row["ttft_s"][key].is_number() && row["e2e_s"][key].is_number(), "{key}");
        }
    }
}
