//! HTTP as it is: framing, hop-by-hop headers, methods and versions at their edges.

use warmroute::config::Mode;
use warmroute::testing::{Answer, FakeEngine, Gate, Head, PLAIN_ANSWER, Step, TestRouter, Wire};

async fn fake() -> (FakeEngine, TestRouter) {
    let engine = FakeEngine::start().await;
    let router = TestRouter::before(Mode::Kv, &[&engine]).await;
    (engine, router)
}

/// Sends bytes on a connection of their own; everything that comes back until the proxy closes it.
async fn raw(router: &TestRouter, bytes: impl AsRef<[u8]>) -> String {
    let mut client = router.client().await;
    client.send(bytes).await;
    let mut all = Vec::new();
    loop {
        let piece = client.piece().await;
        if piece.is_empty() {
            return String::from_utf8_lossy(&all).into_owned();
        }
        all.extend(piece);
    }
}

async fn ask(client: &mut Wire, method: &str, request: &str) -> Answer {
    client.send(request).await;
    client.answer(method).await.expect("an answer")
}

#[tokio::test]
async fn what_is_for_one_hop_stays_on_it() {
    let (engine, router) = fake().await;
    engine.always(|_| {
        vec![Step::send(
            "HTTP/1.1 200 OK\r\nConnection: X-Engine-Hop\r\nX-Engine-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Kept: yes\r\nx-accel-buffering: no\r\ncontent-length: 2\r\n\r\n{}",
        )]
    });
    for _ in 0..100 {
        let answer = raw(
            &router,
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close, X-Drop-Me\r\nx-drop-me: 1\r\nkeep-alive: timeout=1\r\nte: trailers\r\nproxy-connection: keep-alive\r\ncontent-length: 2\r\n\r\n{}",
        )
        .await
        .to_lowercase();
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        assert!(
            answer.contains("\r\nx-kept: yes\r\n") && answer.contains("\r\nx-accel-buffering: no\r\n"),
            "{answer}"
        );
        assert!(!answer.contains("engine-hop") && !answer.contains("keep-alive:"), "{answer}");
    }
    for seen in engine.seen() {
        for name in ["connection", "x-drop-me", "keep-alive", "te", "proxy-connection"] {
            assert_eq!(seen.head.get(name), None, "{name}");
        }
    }
    assert_eq!(engine.connections(), 1, "the client's way of closing is its own");
}

#[tokio::test]
async fn a_compressed_answer_is_not_touched() {
    let (engine, router) = fake().await;
    let zipped: Vec<u8> = (0..1000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        zipped.len()
    );
    let whole = [head.as_bytes(), &zipped].concat();
    engine.always(move |_| vec![Step::send(&whole)]);
    let mut client = router.client().await;
    for accept in ["", "accept-encoding: gzip, br\r\n"] {
        let answer =
            ask(&mut client, "GET", &format!("GET /v1/models HTTP/1.1\r\nhost: a\r\n{accept}\r\n")).await;
        assert_eq!(answer.body, zipped);
        assert_eq!(answer.head.get("content-encoding"), Some("gzip"));
        assert_eq!(answer.head.get("content-length"), Some("4000"));
    }
    let seen = engine.seen();
    assert_eq!(
        (seen[0].head.get("accept-encoding"), seen[1].head.get("accept-encoding")),
        (None, Some("gzip, br"))
    );
}

