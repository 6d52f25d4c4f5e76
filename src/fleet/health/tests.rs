//! What becomes of a worker by what happens to it.

use super::Event::*;
use super::*;

fn settings() -> config::Health {
    config::Health::default()
}

/// Feeds events at their seconds and tells where the worker stands after each.
fn walk(health: &mut Health, steps: &[(f64, Event)]) -> Vec<Standing> {
    steps
        .iter()
        .map(|(second, event)| {
            health.record(*event, Time(*second), &settings());
            health.standing()
        })
        .collect()
}

#[test]
fn a_probed_worker_starts_with_its_first_passed_probe() {
    let mut health = Health::new(true);
    assert!(!health.is_eligible());
    let seen = walk(&mut health, &[(0.0, Unreachable), (2.0, ProbeFailed), (4.0, ProbePassed)]);
    assert_eq!(seen, [Standing::Starting, Standing::Starting, Standing::Up]);
    assert!(health.is_eligible());
}

#[test]
fn a_few_failed_probes_in_a_row_take_it_out_and_one_passed_lets_it_in() {
    let mut health = Health::new(false);
    let seen = walk(
        &mut health,
        &[
            (0.0, ProbeFailed),
            (2.0, ProbeFailed),
            (4.0, ProbePassed),
            (6.0, ProbeFailed),
            (8.0, ProbeFailed),
            (10.0, ProbeFailed),
            (12.0, ProbePassed),
        ],
    );
    assert_eq!(seen[..5], [Standing::Up; 5]);
    assert_eq!(seen[5..], [Standing::Out(Reason::Unhealthy), Standing::Up]);
}

#[test]
fn a_late_page_of_a_worker_that_answers_is_forgiven() {
    let mut health = Health::new(false);
    for second in 0..20 {
        let seen =
            walk(&mut health, &[(f64::from(second), ProbeFailed), (f64::from(second) + 0.5, Answered)]);
        assert_eq!(seen, [Standing::Up; 2]);
    }
}

#[test]
fn a_worker_that_says_it_is_going_is_believed() {
    let mut health = Health::new(false);
    walk(&mut health, &[(0.0, Dying), (0.1, ProbePassed)]);
    assert_eq!(health.standing(), Standing::Out(Reason::Broke));
}

#[test]
fn an_answer_shows_that_a_worker_with_a_bad_page_lives() {
    let mut health = Health::new(false);
    walk(&mut health, &[(0.0, ProbeFailed), (2.0, ProbeFailed), (4.0, ProbeFailed), (5.0, Answered)]);
    assert_eq!(health.standing(), Standing::Up);
}

#[test]
fn a_healthy_page_does_not_redeem_a_worker_that_breaks_or_stalls() {
    for failures in [vec![(0.0, Broke), (0.1, Broke), (0.2, Broke)], vec![(0.2, Stalled)]] {
        let mut health = Health::new(false);
        walk(&mut health, &failures);
        assert!(matches!(health.standing(), Standing::Out(_)));
        walk(&mut health, &[(0.3, ProbePassed), (1.1, Tick)]);
        assert!(matches!(health.standing(), Standing::Out(_)));
        walk(&mut health, &[(1.3, Tick)]);
        assert_eq!(health.standing(), Standing::Trial);
        assert!(health.is_eligible());
        walk(&mut health, &[(1.4, Picked)]);
        assert!(!health.is_eligible(), "one request tries it, not a herd");
        walk(&mut health, &[(1.5, Broke), (3.4, Tick)]);
        assert_eq!(health.standing(), Standing::Out(Reason::Broke), "the second wait is twice as long");
        let seen = walk(&mut health, &[(3.6, Tick), (3.7, Picked), (3.8, Answered)]);
        assert_eq!(seen, [Standing::Trial, Standing::Trial, Standing::Up]);
        assert!(health.is_calm());
    }
}

#[test]
fn a_trial_whose_client_left_can_be_taken_again() {
    let mut health = Health::new(false);
    walk(&mut health, &[(0.0, Stalled), (2.0, Tick), (2.0, Picked), (2.1, Unproven)]);
    assert!(health.is_eligible());
}

