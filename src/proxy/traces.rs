//! OpenTelemetry traces, if they are asked for: a span for each request, sent in batches by OTLP over HTTP to a collector, with
//! `traceparent` (W3C Trace Context) taken from the client and passed on to the worker. Nothing of prompts is in it.
//!
//! No request waits for it: spans that the collector does not take in time are lost, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_http::HeaderInjector;
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout_at};

use super::note::{Known, Lost};
use crate::config::Traces as Settings;
use crate::metrics::Outcome;

/// Spans that may wait to be sent.
const WAITING: usize = 4096;
/// Spans sent at once, at most, and how long the first of them waits for others.
const BATCH: usize = 512;
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take for a batch, also at the end of the process.
const TAKES: Duration = Duration::from_secs(5);
/// Where OTLP over HTTP takes spans, by its specification.
const PATH: &str = "/v1/traces";

/// Where spans go.
pub struct Traces {
    waiting: Option<mpsc::Sender<SpanData>>,
    share: f64,
    /// Not taken by the collector.
    refused: Arc<AtomicU64>,
    /// Not even waiting.
    crowded: AtomicU64,
    ending: Arc<Notify>,
    scope: InstrumentationScope,
}

/// One request in a trace.
#[derive(Debug)]
pub struct Span {
    context: SpanContext,
    parent: SpanId,
    arrived: SystemTime,
}

impl Traces {
    /// No traces.
    pub fn none() -> Traces {
        Traces {
            waiting: None,
            share: 0.0,
            refused: Arc::default(),
            crowded: AtomicU64::default(),
            ending: Arc::default(),
            scope: InstrumentationScope::builder("warmroute").with_version(env!("CARGO_PKG_VERSION")).build(),
        }
    }

    /// Traces by these settings, and what sends them. To be called within a runtime.
    ///
    /// # Errors
    /// If the collector's address cannot be used.
    pub fn open(settings: &Settings) -> Result<(Traces, Option<Sending>), ExporterBuildError> {
        let Some(to) = &settings.to else { return Ok((Traces::none(), None)) };
        let mut exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_endpoint(format!("{}{PATH}", to.trim_end_matches('/')))
            .with_timeout(TAKES)
            .build()?;
        exporter.set_resource(&Resource::builder().with_service_name("warmroute").build());
        let (waiting, spans) = mpsc::channel(WAITING);
        let traces = Traces { waiting: Some(waiting), share: settings.share, ..Traces::none() };
        let (to, refused, ending) = (to.clone(), traces.refused.clone(), traces.ending.clone());
        Ok((traces, Some(Sending { to, spans, exporter, refused, ending })))
    }

    /// Begins the span of a request, if it is to have one: as its client says, or else for a share of them.
    pub fn begin(&self, headers: &HeaderMap) -> Option<Span> {
        self.waiting.as_ref()?;
        let told = TraceContextPropagator::new().extract_with_context(&Context::new(), &Told::by(headers));
        let told = told.span().span_context().clone();
        let (trace, parent, state) = if told.is_valid() {
            told.is_sampled().then(|| (told.trace_id(), told.span_id(), told.trace_state().clone()))?
        } else {
            let drawn = self.share >= 1.0 || rand::random::<f64>() < self.share;
            drawn.then(|| (TraceId::from(rand::random::<u128>()), SpanId::INVALID, TraceState::default()))?
        };
        let id = SpanId::from(rand::random::<u64>());
        let context = SpanContext::new(trace, id, TraceFlags::SAMPLED, false, state);
        Some(Span { context, parent, arrived: SystemTime::now() })
    }

