//! HTTP/2 from clients, by prior knowledge; to workers it is HTTP/1.1 all the same.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use warmroute::app::Ended;
use warmroute::config::Mode;
use warmroute::metrics::Outcome;
use warmroute::testing::{FakeEngine, Gate, PLAIN_ANSWER, Step, TestRouter};

type Body = http_body_util::combinators::BoxBody<Bytes, std::convert::Infallible>;
type Client = http2::SendRequest<Body>;

async fn connect(router: &TestRouter) -> Client {
    let stream = tokio::net::TcpStream::connect(router.clients).await.expect("the proxy takes connections");
    let (client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("the proxy speaks HTTP/2");
    tokio::spawn(connection);
    client
}

fn post(path: &str, body: Body) -> Request<Body> {
    Request::post(format!("http://proxy.test{path}")).body(body).expect("a request")
}

fn whole(text: &str) -> Body {
    Full::new(Bytes::copy_from_slice(text.as_bytes())).boxed()
}

async fn read(response: Response<Incoming>) -> (u16, String) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn requests_side_by_side_are_each_answered() {
    let engine =
        FakeEngine::with(|request| vec![Step::json("200 OK", &String::from_utf8_lossy(&request.body))]).await;
    for mode in [Mode::Kv, Mode::Random] {
        let router = TestRouter::before(mode, &[&engine]).await;
        let client = connect(&router).await;
        let asked = (0..50).map(|n| {
            let mut client = client.clone();
            async move {
                let body = format!(r#"{{"messages":[{{"role":"user","content":"{n}"}}]}}"#);
                let response =
                    client.send_request(post("/v1/chat/completions", whole(&body))).await.expect("an answer");
                assert_eq!(response.version(), Version::HTTP_2);
                assert_eq!(read(response).await, (200, body));
            }
        });
        futures_util::future::join_all(asked).await;
    }
    for seen in engine.seen() {
        assert_eq!(seen.head.start, "POST /v1/chat/completions HTTP/1.1");
        assert_eq!(seen.head.get("host"), Some(engine.address().to_string().as_str()));
        assert_eq!(seen.head.get("x-forwarded-host"), Some("proxy.test"));
        assert_eq!(seen.head.all("content-length").len(), 1);
        assert!(seen.head.headers.iter().all(|(name, _)| !name.starts_with(':')));
    }
}

#[tokio::test]
async fn a_body_that_ends_with_an_empty_frame_ends_once() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = connect(&router).await;
    let frames = ["{\"a\"", ":1}", ""].map(|part| Ok(Frame::data(Bytes::from_static(part.as_bytes()))));
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed();
    let response = client.send_request(post("/v1/completions", body)).await.expect("an answer");
    assert_eq!(read(response).await, (200, PLAIN_ANSWER.to_owned()));
    // The next request on the worker's kept connection is none the worse for it.
    assert_eq!(router.client().await.post("/v1/completions", "{}").await.status(), 200);
    let seen = engine.seen();
    assert_eq!(
        (seen[0].body.as_slice(), seen[0].head.all("content-length")),
        (b"{\"a\":1}".as_slice(), vec!["7"])
    );
    assert_eq!((seen.len(), engine.connections()), (2, 1));
}

#[tokio::test]
async fn events_stream_and_a_reset_takes_the_request_off_the_worker() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = connect(&router).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let mut streaming =
        client.send_request(post("/v1/completions", whole("{}"))).await.expect("an answer").into_body();
    let first = streaming.frame().await.expect("a frame").expect("data").into_data().expect("data");
    assert_eq!(first, "data: 1\n\n");
    drop(streaming);
    engine.abandoned(1).await;
    // Before any head, too.
    engine.next(vec![Step::AwaitClose]);
    let mut another = client.clone();
    let asked = tokio::spawn(async move { another.send_request(post("/v1/completions", whole("{}"))).await });
    engine.saw(2).await;
    asked.abort();
    engine.abandoned(2).await;
    router
        .metric_is(r#"warmroute_requests_total{mode="kv",outcome="client_gone",route="completions"}"#, 2.0)
        .await;
    let response = client
        .send_request(post("/v1/completions", whole("{}")))
        .await
        .expect("the connection is still good");
    assert_eq!(read(response).await.0, 200);
}

#[tokio::test]
async fn the_deadline_of_the_drain_is_told_in_streams_and_before_them() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.drain.announce = Duration::ZERO;
    config.drain.deadline = Duration::from_millis(50);
    let router = TestRouter::start(config).await;
    let mut client = connect(&router).await;
    engine.next(vec![Step::stream_head(), Step::chunk("data: 1\n\n"), Step::AwaitClose]);
    let stream = client.send_request(post("/v1/completions", whole("{}"))).await.expect("an answer");
    engine.next(vec![Step::AwaitClose]);
    let mut another = client.clone();
    let waiting =
        tokio::spawn(async move { another.send_request(post("/v1/completions", whole("{}"))).await });
    engine.saw(2).await;
    router.stop.request();
    let (status, text) = read(waiting.await.expect("no panic").expect("an answer")).await;
    assert!(status == 503 && text.contains("\"shutting_down\""), "{status} {text}");
    let (_, events) = read(stream).await;
    assert!(events.starts_with("data: 1\n\n") && events.contains("\"shutting_down\""), "{events}");
    let proxy = router.proxy.clone();
    router.ended().await;
    assert_eq!(proxy.metrics.requests.total(Outcome::Cut), 2);
}

