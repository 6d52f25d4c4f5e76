//! Answers in pieces of any sizes, answers that are none, and requests as they are written.

use proptest::prelude::*;

use super::*;

/// What a socket may make of `text`: pieces of these sizes, and the rest. For the readers above, too.
pub(crate) fn cut(text: &[u8], sizes: impl IntoIterator<Item = usize>) -> Vec<&[u8]> {
    let mut rest = text;
    let mut pieces = Vec::new();
    for size in sizes {
        let (now, later) = rest.split_at(size.min(rest.len()));
        pieces.push(now);
        rest = later;
    }
    pieces.push(rest);
    pieces
}

/// Status, data, trailers, and whether it is over; and what was read behind it.
type Read = (Option<u16>, Vec<u8>, Option<HeaderMap>, bool, Vec<u8>);

/// An answer that comes in these pieces.
fn read(pieces: &[&[u8]], method: &Method) -> Result<Read, Malformed> {
    let (mut buffer, mut head, mut data, mut trailers) = (BytesMut::new(), None::<Head>, Vec::new(), None);
    for piece in pieces {
        buffer.extend_from_slice(piece);
        if head.is_none() {
            head = take_head(&mut buffer, method)?;
        }
        let Some(head) = &mut head else { continue };
        loop {
            match head.body.take(&mut buffer)? {
                Piece::Data(more) => data.extend_from_slice(&more),
                Piece::Trailers(more) => trailers = Some(more),
                Piece::Over | Piece::Starved => break,
            }
        }
    }
    let over = head.as_ref().is_some_and(|head| head.body.is_over());
    Ok((head.map(|head| head.parts.status.as_u16()), data, trailers, over, buffer.to_vec()))
}

fn whole(answer: &str) -> (Vec<u8>, bool) {
    let (_, data, _, over, _) = read(&[answer.as_bytes()], &Method::GET).expect("an answer");
    (data, over)
}

const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n\
    5\r\nhello\r\n1;name=\"value\"\r\n \r\n00a\r\n0123456789\r\n0\r\n";

#[test]
fn an_answer_cut_anywhere_is_the_same() {
    let long = "x".repeat(9_000);
    for (answer, data, trailers) in [
        (format!("{CHUNKED}\r\n"), "hello 0123456789".to_owned(), false),
        (format!("{CHUNKED}x-end: 1\r\nx-end: 2\r\n\r\n"), "hello 0123456789".to_owned(), true),
        (format!("HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n{long}"), long.clone(), false),
        (
            format!(
                "HTTP/1.1 200\r\ntransfer-encoding: chunked\r\n\r\n2328\r\n{long}\r\n1\r\ny\r\n0\r\n\r\n"
            ),
            format!("{long}y"),
            false,
        ),
    ] {
        let bytes = answer.as_bytes();
        for cut in (0..bytes.len()).filter(|cut| *cut < 300 || cut % 97 == 0) {
            let (status, got, end, over, behind) =
                read(&[&bytes[..cut], &bytes[cut..]], &Method::GET).expect("an answer");
            assert_eq!((status, String::from_utf8(got).unwrap()), (Some(200), data.clone()), "cut at {cut}");
            assert_eq!((end.is_some(), over, behind.len()), (trailers, true, 0), "cut at {cut}");
        }
    }
}

#[test]
fn a_body_has_the_length_that_the_head_gives_it() {
    for (head, body, over) in [
        ("content-length: 3\r\n", "abc", true),
        ("content-length: 3, 3\r\ncontent-length: 3\r\n", "abc", true),
        ("content-length: 0\r\n", "", true),
        ("", "abcdef", false),
        ("transfer-encoding: gzip\r\ncontent-length: 3\r\n", "abcdef", false),
    ] {
        assert_eq!(whole(&format!("HTTP/1.1 200 OK\r\n{head}\r\nabcdef")), (body.into(), over), "{head:?}");
    }
    for (line, method) in [
        ("204 No Content", Method::GET),
        ("304 Not Modified", Method::GET),
        ("200 OK", Method::HEAD),
        ("100 Go", Method::GET),
    ] {
        let answer = format!("HTTP/1.1 {line}\r\ncontent-length: 3\r\n\r\n");
        let (_, data, _, over, _) = read(&[answer.as_bytes()], &method).expect("an answer");
        assert_eq!((data.len(), over), (0, true), "{line}");
    }
}

#[test]
fn what_is_no_answer_is_refused() {
    let many = "a: 1\r\n".repeat(MOST_FIELDS + 1);
    let long = format!("a: {}\r\n", "x".repeat(LONGEST_HEAD));
    for answer in [
        "HTTP/2 200 OK\r\n\r\n",
        "hello\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        &format!("HTTP/1.1 200 OK\r\n{many}\r\n"),
        &format!("HTTP/1.1 200 OK\r\n{long}\r\n"),
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5 5\r\nhello",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\nhello",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhello\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10000000000000000\r\n",
        &format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;{}", "x".repeat(LONGEST_SIZE_LINE)),
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nno field\r\n\r\n",
    ] {
        assert!(read(&[answer.as_bytes()], &Method::GET).is_err(), "{answer:.80}");
    }
}

