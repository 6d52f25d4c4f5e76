//! HTTP/1.1 as it is spoken with workers (RFC 9112), without its sockets: how a request's head is written, where an answer's head
//! ends and what it says, and which bytes behind it are the body. Bytes go in as they come; nothing here waits.

use std::iter;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode, Uri, Version, response};
use hyper::ext::ReasonPhrase;
use smallvec::SmallVec;
use thiserror::Error;

/// Longest head, and longest list of trailers.
pub const LONGEST_HEAD: usize = 64 << 10;
/// Room in an answer's head for the fields that are added on its way to the client.
const ROOM: usize = 2;
/// Most fields of a head or of trailers.
const MOST_FIELDS: usize = 100;
/// Longest line before a chunk; what stands there besides its size has no meaning to anybody.
const LONGEST_SIZE_LINE: usize = 4 << 10;
/// Chunks at least this long are handed on where they lie, smaller ones are put together.
const LARGE_CHUNK: usize = 4 << 10;
/// Bodies up to this length are written together with their head.
const SMALL_BODY: usize = 4 << 10;

/// What a worker has sent is not HTTP.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct Malformed(&'static str);

/// A request as it goes to a worker.
#[derive(Debug)]
pub struct Outgoing {
    /// The head, and the body if it is small.
    pub(super) head: Bytes,
    pub(super) body: Bytes,
    pub(super) method: Method,
    /// It asks for another protocol.
    pub(super) switches: bool,
    /// It says that the connection ends with its answer.
    pub(super) closes: bool,
}

impl Outgoing {
    /// `host` and the body's length stand for whatever `headers` say of them.
    pub fn new(
        method: &Method,
        target: &Uri,
        host: &HeaderValue,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Outgoing {
        Outgoing::with(method, target, host, headers, iter::empty(), body)
    }

    /// As well with the fields `added`, which are none that frame the request or say where it goes.
    pub fn with<'a>(
        method: &Method,
        target: &Uri,
        host: &HeaderValue,
        headers: &'a HeaderMap,
        added: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)> + Clone,
        body: Bytes,
    ) -> Outgoing {
        let path = target.path_and_query().map_or("/", |path| path.as_str());
        let all = || headers.iter().chain(added.clone());
        let fields: usize = all().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        let small = if body.len() <= SMALL_BODY { body.len() } else { 0 };
        let mut head = BytesMut::with_capacity(fields + path.len() + host.len() + small + 96);
        for part in [method.as_str(), " ", path, " HTTP/1.1\r\nhost: "] {
            head.extend_from_slice(part.as_bytes());
        }
        head.extend_from_slice(host.as_bytes());
        head.extend_from_slice(b"\r\n");
        for (name, value) in all() {
            if name != header::HOST && name != header::CONTENT_LENGTH {
                head.extend_from_slice(name.as_str().as_bytes());
                head.extend_from_slice(b": ");
                head.extend_from_slice(value.as_bytes());
                head.extend_from_slice(b"\r\n");
            }
        }
        // Where a body is usual, none is said too (RFC 9110, 8.6).
        let usual = [Method::POST, Method::PUT, Method::PATCH].contains(method);
        if usual || !body.is_empty() || headers.contains_key(header::CONTENT_LENGTH) {
            head.extend_from_slice(b"content-length: ");
            put_number(&mut head, body.len());
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(b"\r\n");
        head.extend_from_slice(&body[..small]);
        let body = if small == body.len() { Bytes::new() } else { body };
        Outgoing {
            head: head.freeze(),
            body,
            method: method.clone(),
            switches: headers.contains_key(header::UPGRADE),
            closes: names(headers, "close"),
        }
    }
}

fn put_number(to: &mut BytesMut, number: usize) {
    let mut digits = [0; 20];
    let (mut at, mut left) = (digits.len(), number);
    loop {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            break to.extend_from_slice(&digits[at..]);
        }
    }
}

/// An answer's head.
#[derive(Debug)]
pub struct Head {
    pub parts: response::Parts,
    pub body: Framing,
    /// The connection can serve another request once the body is over.
    pub keeps: bool,
}

