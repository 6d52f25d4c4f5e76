//! The reader's slow twin: the same canonical bytes from a tree, in plain string work, for tests and fuzzing.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::core::blocks::HashKey;
use crate::core::prompt::canon::{Canon, MEDIA_BYTES, MOST_MEDIA};
use crate::core::prompt::json::Document;
use crate::core::prompt::request::Request;
use crate::core::prompt::{Endpoint, Opaque};

pub mod bodies;
#[cfg(test)]
mod tests;

/// Namespace and stream of a body.
pub type Canonical = (Vec<u8>, Vec<u8>);

/// As the product has them, in its own code.
pub fn fast(endpoint: Endpoint, body: &[u8], key: &HashKey) -> Result<Canonical, Opaque> {
    let (document, outcome) = Document::check(body);
    outcome?;
    let request = Request::new(endpoint, document.root());
    let prompt = request.prompt()?;
    let mut namespace = Vec::new();
    request.write_namespace(prompt, &mut namespace);
    let mut canon = Canon::new(Vec::new(), key);
    request.write_stream(prompt, &mut canon)?;
    Ok((namespace, canon.sink))
}

/// As this twin has them. `Opaque::Json` if `serde_json` finds no tree in the body (lone surrogates, invalid UTF-8).
pub fn slow(endpoint: Endpoint, body: &[u8], key: &HashKey) -> Result<Canonical, Opaque> {
    let text = std::str::from_utf8(body).map_err(|_| Opaque::Json)?;
    let tree = serde_json::from_str(text).map_err(|_| Opaque::Json).and_then(Tree::of)?;
    if !matches!(tree, Tree::Object(_)) {
        return Err(Opaque::Json);
    }
    let mut twin = Twin { key, out: Vec::new(), media: 0 };
    let kind = twin.stream(endpoint, &tree)?;
    Ok((namespace(endpoint, kind, &tree).into_bytes(), twin.out))
}

/// JSON with its keys in order and its numbers as spelled.
#[derive(Clone, Debug)]
pub enum Tree {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Tree>),
    Object(Vec<(String, Tree)>),
}

struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;
            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

impl Tree {
    fn of(raw: &RawValue) -> Result<Tree, Opaque> {
        let text = raw.get();
        let bad = |_| Opaque::Json;
        Ok(match text.as_bytes().first() {
            Some(b'n') => Tree::Null,
            Some(b't' | b'f') => Tree::Bool(text == "true"),
            Some(b'"') => Tree::Text(serde_json::from_str(text).map_err(bad)?),
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(text).map_err(bad)?;
                Tree::List(items.into_iter().map(Tree::of).collect::<Result<_, _>>()?)
            }
            Some(b'{') => {
                let Members(members) = serde_json::from_str(text).map_err(bad)?;
                let member = |(key, raw)| Ok((key, Tree::of(raw)?));
                Tree::Object(members.into_iter().map(member).collect::<Result<_, _>>()?)
            }
            _ => Tree::Number(text.to_owned()),
        })
    }

    fn get(&self, name: &str) -> Option<&Tree> {
        let Tree::Object(members) = self else { return None };
        let (_, value) = members.iter().rev().find(|(key, _)| key == name)?;
        if matches!(value, Tree::Null) { None } else { Some(value) }
    }

    fn text(&self) -> Option<&str> {
        if let Tree::Text(text) = self { Some(text) } else { None }
    }

    fn word(&self, name: &str) -> &str {
        self.get(name).and_then(Tree::text).unwrap_or("")
    }

    fn list(&self) -> Result<&[Tree], Opaque> {
        if let Tree::List(items) = self { Ok(items) } else { Err(Opaque::Shape) }
    }

    fn is_empty(&self) -> bool {
        match self {
            Tree::List(items) => items.is_empty(),
            Tree::Object(members) => members.is_empty(),
            _ => false,
        }
    }

    fn some(&self, name: &str) -> Option<&Tree> {
        self.get(name).filter(|value| !value.is_empty())
    }

    /// Canonical JSON.
    pub fn compact(&self) -> String {
        match self {
            Tree::Null => "null".to_owned(),
            Tree::Bool(truth) => truth.to_string(),
            Tree::Number(digits) => digits.clone(),
            Tree::Text(text) => format!("\"{}\"", escaped(text)),
            Tree::List(items) => {
                format!("[{}]", items.iter().map(Tree::compact).collect::<Vec<_>>().join(","))
            }
            Tree::Object(members) => {
                let member =
                    |(key, value): &(String, Tree)| format!("\"{}\":{}", escaped(key), value.compact());
                format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
            }
        }
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '"' => out += "\\\"",
            '\\' => out += "\\\\",
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\u{8}' => out += "\\b",
            '\u{c}' => out += "\\f",
            '\0'..' ' => out += &format!("\\u{:04x}", u32::from(character)),
            _ => out.push(character),
        }
    }
    out
}

