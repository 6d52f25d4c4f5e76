//! How a family of series is declared: once, with its name, kind, unit, help and labels. Registration and `docs/metrics.md` both
//! come from that.

use std::fmt::Write;

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use super::Label;

/// One family of series.
#[derive(Copy, Clone, Debug)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    /// One or more sentences.
    pub help: &'static str,
    pub labels: &'static [LabelSpec],
}

/// What Prometheus calls the type.
#[derive(Copy, Clone, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    /// With the upper bounds of its buckets.
    Histogram(&'static [f64]),
}

/// What is counted or measured; the last word of the name (before `_total`) says it too, where it is a quantity.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Things that the name names.
    Count,
    /// 1 or 0.
    Flag,
    Seconds,
    Bytes,
    Tokens,
    TokensPerSecond,
    /// From 0 to 1.
    Ratio,
}

/// A label of a family.
#[derive(Copy, Clone, Debug)]
pub struct LabelSpec {
    pub name: &'static str,
    pub values: Values,
}

/// What a label's values can be.
#[derive(Copy, Clone, Debug)]
pub enum Values {
    Closed(&'static [&'static str]),
    /// Said in words.
    Open(&'static str),
}

/// The label `L`.
pub const fn closed<L: Label>() -> LabelSpec {
    LabelSpec { name: L::NAME, values: Values::Closed(L::VALUES) }
}

/// Families that belong together on a page.
#[derive(Copy, Clone, Debug)]
pub struct Section {
    pub title: &'static str,
    pub families: &'static [Family],
}

impl Unit {
    fn as_str(self) -> &'static str {
        match self {
            Unit::Count => "count",
            Unit::Flag => "0 or 1",
            Unit::Seconds => "seconds",
            Unit::Bytes => "bytes",
            Unit::Tokens => "tokens",
            Unit::TokensPerSecond => "tokens per second",
            Unit::Ratio => "share, 0 to 1",
        }
    }

    /// How the name of a family with this unit ends, before `_total`.
    pub fn suffix(self) -> Option<&'static str> {
        match self {
            Unit::Count | Unit::Flag => None,
            Unit::Seconds => Some("_seconds"),
            Unit::Bytes => Some("_bytes"),
            Unit::Tokens => Some("_tokens"),
            Unit::TokensPerSecond => Some("_tokens_per_second"),
            Unit::Ratio => Some("_ratio"),
        }
    }
}

/// A name or shape that the registry refuses is a mistake in the catalogue, and every test would show it.
fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: prometheus::Result<C>) -> C {
    let collector = collector.expect("names and buckets of the catalogue are valid");
    registry.register(Box::new(collector.clone())).expect("names of the catalogue are distinct");
    collector
}

impl Family {
    fn opts(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    pub(super) fn label_names(&self) -> Vec<&'static str> {
        self.labels.iter().map(|label| label.name).collect()
    }

    fn histogram_opts(&self) -> HistogramOpts {
        let Kind::Histogram(buckets) = self.kind else { panic!("{} is no histogram", self.name) };
        HistogramOpts::new(self.name, self.help).buckets(buckets.to_vec())
    }

    pub(super) fn counter(&self, registry: &Registry) -> IntCounter {
        debug_assert!(matches!(self.kind, Kind::Counter), "{}", self.name);
        register(registry, IntCounter::with_opts(self.opts()))
    }

    pub(super) fn counters(&self, registry: &Registry) -> IntCounterVec {
        debug_assert!(matches!(self.kind, Kind::Counter), "{}", self.name);
        register(registry, IntCounterVec::new(self.opts(), &self.label_names()))
    }

    pub(super) fn gauge(&self, registry: &Registry) -> IntGauge {
        debug_assert!(matches!(self.kind, Kind::Gauge), "{}", self.name);
        register(registry, IntGauge::with_opts(self.opts()))
    }

    pub(super) fn gauges(&self, registry: &Registry) -> IntGaugeVec {
        debug_assert!(matches!(self.kind, Kind::Gauge), "{}", self.name);
        register(registry, IntGaugeVec::new(self.opts(), &self.label_names()))
    }

    pub(super) fn float_gauges(&self, registry: &Registry) -> GaugeVec {
        debug_assert!(matches!(self.kind, Kind::Gauge), "{}", self.name);
        register(registry, GaugeVec::new(self.opts(), &self.label_names()))
    }

    pub(super) fn float_gauge(&self, registry: &Registry) -> Gauge {
        debug_assert!(matches!(self.kind, Kind::Gauge), "{}", self.name);
        register(registry, Gauge::with_opts(self.opts()))
    }

    pub(super) fn histograms(&self, registry: &Registry) -> HistogramVec {
        register(registry, HistogramVec::new(self.histogram_opts(), &self.label_names()))
    }
}

/// The page `docs/metrics.md` for these sections, after its introduction.
pub fn as_markdown(sections: &[Section]) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    for Section { title, families } in sections {
        let _ = write!(
            page,
            "\n## {title}\n\n| metric | kind, unit | labels | what it is |\n| --- | --- | --- | --- |\n"
        );
        for Family { name, kind, unit, help, labels } in *families {
            let kind = match kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram(_) => "histogram",
            };
            let labels: Vec<String> = labels.iter().map(|label| format!("`{}`", label.name)).collect();
            let (unit, labels) = (unit.as_str(), labels.join(" "));
            let _ = writeln!(page, "| `{name}` | {kind}, {unit} | {labels} | {help} |");
        }
    }
    page.push_str("\n## Labels\n\n| label | values | of |\n| --- | --- | --- |\n");
    for (label, of) in distinct_labels(sections) {
        let values = match label.values {
            Values::Closed(values) => {
                values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(" ")
            }
            Values::Open(words) => words.to_owned(),
        };
        let _ = writeln!(page, "| `{}` | {values} | {of} |", label.name);
    }
    page.push_str("\n## Buckets\n\n| histogram | upper bounds, seconds |\n| --- | --- |\n");
    for family in sections.iter().flat_map(|section| section.families) {
        if let Kind::Histogram(buckets) = family.kind {
            let bounds: Vec<String> = buckets.iter().map(f64::to_string).collect();
            let _ = writeln!(page, "| `{}` | {} |", family.name, bounds.join(" "));
        }
    }
    page
}

/// Each label with its values once, and which families have it: some names stand for other values elsewhere.
fn distinct_labels(sections: &[Section]) -> Vec<(LabelSpec, String)> {
    let words = |values: Values| match values {
        Values::Closed(values) => values.join(" "),
        Values::Open(words) => words.to_owned(),
    };
    let mut found: Vec<(LabelSpec, Vec<&str>)> = Vec::new();
    for family in sections.iter().flat_map(|section| section.families) {
        for label in family.labels {
            let same = |other: &&mut (LabelSpec, Vec<&str>)| {
                other.0.name == label.name && words(other.0.values) == words(label.values)
            };
            match found.iter_mut().find(same) {
                Some((_, families)) => families.push(family.name),
                None => found.push((*label, vec![family.name])),
            }
        }
    }
    let of = |families: Vec<&str>| match families.len() {
        1..=3 => families.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" "),
        many => format!("{many} metrics"),
    };
    found.into_iter().map(|(label, families)| (label, of(families))).collect()
}
