//! The dashboard and the alerts in `deploy/` speak of metrics and labels that exist, and each alert says what to do.
//! `tests/prometheus/run.sh` has a real Prometheus evaluate them.

use std::collections::BTreeSet;
use std::path::Path;

use warmroute::metrics::catalogue::SECTIONS;
use warmroute::metrics::family::{Family, Kind};

const BOARD: &str = "deploy/grafana/warmroute.json";
const RULES: &str = "deploy/prometheus/rules.yaml";
const MADE_UP: &str = "tests/prometheus/alerts.yaml";

/// Labels that Prometheus adds.
const ADDED: [&str; 2] = ["instance", "job"];

fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path)
}

fn family(name: &str) -> Option<&'static Family> {
    let all = || SECTIONS.iter().flat_map(|section| section.families);
    let is_part = |family: &&Family, suffix: &str| {
        matches!(family.kind, Kind::Histogram(_)) && name.strip_suffix(suffix) == Some(family.name)
    };
    all().find(|family| match family.kind {
        Kind::Histogram(_) => ["_bucket", "_sum", "_count"].iter().any(|suffix| is_part(family, suffix)),
        Kind::Counter | Kind::Gauge => family.name == name,
    })
}

/// Metrics in a text, each with the labels by which it is selected there.
fn selectors(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("warmroute_") {
        let rest = &text[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let labels = match after.strip_prefix('{').and_then(|inside| inside.split_once('}')) {
            None => Vec::new(),
            Some((inside, _)) => inside
                .split([',', ' '])
                .filter_map(|pair| pair.split_once(['=', '!']))
                .map(|(label, _)| label)
                .collect(),
        };
        found.push((name, labels));
    }
    found
}

#[test]
fn boards_and_alerts_name_what_there_is() {
    let mut named = BTreeSet::new();
    for path in [BOARD, RULES, MADE_UP] {
        let text = text(path);
        for (name, labels) in selectors(&text) {
            let family = family(name).unwrap_or_else(|| panic!("{path}: {name} is in no catalogue"));
            for label in labels {
                let known = ADDED.contains(&label)
                    || (label == "le" && name.ends_with("_bucket"))
                    || family.labels.iter().any(|known| known.name == label);
                assert!(known, "{path}: {name} has no label {label}");
            }
            named.insert(family.name);
        }
    }
    assert!(named.len() > 35, "{named:?}");
}

#[test]
fn selectors_are_found_with_their_labels() {
    let found = selectors(r#"rate(warmroute_a_total{x=~"1|2", y!="3"}[5m]) / warmroute_b"#);
    assert_eq!(found, [("warmroute_a_total", vec!["x", "y"]), ("warmroute_b", vec![])]);
}

#[test]
fn every_alert_says_what_it_means_and_is_provoked_by_a_test() {
    let rules: serde_json::Value = serde_yaml::from_str(&text(RULES)).expect("YAML");
    let made_up = text(MADE_UP);
    let alerts = rules["groups"][0]["rules"].as_array().expect("rules");
    assert!(alerts.len() > 15);
    for alert in alerts {
        let name = alert["alert"].as_str().expect("a name");
        let of = |place: &str, key: &str| alert[place][key].as_str().unwrap_or_default().to_owned();
        assert!(["critical", "warning", "info"].contains(&of("labels", "severity").as_str()), "{name}");
        assert!(of("annotations", "summary").ends_with('.'), "{name}");
        assert!(of("annotations", "description").len() > 80, "{name}");
        assert!(made_up.contains(&format!(r#"alertname="{name}""#)), "{name} fires in no test");
    }
}

#[test]
fn every_panel_asks_for_something() {
    let board: serde_json::Value = serde_json::from_str(&text(BOARD)).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64()), "{}", panel["title"]);
        if panel["type"] != "row" {
            let targets = panel["targets"].as_array().expect("targets");
            assert!(!targets.is_empty() && targets.iter().all(|target| target["expr"].is_string()));
        }
    }
    assert!(panels.len() > 30);
}