/// Takes the head of the answer to a request by `method` from `read`, if it is there as a whole.
///
/// # Errors
/// If it is none.
pub fn take_head(read: &mut BytesMut, method: &Method) -> Result<Option<Head>, Malformed> {
    if read.is_empty() {
        return Ok(None);
    }
    let mut fields = [const { std::mem::MaybeUninit::uninit() }; MOST_FIELDS];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let status = config.parse_response_with_uninit_headers(&mut parsed, read, &mut fields);
    let length = match status {
        Ok(httparse::Status::Complete(length)) if length <= LONGEST_HEAD => length,
        Ok(httparse::Status::Partial) if read.len() < LONGEST_HEAD => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Err(Malformed("the head is too long"));
        }
        Err(_) => return Err(Malformed("the head is not HTTP/1")),
    };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(Malformed("the status is none"))?;
    // The usual one is written anew.
    let reason =
        parsed.reason.filter(|reason| !reason.is_empty() && status.canonical_reason() != Some(reason));
    let reason = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok());
    let version = if parsed.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let base = read.as_ptr() as usize;
    // Filled and emptied where it stands, as it is large.
    let mut places: SmallVec<[(HeaderName, usize, usize); 16]> = SmallVec::new();
    for field in parsed.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes());
        let name = name.map_err(|_| Malformed("the head has a field without a name"))?;
        places.push((name, field.value.as_ptr() as usize - base, field.value.len()));
    }
    let whole = read.split_to(length).freeze();
    let mut parts = http::Response::new(()).into_parts().0;
    (parts.status, parts.version) = (status, version);
    if let Some(reason) = reason {
        parts.extensions.insert(reason);
    }
    parts.headers.reserve(places.len() + ROOM);
    for (name, start, length) in places.drain(..) {
        let value = HeaderValue::from_maybe_shared(whole.slice(start..start + length));
        parts.headers.append(name, value.map_err(|_| Malformed("the head has a value that is none"))?);
    }
    let body = Framing::of(&parts, method)?;
    // Whoever sends a coding and a length may mean either (RFC 9112, 6.3).
    let clear = !(parts.headers.contains_key(header::TRANSFER_ENCODING)
        && parts.headers.contains_key(header::CONTENT_LENGTH));
    let keeps = clear && keeps_open(&parts) && body != Framing::UntilClose;
    Ok(Some(Head { parts, body, keeps }))
}

/// RFC 9112, 9.3.
fn keeps_open(parts: &response::Parts) -> bool {
    match parts.version {
        Version::HTTP_10 => names(&parts.headers, "keep-alive"),
        _ => !names(&parts.headers, "close"),
    }
}

/// Whether `Connection` has that option.
fn names(headers: &HeaderMap, option: &str) -> bool {
    let lines = headers.get_all(header::CONNECTION).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|word| word.trim().eq_ignore_ascii_case(option))
}

/// How a body ends, and how much of it is still to come.
#[derive(Debug, PartialEq, Eq)]
pub enum Framing {
    /// After so many bytes.
    Length(u64),
    Chunked(Chunk),
    /// With the connection.
    UntilClose,
}

/// Where in a chunked body one is.
#[derive(Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Before a size.
    Size,
    /// So many bytes of one are to come.
    Data(u64),
    /// Behind one, before the end of its line.
    End,
    /// Behind the last one.
    Trailers,
    Over,
}

/// What was found of a body.
#[derive(Debug)]
pub enum Piece {
    Data(Bytes),
    Trailers(HeaderMap),
    /// There is no more.
    Over,
    /// Nothing, until more is read.
    Starved,
}

impl Framing {
    /// RFC 9112, 6.3.
    fn of(parts: &response::Parts, method: &Method) -> Result<Framing, Malformed> {
        let status = parts.status;
        let bodiless = status.is_informational()
            || status == StatusCode::NO_CONTENT
            || status == StatusCode::NOT_MODIFIED;
        if method == Method::HEAD || bodiless {
            return Ok(Framing::Length(0));
        }
        let coding = parts.headers.get_all(header::TRANSFER_ENCODING).iter().next_back();
        if let Some(coding) = coding {
            let last = coding.as_bytes().rsplit(|byte| *byte == b',').next().unwrap_or_default();
            let chunked = last.trim_ascii().eq_ignore_ascii_case(b"chunked");
            return match parts.version {
                Version::HTTP_10 => Err(Malformed("the head has a coding that HTTP/1.0 does not know")),
                _ if chunked => Ok(Framing::Chunked(Chunk::Size)),
                _ => Ok(Framing::UntilClose),
            };
        }
        let mut length = None;
        for value in parts.headers.get_all(header::CONTENT_LENGTH) {
            for said in value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
                let digits = !said.is_empty() && said.iter().all(u8::is_ascii_digit);
                let said =
                    std::str::from_utf8(said).ok().filter(|_| digits).and_then(|said| said.parse().ok());
                let said: u64 = said.ok_or(Malformed("the head has a length that is none"))?;
                if length.is_some_and(|length| length != said) {
                    return Err(Malformed("the head has two lengths"));
                }
                length = Some(said);
            }
        }
        Ok(length.map_or(Framing::UntilClose, Framing::Length))
    }

    /// Nothing is to come.
    pub fn is_over(&self) -> bool {
        matches!(self, Framing::Length(0) | Framing::Chunked(Chunk::Over))
    }

    /// Bytes to come, if that is known.
    pub fn left(&self) -> Option<u64> {
        match self {
            Framing::Length(left) => Some(*left),
            Framing::Chunked(Chunk::Over) => Some(0),
            Framing::Chunked(_) | Framing::UntilClose => None,
        }
    }

    /// Takes what there is of the body from `read`.
    ///
    /// # Errors
    /// If it is not framed as it should be.
    pub fn take(&mut self, read: &mut BytesMut) -> Result<Piece, Malformed> {
        match self {
            _ if self.is_over() => Ok(Piece::Over),
            Framing::Chunked(chunk) => chunk.take(read),
            _ if read.is_empty() => Ok(Piece::Starved),
            Framing::UntilClose => Ok(Piece::Data(read.split().freeze())),
            Framing::Length(left) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(read.len());
                *left -= here as u64;
                Ok(Piece::Data(read.split_to(here).freeze()))
            }
        }
    }
}