fn namespace(endpoint: Endpoint, kind: &str, body: &Tree) -> String {
    let mut out = kind.to_owned();
    let mut root = |label: &str, value: Option<&Tree>, defaults: &[&str]| {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            let value = value.compact();
            if !defaults.contains(&value.as_str()) {
                out += &format!("\n{label} {value}");
            }
        }
    };
    let inner = |outer: &str, name: &str| body.get(outer).and_then(|outer| outer.get(name));
    root("model", body.get("model"), &[]);
    root("salt", body.get("cache_salt"), &[]);
    let chatty = endpoint != Endpoint::Completions;
    if endpoint == Endpoint::Chat {
        root("template", body.get("chat_template"), &[]);
    }
    if chatty {
        root("template_kwargs", body.get("chat_template_kwargs"), &[]);
    }
    match endpoint {
        Endpoint::Chat => root("effort", body.get("reasoning_effort"), &[]),
        Endpoint::Responses => root("effort", inner("reasoning", "effort"), &[]),
        Endpoint::Messages => root("effort", inner("output_config", "effort"), &[]),
        Endpoint::Completions => root("special_tokens", body.get("add_special_tokens"), &["true"]),
    }
    match endpoint {
        Endpoint::Chat => root("special_tokens", body.get("add_special_tokens"), &["false"]),
        Endpoint::Completions => root("suffix", body.get("suffix"), &[]),
        Endpoint::Messages => root("thinking", inner("thinking", "type"), &["\"enabled\"", "\"adaptive\""]),
        Endpoint::Responses => {}
    }
    if matches!(endpoint, Endpoint::Chat | Endpoint::Responses) {
        root("processor", body.get("mm_processor_kwargs"), &[]);
        root("media_io", body.get("media_io_kwargs"), &[]);
    }
    match endpoint {
        Endpoint::Responses => root("truncate", body.get("truncation"), &["\"disabled\""]),
        Endpoint::Messages => {}
        Endpoint::Chat | Endpoint::Completions => {
            root("truncate", body.get("truncate_prompt_tokens"), &[]);
            root("side", body.get("truncation_side"), &[]);
        }
    }
    out
}

/// Takes the line that changes with every request off a system text; `None` if nothing is left.
fn unbilled(text: &str) -> Option<&str> {
    if !text.starts_with("x-anthropic-billing-header") {
        return Some(text);
    }
    text.split_once('\n').map(|(_, rest)| rest).filter(|rest| !rest.is_empty())
}

struct Twin<'k> {
    key: &'k HashKey,
    out: Vec<u8>,
    media: usize,
}

type Written = Result<(), Opaque>;