#[tokio::test]
async fn options_and_head_reach_a_worker_and_leave_the_connection_usable() {
    let (engine, router) = fake().await;
    engine.always(|request| {
        let cors = "access-control-allow-origin: https://ui.example\r\nvary: Origin\r\n";
        match request.head.start.split(' ').next() {
            Some("OPTIONS") => vec![Step::send(format!("HTTP/1.1 204 No Content\r\n{cors}\r\n"))],
            Some("HEAD") => vec![Step::send(
                "HTTP/1.1 200 OK\r\ncontent-length: 1234\r\ncontent-type: application/json\r\n\r\n",
            )],
            _ => vec![Step::json("200 OK", PLAIN_ANSWER)],
        }
    });
    let mut client = router.client().await;
    let preflight = ask(
        &mut client,
        "OPTIONS",
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: a\r\norigin: https://ui.example\r\naccess-control-request-headers: authorization\r\n\r\n",
    )
    .await;
    assert_eq!((preflight.status(), preflight.body.len()), (204, 0));
    assert_eq!(preflight.head.get("access-control-allow-origin"), Some("https://ui.example"));
    for path in ["/v1/models", "/health2"] {
        let answer = ask(&mut client, "HEAD", &format!("HEAD {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!((answer.status(), answer.head.get("content-length")), (200, Some("1234")));
    }
    assert_eq!(client.get("/v1/models").await.text(), PLAIN_ANSWER);
    assert_eq!(engine.seen()[0].head.get("access-control-request-headers"), Some("authorization"));
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn answers_without_a_body_end_where_they_should() {
    let (engine, router) = fake().await;
    let mut client = router.client().await;
    for head in [
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        engine.next(vec![Step::send(head)]);
        let answer = client.get("/v1/models").await;
        assert!(answer.complete && answer.body.is_empty(), "{head}");
    }
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    assert_eq!(router.metric(r#"warmroute_requests_total{mode="kv",outcome="ok",route="other"}"#).await, 4.0);
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn a_client_that_waits_to_be_asked_for_its_body_is_asked() {
    let (engine, router) = fake().await;
    let body = vec![b'x'; 2 << 20];
    let mut client = router.client().await;
    client
        .send(format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
            body.len()
        ))
        .await;
    let (head, _) = client.head().await.expect("a word to go on");
    assert_eq!(head.start, "HTTP/1.1 100 Continue");
    client.send(&body).await;
    assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
    assert!(engine.seen()[0].body == body);
    assert_eq!(engine.seen()[0].head.get("expect"), None);
}

#[tokio::test]
async fn a_waiting_client_whose_body_is_too_large_is_told_before_it_sends() {
    let engine = FakeEngine::start().await;
    let mut config = TestRouter::config(Mode::Kv, &[&engine]);
    config.limits.body = 1000;
    let router = TestRouter::start(config).await;
    let answer = raw(&router, "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1001\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert_eq!(engine.seen(), []);
}

#[tokio::test]
async fn a_worker_that_answers_before_it_has_read_is_relayed() {
    let (engine, router) = fake().await;
    engine.next(vec![Step::json("401 Unauthorized", r#"{"error":"Unauthorized"}"#), Step::Close]);
    let answer = router.client().await.post("/v1/chat/completions", vec![b'x'; 4 << 20]).await;
    assert_eq!((answer.status(), answer.text().as_str()), (401, r#"{"error":"Unauthorized"}"#));
}

#[tokio::test]
async fn a_body_in_chunks_arrives_whole_under_one_framing() {
    let (engine, router) = fake().await;
    let mut client = router.client().await;
    let request = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n4;ext=1\r\n{\"a\"\r\n3\r\n:1}\r\n0\r\nx-sum: 7\r\n\r\n";
    assert_eq!(ask(&mut client, "POST", request).await.status(), 200);
    assert_eq!(client.get("/v1/models").await.status(), 200);
    let seen = &engine.seen()[0];
    assert_eq!(seen.body, b"{\"a\":1}");
    assert_eq!((seen.head.all("content-length"), seen.head.get("transfer-encoding")), (vec!["7"], None));
}

#[tokio::test]
async fn framing_that_can_be_read_two_ways_is_refused() {
    let (engine, router) = fake().await;
    for framing in [
        "content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        "content-length: 2, 3\r\n\r\n{}x",
        "content-length: +2\r\n\r\n{}",
        "content-length: 2x\r\n\r\n{}",
        "content-length: -1\r\n\r\n",
        "transfer-encoding: gzip\r\n\r\n",
        "transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "content-length : 2\r\n\r\n{}",
        "x: a\r\n folded: b\r\ncontent-length: 2\r\n\r\n{}",
        "host: b\r\ncontent-length: 2\r\n\r\n{}",
    ] {
        let answer = raw(
            &router,
            format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{framing}"),
        )
        .await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{framing:?}: {answer}");
    }
    let old = raw(&router, "POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n").await;
    assert!(old.starts_with("HTTP/1.0 400 ") || old.starts_with("HTTP/1.1 400 "), "{old}");
    for chunk in ["x\r\n{}\r\n0\r\n\r\n", "2 \n{}\r\n0\r\n\r\n", "fffffffffffffffff\r\n", "2\r\n{}0\r\n\r\n"]
    {
        let request = format!(
            "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n{chunk}"
        );
        let answer = raw(&router, request).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{chunk:?}: {answer}");
    }
    assert_eq!(engine.seen(), [], "nothing of it reaches a worker");
}

#[tokio::test]
async fn chunks_count_where_a_length_is_given_too_and_the_connection_ends_there() {
    let (engine, router) = fake().await;
    // RFC 9112, 6.3: the length is void, and whatever follows is not read as a request.
    for order in
        ["content-length: 5\r\ntransfer-encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 5"]
    {
        let request =
            format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\n{order}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n");
        let answer = raw(&router, request + "GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
    for seen in engine.seen() {
        assert_eq!((seen.head.second(), seen.body.as_slice()), ("/v1/completions", b"{}".as_slice()));
        assert_eq!((seen.head.all("content-length"), seen.head.get("transfer-encoding")), (vec!["2"], None));
    }
}

#[tokio::test]
async fn a_worker_whose_framing_makes_no_sense_is_a_502() {
    let (engine, router) = fake().await;
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n{}",
        "HTTP/9.9 200 OK\r\n\r\n",
        "\u{16}\u{3}\u{1}",
    ] {
        engine.next(vec![Step::send(answer), Step::Close]);
        let got = router.client().await.get("/v1/models").await;
        assert_eq!(got.status(), 502, "{answer:?}");
        engine.next(vec![
            Step::send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
            Step::Close,
        ]);
        assert_eq!(router.client().await.get("/v1/models").await.status(), 200);
    }
}

#[tokio::test]
async fn a_body_shorter_or_longer_than_promised_is_not_made_right() {
    let (engine, router) = fake().await;
    engine.next(vec![Step::send("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{}"), Step::Close]);
    let short = router.client().await.get("/v1/models").await;
    assert_eq!((short.complete, short.text().as_str()), (false, "{}"));
    engine.next(vec![Step::send(
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad",
    )]);
    let mut client = router.client().await;
    assert_eq!(client.get("/v1/models").await.text(), "{}");
    // What came too much is nobody's answer: the connection it came on is not used again.
    assert_eq!(client.get("/v1/models").await.text(), PLAIN_ANSWER);
}

#[tokio::test]
async fn chunks_of_an_answer_count_where_a_length_is_given_too() {
    let (engine, router) = fake().await;
    for length in [2, 500] {
        engine.next(vec![Step::send(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n5\r\n body\r\n0\r\n\r\n"
        ))]);
        let answer = router.client().await.get("/v1/models").await;
        assert_eq!((answer.text().as_str(), answer.complete), ("whole body", true));
        assert_eq!(answer.head.get("content-length"), None);
    }
}

#[tokio::test]
async fn an_http_1_0_client_gets_an_answer_that_it_can_read() {
    let (engine, router) = fake().await;
    engine.next(vec![
        Step::stream_head(),
        Step::chunk("data: 1\n\n"),
        Step::chunk("data: 2\n\n"),
        Step::last_chunk(),
    ]);
    let answer = raw(&router, "POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(answer.starts_with("HTTP/1.0 200 OK\r\n"), "{answer}");
    assert!(!answer.to_lowercase().contains("transfer-encoding"), "{answer}");
    assert!(answer.ends_with("\r\n\r\ndata: 1\n\ndata: 2\n\n"), "{answer}");
    assert_eq!(engine.seen()[0].head.start, "POST /v1/completions HTTP/1.1");
}

#[tokio::test]
async fn a_worker_that_speaks_http_1_0_is_understood() {
    let (engine, router) = fake().await;
    engine.next(vec![
        Step::send("HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end"),
        Step::Close,
    ]);
    let mut client = router.client().await;
    let answer = client.get("/v1/models").await;
    assert!(answer.head.start.starts_with("HTTP/1.1 200") && answer.complete);
    assert_eq!(answer.text(), "until the end");
    assert_eq!(client.get("/v1/models").await.text(), PLAIN_ANSWER);
}

#[tokio::test]
async fn trailers_of_an_answer_reach_a_client_that_takes_them() {
    let (engine, router) = fake().await;
    engine.always(|_| {
        vec![
            Step::send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"),
            Step::chunk("abc"),
            Step::send("0\r\nx-sum: 7\r\n\r\n"),
        ]
    });
    let mut client = router.client().await;
    let asked =
        ask(&mut client, "GET", "GET / HTTP/1.1\r\nhost: a\r\nte: trailers\r\nconnection: te\r\n\r\n").await;
    assert_eq!((asked.text().as_str(), asked.trailers), ("abc", vec![("x-sum".to_owned(), "7".to_owned())]));
    let unasked = client.get("/").await;
    assert!(unasked.complete && unasked.trailers.is_empty());
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    assert_eq!(router.metric(r#"warmroute_requests_total{mode="kv",outcome="ok",route="other"}"#).await, 2.0);
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn interim_responses_of_a_worker_are_not_taken_for_the_answer() {
    let (engine, router) = fake().await;
    engine.next(vec![
        Step::send("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"),
        Step::json("200 OK", PLAIN_ANSWER),
    ]);
    assert_eq!(router.client().await.get("/v1/models").await.text(), PLAIN_ANSWER);
}

#[tokio::test]
async fn a_redirect_to_the_worker_becomes_one_to_the_proxy() {
    let (engine, router) = fake().await;
    let address = engine.address();
    engine.always(move |_| {
        vec![Step::send(format!("HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{address}/v1/models?a=1\r\ncontent-length: 0\r\n\r\n"))]
    });
    let answer = router.client().await.get("/v1/models/?a=1").await;
    assert_eq!((answer.status(), answer.head.get("location")), (307, Some("/v1/models?a=1")));
}

#[tokio::test]
async fn requests_sent_ahead_are_answered_in_order() {
    let (engine, router) = fake().await;
    engine.always(|request| vec![Step::json("200 OK", request.head.second())]);
    let mut client = router.client().await;
    let requests: String = (0..20).map(|n| format!("GET /{n} HTTP/1.1\r\nhost: a\r\n\r\n")).collect();
    client.send(requests).await;
    for n in 0..20 {
        assert_eq!(client.answer("GET").await.expect("an answer").text(), format!("/{n}"));
    }
}

#[tokio::test]
async fn only_configured_workers_are_ever_contacted() {
    let (engine, router) = fake().await;
    let stranger = FakeEngine::start().await;
    let there = stranger.address();
    let mut client = router.client().await;
    let request = format!(
        "POST http://{there}/v1/completions HTTP/1.1\r\nhost: {there}\r\nx-prefiller-host-port: {there}\r\nx-gateway-destination-endpoint: {there}\r\nx-worker-url: http://{there}\r\nx-forwarded-host: {there}\r\nforwarded: host={there}\r\ncontent-length: 2\r\n\r\n{{}}"
    );
    assert_eq!(ask(&mut client, "POST", &request).await.status(), 200);
    let tunnel =
        ask(&mut client, "CONNECT", &format!("CONNECT {there} HTTP/1.1\r\nhost: {there}\r\n\r\n")).await;
    assert_eq!(tunnel.status(), 400);
    assert_eq!((stranger.connections(), stranger.seen()), (0, vec![]));
    assert_eq!(engine.seen()[0].head.start, "POST /v1/completions HTTP/1.1");
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused_in_good_order() {
    let (engine, router) = fake().await;
    let long = format!("GET / HTTP/1.1\r\nhost: a\r\nx-request-id: {}\r\n\r\n", "i".repeat(60_000));
    assert_eq!(ask(&mut router.client().await, "GET", &long).await.status(), 200);
    let large = format!("GET / HTTP/1.1\r\nhost: a\r\nx-large: {}\r\n\r\n", "i".repeat(200_000));
    let many = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x-a: 1\r\n".repeat(500));
    for request in [large, many] {
        let answer = raw(&router, request).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
    assert_eq!(engine.seen().len(), 1);
}

#[tokio::test]
async fn request_ids_are_passed_or_made_and_never_shared() {
    let (engine, router) = fake().await;
    let mut client = router.client().await;
    let own = ask(&mut client, "GET", "GET / HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\n\r\n").await;
    assert_eq!(own.head.get("x-request-id"), Some("mine"));
    let made: Vec<Answer> = [client.get("/").await, client.get("/").await].into();
    let seen = engine.seen();
    let ids: Vec<_> = seen.iter().map(|seen| seen.head.get("x-request-id").expect("an id")).collect();
    assert_eq!(ids[0], "mine");
    assert_ne!(ids[1], ids[2]);
    assert_eq!(
        made.iter().map(|made| made.head.get("x-request-id").expect("an id")).collect::<Vec<_>>(),
        ids[1..]
    );
    engine
        .next(vec![Step::send("HTTP/1.1 200 OK\r\nx-request-id: the worker's\r\ncontent-length: 0\r\n\r\n")]);
    assert_eq!(client.get("/").await.head.get("x-request-id"), Some("the worker's"));
}

#[tokio::test]
async fn what_an_old_client_takes_for_the_end_is_never_a_broken_answer() {
    let (engine, router) = fake().await;
    let open_ended =
        Step::send("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n");
    let by_close = Step::send("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"a\":1}");
    let ask = "GET /v1/models HTTP/1.0\r\n\r\n";

    engine.next(vec![open_ended.clone(), Step::chunk("{\"a\":"), Step::Reset]);
    let mut client = router.client().await;
    client.send(ask).await;
    let broken = client.rest().await.expect_err("a close would look like the end");
    assert_eq!(broken.kind(), std::io::ErrorKind::ConnectionReset);

    engine.next(vec![open_ended.clone(), Step::chunk("{\"a\":"), Step::chunk("1}"), Step::last_chunk()]);
    engine.next(vec![by_close, Step::Close]);
    for _ in 0..2 {
        let mut client = router.client().await;
        client.send(ask).await;
        let whole = String::from_utf8(client.rest().await.expect("a good end")).expect("text");
        assert!(whole.ends_with("\r\n\r\n{\"a\":1}"), "{whole}");
    }
}

#[tokio::test]
async fn a_client_that_ends_its_sending_side_counts_as_gone() {
    let (engine, router) = fake().await;
    let gate = Gate::default();
    engine.next(vec![Step::Await(gate.clone()), Step::json("200 OK", PLAIN_ANSWER)]);
    let mut client = router.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}").await;
    engine.saw(1).await;
    client.finish_sending().await;
    // As vLLM itself does: no answer, and the work is given up.
    engine.abandoned(1).await;
    client.ended().await;
}

#[tokio::test]
async fn paths_of_other_kinds_of_work_pass_in_either_mode() {
    for mode in [Mode::Kv, Mode::Random] {
        let engine = FakeEngine::start().await;
        let router = TestRouter::before(mode, &[&engine]).await;
        let audio: Vec<u8> = (0..5 << 20).map(|n: u32| (n * 31 % 251) as u8).collect();
        let mut client = router.client().await;
        let head = format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=----x y\r\ncontent-length: {}\r\n\r\n",
            audio.len()
        );
        client.send([head.as_bytes(), &audio].concat()).await;
        assert_eq!(client.answer("POST").await.expect("an answer").status(), 200);
        for path in ["/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/responses", "/v1/messages", "/unknown"]
        {
            assert_eq!(client.post(path, r#"{"input":"x"}"#).await.status(), 200, "{path}");
        }
        let seen = engine.seen();
        let first: &Head = &seen[0].head;
        assert_eq!(first.get("content-type"), Some("multipart/form-data; boundary=----x y"));
        assert!(seen[0].body == audio);
        assert_eq!(seen.len(), 7);
    }
}
