//! The prompt of `/v1/completions`: text, token ids or embeddings. Of a batch the first prompt is read: the others go where it
//! goes.

use crate::core::prompt::Opaque;
use crate::core::prompt::canon::{Canon, Medium, Pieces, Sink, write_json};
use crate::core::prompt::json::Value;
use crate::core::prompt::request::{Request, member};
use crate::core::prompt::text::Text;

/// A prompt that no chat template touches.
#[derive(Copy, Clone)]
pub(super) enum Plain<'d> {
    Text(Text<'d>),
    /// An array of token ids.
    Ids(Value<'d>),
    /// Base64 of a tensor.
    Embeddings(Value<'d>),
}

impl Plain<'_> {
    /// Keeps apart what can never be equal: ids and text have bytes in common, but no block.
    pub fn namespace(self) -> &'static [u8] {
        match self {
            Plain::Text(_) => b"text",
            Plain::Ids(_) => b"ids",
            Plain::Embeddings(_) => b"embeds",
        }
    }
}

/// Embeddings come before prompts, as in vLLM.
pub(super) fn find<'d>(request: &Request<'d>) -> Result<Plain<'d>, Opaque> {
    if let Some(embeddings) = request.get(member!("prompt_embeds")).filter(|value| !value.is_empty()) {
        let first = first_of(embeddings)?;
        return first.text().map(|_| Plain::Embeddings(first)).ok_or(Opaque::Shape);
    }
    let prompt = request.get(member!("prompt")).ok_or(Opaque::Shape)?;
    let first = first_of(prompt)?;
    if let Some(text) = first.text() {
        return Ok(Plain::Text(text));
    }
    if first.number().is_some() {
        return Ok(Plain::Ids(prompt));
    }
    first.items().map(|_| Plain::Ids(first)).ok_or(Opaque::Shape)
}

/// The first of a list, or what is no list.
fn first_of(value: Value) -> Result<Value, Opaque> {
    match value.items() {
        Some(mut items) => items.next().ok_or(Opaque::Shape),
        None => Ok(value),
    }
}

pub(super) fn write<S: Sink>(plain: Plain, canon: &mut Canon<S>) -> Result<(), Opaque> {
    match plain {
        Plain::Text(text) => text.write(&mut canon.sink),
        Plain::Embeddings(value) => canon.media(Medium::Embeddings, |hasher| write_json(value, hasher)),
        Plain::Ids(ids) => {
            let mut pieces = Pieces::new(&mut canon.sink);
            ids.whole_numbers(|id| pieces.put(&id.to_le_bytes())).ok_or(Opaque::Shape)?;
            pieces.flush();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::core::prompt::Endpoint::Completions;
    use crate::core::prompt::Opaque;
    use crate::core::prompt::tests::{alike, apart, canonical, chain, opaque, read_bytes, unrelated};

    fn prompt(prompt: &str) -> String {
        format!(r#"{{"model":"m","prompt":{prompt}}}"#)
    }

    const IDS: &str = "[1,2,3,4,5,6,7,8]";

    #[test]
    fn text_is_its_own_stream() {
        assert_eq!(
            canonical(Completions, &prompt(r#""a \"b\"""#)),
            ("text\nmodel \"m\"".into(), r#"a \"b\""#.into())
        );
        assert!(chain(Completions, &prompt(r#""""#)).is_empty());
    }

    #[test]
    fn a_longer_text_keeps_the_blocks_of_a_shorter_one() {
        let (short, long) = ("all of this is shared ".repeat(3), "all of this is shared ".repeat(9));
        let (short, long) = (
            chain(Completions, &prompt(&format!("\"{short}\""))),
            chain(Completions, &prompt(&format!("\"{long}\""))),
        );
        assert_eq!(short, long[..short.len()]);
    }

    #[test]
    fn the_first_of_a_batch_is_read() {
        let one = prompt(r#""a prompt of some length""#);
        alike(Completions, &one, &prompt(r#"["a prompt of some length"]"#));
        alike(Completions, &one, &prompt(r#"["a prompt of some length","another"]"#));
        alike(Completions, &prompt(IDS), &prompt(&format!("[{IDS},[7]]")));
    }

    #[test]
    fn ids_are_numbers_not_digits() {
        apart(Completions, &prompt("[1,23]"), &prompt("[12,3]"));
        apart(Completions, &prompt("[1,23]"), &prompt("[123]"));
        apart(Completions, &prompt("[1,2]"), &prompt("[2,1]"));
        alike(Completions, &prompt("[1,23]"), &prompt(" [ 1 ,\n23 ] "));
        assert_eq!(chain(Completions, &prompt("[1,2,3,4]")), chain(Completions, &prompt(IDS))[..1]);
        assert_eq!(chain(Completions, &prompt("[4294967295,0,0,0]")).len(), 1);
    }

    #[test]
    fn ids_and_text_share_nothing() {
        // "aaaa" as one id is 0x61616161.
        unrelated(
            Completions,
            &prompt(&format!("[{}]", ["1633771873"; 8].join(","))),
            &prompt(&format!("\"{}\"", "a".repeat(32))),
        );
    }

    #[test]
    fn embeddings_count_by_digest() {
        let with = |data: &str| format!(r#"{{"prompt_embeds":{data}}}"#);
        apart(Completions, &with(r#""aa""#), &with(r#""ab""#));
        alike(Completions, &with(r#""aa""#), &with(r#"["aa","bb"]"#));
        alike(Completions, &with(r#""aa""#), r#"{"prompt":"x","prompt_embeds":"aa"}"#);
        alike(Completions, &prompt(IDS), &prompt(IDS).replace('}', r#","prompt_embeds":[]}"#));
        assert!(read_bytes(Completions, with(r#""aa""#).as_bytes()).media);
        assert!(!chain(Completions, &with(r#""aa""#)).is_empty());
    }

    #[test]
    fn special_tokens_root_the_chain() {
        let with =
            |flag: &str| format!(r#"{{"prompt":"a prompt of some length","add_special_tokens":{flag}}}"#);
        alike(Completions, &with("true"), &with("null"));
        unrelated(Completions, &with("true"), &with("false"));
    }

    #[test]
    fn what_vllm_refuses_is_opaque() {
        for bad in [
            "null",
            "[]",
            "1",
            "true",
            "{}",
            "[1,\"a\"]",
            "[1.5]",
            "[-1]",
            "[4294967296]",
            "[true]",
            "[[1,\"a\"]]",
            "[{}]",
        ] {
            opaque(Completions, &prompt(bad), Opaque::Shape);
        }
        opaque(Completions, r#"{"prompt_embeds":7}"#, Opaque::Shape);
        opaque(Completions, r#"{"messages":[]}"#, Opaque::Shape);
    }
}