#[test]
fn a_slow_trial_is_followed_by_another() {
    for (second, event) in [(2.2, ProbePassed), (3.1, Tick)] {
        let mut health = Health::new(false);
        walk(&mut health, &[(0.0, Stalled), (2.0, Tick), (2.0, Picked), (2.1, Tick)]);
        assert!(!health.is_eligible());
        let seen = walk(&mut health, &[(second, event)]);
        assert_eq!(seen, [Standing::Trial], "it has shown nothing yet");
        assert!(health.is_eligible());
    }
}

#[test]
fn a_worker_that_starts_is_tried_once_probes_are_switched_off() {
    let mut settings = settings();
    let mut health = Health::new(true);
    health.record(Tick, Time(1.0), &settings);
    assert_eq!(health.standing(), Standing::Starting);
    settings.interval = None;
    health.record(Tick, Time(1.1), &settings);
    assert_eq!(health.standing(), Standing::Trial);
    health.record(Unreachable, Time(1.2), &settings);
    health.record(Tick, Time(2.1), &settings);
    assert!(!health.is_eligible());
    health.record(Tick, Time(2.3), &settings);
    assert!(health.is_eligible(), "the first wait is a single one");
}

#[test]
fn an_answer_between_failures_forgives_them() {
    let mut health = Health::new(false);
    let seen = walk(&mut health, &[(0.0, Broke), (0.0, Broke), (0.0, Answered), (0.0, Broke), (0.0, Broke)]);
    assert_eq!(seen, [Standing::Up; 5]);
    assert!(!health.is_calm());
}

#[test]
fn an_unreachable_worker_waits_for_a_probe_or_if_there_are_none_for_its_time() {
    let mut settings = settings();
    for interval in [Some(std::time::Duration::from_secs(2)), None] {
        settings.interval = interval;
        let mut health = Health::new(false);
        for _ in 0..3 {
            health.record(Unreachable, Time(0.0), &settings);
        }
        assert_eq!(health.standing(), Standing::Out(Reason::Unreachable));
        health.record(Tick, Time(1.5), &settings);
        assert_eq!(health.is_eligible(), interval.is_none());
    }
}

#[test]
fn a_worker_whose_answers_are_mostly_errors_is_left_alone_for_longer_each_time() {
    let mut health = Health::new(false);
    let errors = |from: f64, count: usize| -> Vec<_> {
        (0..count).map(|at| (from + at as f64 / 10.0, Erred)).collect()
    };
    let seen = walk(&mut health, &errors(0.0, 5));
    assert_eq!(seen, [[Standing::Up; 4].as_slice(), &[Standing::Out(Reason::Erring)]].concat());
    let seen = walk(&mut health, &[(0.5, ProbePassed), (0.6, Answered), (1.3, Tick)]);
    assert_eq!(
        seen,
        [Standing::Out(Reason::Erring); 3],
        "neither a page nor an answer from before redeems it"
    );
    let seen = walk(&mut health, &[(1.5, Tick), (1.5, Picked), (1.6, Erred), (3.5, Tick), (3.7, Tick)]);
    let out = Standing::Out(Reason::Erring);
    assert_eq!(seen, [Standing::Trial, Standing::Trial, out, out, Standing::Trial], "twice as long");
    // A lucky trial lets it in, and the next error shows that nothing has changed.
    let seen = walk(&mut health, &[(3.8, Answered), (3.9, Erred), (5.8, Tick), (6.0, Tick)]);
    assert_eq!(seen, [Standing::Up, out, out, Standing::Trial]);
    walk(&mut health, &[(6.0, Answered)]);
    assert!(!health.is_calm());
    // After a while without errors all is forgotten.
    walk(&mut health, &[(200.0, Answered)]);
    assert!(health.is_calm());
    let seen = walk(&mut health, &errors(300.0, 4));
    assert_eq!(seen, [Standing::Up; 4]);
}

