//! HTTP/1.1 as RFC 9112 has it, written down a second time: what a client has asked for, and whether what it got are answers.

/// One request that is framed beyond doubt.
#[derive(Debug, PartialEq)]
pub struct Asked {
    pub method: Vec<u8>,
    pub target: Vec<u8>,
    pub body: Vec<u8>,
}

/// All that a client has asked for on one connection.
#[derive(Debug, Default)]
pub struct Heard {
    pub requests: Vec<Asked>,
    /// The method of one more, whose body did not come whole.
    pub unfinished: Option<Vec<u8>>,
}

/// Bytes that are taken from the front.
struct Rest<'b>(&'b [u8]);

impl<'b> Rest<'b> {
    fn take(&mut self, count: usize) -> Option<&'b [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    /// Up to a line's end, which may be a line feed alone in a head. A carriage return anywhere else is no part of any line.
    fn line(&mut self, lone_feed: bool) -> Option<&'b [u8]> {
        let end = self.0.iter().position(|byte| *byte == b'\n')?;
        let line = &self.take(end + 1)?[..end];
        let line = match line.strip_suffix(b"\r") {
            Some(line) => line,
            None if lone_feed => line,
            None => return None,
        };
        (!line.contains(&b'\r')).then_some(line)
    }
}

impl<'b> Rest<'b> {
    /// Up to the first carriage return, which must end the line.
    fn trailer(&mut self) -> Option<&'b [u8]> {
        let end = self.0.iter().position(|byte| *byte == b'\r')?;
        self.take(end + 2)?.strip_suffix(b"\r\n")
    }
}

fn is_token(name: &[u8]) -> bool {
    let odd = |byte: &u8| !(byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte));
    !name.is_empty() && !name.iter().any(odd)
}

fn is_value(value: &[u8]) -> bool {
    value.iter().all(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 127))
}

type Fields<'b> = Vec<(Vec<u8>, &'b [u8])>;

/// Header fields up to the empty line; a folded line is none.
fn fields<'b>(rest: &mut Rest<'b>, lone_feed: bool) -> Option<Fields<'b>> {
    let mut fields = Vec::new();
    loop {
        let line = rest.line(lone_feed)?;
        if line.is_empty() {
            return Some(fields);
        }
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if !is_token(name) || !is_value(value) {
            return None;
        }
        fields.push((name.to_ascii_lowercase(), value));
    }
}

fn all<'f, 'b>(fields: &'f Fields<'b>, name: &'f str) -> impl Iterator<Item = &'b [u8]> + 'f {
    fields.iter().filter(move |(key, _)| key == name.as_bytes()).map(|(_, value)| *value)
}

/// Every length that is told, if they are the same one.
fn length(fields: &Fields<'_>) -> Option<Option<usize>> {
    let mut said = None;
    for value in all(fields, "content-length") {
        let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let length = std::str::from_utf8(value).ok().filter(|_| digits)?.parse::<usize>().ok()?;
        if said.is_some_and(|before| before != length) {
            return None;
        }
        said = Some(length);
    }
    Some(said)
}

fn chunks(rest: &mut Rest<'_>) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest.line(false)?;
        let size = line.split(|byte| *byte == b';').next()?.trim_ascii_end();
        if size.is_empty() || !size.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let size = usize::from_str_radix(std::str::from_utf8(size).ok()?, 16).ok()?;
        if size == 0 {
            while !rest.trailer()?.is_empty() {}
            return Some(body);
        }
        body.extend_from_slice(rest.take(size)?);
        if rest.take(2)? != b"\r\n" {
            return None;
        }
    }
}

/// The requests up to the first doubt. One that has a coding and a length is read by its coding, and is the last.
pub fn requests(bytes: &[u8]) -> Heard {
    let (mut rest, mut heard) = (Rest(bytes), Heard::default());
    while read_request(&mut rest, &mut heard).is_some_and(|goes_on| goes_on) {}
    heard
}

fn read_request(rest: &mut Rest<'_>, heard: &mut Heard) -> Option<bool> {
    let mut line = rest.line(true)?;
    while line.is_empty() {
        line = rest.line(true)?;
    }
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let [method, target, version] = words[..] else { return None };
    if !is_token(method) || target.is_empty() || !is_value(target) {
        return None;
    }
    let fields = fields(rest, true)?;
    let codings: Vec<&[u8]> = all(&fields, "transfer-encoding").collect();
    heard.unfinished = Some(method.to_vec());
    let lengths = all(&fields, "content-length").next().is_some();
    let body = match (&codings[..], version) {
        ([], b"HTTP/1.0" | b"HTTP/1.1") => rest.take(length(&fields)?.unwrap_or(0))?.to_vec(),
        ([coding], b"HTTP/1.1") if coding.eq_ignore_ascii_case(b"chunked") => chunks(rest)?,
        _ => return None,
    };
    heard.unfinished = None;
    heard.requests.push(Asked { method: method.to_vec(), target: target.to_vec(), body });
    Some(codings.is_empty() || !lengths)
}

/// Checks that `bytes` are answers to requests with these methods, in their order, and perhaps one more. `cut`: the last one
/// may have lost its end.
///
/// # Errors
/// Says what is wrong.
pub fn check_answers(bytes: &[u8], methods: &[&[u8]], cut: bool) -> Result<usize, String> {
    let (mut rest, mut count) = (Rest(bytes), 0);
    while !rest.0.is_empty() {
        let at = bytes.len() - rest.0.len();
        match answer(&mut rest, methods.get(count).copied().unwrap_or(b"")) {
            Some(last) => count += usize::from(last),
            None if cut => break,
            None => return Err(format!("answer {count} at byte {at} is none")),
        }
    }
    if count > methods.len() + 1 { Err(format!("{count} answers")) } else { Ok(count) }
}

/// Reads one answer; false if it was an interim one.
fn answer(rest: &mut Rest<'_>, method: &[u8]) -> Option<bool> {
    let line = rest.line(false)?;
    let (start, reason) = line.split_at_checked(13)?;
    let version = start.strip_prefix(b"HTTP/1.1 ").or(start.strip_prefix(b"HTTP/1.0 "))?;
    let status = std::str::from_utf8(&version[..3]).ok()?.parse::<u16>().ok()?;
    if !(100..600).contains(&status) || version[3] != b' ' || !is_value(reason) {
        return None;
    }
    let fields = fields(rest, false)?;
    if status < 200 {
        return Some(false);
    }
    let codings: Vec<&[u8]> = all(&fields, "transfer-encoding").collect();
    let length = length(&fields)?;
    if method == b"HEAD" || matches!(status, 204 | 304) {
        return Some(true);
    }
    match (&codings[..], length) {
        ([b"chunked"], None) => drop(chunks(rest)?),
        ([], Some(length)) => drop(rest.take(length)?),
        // Up to the end of the connection.
        ([], None) => rest.0 = &[],
        _ => return None,
    }
    Some(true)
}