impl Chunk {
    /// The data of all chunks that are there in one piece, but for large ones. What came before a fault, or before trailers, goes first.
    fn take(&mut self, read: &mut BytesMut) -> Result<Piece, Malformed> {
        let mut data = BytesMut::new();
        let mut at = 0;
        loop {
            let rest = &read[at..];
            if let Chunk::Data(left) = self {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                let large = here >= LARGE_CHUNK;
                if here == 0 || (large && !data.is_empty()) {
                    break;
                }
                *left -= here as u64;
                if *left == 0 {
                    *self = Chunk::End;
                }
                if large {
                    read.advance(at);
                    return Ok(Piece::Data(read.split_to(here).freeze()));
                }
                if data.is_empty() {
                    data.reserve(rest.len());
                }
                data.extend_from_slice(&rest[..here]);
                at += here;
                continue;
            }
            match self.step(rest) {
                Ok(Some(length)) => at += length,
                Err(fault) if data.is_empty() => return Err(fault),
                Ok(None) | Err(_) => break,
            }
        }
        read.advance(at);
        match self {
            _ if !data.is_empty() => Ok(Piece::Data(data.freeze())),
            Chunk::Over => Ok(Piece::Over),
            Chunk::Trailers => self.trailers(read),
            _ => Ok(Piece::Starved),
        }
    }

    /// Goes past what stands between data, if it is there as a whole; answers how long that is.
    fn step(&mut self, rest: &[u8]) -> Result<Option<usize>, Malformed> {
        let (length, next) = match self {
            Chunk::Size => {
                let (size, length) = match plain_size(rest) {
                    Some(plain) => plain,
                    None => match line_of(rest, LONGEST_SIZE_LINE)? {
                        Some(line) => (size_of(line)?, line.len() + 2),
                        None => return Ok(None),
                    },
                };
                (length, if size == 0 { Chunk::Trailers } else { Chunk::Data(size) })
            }
            Chunk::End => match rest.first_chunk::<2>() {
                None => return Ok(None),
                Some(b"\r\n") => (2, Chunk::Size),
                Some(_) => return Err(Malformed("a chunk is longer than it says")),
            },
            Chunk::Trailers if rest.starts_with(b"\r\n") => (2, Chunk::Over),
            Chunk::Trailers | Chunk::Data(_) | Chunk::Over => return Ok(None),
        };
        *self = next;
        Ok(Some(length))
    }

    fn trailers(&mut self, read: &mut BytesMut) -> Result<Piece, Malformed> {
        let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
        let (length, fields) = match httparse::parse_headers(read, &mut fields) {
            Ok(httparse::Status::Complete(parsed)) => parsed,
            Ok(httparse::Status::Partial) if read.len() < LONGEST_HEAD => return Ok(Piece::Starved),
            _ => return Err(Malformed("the trailers are none, or too long")),
        };
        let mut trailers = HeaderMap::with_capacity(fields.len());
        for field in fields {
            let name = HeaderName::from_bytes(field.name.as_bytes()).ok();
            let value = HeaderValue::from_bytes(field.value).ok();
            let (name, value) = name.zip(value).ok_or(Malformed("the trailers have a field that is none"))?;
            trailers.append(name, value);
        }
        read.advance(length);
        *self = Chunk::Over;
        Ok(Piece::Trailers(trailers))
    }
}

/// A chunk's size as all but a few write it, a few digits alone, and the length of its line. What is not so plain may be a size too.
fn plain_size(bytes: &[u8]) -> Option<(u64, usize)> {
    let mut size = 0;
    for (at, &byte) in bytes.iter().enumerate().take(8) {
        match char::from(byte).to_digit(16) {
            Some(digit) => size = size << 4 | u64::from(digit),
            None => return (at > 0 && bytes[at..].starts_with(b"\r\n")).then_some((size, at + 2)),
        }
    }
    None
}

/// The line at the beginning of `bytes` without its end, if it is there.
fn line_of(bytes: &[u8], longest: usize) -> Result<Option<&[u8]>, Malformed> {
    let Some(end) = memchr::memchr(b'\n', &bytes[..bytes.len().min(longest)]) else {
        return if bytes.len() < longest { Ok(None) } else { Err(Malformed("a chunk's size is too long")) };
    };
    let line = bytes[..end].strip_suffix(b"\r");
    line.map(Some).ok_or(Malformed("a chunk's size ends without a carriage return"))
}

/// RFC 9112, 7.1: hexadecimal digits, and behind them extensions that mean nothing here.
fn size_of(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (size, rest) = line.split_at(digits);
    let wrong = Malformed("a chunk's size is none");
    let extension = rest.trim_ascii_start();
    if !(extension.is_empty() || extension.starts_with(b";")) || rest.contains(&b'\r') {
        return Err(wrong);
    }
    let size = std::str::from_utf8(size).map_err(|_| wrong)?;
    u64::from_str_radix(size, 16).map_err(|_| wrong)
}

#[cfg(test)]
pub(crate) mod tests;
