//! The catalogue: every family of series that there is, declared once. `docs/metrics.md` is generated from it.

use super::family::{Family, Kind, LabelSpec, Section, Unit, Values, as_markdown, closed};
use super::label::{
    Basis, Capacity, FailureKind, Fallback, Footing, Forgot, NewsLost, Outcome, Played, Predicted, Reload,
    Retry, Route, Scraped, Source, Trouble, Way, WorkerState,
};
use crate::config::Mode;
use crate::core::planner::Reason;
use crate::lifecycle::Phase;

/// Seconds. A cached prompt answers in tens of milliseconds, a long cold one under load in minutes: 1 ms to 10 min.
pub(super) const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 300.0, 600.0,
];
/// Seconds; a decoding step takes from a millisecond or so to hundreds of them.
const PER_TOKEN_BUCKETS: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];
/// Seconds; from one token to a long chain of thought.
const DURATION_BUCKETS: &[f64] =
    &[0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];
/// Seconds; from a few microseconds for a short prompt to milliseconds for a body of megabytes.
const DECISION_BUCKETS: &[f64] =
    &[2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2];
/// Seconds; a short answer costs tens of microseconds, a stream of thousands of pieces tens of milliseconds.
const OVERHEAD_BUCKETS: &[f64] =
    &[2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 1.0];

const WORKER: LabelSpec = LabelSpec {
    name: "worker",
    values: Values::Open(
        "host and port of the worker (with `https://` before it in TLS); its series vanish with it",
    ),
};
const MODEL: LabelSpec = LabelSpec {
    name: "model",
    values: Values::Open(
        "as requests name it, once a worker has answered for it; `default` where they name none; `other` for what \
         comes after the first 32, or is longer than 96 bytes",
    ),
};
const SOURCE: LabelSpec = LabelSpec {
    name: "source",
    values: Values::Open(
        "an entry of the config: `kubernetes:` or `dns:`, and what it names; its series vanish with it",
    ),
};
const VERSION: LabelSpec = LabelSpec { name: "version", values: Values::Open("of this program") };

macro_rules! families {
    ($($title:literal { $($name:ident = $kind:expr, $unit:ident, $metric:literal, [$($label:expr),*], $help:literal;)+ })+) => {
        $($(
            pub(super) const $name: Family = Family {
                name: $metric,
                kind: $kind,
                unit: Unit::$unit,
                help: $help,
                labels: &[$($label),*],
            };
        )+)+

        /// All families, in the order of the documentation.
        pub const SECTIONS: &[Section] = &[$(Section { title: $title, families: &[$($name),+] }),+];
    };
}

use Kind::{Counter, Gauge, Histogram};

