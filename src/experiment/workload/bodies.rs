//! Users' own requests: JSON lines in OpenAI's format. A row is a request body, or an object that has one in `body`, as in
//! OpenAI's batch files, maybe with a `timestamp`: milliseconds, or a date and time as in RFC 3339.
//!
//! Which prompts begin alike is read as the proxy reads it, so that what a check of the file promises is what routing sees.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::schema::TEXT_BLOCK_TOKENS;
use crate::core::blocks::HashKey;
use crate::core::ids::BlockHash;
use crate::core::prompt::{self, Endpoint};
use crate::experiment::trace::Row;

/// Canonical bytes of a block, and of a token: what the proxy takes them to be until answers tell.
const BLOCK_BYTES: usize = 256;
const BYTES_PER_TOKEN: u64 = BLOCK_BYTES as u64 / TEXT_BLOCK_TOKENS as u64;
/// Tokens of an answer whose request does not limit it.
const USUAL_OUTPUT: u32 = 128;

/// A JSON object whose values stay as they were written: what a template renders of them may depend on it.
type Fields = BTreeMap<String, Box<RawValue>>;

/// One line, not yet understood.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub struct BodyRow(Fields);

impl Row for BodyRow {
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// One request.
pub struct Body {
    fields: Fields,
    /// Where it goes: `/v1/chat/completions` or `/v1/completions`.
    pub path: &'static str,
    /// The prompt as the proxy would key it, in blocks of about 64 tokens.
    pub chain: Arc<[BlockHash]>,
    /// By its bytes, four a token.
    pub prompt_tokens: u32,
    /// The most it asks for, 128 where it does not say.
    pub output_tokens: u32,
    pub timestamp_ms: Option<f64>,
}

impl Body {
    /// # Errors
    /// In words, if the row has no prompt that could be sent.
    pub fn read(row: BodyRow) -> Result<Body, String> {
        let BodyRow(mut outer) = row;
        let timestamp_ms = outer.remove("timestamp").map(|raw| time(&raw)).transpose()?;
        let fields: Fields = match outer.remove("body") {
            Some(body) => {
                serde_json::from_str(body.get()).map_err(|_| "`body` is not an object".to_owned())?
            }
            None => outer,
        };
        let (path, endpoint) = match (fields.contains_key("messages"), fields.contains_key("prompt")) {
            (true, _) => ("/v1/chat/completions", Endpoint::Chat),
            (false, true) => ("/v1/completions", Endpoint::Completions),
            _ => return Err("the request has neither `messages` nor `prompt`".to_owned()),
        };
        let text = serde_json::to_vec(&fields).map_err(|error| error.to_string())?;
        let reading = prompt::read(endpoint, &text, &HashKey([0; 32]), BLOCK_BYTES);
        let chain = reading.chain.map_err(|why| format!("its prompt cannot be read ({why:?})"))?;
        let tokens = |count: u64| u32::try_from(count.max(1)).unwrap_or(u32::MAX);
        Ok(Body {
            fields,
            path,
            chain: chain.widths.evened(&chain.hashes),
            prompt_tokens: tokens(chain.bytes / BYTES_PER_TOKEN),
            output_tokens: reading.max_tokens.map_or(USUAL_OUTPUT, tokens),
            timestamp_ms,
        })
    }

    /// The body to send: streamed, with usage, and asking for `model` and under `salt` where they are given.
    pub fn bytes(&self, model: Option<&str>, salt: Option<&str>) -> Bytes {
        let mut fields: BTreeMap<&str, &RawValue> =
            self.fields.iter().map(|(key, value)| (key.as_str(), &**value)).collect();
        let raw = |text: &str| RawValue::from_string(text.to_owned()).ok();
        let quoted =
            |text: Option<&str>| text.and_then(|text| raw(&serde_json::Value::from(text).to_string()));
        let added = [
            ("stream", raw("true")),
            ("stream_options", raw(r#"{"include_usage":true}"#)),
            ("model", quoted(model)),
            ("cache_salt", quoted(salt)),
        ];
        for (key, value) in &added {
            if let Some(value) = value {
                fields.insert(key, value);
            }
        }
        serde_json::to_vec(&fields).unwrap_or_default().into()
    }
}

fn time(raw: &RawValue) -> Result<f64, String> {
    let wrong = || "`timestamp` is neither milliseconds nor a date and time as in RFC 3339".to_owned();
    let found = match serde_json::from_str(raw.get()) {
        Ok(serde_json::Value::Number(number)) => number.as_f64(),
        Ok(serde_json::Value::String(text)) => {
            let since =
                humantime::parse_rfc3339_weak(&text).ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            since.map(|since| since.as_secs_f64() * 1e3)
        }
        _ => None,
    };
    found.filter(|at| at.is_finite() && *at >= 0.0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(row: &Value) -> Result<Body, String> {
        Body::read(serde_json::from_value(row.clone()).unwrap())
    }

    #[test]
    fn a_row_is_a_body_or_has_one() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(2000)}], "max_tokens": 9});
        let plain = read(&body).unwrap();
        let batch = json!({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body,
                           "timestamp": "1970-01-01T00:00:02Z"});
        let batch = read(&batch).unwrap();
        assert_eq!((plain.path, plain.output_tokens, plain.timestamp_ms), ("/v1/chat/completions", 9, None));
        assert_eq!((&batch.chain, batch.timestamp_ms), (&plain.chain, Some(2000.0)));
        assert!(
            (500..520).contains(&plain.prompt_tokens) && plain.chain.len() == 7,
            "{}",
            plain.prompt_tokens
        );
        let completion = read(&json!({"prompt": "hello", "timestamp": 5})).unwrap();
        assert_eq!((completion.path, completion.timestamp_ms), ("/v1/completions", Some(5.0)));
    }

    #[test]
    fn what_is_sent_streams_and_keeps_the_rest_as_written() {
        let text = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"tools":[{"b":1,"a":2.50}],"stream":false}"#;
        let body = Body::read(serde_json::from_str(text).unwrap()).unwrap();
        let sent = String::from_utf8(body.bytes(None, None).to_vec()).unwrap();
        assert!(sent.contains(r#""tools":[{"b":1,"a":2.50}]"#) && sent.contains(r#""model":"m""#), "{sent}");
        assert!(sent.contains(r#""stream":true,"stream_options":{"include_usage":true}"#), "{sent}");
        let other: Value = serde_json::from_slice(&body.bytes(Some("n\"n"), Some("s"))).unwrap();
        assert_eq!((&other["model"], &other["cache_salt"]), (&json!("n\"n"), &json!("s")));
    }

    #[test]
    fn rows_without_a_prompt_are_told() {
        for (row, what) in [
            (json!({"input": "x"}), "neither `messages` nor `prompt`"),
            (json!({"body": 5}), "`body` is not an object"),
            (json!({"messages": 5}), "cannot be read"),
            (json!({"prompt": "x", "timestamp": "soon"}), "`timestamp`"),
        ] {
            let error = read(&row).err().unwrap();
            assert!(error.contains(what), "{error}");
        }
    }
}
