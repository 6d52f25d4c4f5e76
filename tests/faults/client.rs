//! Clients: they send in any way that HTTP has, and leave whenever they like.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::net::TcpStream;
use warmroute::testing::{Head, Wire, soon};

use super::ledger::Ledger;
use super::traffic::{Ask, random};

/// Requests on one connection, if it lasts.
const PER_CONNECTION: usize = 20;

/// How a client behaves with one request.
#[derive(Copy, Clone, PartialEq)]
enum Manner {
    Whole,
    Chunked,
    InPieces,
    LeavesWithin,
    StallsWithin,
    LeavesAfter,
    ResetsAfter,
    LeavesInAnswer,
}

fn manner(random: &mut StdRng) -> Manner {
    match random.random_range(0..40) {
        0..22 => Manner::Whole,
        22..28 => Manner::Chunked,
        28..33 => Manner::InPieces,
        33 => Manner::LeavesWithin,
        34 => Manner::StallsWithin,
        35 | 36 => Manner::LeavesAfter,
        37 => Manner::ResetsAfter,
        _ => Manner::LeavesInAnswer,
    }
}

/// One connection of HTTP/1.1.
pub async fn http1(ledger: &Ledger, to: SocketAddr, proceeds: impl Fn() -> bool) {
    let (mut wire, mut before) = (Wire::connect(to).await, "a new connection".to_owned());
    for _ in 0..PER_CONNECTION {
        if !proceeds() {
            return;
        }
        let ask = ledger.ask();
        match exchange(ledger, wire, &ask, &before).await {
            Some((again, how)) => (wire, before) = (again, how),
            None => return,
        }
    }
}

/// The connection, if it can be used again, and what came over it last.
async fn exchange(ledger: &Ledger, mut wire: Wire, ask: &Ask, before: &str) -> Option<(Wire, String)> {
    let random = &mut random(ledger.seed, ask.id, 2);
    let manner = manner(random);
    let length = ask.body.len();
    let framing = if manner == Manner::Chunked {
        "transfer-encoding: chunked".to_owned()
    } else {
        format!("content-length: {length}")
    };
    let (path, id) = (ask.path, ask.id);
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nx-fault-run: {id}\r\n{framing}\r\n\r\n"
    );
    // The proxy may answer, and close, before it has read all.
    let mut sent = wire.try_send(&head).await;
    let half = length / 2;
    match manner {
        Manner::LeavesWithin => {
            let _ = wire.try_send(&ask.body[..half]).await;
            ledger.outcome("left while sending");
            return None;
        }
        Manner::StallsWithin => sent = sent.and(wire.try_send(&ask.body[..half]).await),
        Manner::Chunked | Manner::InPieces => {
            let most = (length / 4).max(2);
            let mut rest = ask.body.as_slice();
            while !rest.is_empty() && sent.is_ok() {
                let (piece, later) = rest.split_at(random.random_range(1..=most).min(rest.len()));
                rest = later;
                sent = if manner == Manner::Chunked {
                    let piece = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
                    wire.try_send(piece).await
                } else {
                    wire.try_send(piece).await
                };
                tokio::task::yield_now().await;
            }
            if manner == Manner::Chunked {
                sent = sent.and(wire.try_send("0\r\n\r\n").await);
            }
        }
        _ => sent = sent.and(wire.try_send(&ask.body).await),
    }
    match manner {
        Manner::LeavesAfter | Manner::ResetsAfter => {
            if random.random_bool(0.5) {
                tokio::time::sleep(Duration::from_millis(random.random_range(0..20))).await;
            }
            if manner == Manner::ResetsAfter {
                wire.reset();
            }
            ledger.outcome("left after sending");
            return None;
        }
        Manner::LeavesInAnswer => {
            wire.piece().await;
            ledger.outcome("left in the answer");
            return None;
        }
        _ => {}
    }
    let Some((head, raw)) = wire.head().await else {
        ledger.violation(format!("request {id} ({path}): no answer; sending: {sent:?}; before: {before}"));
        return None;
    };
    let answer = wire.body(head, raw, "POST").await;
    ledger.judge(ask, &answer.head, &answer.body, answer.complete);
    let goes_on = answer.complete && answer.head.get("connection").is_none_or(|value| value != "close");
    (goes_on && manner != Manner::StallsWithin && sent.is_ok())
        .then(|| (wire, format!("{:?} {}", answer.head, answer.text())))
}

/// One connection of HTTP/2, with several requests at once.
pub async fn http2(ledger: &Ledger, to: SocketAddr, proceeds: impl Fn() -> bool) {
    let stream = TcpStream::connect(to).await.expect("the proxy takes connections");
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (client, connection) = handshake.expect("the proxy speaks HTTP/2");
    let connection = tokio::spawn(connection);
    for _ in 0..PER_CONNECTION / 4 {
        if proceeds() {
            futures_util::future::join_all((0..4).map(|_| stream_of(ledger, client.clone(), ledger.ask())))
                .await;
        }
    }
    connection.abort();
}

async fn stream_of(ledger: &Ledger, mut client: http2::SendRequest<Full<Bytes>>, ask: Ask) {
    let random = &mut random(ledger.seed, ask.id, 3);
    let request = http::Request::post(format!("http://a{}", ask.path))
        .header("x-fault-run", ask.id)
        .body(Full::from(ask.body.clone()))
        .expect("a request");
    let answer = client.send_request(request);
    if random.random_bool(0.1) {
        let patience = Duration::from_millis(random.random_range(0..20));
        let _ = tokio::time::timeout(patience, answer).await;
        ledger.outcome("left after sending");
        return;
    }
    let response = match soon("an answer", answer).await {
        Ok(response) => response,
        // A reset overtakes the head that was queued before it.
        Err(error) if format!("{error:?}").contains("INTERNAL_ERROR, Remote") && ledger.broke_off(ask.id) => {
            return ledger.outcome("cut");
        }
        Err(error) => {
            return ledger.violation(format!("request {}: no answer in HTTP/2: {error:?}", ask.id));
        }
    };
    let start = format!("HTTP/2 {}", response.status().as_u16());
    let mut body = response.into_body();
    let mut got = Vec::new();
    let complete = loop {
        match soon("more of an answer", body.frame()).await {
            None => break true,
            Some(Err(_)) => break false,
            Some(Ok(frame)) => got.extend_from_slice(frame.data_ref().map_or(&[][..], Bytes::as_ref)),
        }
    };
    ledger.judge(&ask, &Head { start, headers: Vec::new() }, &got, complete);
}
