//! Websockets: a switch of protocols goes through, and nothing else does under its name.

use warmroute::config::Mode;
use warmroute::testing::{FakeEngine, PLAIN_ANSWER, Step, TestRouter, Wire};

const ASK: &str = "GET /v1/realtime?model=m HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: k\r\nsec-websocket-version: 13\r\n\r\n";
const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n";

async fn fake() -> (FakeEngine, TestRouter) {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    (engine, router)
}

/// Reads until as many bytes as expected have come.
async fn expect(client: &mut Wire, bytes: &[u8]) {
    let mut got = Vec::new();
    while got.len() < bytes.len() {
        let piece = client.piece().await;
        assert!(!piece.is_empty(), "ended after {:?}", String::from_utf8_lossy(&got));
        got.extend(piece);
    }
    assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(bytes));
}

#[tokio::test]
async fn a_websocket_goes_through_both_ways_and_ends_with_either_side() {
    let (engine, router) = fake().await;
    engine.next(vec![Step::send([SWITCH.as_bytes(), b"\x81\x02hi"].concat()), Step::Echo]);
    let mut client = router.client().await;
    // The first frame comes on the heels of the request.
    client.send([ASK.as_bytes(), b"\x82early"].concat()).await;
    let (head, _) = client.head().await.expect("a head");
    assert_eq!(head.start, "HTTP/1.1 101 Switching Protocols");
    assert_eq!(head.get("upgrade"), Some("websocket"));
    assert_eq!(head.get("connection").map(str::to_ascii_lowercase), Some("upgrade".to_owned()));
    assert_eq!(head.get("sec-websocket-accept"), Some("x"));
    expect(&mut client, b"\x81\x02hi\x82early").await;
    for n in 0..100u8 {
        let frame = [[0x82, n].as_slice(), &[n; 3000]].concat();
        client.send(&frame).await;
        expect(&mut client, &frame).await;
    }
    let seen = &engine.seen()[0].head;
    assert_eq!((seen.get("upgrade"), seen.get("connection")), (Some("websocket"), Some("upgrade")));
    assert_eq!(seen.get("sec-websocket-key"), Some("k"));
    let gauge = format!(r#"warmroute_worker_in_flight{{worker="{}"}}"#, engine.address());
    assert_eq!(router.metric(&gauge).await, 1.0, "it keeps its place as long as it lasts");
    drop(client);
    engine.abandoned(1).await;
    router.metric_is(&gauge, 0.0).await;
    // And from the other side.
    engine.next(vec![Step::send(SWITCH), Step::Close]);
    let mut client = router.client().await;
    client.send(ASK).await;
    client.head().await.expect("a head");
    client.ended().await;
}

#[tokio::test]
async fn a_worker_that_does_not_switch_is_answered_as_ever() {
    let (engine, router) = fake().await;
    let mut client = router.client().await;
    client.send(ASK).await;
    assert_eq!(client.answer("GET").await.expect("an answer").text(), PLAIN_ANSWER);
    assert_eq!(client.get("/v1/models").await.text(), PLAIN_ANSWER, "the connection goes on");
    engine.next(vec![Step::json("426 Upgrade Required", "{}")]);
    assert_eq!(client.get("/v1/realtime").await.status(), 426);
}

#[tokio::test]
async fn no_other_protocol_is_switched_to() {
    let (engine, router) = fake().await;
    let mut client = router.client().await;
    for protocol in ["h2c", "TLS/1.0", "websocket, h2c"] {
        let ask = ASK.replace("upgrade: websocket", &format!("upgrade: {protocol}"));
        client.send(ask).await;
        assert_eq!(client.answer("GET").await.expect("an answer").status(), 200);
    }
    assert!(engine.seen().iter().all(|seen| seen.head.get("upgrade").is_none()));
    // A worker that switches unasked is not followed.
    engine.next(vec![Step::send(SWITCH), Step::Echo]);
    assert_eq!(router.client().await.get("/v1/models").await.status(), 502);
}
