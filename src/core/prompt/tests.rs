//! What holds for every endpoint, and the helpers of the endpoints' own tests.

use super::*;

pub(super) fn key() -> HashKey {
    HashKey([42; 32])
}

pub(super) fn read_bytes(endpoint: Endpoint, body: &[u8]) -> Reading {
    read(endpoint, body, &key(), 16)
}

/// The hashes of a body's blocks; blocks are short (16 bytes), so that short prompts have some.
pub(super) fn chain(endpoint: Endpoint, body: &str) -> Vec<u64> {
    let chain = read_bytes(endpoint, body.as_bytes()).chain.unwrap_or_else(|why| panic!("{why:?}: {body}"));
    chain.hashes.iter().map(|hash| hash.0).collect()
}

/// The two bodies have one prompt.
#[track_caller]
pub(super) fn alike(endpoint: Endpoint, left: &str, right: &str) {
    let (left_chain, right_chain) = (canonical(endpoint, left), canonical(endpoint, right));
    assert_eq!(left_chain, right_chain, "\n{left}\n{right}");
    assert_eq!(chain(endpoint, left), chain(endpoint, right));
}

/// The two bodies have different prompts, or differ from their roots.
#[track_caller]
pub(super) fn apart(endpoint: Endpoint, left: &str, right: &str) {
    assert_ne!(canonical(endpoint, left), canonical(endpoint, right), "\n{left}\n{right}");
}

/// The two bodies share no block, and have some.
#[track_caller]
pub(super) fn unrelated(endpoint: Endpoint, left: &str, right: &str) {
    let (left_chain, right_chain) = (chain(endpoint, left), chain(endpoint, right));
    assert!(!left_chain.is_empty() && !right_chain.is_empty());
    assert!(left_chain.iter().all(|hash| !right_chain.contains(hash)), "\n{left}\n{right}");
}

#[track_caller]
pub(super) fn opaque(endpoint: Endpoint, body: &str, why: Opaque) {
    assert_eq!(read_bytes(endpoint, body.as_bytes()).chain.err(), Some(why), "{body}");
}

/// Namespace and stream as bytes.
pub(super) fn canonical(endpoint: Endpoint, body: &str) -> (String, String) {
    let (namespace, stream) =
        twin::fast(endpoint, body.as_bytes(), &key()).unwrap_or_else(|why| panic!("{why:?}: {body}"));
    (String::from_utf8_lossy(&namespace).into_owned(), String::from_utf8_lossy(&stream).into_owned())
}

const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];

