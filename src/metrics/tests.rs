//! Tests of the metrics as a whole.

use prometheus::{IntCounterVec, Opts};

use super::family::{Kind, Unit};
use super::model::MODEL_SERIES;
use super::*;

fn page(metrics: &Metrics) -> String {
    String::from_utf8(metrics.render()).unwrap()
}

#[test]
fn a_worker_takes_its_series_with_it() {
    let metrics = Metrics::new();
    let worker = metrics.worker("10.0.0.7:8000".to_owned());
    touch(&worker);
    assert!(page(&metrics).contains(r#"warmroute_worker_state{state="up",worker="10.0.0.7:8000"} 1"#));
    drop(worker);
    assert!(!page(&metrics).contains("10.0.0.7"));
}

/// Brings every series of a worker into being.
fn touch(worker: &WorkerMetrics) {
    for state in [WorkerState::Starting, WorkerState::Draining, WorkerState::Up] {
        worker.set_state(state);
    }
    for kind in [FailureKind::Connect, FailureKind::Silent] {
        worker.failed(kind);
    }
    worker.requests.inc();
    worker.scraped(Scraped::Ok);
    worker.scraped(Scraped::Timeout);
    worker.set_age(1.0);
    worker.forgot(Forgot::Restarted);
    worker.set_basis(Basis::Frozen);
    worker.set_basis(Basis::Confirmed);
    worker.set_capacity(Some(9_344), Some(9_000));
    worker.set_models(Some(1));
    worker.set_speed(Some(9_000.0));
    worker.set_evicted(7);
    worker.confirmed(16.0, 16, 32);
    worker.engine_counted(16.0, 32.0);
}

#[test]
fn a_worker_shows_the_state_that_it_is_in_and_no_other() {
    let metrics = Metrics::new();
    let worker = metrics.worker("w".to_owned());
    touch(&worker);
    let page = page(&metrics);
    let shown = |name: &str| page.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
    assert_eq!(shown("warmroute_worker_state"), [r#"warmroute_worker_state{state="up",worker="w"} 1"#]);
    assert_eq!(
        shown("warmroute_worker_basis"),
        [r#"warmroute_worker_basis{basis="calibrated",reason="confirmed",worker="w"} 1"#]
    );
}

#[test]
fn model_names_are_bounded_and_odd_ones_escaped() {
    let metrics = Metrics::new();
    for n in 0..10_000 {
        metrics.models.of(&format!("model \"{n}\"\n\\")).tokens(Mode::Kv).prompt.inc();
    }
    metrics.models.of(&"x".repeat(1_000)).tokens(Mode::Kv).prompt.inc();
    let page = page(&metrics);
    let lines: Vec<_> =
        page.lines().filter(|line| line.starts_with("warmroute_prompt_tokens_total")).collect();
    assert_eq!(lines.len(), MODEL_SERIES + 1);
    assert!(lines.iter().any(|line| line.contains(r#"mode="kv",model="other"} 9969"#)), "{lines:?}");
    assert!(page.contains(r#"model="model \"0\"\n\\""#), "{page}");
}

#[test]
fn what_adds_up_for_the_status_page_covers_all_models() {
    let metrics = Metrics::new();
    for model in ["a", "b"] {
        let model = metrics.models.of(model);
        model.tokens(Mode::Kv).prompt.inc_by(10);
        model.tokens(Mode::Random).prompt.inc_by(1);
        model.latencies(Mode::Kv, Predicted::Hit).first_token.observe(0.03);
        model.latencies(Mode::Random, Predicted::Hit).first_token.observe(0.9);
    }
    assert_eq!(metrics.models.token_totals(Mode::Kv).prompt, 20);
    assert_eq!(metrics.models.token_totals(Mode::Random).prompt, 2);
    let (hits, bounds) = (metrics.models.first_tokens(Predicted::Hit), metrics.models.first_token_bounds());
    let upto = |bound: f64| hits[bounds.iter().position(|each| *each == bound).unwrap()];
    assert_eq!((upto(0.02), upto(0.04), upto(1.0), hits.last()), (0, 2, 4, Some(&4)));
    assert!(metrics.models.first_tokens(Predicted::Miss).iter().all(|count| *count == 0));
}

#[test]
fn labels_of_other_modules_are_in_the_order_of_their_cases() {
    for reason in Reason::ALL {
        assert_eq!(Label::as_str(reason), reason.as_str());
    }
    for mode in [Mode::Kv, Mode::Random] {
        assert_eq!(Label::as_str(mode), mode.as_str());
    }
    let phases = [Phase::Serving, Phase::Leaving, Phase::Draining, Phase::Cut].map(Label::as_str);
    assert_eq!(phases.as_slice(), Phase::VALUES);
}

#[test]
fn every_outcome_lands_in_its_own_series() {
    let metrics = Metrics::new();
    metrics.requests.inc(Route::Chat, Outcome::Ok, Mode::Random);
    metrics.requests.inc(Route::Blocked, Outcome::Internal, Mode::Random);
    metrics.requests.inc(Route::Other, Outcome::Internal, Mode::Kv);
    let page = page(&metrics);
    assert!(
        page.contains(r#"warmroute_requests_total{mode="random",outcome="ok",route="chat"} 1"#),
        "{page}"
    );
    assert!(page.contains(r#"{mode="random",outcome="internal",route="blocked"} 1"#), "{page}");
    let totals =
        [Outcome::Ok, Outcome::Internal, Outcome::Shed].map(|outcome| metrics.requests.total(outcome));
    assert_eq!(totals, [1, 2, 0]);
}

fn families() -> impl Iterator<Item = &'static Family> {
    catalogue::SECTIONS.iter().flat_map(|section| section.families)
}

#[test]
fn every_family_of_the_catalogue_is_registered() {
    let metrics = Metrics::new();
    // Those of `sharing` by whoever shares.
    LazyLock::force(&metrics.sharing);
    for family in families() {
        let twin = IntCounterVec::new(Opts::new(family.name, family.help), &family.label_names()).unwrap();
        assert!(
            metrics.registry.register(Box::new(twin)).is_err(),
            "{} is registered by nobody",
            family.name
        );
    }
}

#[test]
fn names_say_their_kind_and_unit() {
    for family in families() {
        let name = family.name;
        assert!(name.starts_with("warmroute_"), "{name}");
        let bare = name.strip_suffix("_total");
        assert_eq!(bare.is_some(), matches!(family.kind, Kind::Counter), "{name}");
        let suffix = family.unit.suffix().unwrap_or_default();
        assert!(bare.unwrap_or(name).ends_with(suffix), "{name} {suffix}");
        assert!(family.help.ends_with('.') && !family.help.contains('|'), "{name}");
        assert!(family.unit != Unit::Seconds || !matches!(family.kind, Kind::Counter), "{name}");
    }
}

#[test]
fn buckets_go_up() {
    for family in families() {
        if let Kind::Histogram(buckets) = family.kind {
            assert!(buckets.is_sorted_by(|one, next| one < next), "{}", family.name);
        }
    }
}

/// The most there can be at once: all model names that get series, in both modes, and five hundred workers.
#[test]
fn the_largest_page_stays_below_two_megabytes() {
    let metrics = Metrics::new();
    for n in 0..10_000 {
        let model = metrics.models.of(&format!("organisation/model-{n}"));
        for mode in [Mode::Kv, Mode::Random] {
            model.tokens(mode);
            for predicted in [Predicted::Hit, Predicted::Miss] {
                model.latencies(mode, predicted).first_token.observe(0.1);
            }
        }
    }
    let workers: Vec<_> =
        (0..500).map(|n| metrics.worker(format!("10.0.{}.{}:8000", n / 250, n % 250))).collect();
    workers.iter().for_each(|worker| touch(worker));
    let size = page(&metrics).len();
    assert!((1_000_000..2_000_000).contains(&size), "{size}");
}
