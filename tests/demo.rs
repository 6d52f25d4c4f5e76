//! `warmroute demo`, the real binary: workers, proxy and load over real sockets, small enough to end in seconds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, its helpers too")]

use std::process::{Command, Output};

use serde_json::Value;

fn demo(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warmroute")).arg("demo").args(args).output().unwrap()
}

const SMALL: [&str; 8] = ["--workers", "2", "--prefixes", "2,6", "--requests", "48", "--runs", "1"];

#[test]
fn shows_both_modes_on_the_same_requests() {
    let output = demo(&[&SMALL[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["shareable_tokens"], 2032);

    let points = report["points"].as_array().unwrap();
    let order: Vec<(&str, u64)> = points
        .iter()
        .map(|point| (point["mode"].as_str().unwrap(), point["prefixes"].as_u64().unwrap()))
        .collect();
    assert_eq!(order, [("random", 2), ("kv", 2), ("random", 6), ("kv", 6)]);
    for point in points {
        assert_eq!(point["workers"], 2);
        assert_eq!(point["requests"], 48);
        assert_eq!(point["failed"], 0);
        let by_worker = point["requests_by_worker"].as_object().unwrap();
        assert_eq!(by_worker.len(), 2);
        assert_eq!(by_worker.values().map(|count| count.as_u64().unwrap()).sum::<u64>(), 48);
        let share = |count: &str| point[count].as_f64().unwrap();
        assert!((share("usage_token_share") - share("counter_token_share")).abs() <= 0.002, "{point:#}");
    }

    // Two prefixes, two workers: at random each of the two pairs that the warm-up left over misses once, if it occurs;
    // by prefix nothing misses but a copy made on purpose.
    let hits = |at: usize| (points[at]["hit_share"].as_f64().unwrap() * 48.0).round();
    assert!((46.0..=48.0).contains(&hits(0)), "{} of 48", hits(0));
    assert!(hits(1) >= 46.0, "{} of 48", hits(1));
    // Six prefixes do not fit one worker and do fit two: only routing by prefix can hold them.
    assert!(hits(3) >= 40.0 && hits(3) > hits(2), "kv {} of 48, random {}", hits(3), hits(2));
}

#[test]
fn prints_a_table_with_its_legend() {
    let output = demo(&SMALL);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["2 simulated vLLM workers", "formula    min(1, 3.95/P)", "With 6 prefixes", "published"] {
        assert!(text.contains(line), "`{line}` is not in:\n{text}");
    }
    // Without a terminal, a line now and then: a run this small ends before, or tells of nothing else.
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.lines().all(|line| line.contains(" left")), "{told}");
}

#[test]
fn arguments_out_of_range_are_named() {
    for args in [["--workers", "0"], ["--prefixes", "0"], ["--runs", "0"], ["--concurrency", "0"]] {
        let output = demo(&args);
        assert!(!output.status.success());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(args[0]), "{message}");
    }
}

#[test]
fn leaves_reports_in_the_forms_that_their_names_ask_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (html, markdown, json) = (file("out.html"), file("out.md"), file("out.json"));
    let reports = ["--report", &html, "--report", &markdown, "--report", &json];
    let output = demo(&[&SMALL[..], &reports].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |file: &str| std::fs::read_to_string(file).unwrap();
    assert!(read(&html).contains("</svg>") && read(&html).contains("min(1, 3.95/P)"));
    assert!(read(&markdown).contains("| random | 2 | 8 | 48 |"));
    let report: Value = serde_json::from_str(&read(&json)).unwrap();
    assert_eq!(report["points"][0]["runs"][0]["samples"].as_array().unwrap().len(), 48);

    let refused = demo(&["--report", "out.pdf"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains(".html, .md or .json"));
}