#[test]
fn errors_among_good_answers_and_rare_ones_take_nobody_out() {
    let mut health = Health::new(false);
    for at in 0..1_000 {
        // Every other answer is one: they may be the requests' own fault.
        walk(&mut health, &[(f64::from(at), Erred), (f64::from(at) + 0.5, Answered)]);
        assert_eq!(health.standing(), Standing::Up, "at {at}");
    }
    let mut health = Health::new(false);
    for at in 0..1_000 {
        walk(&mut health, &[(10.0 * f64::from(at), Erred)]);
        assert_eq!(health.standing(), Standing::Up, "every ten seconds, at {at}");
    }
}

#[test]
fn a_worker_without_a_certificate_that_is_accepted_says_so_from_the_start() {
    let mut health = Health::new(true);
    let seen = walk(&mut health, &[(0.0, Unreachable), (2.0, Insecure), (4.0, Tick), (6.0, ProbePassed)]);
    let out = Standing::Out(Reason::Insecure);
    assert_eq!(seen, [Standing::Starting, out, out, Standing::Up]);
    let seen = walk(&mut health, &[(8.0, Insecure), (10.0, Insecure), (12.0, Insecure), (14.0, Unreachable)]);
    assert_eq!(seen, [Standing::Up, Standing::Up, out, Standing::Out(Reason::Unreachable)]);
}

#[test]
fn what_comes_on_open_connections_says_nothing_of_new_ones() {
    let out = Standing::Out(Reason::Unreachable);
    for sign in [Moved, Answered] {
        let mut health = Health::new(false);
        let refused = walk(
            &mut health,
            &[(0.0, Unreachable), (0.1, sign), (0.2, Unreachable), (0.3, sign), (0.4, Unreachable)],
        );
        assert_eq!(refused.last(), Some(&out), "{sign:?}");
        let seen = walk(&mut health, &[(0.5, sign), (0.6, Opened), (0.7, ProbePassed)]);
        assert_eq!(seen, [out, out, Standing::Up], "{sign:?}");
        assert!(health.is_calm());
    }
    for opened in [Opened, ProbePassed] {
        let mut health = Health::new(false);
        walk(&mut health, &[(0.0, Unreachable), (0.1, Unreachable), (0.2, opened)]);
        assert!(health.is_calm(), "{opened:?}");
    }
}

#[test]
fn more_of_an_answer_shows_that_a_worker_moves_and_not_that_it_loses_nothing() {
    for (failed, count, standing) in [
        (ProbeFailed, 3, Standing::Up),
        (Stalled, 1, Standing::Up),
        (Broke, 3, Standing::Out(Reason::Broke)),
        (Erred, 5, Standing::Out(Reason::Erring)),
        (Insecure, 3, Standing::Out(Reason::Insecure)),
    ] {
        let mut health = Health::new(false);
        for _ in 0..count {
            assert_eq!(walk(&mut health, &[(0.0, Moved), (0.0, failed)]).len(), 2);
        }
        walk(&mut health, &[(0.1, Moved)]);
        assert_eq!(health.standing(), standing, "{failed:?}");
    }
}

#[test]
fn the_wait_is_bounded() {
    let mut health = Health::new(false);
    health.state = State::Trial { taken: Some(Time(99.0)), times: 40 };
    walk(&mut health, &[(100.0, Broke), (130.5, Tick)]);
    assert_eq!(health.standing(), Standing::Trial);
}

/// The operator's word stands above the worker's health, and hides none of it.
#[test]
fn a_drained_worker_takes_nothing_whatever_happens_to_it_until_it_is_resumed() {
    let mut health = Health::new(true);
    health.set_draining(true);
    for (at, event, standing) in [
        (0.0, ProbePassed, Standing::Up),
        (1.0, Stalled, Standing::Out(Reason::Stalled)),
        (3.0, Tick, Standing::Trial),
        (3.1, Answered, Standing::Up),
    ] {
        assert_eq!(walk(&mut health, &[(at, event)]), [standing]);
        assert!(health.is_draining() && !health.is_eligible(), "{event:?}");
    }
    health.set_draining(false);
    assert!(health.is_eligible());
}
