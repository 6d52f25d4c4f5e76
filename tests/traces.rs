//! OpenTelemetry traces: what the collector is told, and what the worker sees of a trace.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, PLAIN_ANSWER, Step, TestRouter, until};

const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"a secret word"}]}"#;
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

async fn collector() -> FakeEngine {
    let collector = FakeEngine::start().await;
    collector.always(|_| vec![Step::json("200 OK", "{}")]);
    collector
}

async fn router(engine: &FakeEngine, collector: &FakeEngine, share: f64) -> TestRouter {
    let mut config = TestRouter::config(Mode::Kv, &[engine]);
    config.log.traces.to = Some(collector.url());
    config.log.traces.share = share;
    TestRouter::start(config).await
}

fn request(traceparent: &str) -> String {
    let header =
        if traceparent.is_empty() { String::new() } else { format!("traceparent: {traceparent}\r\n") };
    let length = BODY.len();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{header}content-length: {length}\r\n\r\n{BODY}")
}

/// Sends it, and answers with the `traceparent` that the worker saw.
async fn ask(router: &TestRouter, engine: &FakeEngine, traceparent: &str) -> Option<String> {
    let before = engine.seen().len();
    let mut client = router.client().await;
    client.send(request(traceparent)).await;
    client.answer("POST").await.expect("an answer");
    let seen = engine.saw(before + 1).await;
    seen[before].head.get("traceparent").map(str::to_owned)
}

fn spans(collector: &FakeEngine) -> Vec<Span> {
    let decode = |message: &warmroute::testing::Message| {
        assert_eq!(message.head.second(), "/v1/traces");
        ExportTraceServiceRequest::decode(&message.body[..]).expect("OTLP")
    };
    let resources =
        collector.seen().iter().map(decode).flat_map(|told| told.resource_spans).collect::<Vec<_>>();
    resources.into_iter().flat_map(|one| one.scope_spans).flat_map(|scope| scope.spans).collect()
}

fn text(span: &Span, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_request_of_a_trace_is_a_span_between_its_client_and_its_worker() {
    let (engine, collector) = (FakeEngine::start().await, collector().await);
    let router = router(&engine, &collector, 0.0).await;
    let passed = ask(&router, &engine, &format!("00-{TRACE}-{PARENT}-01")).await.expect("a traceparent");
    router.stop.request();
    until("the last spans to be sent", async || !spans(&collector).is_empty()).await;
    let spans = spans(&collector);
    let span = &spans[0];
    assert_eq!(
        (spans.len(), hex(&span.trace_id), hex(&span.parent_span_id)),
        (1, TRACE.into(), PARENT.into())
    );
    assert_eq!(passed, format!("00-{TRACE}-{}-01", hex(&span.span_id)));
    assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
    assert_eq!(span.name, "chat");
    for (name, value) in [
        ("gen_ai.request.model", "m"),
        ("http.response.status_code", "200"),
        ("warmroute.mode", "kv"),
        ("warmroute.outcome", "ok"),
        ("warmroute.reason", "only"),
        ("warmroute.worker", &engine.address().to_string()),
    ] {
        assert_eq!(text(span, name).as_deref(), Some(value), "{name}");
    }
    assert!(!format!("{span:?}").contains("secret"), "nothing of prompts");
}

#[tokio::test]
async fn a_request_that_fails_before_its_answer_is_a_whole_span() {
    let (engine, collector) = (FakeEngine::start().await, collector().await);
    let router = router(&engine, &collector, 1.0).await;
    engine.next(vec![Step::Reset]);
    assert_eq!(router.client().await.post("/v1/chat/completions", BODY).await.status(), 502);
    until("the span to be sent", async || !spans(&collector).is_empty()).await;
    let span = &spans(&collector)[0];
    for (name, value) in [
        ("http.response.status_code", "502"),
        ("warmroute.outcome", "worker_failed"),
        ("warmroute.reason", "only"),
        ("warmroute.worker", &engine.address().to_string()),
    ] {
        assert_eq!(text(span, name).as_deref(), Some(value), "{name}");
    }
    assert!(text(span, "warmroute.request_id").is_some());
}

#[tokio::test]
async fn whether_there_is_a_span_is_the_clients_to_say_or_else_drawn() {
    let (engine, collector) = (FakeEngine::start().await, collector().await);
    let all = router(&engine, &collector, 1.0).await;
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    assert_eq!(ask(&all, &engine, &unsampled).await, Some(unsampled.clone()), "passed as it came");
    let begun = ask(&all, &engine, "").await.expect("a trace of its own");
    assert!(begun.starts_with("00-") && begun.ends_with("-01") && !begun.contains(TRACE), "{begun}");
    let nonsense = ask(&all, &engine, "00-zz-1-01").await.expect("a trace of its own");
    assert!(nonsense.ends_with("-01") && nonsense.len() == 55, "{nonsense}");
    until("both spans to be sent", async || spans(&collector).len() == 2).await;
    assert!(
        spans(&collector).iter().all(|span| span.parent_span_id.is_empty() && hex(&span.trace_id) != TRACE)
    );

    let none = router(&engine, &collector, 0.0).await;
    assert_eq!(ask(&none, &engine, "").await, None);
}

/// The list of the vendors' states is one, in however many lines it came, and none is sent where there is nothing in it.
#[tokio::test]
async fn the_state_of_a_trace_goes_on_whole_or_not_at_all() {
    let (engine, collector) = (FakeEngine::start().await, collector().await);
    let router = router(&engine, &collector, 1.0).await;
    let parent = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\n");
    let twice = format!("{parent}traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: a=1\r\n");
    for (sent, state) in [
        (parent.clone(), vec![]),
        (format!("{parent}tracestate: a=1\r\ntracestate: b=2,c=3\r\n"), vec!["a=1,b=2,c=3"]),
        (format!("{parent}tracestate: \r\n"), vec![]),
        (format!("{parent}tracestate: \r\ntracestate: a=1\r\n"), vec!["a=1"]),
        // What stands beside no parent, or two, is of no trace.
        ("tracestate: a=1\r\n".to_owned(), vec![]),
        (twice, vec![]),
        (String::new(), vec![]),
    ] {
        let before = engine.seen().len();
        let head =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n{sent}content-length: 2\r\n\r\n{{}}");
        let mut client = router.client().await;
        client.send(head).await;
        client.answer("POST").await.expect("an answer");
        let seen = engine.saw(before + 1).await;
        assert_eq!(seen[before].head.all("tracestate"), state, "{sent}");
        assert_eq!(seen[before].head.all("traceparent").len(), 1, "{sent}");
    }
}

#[tokio::test]
async fn without_a_collector_a_trace_passes_as_it_came() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    assert_eq!(ask(&router, &engine, &sampled).await, Some(sampled));
    assert_eq!(ask(&router, &engine, "").await, None);
}

#[tokio::test]
async fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    let (engine, mut collector) = (FakeEngine::start().await, collector().await);
    let router = router(&engine, &collector, 1.0).await;
    collector.kill().await;
    let answer = router.client().await.post("/v1/chat/completions", BODY).await;
    assert_eq!((answer.status(), &*answer.text()), (200, PLAIN_ANSWER));
    router.metric_is("warmroute_traces_lost_total", 1.0).await;
    collector.revive().await;
    router.client().await.post("/v1/chat/completions", BODY).await;
    until("spans to be sent again", async || !spans(&collector).is_empty()).await;
}