    /// The request has ended, so.
    pub(super) fn end(&self, span: Span, known: &Known, outcome: Outcome) {
        let Some(waiting) = &self.waiting else { return };
        let ours = !matches!(outcome, Outcome::Ok | Outcome::ClientError | Outcome::ClientGone);
        let status = if ours { Status::error(known.outcome) } else { Status::Unset };
        let data = SpanData {
            span_context: span.context,
            parent_span_id: span.parent,
            parent_span_is_remote: span.parent != SpanId::INVALID,
            span_kind: SpanKind::Server,
            name: known.route.into(),
            start_time: span.arrived,
            end_time: SystemTime::now(),
            attributes: attributes(known),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status,
            instrumentation_scope: self.scope.clone(),
        };
        if waiting.try_send(data).is_err() {
            self.crowded.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// No more will come: what waits is sent.
    pub fn finish(&self) {
        self.ending.notify_one();
    }

    /// Spans lost since the start.
    pub fn lost(&self) -> Lost {
        Lost { failed: self.refused.load(Ordering::Relaxed), crowded: self.crowded.load(Ordering::Relaxed) }
    }
}

/// Names are those of OpenTelemetry's conventions for HTTP and for generative AI, where they have one.
fn attributes(known: &Known) -> Vec<KeyValue> {
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let mut all = vec![
        KeyValue::new("http.request.method", "POST"),
        KeyValue::new("gen_ai.request.model", known.model.clone()),
        KeyValue::new("gen_ai.usage.input_tokens", number(known.prompt_tokens)),
        KeyValue::new("warmroute.mode", known.mode),
        KeyValue::new("warmroute.outcome", known.outcome),
    ];
    let told = [
        ("gen_ai.usage.output_tokens", known.output_tokens.map(u64::from)),
        ("gen_ai.usage.cache_read.input_tokens", known.cached_tokens.map(u64::from)),
        ("http.response.status_code", known.status.map(u64::from)),
        ("warmroute.predicted_cached_tokens", known.predicted_cached_tokens),
    ];
    all.extend(told.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, number(value?)))));
    all.extend(known.worker.clone().map(|worker| KeyValue::new("warmroute.worker", worker)));
    all.extend(known.reason.map(|reason| KeyValue::new("warmroute.reason", reason)));
    all.extend(known.request_id.clone().map(|id| KeyValue::new("warmroute.request_id", id)));
    all.extend(known.ttft_ms.map(|ms| KeyValue::new("warmroute.time_to_first_token", ms / 1e3)));
    all
}

impl Span {
    /// Makes this the parent of what the worker does.
    pub fn write(&self, headers: &mut HeaderMap) {
        let context = Context::new().with_remote_span_context(self.context.clone());
        TraceContextPropagator::new().inject_context(&context, &mut HeaderInjector(headers));
        // An empty list is better not sent (W3C Trace Context, 3.3.1).
        if headers.get(STATE).is_some_and(|state| state.is_empty()) {
            headers.remove(STATE);
        }
    }
}

const PARENT: &str = "traceparent";
const STATE: &str = "tracestate";

/// A client's trace context. A header that came in several lines is one, with a comma between them (RFC 9110, 5.3): a list for the
/// state, nonsense for the parent.
struct Told {
    parent: Option<String>,
    state: Option<String>,
}

impl Told {
    fn by(headers: &HeaderMap) -> Told {
        let joined = |name| {
            let lines = headers.get_all(name).iter().map(|line| line.to_str().ok());
            lines.collect::<Option<Vec<_>>>().filter(|lines| !lines.is_empty()).map(|lines| lines.join(","))
        };
        match headers.contains_key(PARENT) {
            true => Told { parent: joined(PARENT), state: joined(STATE) },
            // It means nothing without.
            false => Told { parent: None, state: None },
        }
    }
}

impl Extractor for Told {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            PARENT => self.parent.as_deref(),
            STATE => self.state.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec![PARENT, STATE]
    }
}

/// Sends what ends to the collector.
pub struct Sending {
    /// The collector's address.
    to: String,
    spans: mpsc::Receiver<SpanData>,
    exporter: opentelemetry_otlp::SpanExporter,
    refused: Arc<AtomicU64>,
    ending: Arc<Notify>,
}

impl Sending {
    /// Until the last span is sent.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        let mut taken = true;
        loop {
            tokio::select! {
                biased;
                () = self.ending.notified() => self.spans.close(),
                read = self.spans.recv_many(&mut batch, BATCH) => if read == 0 { return },
            }
            self.gather(&mut batch).await;
            if batch.is_empty() {
                continue;
            }
            let count = batch.len() as u64;
            let sent = self.exporter.export(std::mem::take(&mut batch)).await;
            if let Err(error) = &sent {
                self.refused.fetch_add(count, Ordering::Relaxed);
                // Said once, until it is well again: the metric counts on.
                if taken {
                    tracing::warn!("log.traces: {} takes no spans: {error}", self.to);
                }
            } else if !taken {
                tracing::info!("log.traces: {} takes spans again", self.to);
            }
            taken = sent.is_ok();
        }
    }

    async fn gather(&mut self, batch: &mut Vec<SpanData>) {
        let until = Instant::now() + GATHER;
        while batch.len() < BATCH && !self.spans.is_closed() {
            match timeout_at(until, self.spans.recv_many(batch, BATCH)).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }
}
