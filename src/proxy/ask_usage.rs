//! The option `feedback.ask_for_usage`, on the way to the worker: a streamed request whose client did not ask for `usage` is
//! made to ask for it. A few bytes are spliced in and all others stay as they are. [`super::hide_usage`] takes the answer's
//! extra event out again.
//!
//! Only what vLLM reads without doubt is touched. Where a member has a spelling that vLLM may take one way or the other (`1`,
//! `"true"`), where the request would be refused, or where it has several answers (their last events could not be told as they
//! would have been without the option), the body goes on as it came.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::core::prompt::Endpoint;

/// The body with `stream_options.include_usage` switched on; `None` where it is to go on as it came: already asked for, not
/// streamed, another endpoint (which tells its usage unasked, or has none), or in doubt.
pub fn ask_for_usage(endpoint: Endpoint, body: &[u8]) -> Option<Bytes> {
    let prompt = match endpoint {
        Endpoint::Chat => "messages",
        Endpoint::Completions => "prompt",
        Endpoint::Responses | Endpoint::Messages => return None,
    };
    let text = std::str::from_utf8(body).ok()?;
    let names = ["stream", "stream_options", "n", "prompt_embeds", prompt];
    let [stream, options, n, embeds, prompt] = members(text, names)?;
    let single = matches!(n, None | Some("null" | "1")) && matches!(embeds, None | Some("null"));
    if stream != Some("true") || !single || !is_single_prompt(endpoint, prompt?) {
        return None;
    }
    let (edit, more) = match options {
        None => (insert(text, text, r#""stream_options":{"include_usage":true}"#)?, None),
        Some(null @ "null") => ((place(text, null), Cow::from(r#"{"include_usage":true}"#)), None),
        Some(options) => switch_on(text, options)?,
    };
    let mut edits: Vec<Edit> = std::iter::once(edit).chain(more).collect();
    edits.sort_unstable_by_key(|(range, _)| range.start);
    Some(apply(body, &edits))
}

/// What is put in the place of which bytes.
type Edit = (Range<usize>, Cow<'static, str>);

/// Switches usage on in an object of options, and what would tell it in every event off: without usage, that has no effect.
fn switch_on(text: &str, options: &str) -> Option<(Edit, Option<Edit>)> {
    let [usage, continuous] = members(options, ["include_usage", "continuous_usage_stats"])?;
    let on = match usage {
        None => insert(text, options, r#""include_usage":true"#)?,
        Some(off @ ("false" | "null")) => (place(text, off), Cow::from("true")),
        Some(_) => return None,
    };
    let off = match continuous {
        None | Some("false" | "null") => None,
        Some(on @ "true") => Some((place(text, on), Cow::from("false"))),
        Some(_) => return None,
    };
    Some((on, off))
}

/// One answer will come. A list of texts, or of lists of tokens, has one for each.
fn is_single_prompt(endpoint: Endpoint, prompt: &str) -> bool {
    let items = || serde_json::from_str::<Vec<&RawValue>>(prompt).unwrap_or_default();
    match (endpoint, prompt.as_bytes().first()) {
        (Endpoint::Chat, Some(b'[')) | (Endpoint::Completions, Some(b'"')) => true,
        (Endpoint::Completions, Some(b'[')) => match items()[..] {
            [] => false,
            [_] => true,
            [first, ..] => first.get().starts_with(|digit: char| digit.is_ascii_digit()),
        },
        _ => false,
    }
}

/// `member` as the first one of `object`, which is a part of `text`.
fn insert(text: &str, object: &str, member: &'static str) -> Option<Edit> {
    let brace = object.find('{')?;
    let at = place(text, object).start + brace + 1;
    let empty = object[brace + 1..].trim_start().starts_with('}');
    Some((at..at, if empty { Cow::from(member) } else { Cow::from(format!("{member},")) }))
}

/// Where in `text` its part `part` lies.
fn place(text: &str, part: &str) -> Range<usize> {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    start..start + part.len()
}

/// `edits` are in the order of their places, which do not overlap.
fn apply(body: &[u8], edits: &[Edit]) -> Bytes {
    let added: usize = edits.iter().map(|(_, text)| text.len()).sum();
    let mut changed = Vec::with_capacity(body.len() + added);
    let mut at = 0;
    for (range, text) in edits {
        changed.extend_from_slice(&body[at..range.start]);
        changed.extend_from_slice(text.as_bytes());
        at = range.end;
    }
    changed.extend_from_slice(&body[at..]);
    changed.into()
}

/// The members `names` of an object as they are spelt, the last one where a name comes twice, as Python has it. `None` if `text`
/// is no JSON object.
fn members<'t, const N: usize>(text: &'t str, names: [&str; N]) -> Option<[Option<&'t str>; N]> {
    let mut json = serde_json::Deserializer::from_str(text);
    let found = Names(names).deserialize(&mut json).ok()?;
    json.end().ok()?;
    Some(found)
}

struct Names<'n, const N: usize>([&'n str; N]);

impl<'de, const N: usize> DeserializeSeed<'de> for Names<'_, N> {
    type Value = [Option<&'de str>; N];

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, const N: usize> Visitor<'de> for Names<'_, N> {
    type Value = [Option<&'de str>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            match self.0.iter().position(|wanted| *wanted == name) {
                Some(at) => found[at] = Some(map.next_value::<&'de RawValue>()?.get()),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn chat(members: &str) -> String {
        format!(r#"{{"messages":[],{members}}}"#)
    }

    fn asked(body: &str) -> Option<String> {
        let asked = ask_for_usage(Endpoint::Chat, body.as_bytes())?;
        Some(String::from_utf8(asked.to_vec()).unwrap())
    }

    #[test]
    fn the_option_is_put_in_and_nothing_else_changes() {
        for (before, after) in [
            (
                " {\n \"messages\" : [] ,\"stream\": true }",
                " {\"stream_options\":{\"include_usage\":true},\n \"messages\" : [] ,\"stream\": true }",
            ),
            (
                r#"{"messages":[],"stream":true,"stream_options": null}"#,
                r#"{"messages":[],"stream":true,"stream_options": {"include_usage":true}}"#,
            ),
            (
                r#"{"stream_options":{ },"messages":[],"stream":true}"#,
                r#"{"stream_options":{"include_usage":true },"messages":[],"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"x":1},"messages":[],"stream":true}"#,
                r#"{"stream_options":{"include_usage":true,"x":1},"messages":[],"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"include_usage" : false},"messages":[],"stream":true}"#,
                r#"{"stream_options":{"include_usage" : true},"messages":[],"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"continuous_usage_stats":true,"include_usage":null},"messages":[],"stream":true}"#,
                r#"{"stream_options":{"continuous_usage_stats":false,"include_usage":true},"messages":[],"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"continuous_usage_stats":true},"messages":[],"stream":true}"#,
                r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":false},"messages":[],"stream":true}"#,
            ),
            // The last of two members counts.
            (
                r#"{"stream_options":{"include_usage":true},"messages":[],"stream":false,"stream":true,"stream_options":null}"#,
                r#"{"stream_options":{"include_usage":true},"messages":[],"stream":false,"stream":true,"stream_options":{"include_usage":true}}"#,
            ),
            (
                r#"{"str\u0065am":true,"messages":[],"stream_options":{"include_usage":true,"include_us\u0061ge":false}}"#,
                r#"{"str\u0065am":true,"messages":[],"stream_options":{"include_usage":true,"include_us\u0061ge":true}}"#,
            ),
        ] {
            assert_eq!(asked(before).as_deref(), Some(after), "{before}");
        }
    }

    #[test]
    fn what_needs_nothing_or_is_in_doubt_goes_on_as_it_came() {
        for members in [
            r#""stream":true,"stream_options":{"include_usage":true}"#,
            r#""stream":true,"stream_options":{"include_usage":false,"include_usage":true}"#,
            r#""stream":true,"stream_options":{"include_usage":1}"#,
            r#""stream":true,"stream_options":{"include_usage":"no"}"#,
            r#""stream":true,"stream_options":{"continuous_usage_stats":1}"#,
            r#""stream":true,"stream_options":false"#,
            r#""stream":true,"stream_options":[]"#,
            r#""stream":true,"n":2"#,
            r#""stream":true,"n":1.0"#,
            r#""stream":true,"prompt_embeds":"AAAA""#,
            r#""stream":true,"stream":false"#,
            r#""stream":1"#,
            r#""stream":"true""#,
            r#""stream":null"#,
            r#""n":1"#,
            r#""stream":true,"messages":null"#,
            r#""stream":true,"messages":"x""#,
            r#""stream":true,"#,
        ] {
            assert_eq!(asked(&chat(members)), None, "{members}");
        }
        for body in ["", "{}", "[]", "true", r#"{"stream":true}"#, "{\"messages\":[],\"stream\":true} x"] {
            assert_eq!(asked(body), None, "{body}");
        }
        assert_eq!(ask_for_usage(Endpoint::Chat, b"{\"messages\":[\"\xff\"],\"stream\":true}"), None);
        for endpoint in [Endpoint::Responses, Endpoint::Messages] {
            let body = br#"{"messages":[],"input":"x","stream":true}"#;
            assert_eq!(ask_for_usage(endpoint, body), None);
        }
    }

    #[test]
    fn requests_with_several_answers_are_left_alone() {
        let asks = |prompt: &str| {
            let body = format!(r#"{{"prompt":{prompt},"stream":true}}"#);
            ask_for_usage(Endpoint::Completions, body.as_bytes()).is_some()
        };
        for single in [r#""x""#, "[1,2,3]", "[ 1 ]", r#"["x"]"#, "[[1,2]]"] {
            assert!(asks(single), "{single}");
        }
        for other in [r#"["x","y"]"#, "[[1],[2]]", "[]", "null", "7", "{}", "true"] {
            assert!(!asks(other), "{other}");
        }
    }

    fn json() -> impl Strategy<Value = String> {
        let leaf =
            prop::sample::select(vec!["null", "true", "false", "0", "1", "\"x\"", "[]", "{}", "\"}{\\\"\""]);
        let name = prop::sample::select(vec![
            "stream",
            "stream_options",
            "include_usage",
            "continuous_usage_stats",
            "messages",
            "n",
            "x",
        ]);
        let leaf = leaf.prop_map(str::to_owned);
        leaf.prop_recursive(3, 24, 6, move |inner| {
            prop::collection::vec((name.clone(), inner, prop::sample::select(vec!["", " ", "\n\t"])), 0..6)
                .prop_map(|members| {
                    let members: Vec<String> = members
                        .into_iter()
                        .map(|(name, value, space)| format!("{space}\"{name}\"{space}:{space}{value}{space}"))
                        .collect();
                    format!("{{{}}}", members.join(","))
                })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        #[test]
        fn a_changed_body_says_the_same_but_for_the_option(inner in json()) {
            let body = inner.replacen('{', r#"{"messages":[],"stream":true,"#, 1).replace(",}", "}");
            let Some(changed) = asked(&body) else { return Ok(()) };
            let before: Value = serde_json::from_str(&body).unwrap();
            let mut after: Value = serde_json::from_str(&changed).unwrap();
            prop_assert_eq!(&after["stream_options"]["include_usage"], true);
            let options = after["stream_options"].as_object_mut().unwrap();
            options.remove("include_usage");
            let mut expected = before.clone();
            if let Some(asked) = expected["stream_options"].as_object_mut() {
                let usage = asked.remove("include_usage").unwrap_or_default();
                prop_assert!(usage == Value::Null || usage == false);
                if asked.get("continuous_usage_stats") == Some(&true.into()) {
                    asked.insert("continuous_usage_stats".into(), false.into());
                }
            } else {
                prop_assert!(before["stream_options"].is_null());
                expected["stream_options"] = serde_json::json!({});
            }
            prop_assert_eq!(after, expected);
        }
    }
}