#[test]
fn a_connection_is_kept_as_both_sides_mean_it() {
    for (answer, keeps) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", true),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: x, Close\r\n\r\n", false),
        ("HTTP/1.1 200 OK\r\n\r\n", false),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", false),
        ("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", false),
        ("HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: Keep-Alive\r\n\r\n", true),
    ] {
        let head =
            take_head(&mut BytesMut::from(answer), &Method::GET).expect("a head").expect("a whole one");
        assert_eq!(head.keeps, keeps, "{answer}");
    }
}

#[test]
fn a_request_says_where_it_goes_and_how_long_it_is() {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("7"));
    headers.insert(header::HOST, HeaderValue::from_static("elsewhere"));
    headers.insert("x-a", HeaderValue::from_static("1"));
    let host = HeaderValue::from_static("worker:8000");
    for size in [0, 1, SMALL_BODY, SMALL_BODY + 1, 100_000] {
        let body = Bytes::from(vec![b'x'; size]);
        let request = Outgoing::new(&Method::POST, &Uri::from_static("/v1/a?b=c"), &host, &headers, body);
        let sent = [request.head.as_ref(), request.body.as_ref()].concat();
        let wanted = format!(
            "POST /v1/a?b=c HTTP/1.1\r\nhost: worker:8000\r\nx-a: 1\r\ncontent-length: {size}\r\n\r\n{}",
            "x".repeat(size)
        );
        assert_eq!(String::from_utf8(sent).unwrap(), wanted);
    }
    let bare = Outgoing::new(&Method::GET, &Uri::from_static("*"), &host, &HeaderMap::new(), Bytes::new());
    assert_eq!(bare.head.as_ref(), b"GET * HTTP/1.1\r\nhost: worker:8000\r\n\r\n");
}

proptest! {
    #[test]
    fn pieces_of_any_sizes_give_the_same(sizes in prop::collection::vec(1usize..60, 1..40)) {
        let answer = format!("{CHUNKED}\r\n");
        let pieces = cut(answer.as_bytes(), sizes);
        let (_, data, _, over, _) = read(&pieces, &Method::GET).expect("an answer");
        prop_assert_eq!((data, over), (b"hello 0123456789".to_vec(), true));
    }

    #[test]
    fn no_bytes_can_break_it(pieces in prop::collection::vec(prop::collection::vec(
        prop::sample::select(b"HTTP/1. 20\r\n:;aAfF09xchunkedtransfer-encoding".to_vec()), 0..40), 0..12)) {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".as_slice();
        let pieces: Vec<&[u8]> = [head].into_iter().chain(pieces.iter().map(Vec::as_slice)).collect();
        let whole = pieces.concat();
        let (one, many) = (read(&[&whole], &Method::GET), read(&pieces, &Method::GET));
        prop_assert_eq!(one.is_ok(), many.is_ok());
        if let (Ok(one), Ok(many)) = (one, many) {
            prop_assert_eq!((one.1, one.3, one.4), (many.1, many.3, many.4));
        }
    }
}

/// Short texts of the bytes that matter there, each as it is and with a line's end.
#[test]
fn a_plain_size_is_what_the_line_says() {
    const SIGNS: &[u8] = b"09aF \t;\r\nx";
    let mut plain = 0;
    for number in 0..SIGNS.len().pow(4) {
        let signs = |at: u32| SIGNS[number / SIGNS.len().pow(at) % SIGNS.len()];
        for length in 0..=4 {
            for end in ["", "\r\n", "\r\nrest"] {
                let text: Vec<u8> = (0..length).map(signs).chain(end.bytes()).collect();
                let Some((size, length)) = plain_size(&text) else { continue };
                plain += 1;
                let line = line_of(&text, LONGEST_SIZE_LINE).unwrap().unwrap();
                assert_eq!((size_of(line).unwrap(), line.len() + 2), (size, length), "{text:?}");
            }
        }
    }
    assert!(plain > 1_000, "{plain}");
    for (text, size) in [("7\r\n", 7), ("0\r\n", 0), ("1fFf\r\nx", 0x1fff), ("fffffff\r\n", 0xfff_ffff)] {
        assert_eq!(plain_size(text.as_bytes()), Some((size, text.find('\n').unwrap() + 1)));
    }
    for text in ["", "7", "7\r", "\r\n", "7;x\r\n", "7 \r\n", "12345678\r\n", "-1\r\n", "+1\r\n"] {
        assert_eq!(plain_size(text.as_bytes()), None, "{text:?}");
    }
}