#[expect(clippy::unit_arg, reason = "a branch that writes and is done reads best as one line")]
impl Twin<'_> {
    fn stream(&mut self, endpoint: Endpoint, body: &Tree) -> Result<&'static str, Opaque> {
        match endpoint {
            Endpoint::Chat => self.chat(body)?,
            Endpoint::Responses => self.responses(body)?,
            Endpoint::Messages => self.messages(body)?,
            Endpoint::Completions => return self.completions(body),
        }
        Ok("chat")
    }

    fn put(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    fn text(&mut self, text: &str) {
        self.put(&format!("\"{}\"", escaped(text)));
    }

    fn tagged(&mut self, tag: &str, value: Option<&Tree>) {
        if let Some(value) = value {
            self.put(tag);
            self.put(&value.compact());
        }
    }

    fn listed(&mut self, tag: &str, object: &Tree, names: &[&str]) {
        let values: Vec<_> =
            names.iter().map(|name| object.get(name).unwrap_or(&Tree::Null).clone()).collect();
        self.tagged(tag, Some(&Tree::List(values)));
    }

    fn media(&mut self, medium: &str, what: &str) {
        let digest = blake3::keyed_hash(&self.key.0, format!("{medium}{what}").as_bytes());
        self.put("I");
        self.media += 1;
        for _ in 0..if self.media > MOST_MEDIA { 1 } else { MEDIA_BYTES / 32 } {
            self.out.extend_from_slice(digest.as_bytes());
        }
    }

    fn completions(&mut self, body: &Tree) -> Result<&'static str, Opaque> {
        if let Some(embeddings) = body.some("prompt_embeds") {
            let first = if let Tree::List(items) = embeddings { &items[0] } else { embeddings };
            first.text().ok_or(Opaque::Shape)?;
            self.media("e", &first.compact());
            return Ok("embeds");
        }
        let prompt = body.some("prompt").ok_or(Opaque::Shape)?;
        let ids = match prompt {
            Tree::Text(text) => {
                self.put(&escaped(text));
                return Ok("text");
            }
            Tree::List(items) => match &items[0] {
                Tree::Text(text) => {
                    self.put(&escaped(text));
                    return Ok("text");
                }
                Tree::List(ids) => ids,
                _ => items,
            },
            _ => return Err(Opaque::Shape),
        };
        for id in ids {
            let Tree::Number(digits) = id else { return Err(Opaque::Shape) };
            let id: u32 = digits.parse().map_err(|_| Opaque::Shape)?;
            self.out.extend(id.to_le_bytes());
        }
        Ok("ids")
    }

    fn chat(&mut self, body: &Tree) -> Written {
        let messages = body.get("messages").ok_or(Opaque::Shape)?;
        self.tagged("t", body.some("tools"));
        self.tagged("d", body.some("documents"));
        for message in messages.list()? {
            self.message(message)?;
        }
        if matches!(body.get("add_generation_prompt"), Some(Tree::Bool(false))) {
            self.put("g");
        }
        if matches!(body.get("continue_final_message"), Some(Tree::Bool(true))) {
            self.put("o");
        }
        Ok(())
    }

    fn message(&mut self, message: &Tree) -> Written {
        let role = message.get("role").and_then(Tree::text).ok_or(Opaque::Shape)?;
        self.put("m");
        self.text(role);
        self.tagged("n", message.get("name"));
        self.tagged("r", message.get("reasoning").or(message.get("reasoning_content")));
        self.content(role == "system", message.get("content"))?;
        self.tagged("k", message.some("tool_calls"));
        self.tagged("i", message.get("tool_call_id"));
        self.tagged("t", message.some("tools"));
        self.tagged("w", message.get("task"));
        Ok(())
    }

    fn content(&mut self, system: bool, content: Option<&Tree>) -> Written {
        self.put("c");
        let before = self.out.len();
        match content {
            None => {}
            Some(Tree::Text(text)) => self.said(system, text),
            Some(Tree::List(parts)) => {
                for part in parts {
                    self.part(system, part)?;
                }
            }
            Some(_) => return Err(Opaque::Shape),
        }
        if self.out.len() == before {
            self.text("");
        }
        Ok(())
    }

    fn said(&mut self, system: bool, text: &str) {
        if let Some(text) = if system { unbilled(text) } else { Some(text) } {
            self.text(text);
        }
    }

    fn part(&mut self, system: bool, part: &Tree) -> Written {
        match part {
            Tree::Text(text) => return Ok(self.said(system, text)),
            Tree::Object(_) => {}
            _ => return Err(Opaque::Shape),
        }
        let member = match part.word("type") {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            "thinking" => "thinking",
            "tool_reference" => return Ok(self.tagged("f", part.get("name"))),
            "prompt_embeds" => {
                let data = part.get("data").ok_or(Opaque::Shape)?.compact();
                return Ok(self.media("e", &data));
            }
            _ => return Ok(self.other_part(part)),
        };
        match part.get(member) {
            None => Ok(()),
            Some(text) => Ok(self.said(system, text.text().ok_or(Opaque::Shape)?)),
        }
    }

    fn other_part(&mut self, part: &Tree) {
        let kinds = [
            ("image_url", "i"),
            ("image_embeds", "i"),
            ("audio_embeds", "a"),
            ("video_embeds", "v"),
            ("prompt_embeds", "e"),
            ("audio_url", "a"),
            ("input_audio", "a"),
            ("video_url", "v"),
        ];
        let found = kinds.into_iter().find_map(|(name, medium)| Some((part.get(name)?, medium)));
        match (found, part.get("uuid")) {
            (None, None) => self.tagged("u", Some(part)),
            (found, Some(uuid)) => {
                self.media(found.map_or("i", |(_, medium)| medium), &format!("uuid {}", uuid.compact()));
            }
            (Some((value, medium)), None) => self.media(medium, &value.get("url").unwrap_or(value).compact()),
        }
    }

    fn responses(&mut self, body: &Tree) -> Written {
        if body.get("previous_response_id").is_some() {
            return Err(Opaque::Stored);
        }
        let input = body.get("input").ok_or(Opaque::Shape)?;
        self.tagged("t", body.some("tools"));
        self.tagged("u", body.some("previous_input_messages"));
        if let Some(instructions) = body.get("instructions").filter(|value| value.text() != Some("")) {
            self.put("m\"system\"");
            self.content(true, Some(instructions))?;
        }
        if input.text().is_some() {
            self.put("m\"user\"");
            return self.content(false, Some(input));
        }
        for item in input.list()? {
            self.item(item)?;
        }
        Ok(())
    }

    fn item(&mut self, item: &Tree) -> Written {
        if !matches!(item, Tree::Object(_)) {
            return Err(Opaque::Shape);
        }
        let kind = item.word("type");
        if item.get("role").is_some() && (item.get("type").is_none() || kind == "message") {
            return self.message(item);
        }
        match kind {
            "function_call" | "custom_tool_call" => {
                self.listed("k", item, &["call_id", "namespace", "name", "arguments", "input"]);
            }
            "function_call_output" | "custom_tool_call_output" => {
                self.put("m\"tool\"");
                self.content(false, item.get("output"))?;
                self.tagged("i", item.get("call_id"));
            }
            "reasoning" => {
                let texts = item.some("content").or(item.some("summary"));
                let first = texts.and_then(|texts| texts.list().ok()?.first());
                self.tagged("r", first.and_then(|first| first.get("text")));
            }
            _ => self.tagged("u", Some(item)),
        }
        Ok(())
    }

    fn messages(&mut self, body: &Tree) -> Written {
        let messages = body.get("messages").ok_or(Opaque::Shape)?;
        if let Some(tools) = body.some("tools") {
            for tool in tools.list()? {
                self.listed("t", tool, &["name", "description", "input_schema", "strict", "defer_loading"]);
            }
        }
        match body.get("system") {
            None => {}
            Some(Tree::Text(text)) => self.system(unbilled(text).unwrap_or("")),
            Some(blocks) => self.system(&system_text(blocks)?),
        }
        for message in messages.list()? {
            let role = message.get("role").and_then(Tree::text).ok_or(Opaque::Shape)?;
            let content = message.get("content").ok_or(Opaque::Shape)?;
            if role == "system" {
                let text = system_text(content)?;
                self.system(&text);
                continue;
            }
            self.put("m");
            self.text(role);
            self.blocks(content, true)?;
        }
        Ok(())
    }

    fn system(&mut self, text: &str) {
        if !text.is_empty() {
            self.put("m\"system\"c");
            self.text(text);
        }
    }

    fn blocks(&mut self, content: &Tree, results: bool) -> Written {
        self.put("c");
        if let Some(text) = content.text() {
            return Ok(self.text(text));
        }
        for block in content.list()? {
            let kind = block.get("type").and_then(Tree::text).ok_or(Opaque::Shape)?;
            match kind {
                "text" if block.word("text").is_empty() => {}
                "text" => self.text(block.word("text")),
                "image" => self.image(block.get("source").ok_or(Opaque::Shape)?),
                "thinking" => self.tagged("r", block.get("thinking")),
                "tool_use" => self.listed("k", block, &["id", "name", "input"]),
                "tool_result" => self.tagged("i", block.get("tool_use_id")),
                "tool_reference" => self.tagged("f", block.get("tool_name").or(block.get("name"))),
                "redacted_thinking" => {}
                _ => self.tagged("u", Some(block)),
            }
            if kind == "tool_result" && results {
                match block.get("content") {
                    None => self.put("c"),
                    Some(result) => self.blocks(result, false)?,
                }
            }
        }
        Ok(())
    }

    fn image(&mut self, source: &Tree) {
        let url = match source.word("type") {
            "url" => source.get("url").unwrap_or(source).compact(),
            _ => {
                let kind = source.get("media_type").and_then(Tree::text).unwrap_or("image/jpeg");
                format!("\"data:{};base64,{}\"", escaped(kind), escaped(source.word("data")))
            }
        };
        self.media("i", &url);
    }
}

/// The system texts of a text or of blocks, run into one.
fn system_text(content: &Tree) -> Result<String, Opaque> {
    let billed = |text: &&str| !text.starts_with("x-anthropic-billing-header");
    match content {
        Tree::Text(text) => Ok(Some(text.as_str()).filter(billed).unwrap_or("").to_owned()),
        Tree::List(blocks) => {
            let text = |block| if Tree::word(block, "type") == "text" { block.word("text") } else { "" };
            Ok(blocks.iter().map(text).filter(billed).collect())
        }
        _ => Err(Opaque::Shape),
    }
}