families! {
    "Requests" {
        REQUESTS = Counter, Count, "warmroute_requests_total",
            [closed::<Route>(), closed::<Outcome>(), closed::<Mode>()],
            "Requests that have ended, by what they were, how they ended for their client, and the mode that they went by. `ok`, \
             `client_error` and `worker_error` are a worker's answer, complete, by its status; `worker_failed`: it broke off, or none \
             came; `client_gone`: the client left before the end; `refused`: too large, malformed, or a blocked path; `shed`: too many \
             were there already; `unavailable`: no worker could take it; `cut`: ended before its end, by \
             `drain.deadline`, a second signal, or `timeouts.response` once it had begun; `internal`: a fault of the proxy.";
        IN_FLIGHT = Gauge, Count, "warmroute_requests_in_flight", [],
            "Requests that have come and not ended.";
        QUEUED = Gauge, Count, "warmroute_requests_queued", [],
            "Requests that wait for a place at a worker.";
        BODY_BYTES = Gauge, Bytes, "warmroute_request_body_bytes", [],
            "Bytes of request bodies that are held.";
        CLIENT_CONNECTIONS = Gauge, Count, "warmroute_client_connections", [],
            "Open client connections.";
        RETRIES = Counter, Count, "warmroute_retries_total", [closed::<Retry>()],
            "Attempts made again, by what befell the one before.";
        RETRIES_DENIED = Counter, Count, "warmroute_retries_denied_total", [],
            "Retries not made because their budget was spent.";
    }
    "Latency" {
        TTFT = Histogram(TTFT_BUCKETS), Seconds, "warmroute_time_to_first_token_seconds",
            [MODEL, closed::<Predicted>(), closed::<Mode>()],
            "From the arrival of a request to the first token of its streamed answer. Answers that are not streamed show no first \
             token; see their duration.";
        PER_TOKEN = Histogram(PER_TOKEN_BUCKETS), Seconds, "warmroute_time_per_output_token_seconds",
            [MODEL, closed::<Predicted>(), closed::<Mode>()],
            "Mean time between the tokens of a streamed answer after its first, once for each answer that told its `usage`.";
        DURATION = Histogram(DURATION_BUCKETS), Seconds, "warmroute_request_duration_seconds",
            [MODEL, closed::<Predicted>(), closed::<Mode>()],
            "From the arrival of a request to the last byte of its answer, streamed or not; of complete answers to prompts.";
        OVERHEAD = Histogram(OVERHEAD_BUCKETS), Seconds, "warmroute_overhead_seconds", [closed::<Mode>()],
            "Time that the proxy itself worked on a request that a worker answered: all its time less the waits for the worker, \
             for the client, for a place, and for a turn on a processor.";
        DECISION = Histogram(DECISION_BUCKETS), Seconds, "warmroute_decision_seconds", [closed::<Mode>()],
            "Time spent reading a prompt and picking its worker; part of the overhead.";
    }
    "Hits" {
        PROMPT_TOKENS = Counter, Tokens, "warmroute_prompt_tokens_total", [MODEL, closed::<Mode>()],
            "Prompt tokens, as the workers counted them.";
        PREDICTED_CACHED = Counter, Tokens, "warmroute_predicted_cached_tokens_total", [MODEL, closed::<Mode>()],
            "Of these, believed cached when the request was placed.";
        CONFIRMED_CACHED = Counter, Tokens, "warmroute_confirmed_cached_tokens_total", [MODEL, closed::<Mode>()],
            "Prompt tokens that the workers said were cached.";
        CONFIRMED_PROMPT = Counter, Tokens, "warmroute_confirmed_prompt_tokens_total", [MODEL, closed::<Mode>()],
            "Prompt tokens of the answers that said how many were cached: what the confirmed ones are a share of.";
        OUTPUT_TOKENS = Counter, Tokens, "warmroute_output_tokens_total", [MODEL, closed::<Mode>()],
            "Generated tokens, as the workers counted them.";
    }
    "Shadow" {
        SHADOW_PROMPT = Counter, Tokens, "warmroute_shadow_prompt_tokens_total", [closed::<Mode>(), closed::<Played>()],
            "Prompt tokens, as far as each policy's model sees them; `mode` is the one that the requests went by.";
        SHADOW_CACHED = Counter, Tokens, "warmroute_shadow_cached_tokens_total", [closed::<Mode>(), closed::<Played>()],
            "Of these, cached: as predicted where `policy` is the mode that the requests went by; else what they would have found \
             under the other one, and (`ideal`) in one cache without end.";
        SHADOW_ONE_IN = Gauge, Count, "warmroute_shadow_one_in", [],
            "The models of the workers' caches hold one block in so many; 0 without a shadow.";
    }
    "Decisions" {
        DECISIONS = Counter, Count, "warmroute_decisions_total", [closed::<Reason>()],
            "Placements, by why the worker was picked: `random`, by the mode; `only`, nobody else could be; `warm`, nobody holds \
             more of the prompt; `spill`, somebody does and would have been slower; `home`, not known to hold the most, but other routers \
             send such prompts there too; `cold`, nobody holds any; `load`, there is \
             no prefix to go by.";
        FALLBACKS = Counter, Count, "warmroute_fallbacks_total", [closed::<Fallback>()],
            "Requests routed without what the policy wants.";
        MODE = Gauge, Flag, "warmroute_mode", [closed::<Mode>()],
            "1 for the mode in force.";
    }
    "Workers" {
        WORKER_STATE = Gauge, Flag, "warmroute_worker_state", [WORKER, closed::<WorkerState>()],
            "1 for the state that the worker is in; other states have no series.";
        WORKER_IN_FLIGHT = Gauge, Count, "warmroute_worker_in_flight", [WORKER],
            "Requests placed on the worker, not ended.";
        WORKER_REQUESTS = Counter, Count, "warmroute_worker_requests_total", [WORKER],
            "Requests placed on the worker.";
        WORKER_FAILURES = Counter, Count, "warmroute_worker_failures_total", [WORKER, closed::<FailureKind>()],
            "Requests that the worker failed.";
        WORKER_CONNECTIONS = Gauge, Count, "warmroute_worker_connections", [WORKER],
            "Open connections to the worker.";
        WORKER_QUEUE = Gauge, Tokens, "warmroute_worker_queue_tokens", [WORKER],
            "Uncached prompt tokens sent to the worker and, as far as is known, not prefilled yet.";
        WORKER_SPEED = Gauge, TokensPerSecond, "warmroute_worker_prefill_tokens_per_second", [WORKER],
            "The worker's prefill speed as learned or told; there is none while it is not known.";
        WORKER_MODELS = Gauge, Count, "warmroute_worker_models", [WORKER],
            "Models and adapters that the worker lists; there is none while that is not known.";
    }
    "Where workers are found" {
        DISCOVERY_SYNCED = Gauge, Flag, "warmroute_discovery_synced", [SOURCE],
            "1 while the source tells who the workers are; 0 while the last known ones stay in use.";
        DISCOVERY_WORKERS = Gauge, Count, "warmroute_discovery_workers", [SOURCE],
            "Workers that the source names, ready or not.";
        DISCOVERY_UPDATES = Counter, Count, "warmroute_discovery_updates_total", [SOURCE],
            "Lists and changes that the source has told.";
        DISCOVERY_FAILURES = Counter, Count, "warmroute_discovery_failures_total", [SOURCE, closed::<Trouble>()],
            "Times that the source could not tell who the workers are.";
    }
    "What routers tell each other" {
        SHARING_CONNECTED = Gauge, Flag, "warmroute_sharing_connected", [],
            "1 while the store can be read and written; 0 while it cannot. Without `sharing` there is none of these series.";
        SHARING_PEERS = Gauge, Count, "warmroute_sharing_peers", [],
            "Other routers that have said lately that they live.";
        SHARING_UNKNOWN = Gauge, Count, "warmroute_sharing_unknown_workers", [],
            "Workers that others have placed on for 30 s and more, and that are not known here: they are named otherwise there, or are in \
             one list only.";
        SHARING_NEWS = Counter, Count, "warmroute_sharing_news_total", [closed::<Way>()],
            "What was said of requests (placed, first token, ended), sent to others and received from them.";
        SHARING_BYTES = Counter, Bytes, "warmroute_sharing_bytes_total", [closed::<Way>()],
            "Bytes of that, without what the store's protocol adds; `received` has what this router sent itself, which comes back.";
        SHARING_DROPPED = Counter, Count, "warmroute_sharing_dropped_total", [closed::<NewsLost>()],
            "What was not sent, or not taken up: `full`, too much waited for the store; `gap`, others' batches are missing; \
             `unknown_worker`, placed on one that is not known here; `restarted`, placed on one whose process has ended since; `routers`, \
             there are too many of them; `version`, of a router that speaks another format; `malformed`.";
        SHARING_LAG = Gauge, Seconds, "warmroute_sharing_lag_seconds", [],
            "Age of what was taken up last, from the event at another router on; of its word that it lives, from when that was sent.";
    }
    "What is believed of the workers" {
        WORKER_BASIS = Gauge, Flag, "warmroute_worker_basis", [WORKER, closed::<Footing>(), closed::<Basis>()],
            "1 for what the belief about the worker stands on, and why it is no better; others have no series. `calibrated`: its page tells \
             its cache, and answers confirm what they found there; `predicted`: its page tells, but no answer does; `blind`: its page \
             tells nothing of use.";
        WORKER_CACHED = Counter, Tokens, "warmroute_worker_cached_tokens_total", [WORKER, closed::<Source>()],
            "Prompt tokens found cached: as predicted and as confirmed, both of answers that told, and as the engine counted \
             (each look-up of a request, also of others' requests).";
        WORKER_PROMPT = Counter, Tokens, "warmroute_worker_prompt_tokens_total", [WORKER, closed::<Source>()],
            "Prompt tokens that the above are a share of: `confirmed` for those of answers that told, `engine` for those that the \
             engine looked up.";
        WORKER_CAPACITY = Gauge, Tokens, "warmroute_worker_capacity_tokens", [WORKER, closed::<Capacity>()],
            "KV cache of the worker: as configured or told by it, and as it is believed to stay for us.";
        WORKER_BELIEVED_TOKENS = Gauge, Tokens, "warmroute_worker_believed_tokens", [WORKER],
            "Tokens believed to be in the worker's KV cache, answers and requests in flight included.";
        WORKER_BELIEVED_BLOCKS = Gauge, Count, "warmroute_worker_believed_blocks", [WORKER],
            "Prompt blocks believed to be in the worker's KV cache.";
        WORKER_EVICTED = Counter, Count, "warmroute_worker_evicted_blocks_total", [WORKER],
            "Prompt blocks believed to have been pushed out of the worker's KV cache by others.";
        WORKER_CREDIT = Gauge, Ratio, "warmroute_worker_credit_ratio", [WORKER],
            "Of what was believed cached on the worker, the share that was confirmed of late.";
        WORKER_FOREIGN_REQUESTS = Gauge, Count, "warmroute_worker_foreign_requests", [WORKER],
            "Requests at the worker that did not come through here; zero if unknown.";
        WORKER_FOREIGN_RATIO = Gauge, Ratio, "warmroute_worker_foreign_ratio", [WORKER],
            "Share of the worker's prompt tokens that did not come through here; zero if unknown.";
        WORKER_FORGOTTEN = Counter, Count, "warmroute_worker_beliefs_forgotten_total", [WORKER, closed::<Forgot>()],
            "Times that all that was believed cached on the worker was forgotten.";
        WORKER_SCRAPES = Counter, Count, "warmroute_worker_scrapes_total", [WORKER, closed::<Scraped>()],
            "Readings of the worker's metrics page, by how they ended.";
        WORKER_SCRAPE_AGE = Gauge, Seconds, "warmroute_worker_scrape_age_seconds", [WORKER],
            "Time since the worker's metrics page was last read; there is none before the first time.";
        BELIEVED_BLOCKS = Gauge, Count, "warmroute_believed_blocks", [],
            "Distinct prompt blocks believed to be cached anywhere.";
        BELIEF_BYTES = Gauge, Bytes, "warmroute_belief_bytes", [],
            "Memory of what is believed, by the sizes of its tables.";
    }
    "Process" {
        BUILD_INFO = Gauge, Flag, "warmroute_build_info", [VERSION],
            "Always 1; the version is in the label.";
        PHASE = Gauge, Flag, "warmroute_phase", [closed::<Phase>()],
            "1 for how far the process is on its way out: `serving`; `leaving`, not ready and still serving; `draining`, no new \
             connections; `cut`, ending what still runs.";
        RELOADS = Counter, Count, "warmroute_config_reloads_total", [closed::<Reload>()],
            "Reloads of the config file.";
        ACCESS_LOST = Counter, Count, "warmroute_access_log_lost_total", [],
            "Lines of the access log that were lost.";
        TRACES_LOST = Counter, Count, "warmroute_traces_lost_total", [],
            "Spans that the collector did not take in time.";
    }
}

/// `docs/metrics.md`, whole.
pub fn documentation() -> String {
    const INTRODUCTION: &str = "\
# Metrics

`GET /metrics` on the admin listener, in Prometheus' text format. This page is generated from the catalogue in
`src/metrics/catalogue.rs` and held equal to it by a test; `WARMROUTE_WRITE_DOCS=1 cargo test --test metrics` writes it anew.

Names and labels are stable: a change of one is a breaking change and stands in the changelog. Series with a `worker` label vanish
with their worker. Clients can add series only by model names that a worker has answered for, and of those there is a limit. The
histograms by model appear with the first request of their model, with a count of 0 where it had nothing for them.
";
    format!("{INTRODUCTION}{}", as_markdown(SECTIONS))
}