#[tokio::test]
async fn a_cut_answer_is_a_reset_and_errors_have_their_shape() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.limits.body = 10;
    let router = TestRouter::start(config).await;
    let mut client = connect(&router).await;
    engine.next(vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\""), Step::Reset]);
    let cut = client.send_request(post("/v1/completions", whole("{}"))).await.expect("a head");
    assert!(cut.into_body().collect().await.is_err());
    let large =
        client.send_request(post("/v1/completions", whole(&"x".repeat(11)))).await.expect("an answer");
    let (status, text) = read(large).await;
    assert_eq!(status, 413);
    assert!(text.contains("request_too_large"));
}

#[tokio::test]
async fn cookies_that_come_one_by_one_arrive_as_one() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = connect(&router).await;
    let mut request = post("/v1/completions", whole("{}"));
    for crumb in ["a=1", "b=2"] {
        request.headers_mut().append("cookie", crumb.parse().expect("a value"));
    }
    client.send_request(request).await.expect("an answer");
    assert_eq!(engine.seen()[0].head.all("cookie"), ["a=1; b=2"]);
}

#[tokio::test]
async fn a_drain_lets_its_streams_end() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.drain.announce = std::time::Duration::ZERO;
    let router = TestRouter::start(config).await;
    let mut client = connect(&router).await;
    let gate = Gate::default();
    engine.next(vec![
        Step::stream_head(),
        Step::Await(gate.clone()),
        Step::chunk("data: 1\n\n"),
        Step::last_chunk(),
    ]);
    let response = client.send_request(post("/v1/completions", whole("{}"))).await.expect("a head");
    router.stop.request();
    let refused = async || tokio::net::TcpStream::connect(router.clients).await.is_err();
    warmroute::testing::until("connections to be refused", refused).await;
    gate.open();
    assert_eq!(read(response).await, (200, "data: 1\n\n".to_owned()));
    assert_eq!(router.ended().await, Ended::Drained);
}

#[tokio::test]
async fn a_request_line_that_comes_in_pieces_is_not_taken_for_a_preface() {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    let mut client = router.client().await;
    for byte in b"PRI /x HTTP/1.1\r\nhost: a\r\n\r\n" {
        client.send([*byte]).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(client.answer("PRI").await.expect("an answer").status(), 200);
    assert_eq!(engine.seen()[0].head.start, "PRI /x HTTP/1.1");
}

/// The connection goes on; only the one stream is given up.
#[tokio::test]
async fn a_stream_whose_client_takes_nothing_of_it_gives_its_place_back_in_time() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.timeouts.client_read = Some(Duration::from_millis(200));
    let router = TestRouter::start(config).await;
    let mut client = connect(&router).await;
    let flood = vec![Step::chunk(format!("data: {}\n\n", "x".repeat(1 << 20))); 8];
    engine.next([vec![Step::stream_head()], flood, vec![Step::last_chunk()]].concat());
    let (gate, slow) = (Gate::default(), post("/v1/chat/completions", whole("{}")));
    let not_taken = client.send_request(slow).await.expect("an answer");
    // One whose worker takes its time is waited for, however long that is.
    engine.next(Step::stream_held_by(&gate));
    let waiting = client.send_request(post("/v1/chat/completions", whole("{}"))).await.expect("an answer");
    let gone = r#"warmroute_requests_total{mode="kv",outcome="client_gone",route="chat"}"#;
    router.metric_is(gone, 1.0).await;
    router.metric_is("warmroute_requests_in_flight", 1.0).await;
    gate.open();
    let (status, text) = read(waiting).await;
    assert!(status == 200 && text.contains("[DONE]"), "{text}");
    assert!(not_taken.into_body().collect().await.is_err(), "its end is no good one");
}
