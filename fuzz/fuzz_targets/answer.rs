//! Any bytes as a worker's answer, in pieces of any sizes: what is read of them does not hang on how they are cut, and hyper's client,
//! where it takes them for an answer too, reads the same.
#![no_main]

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use tokio::io::AsyncWriteExt;
use warmroute::fleet::framing::{Framing, Head, Piece, take_head};

/// Status, fields, and data; and whether the answer was whole.
type Read = (Option<(u16, Vec<(String, Vec<u8>)>)>, Vec<u8>, bool);

fn fields(headers: &http::HeaderMap) -> Vec<(String, Vec<u8>)> {
    headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect()
}

/// What is read of an answer to `GET` that ends with its connection.
fn read<'p>(pieces: impl Iterator<Item = &'p [u8]>) -> Read {
    let (mut buffer, mut head, mut data) = (BytesMut::new(), None::<Head>, Vec::new());
    let seen = |head: &Option<Head>| {
        head.as_ref().map(|head| (head.parts.status.as_u16(), fields(&head.parts.headers)))
    };
    for piece in pieces {
        buffer.extend_from_slice(piece);
        while head.is_none() {
            match take_head(&mut buffer, &http::Method::GET) {
                Ok(Some(interim))
                    if interim.parts.status.is_informational() && interim.parts.status != 101 => {}
                Ok(Some(found)) => head = Some(found),
                Ok(None) => break,
                Err(_) => return (None, data, false),
            }
        }
        let Some(head) = &mut head else { continue };
        loop {
            match head.body.take(&mut buffer) {
                Ok(Piece::Data(more)) => data.extend_from_slice(&more),
                Ok(Piece::Trailers(_)) => {}
                Ok(Piece::Over | Piece::Starved) => break,
                Err(_) => return (seen(&Some(head_of(head))), data, false),
            }
        }
    }
    let whole = head.as_ref().is_some_and(|head| head.body.is_over() || head.body == Framing::UntilClose);
    (seen(&head), data, whole)
}

/// As much of a head as is compared.
fn head_of(head: &Head) -> Head {
    let mut parts = http::Response::new(()).into_parts().0;
    (parts.status, parts.headers) = (head.parts.status, head.parts.headers.clone());
    Head { parts, body: Framing::Length(0), keeps: false }
}

/// The same by hyper's client.
async fn by_hyper(answer: &[u8]) -> Read {
    let (near, mut far) = tokio::io::duplex(answer.len().max(1) + 1024);
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(near)).await;
    let (mut sender, connection) = handshake.expect("a connection");
    let driving = tokio::spawn(connection);
    let request = http::Request::get("/").header("host", "a").body(Empty::<Bytes>::new()).expect("a request");
    let asked = sender.send_request(request);
    let answering = async {
        // Not before it is asked: hyper takes that for nonsense.
        tokio::task::yield_now().await;
        far.write_all(answer).await.expect("room for the answer");
        far.shutdown().await.expect("an end");
    };
    let (response, ()) = tokio::join!(asked, answering);
    let mut read: Read = (None, Vec::new(), false);
    if let Ok(response) = response {
        read.0 = Some((response.status().as_u16(), fields(response.headers())));
        let mut body = response.into_body();
        read.2 = loop {
            match body.frame().await {
                None => break true,
                Some(Err(_)) => break false,
                Some(Ok(frame)) => read.1.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
            }
        };
    }
    driving.abort();
    read
}

fuzz_target!(|data: &[u8]| {
    let [cuts, rest @ ..] = data else { return };
    let (cuts, answer) = rest.split_at(usize::from(*cuts).min(rest.len() / 2));
    let whole = read(std::iter::once(answer));
    let mut left = answer;
    let mut cuts = cuts.iter().cycle();
    let pieces = std::iter::from_fn(|| {
        let size = cuts.next().map_or(1, |cut| usize::from(*cut) + 1);
        let (piece, later) = left.split_at(size.min(left.len()));
        left = later;
        (!piece.is_empty()).then_some(piece)
    });
    let pieced = read(pieces);
    // A fault behind the end of the head may be seen with it or after it.
    assert_eq!(whole, pieced);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let theirs =
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), by_hyper(answer)).await });
    let Ok(theirs) = theirs else { return };
    // hyper reads fields that the RFC would have refused, and the other way round: what both take for an answer is the same one.
    if let (Some(ours), Some(hyper)) = (&whole.0, &theirs.0)
        && ours.0 != 101
    {
        assert_eq!(ours, hyper);
        if whole.2 && theirs.2 {
            assert_eq!(whole.1, theirs.1);
        }
    }
});