#[test]
fn facts_are_read() {
    let reading = read_bytes(
        Endpoint::Chat,
        br#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":5,
            "max_completion_tokens":7,"priority":-3,"messages":[]}"#,
    );
    assert_eq!((reading.model.as_str(), reading.stream, reading.include_usage), ("m", true, true));
    assert_eq!((reading.max_tokens, reading.priority, reading.media), (Some(7), -3, false));
    let reading = read_bytes(Endpoint::Completions, br#"{"prompt":"x","stream":null,"max_tokens":null}"#);
    assert_eq!((reading.model.as_str(), reading.stream, reading.include_usage), ("", false, false));
    assert_eq!((reading.max_tokens, reading.priority), (Some(16), 0));
    assert_eq!(
        read_bytes(Endpoint::Responses, br#"{"input":"x","max_output_tokens":9}"#).max_tokens,
        Some(9)
    );
    assert!(read_bytes(Endpoint::Messages, br#"{"messages":[]}"#).include_usage);
}

#[test]
fn facts_survive_an_opaque_prompt() {
    for (tail, why) in [
        (r#""messages":7}"#, Opaque::Shape),
        (r#""messages":[}"#, Opaque::Json),
        (r#""messages":[]} x"#, Opaque::Json),
        ("", Opaque::Json),
        (&format!(r#""messages":{}"#, "[".repeat(200)), Opaque::Depth),
    ] {
        let body = format!(r#"{{"model":"m","stream":true,"max_tokens":3,{tail}"#);
        let reading = read_bytes(Endpoint::Chat, body.as_bytes());
        assert_eq!(reading.chain.err(), Some(why), "{body}");
        assert_eq!(
            (reading.model.as_str(), reading.stream, reading.max_tokens),
            ("m", true, Some(3)),
            "{body}"
        );
    }
}

#[test]
fn what_is_no_json_object_is_opaque() {
    for endpoint in ENDPOINTS {
        for body in [
            "",
            " ",
            "null",
            "[]",
            "\"x\"",
            "1",
            "{",
            "{}}",
            "{} {}",
            "\u{feff}{}",
            "{\"a\":1,}",
            "{,}",
            "{\"a\"}",
        ] {
            opaque(endpoint, body, Opaque::Json);
        }
        opaque(endpoint, "{}", Opaque::Shape);
        opaque(endpoint, " \n\t\r{ \n} \r\n", Opaque::Shape);
    }
}

#[test]
fn depth_is_bounded() {
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        format!(r#"{{"prompt":"a prompt of some length","x":{open}{close}}}"#)
    };
    assert_eq!(chain(Endpoint::Completions, &nested(127)).len(), 1);
    opaque(Endpoint::Completions, &nested(128), Opaque::Depth);
    let objects = format!(r#"{{"x":{}"#, r#"{"a":"#.repeat(100_000));
    opaque(Endpoint::Completions, &objects, Opaque::Depth);
}

#[test]
fn model_names_keep_apart_and_are_given_as_sent() {
    let body = |model: &str| format!(r#"{{"model":"{model}","prompt":"a prompt of some length"}}"#);
    let names = ["base", "adapter-1", "adapter-2", r"a/b:c d é", "", r"x\\y"];
    for left in names {
        for right in names.iter().filter(|right| **right != left) {
            unrelated(Endpoint::Completions, &body(left), &body(right));
        }
        alike(Endpoint::Completions, &body(left), &body(left));
    }
    alike(Endpoint::Completions, &body("a/é"), &body(r"a\/\u00e9"));
    assert_eq!(read_bytes(Endpoint::Completions, body(r"a\/b:c \u00e9\\").as_bytes()).model, "a/b:c é\\");
    assert_eq!(read_bytes(Endpoint::Completions, body(&"é".repeat(4000)).as_bytes()).model.len(), 1024);
    unrelated(Endpoint::Completions, &body(&"é".repeat(4000)), &body(&"é".repeat(4001)));
    assert_eq!(read_bytes(Endpoint::Completions, br#"{"model":7,"prompt":"x"}"#).model, "");
}

#[test]
fn salts_keep_apart() {
    let body = |salt: &str| format!(r#"{{"cache_salt":{salt},"prompt":"a prompt of some length"}}"#);
    unrelated(Endpoint::Completions, &body(r#""a""#), &body(r#""b""#));
    unrelated(Endpoint::Completions, &body(r#""a""#), &body("null"));
    alike(Endpoint::Completions, &body("null"), r#"{"prompt":"a prompt of some length"}"#);
}

#[test]
fn members_come_in_any_order_and_the_last_one_counts() {
    let first = r#"{"model":"m","tools":[{"a":1}],"messages":[{"role":"user","content":"hello, hello"}],"cache_salt":"s"}"#;
    let turned = r#"{"cache_salt":"s","messages":[{"content":"hello, hello","role":"user"}],"tools":[{"a":1}],"model":"m"}"#;
    alike(Endpoint::Chat, first, turned);
    let twice = r#"{"model":"x","messages":7,"model":"m","tools":null,"messages":[{"role":"x","content":"y","content":"hello, hello",
        "role":"user"}],"cache_salt":"s","tools":[{"a":1}]}"#;
    alike(Endpoint::Chat, first, twice);
    alike(Endpoint::Chat, first, &first.replace("model", r"m\u006fdel").replace("role", r"\u0072ole"));
    let undone = r#"{"model":"m","cache_salt":"s","cache_salt":null,"messages":[]}"#;
    alike(Endpoint::Chat, undone, r#"{"model":"m","messages":[]}"#);
}

#[test]
fn every_block_edge_may_fall_inside_a_character() {
    for character in ["😀", "中", "é", "e\u{301}", "👩‍👩‍👧"] {
        let escaped: String = character.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
        for count in 1..=300 {
            let text = format!("{}{}", "x".repeat(count % 7), character.repeat(count));
            let body = format!(r#"{{"prompt":"{text}"}}"#);
            let hashes = chain(Endpoint::Completions, &body);
            let units = text.len() / 16;
            assert_eq!(hashes.len(), units.min(128) + units.saturating_sub(128) / 4);
            let spelled = format!(r#"{{"prompt":"{}{}"}}"#, "x".repeat(count % 7), escaped.repeat(count));
            assert_eq!(chain(Endpoint::Completions, &spelled), hashes);
        }
    }
}

#[test]
fn what_is_no_unicode_is_carried() {
    let body =
        |inside: &[u8]| [br#"{"prompt":"a prompt of some length "#, inside, br#" and more of it"}"#].concat();
    let variants: [&[u8]; 9] =
        [b"", br"\ud83d", br"\ude00", b"\xff", b"\xc3", b"\xed\xa0\xbd", br"\u0000", br"\ufffd", br"\\ud83d"];
    let chains: Vec<_> =
        variants.map(|inside| read_bytes(Endpoint::Completions, &body(inside)).chain.unwrap().hashes).into();
    for (at, chain) in chains.iter().enumerate() {
        assert!(chain.len() > 1);
        assert!(chains[..at].iter().all(|other| other != chain), "{:?}", variants[at]);
    }
}

#[test]
fn control_characters_and_bad_escapes_are_no_json() {
    for inside in ["\n", "\u{1f}", "\0", r"\x", r"\u12", r"\u12g4", r"\", "\\\n"] {
        opaque(
            Endpoint::Completions,
            &format!(r#"{{"prompt":"{}{inside}"}}"#, "x".repeat(300)),
            Opaque::Json,
        );
    }
}

#[test]
fn numbers_are_checked() {
    let body = |number: &str| format!(r#"{{"temperature":{number},"prompt":"x"}}"#);
    for good in
        ["0", "-0", "1", "10", "-1.5", "1e5", "1E+5", "1.0e-05", "123456789012345678901234567890", "1e999"]
    {
        assert!(read_bytes(Endpoint::Completions, body(good).as_bytes()).chain.is_ok(), "{good}");
    }
    for bad in [
        "01", "+1", ".5", "1.", "1e", "1e+", "-", "0x1", "NaN", "Infinity", "1 2", "--1", "truex", "nul",
        "1.e5",
    ] {
        opaque(Endpoint::Completions, &body(bad), Opaque::Json);
    }
}

#[test]
fn bytes_count_what_is_canonical() {
    let reading = read(Endpoint::Completions, br#"{"prompt":"ab\u00e9\n"}"#, &key(), 256);
    assert_eq!(reading.chain.unwrap().bytes, 2 + 2 + 2);
    let reading = read(Endpoint::Completions, br#"{"prompt":[1,2,300]}"#, &key(), 256);
    assert_eq!(reading.chain.unwrap().bytes, 12);
}
