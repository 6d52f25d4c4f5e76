//! What is learned of an answer as it passes: the first token, the usage, and how it ended. Tells the planner, the fleet and
//! the metrics.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{StatusCode, header, response};
use tokio::time::Instant;

use super::Proxy;
use super::note::Note;
use super::place::{Asked, Placed};
use super::sse::Events;
use super::usage::UsageReader;
use crate::core::booking::Finished;
use crate::fleet::health::Event;
use crate::metrics::{FailureKind, Forgot, LatencyMetrics, ModelMetrics};

/// What is known of the request, and what is learned of its answer.
pub struct Watch {
    placed: Box<Placed>,
    asked: Asked,
    arrived: Instant,
    note: Note,
    /// The worker has done what was asked: only then does it hold what the request needed.
    served: bool,
    /// Only a good answer says anything of tokens.
    usage: Option<UsageReader>,
    events: Option<Events>,
    /// Where the numbers of its model go, if it is a good answer.
    model: Option<Arc<ModelMetrics>>,
    first_token: Option<Instant>,
    failed: bool,
    proxy: Arc<Proxy>,
}

/// The answer is a stream of events that can be read.
pub fn is_event_stream(head: &response::Parts) -> bool {
    let kind = head.headers.get(header::CONTENT_TYPE).map_or(b"".as_slice(), |kind| kind.as_bytes());
    kind.starts_with(b"text/event-stream") && !head.headers.contains_key(header::CONTENT_ENCODING)
}

/// An answer that shows that the engine works, or at least turns work away on purpose.
fn shows_life(status: StatusCode) -> bool {
    !status.is_server_error()
        || status == StatusCode::SERVICE_UNAVAILABLE
        || status == StatusCode::NOT_IMPLEMENTED
}

impl Watch {
    pub fn new(
        mut placed: Box<Placed>,
        asked: Asked,
        head: &response::Parts,
        arrived: Instant,
        note: Note,
        proxy: Arc<Proxy>,
    ) -> Watch {
        let streams = is_event_stream(head) && head.status.is_success();
        // vLLM sends the head of a stream at once, before any work: that shows nothing. Any other head is the answer.
        if !streams && shows_life(head.status) {
            placed.report(Event::Answered);
            placed.worker.activity.progress();
        } else if !streams {
            placed.report(Event::Erred);
        }
        if head.status == StatusCode::NOT_FOUND {
            placed.worker.relist_if_listed(&asked.model);
        }
        let kind = head.headers.get(header::CONTENT_TYPE).map_or(b"".as_slice(), |kind| kind.as_bytes());
        let json =
            kind.starts_with(b"application/json") && !head.headers.contains_key(header::CONTENT_ENCODING);
        let usage = streams || (json && head.status.is_success());
        let model = head.status.is_success().then(|| proxy.metrics.models.of(&asked.model));
        Watch {
            model,
            first_token: None,
            failed: false,
            placed,
            asked,
            arrived,
            note,
            served: head.status.is_success(),
            usage: usage.then(UsageReader::default),
            events: streams.then(Events::default),
            proxy,
        }
    }

    /// Takes the next piece; true if the engine says in it that it has failed.
    pub fn saw(&mut self, data: &Bytes) -> bool {
        if let Some(usage) = &mut self.usage {
            usage.feed(data);
        }
        let Some(events) = &mut self.events else { return false };
        let seen = events.feed(data);
        if seen.first_token {
            let now = Instant::now();
            self.first_token = Some(now);
            if let Some(latencies) = self.latencies() {
                latencies.first_token.observe((now - self.arrived).as_secs_f64());
            }
            if let Some(booking) = &mut self.placed.booking {
                booking.first_token(self.proxy.clock.at(now));
            }
            self.placed.report(Event::Answered);
            self.note.first_token();
        }
        if seen.failure {
            self.failed(FailureKind::InStream, &"the engine's own word", Event::Broke);
        } else {
            self.placed.worker.activity.progress();
        }
        seen.failure
    }

    /// Where the times of an answer to a prompt go.
    fn latencies(&self) -> Option<&LatencyMetrics> {
        let model = self.model.as_ref().filter(|_| self.asked.generates)?;
        Some(model.latencies(self.placed.mode, self.placed.predicted()))
    }

    /// Time that was spent on reading the request apart from the task that serves it.
    pub fn read_apart(&self) -> Duration {
        self.asked.apart
    }

    /// What must come before an event that is added to the stream.
    pub fn lead(&self) -> &'static str {
        self.events.as_ref().map_or("", Events::lead)
    }

    /// The stream has told its end, though that of the body is still to come.
    pub fn is_told(&self) -> bool {
        self.events.as_ref().is_some_and(Events::is_done)
    }

    /// The answer is complete. Told once: the booking is gone afterwards.
    pub fn finish(&mut self) {
        let Some(booking) = self.placed.booking.take().filter(|_| self.served) else { return };
        let now = Instant::now();
        let found = self.usage.take().and_then(|usage| usage.found());
        let finished = found.unwrap_or_default();
        self.note.finished(finished);
        if let Some(followed) = self.placed.followed.take() {
            followed.finish(finished.output_tokens, self.proxy.clock.at(now));
        }
        self.observe_end(finished, now);
        if let Some(blocks) = booking.finish(finished, self.proxy.clock.at(now)) {
            self.proxy.fleet.forgot(&self.placed.worker, Forgot::Unconfirmed, blocks);
        }
        if found.is_some() {
            self.learn(finished);
        }
    }

    fn observe_end(&self, finished: Finished, now: Instant) {
        let Some(latencies) = self.latencies().filter(|_| !self.failed) else { return };
        latencies.duration.observe((now - self.arrived).as_secs_f64());
        let after_the_first = finished.output_tokens.filter(|tokens| *tokens > 1).map(|tokens| tokens - 1);
        if let (Some(first), Some(tokens)) = (self.first_token, after_the_first) {
            latencies.per_output_token.observe((now - first).as_secs_f64() / f64::from(tokens));
        }
    }

    fn learn(&self, Finished { prompt_tokens, cached_tokens, output_tokens }: Finished) {
        let (Some(prompt_tokens), Some(model)) = (prompt_tokens, &self.model) else { return };
        let metrics = model.tokens(self.placed.mode);
        metrics.prompt.inc_by(u64::from(prompt_tokens));
        metrics.predicted_cached.inc_by(self.placed.predicted_cached_tokens.max(0.0).round() as u64);
        metrics.output.inc_by(u64::from(output_tokens.unwrap_or(0)));
        if let Some(cached) = cached_tokens {
            metrics.confirmed_cached.inc_by(u64::from(cached));
            metrics.confirmed_prompt.inc_by(u64::from(prompt_tokens));
            let predicted = self.placed.predicted_cached_tokens;
            self.placed.worker.metrics.confirmed(predicted, cached, prompt_tokens);
        }
        if self.asked.prompt_bytes > 0 {
            let bytes = self.asked.prompt_bytes;
            self.proxy.feedback.learn(&self.asked.model, bytes, prompt_tokens, output_tokens);
        }
    }

    /// The answer is cut, through no fault of its worker.
    pub fn cut(&mut self) {
        self.failed = true;
    }

    /// The answer has broken off.
    pub fn failed(&mut self, kind: FailureKind, why: &dyn fmt::Display, event: Event) {
        self.failed = true;
        let worker = self.placed.worker.clone();
        let url = worker.url.to_string();
        let message = format_args!("an answer of worker {url} broke off: {why}");
        self.proxy.complaints.warn("broke_off", &url, &message);
        worker.metrics.failed(kind);
        self.placed.report(event);
    }
}
