//! `GET /fleet`: the workers and what is believed of them; and the operator's word on who takes requests.

use http::StatusCode;
use serde_json::{Value, json};

use super::answer::{Page, object, text};
use super::query::decoded;
use super::sharing::sharing;
use crate::config::Mode;
use crate::metrics::Label;
use crate::proxy::{Proxy, arms};

/// Workers that an error lists.
const NAMED: usize = 20;

pub(super) fn fleet(proxy: &Proxy) -> Value {
    let now = proxy.clock.now();
    let config = proxy.config.load();
    let fleet = proxy.fleet.snapshot();
    let split = Some(&config.split).filter(|split| split.share > 0.0);
    let workers: Vec<Value> = fleet
        .workers
        .iter()
        .map(|worker| {
            let belief = proxy.planner.belief(worker.id, now).map(|belief| {
                json!({
                    "blocks": belief.blocks,
                    "evicted_blocks": belief.evicted_blocks,
                    "held_tokens": belief.held_tokens,
                    "capacity_tokens": belief.capacity_tokens,
                    "queue_tokens": belief.queue_tokens.round(),
                    "prefill_tokens_per_s": belief.prefill_speed.map(f64::round),
                    "credit": belief.credit,
                    "foreign_share": belief.foreign_share,
                })
            });
            let hits = worker.metrics.hits();
            let basis = worker.basis();
            json!({
                "name": worker.url.label(),
                "url": worker.url,
                "pod": worker.pod.get().map(|pod| &*pod.name),
                "zone": worker.zone().as_deref(),
                "state": worker.state().as_str(),
                "health": worker.health().as_str(),
                "usable": worker.is_eligible(),
                "basis": basis.map(|basis| basis.footing().as_str()),
                "basis_reason": basis.map(Label::as_str),
                "arm": arms::of_worker(&config, &fleet, worker.id).map(Mode::as_str),
                "models": worker.models().map(|models| models.names().to_vec()),
                "in_flight": worker.metrics.in_flight.get(),
                "requests": worker.metrics.requests.get(),
                "connections": worker.metrics.connections.get(),
                "hits": {"predicted": hits.predicted, "confirmed": hits.confirmed, "prompt": hits.prompt},
                "scrape_age_s": worker.scrape_age(now),
                "believed": belief,
            })
        })
        .collect();
    let (sources, kept) = proxy.fleet.sources_status();
    let split = split.map(|split| {
        json!({"share": split.share, "mode": config.mode.other(), "by": split.by, "root_blocks": split.root_blocks})
    });
    let shadow = proxy.shadow_one_in().map(|one_in| json!({"one_in": one_in}));
    json!({"mode": config.mode, "sharing": sharing(proxy), "split": split, "shadow": shadow, "sources": sources, "kept": kept, "workers": workers})
}

/// `POST /workers/<name>/drain` and `/resume`; `rest` is what follows `/workers/`. The name may be percent-encoded.
pub(super) fn set_draining(proxy: &Proxy, rest: &str) -> Page {
    let (name, draining) = match rest.rsplit_once('/') {
        Some((name, "drain")) => (name, true),
        Some((name, "resume")) => (name, false),
        _ => {
            return text(
                StatusCode::NOT_FOUND,
                "not found; there are /workers/NAME/drain and /workers/NAME/resume\n",
            );
        }
    };
    let Some(name) = decoded(name) else {
        return text(StatusCode::BAD_REQUEST, "the worker's name: must be UTF-8, percent-encoded\n");
    };
    let Some(worker) = proxy.fleet.set_draining(&name, draining) else {
        let fleet = proxy.fleet.snapshot();
        let names: Vec<String> = fleet.workers.iter().take(NAMED).map(|worker| worker.url.label()).collect();
        let more = if fleet.workers.len() > NAMED { " and more" } else { "" };
        let message =
            format!("no worker is called {}; there are: {}{more}\n", name.escape_debug(), names.join(" "));
        return text(StatusCode::NOT_FOUND, &message);
    };
    let told = json!({
        "worker": worker.url.label(),
        "state": worker.state().as_str(),
        "in_flight": worker.metrics.in_flight.get(),
        "usable": proxy.fleet.snapshot().workers.iter().filter(|worker| worker.is_eligible()).count(),
    });
    object(StatusCode::OK, &told)
}
