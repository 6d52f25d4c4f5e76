//! From a request's body to what the worker is asked to generate, checked in vLLM's order and refused in its words.

use serde_json::{Map, Value};

use super::config::EngineConfig;
use super::error::ApiError;
use super::template::{self, Chat};
use super::tokenizer::{Chain, Tokenizer};

/// Answers to one prompt at most; each takes a place of its own in the worker.
const MOST_CHOICES: i64 = 128;

/// Characters that a token of the context may stand for at most before a prompt is refused unread.
const CHARACTERS_A_TOKEN: usize = 64;

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// One prompt of a request.
pub(super) struct Prompt {
    pub tokens: u32,
    pub chain: Chain,
    /// Tokens of each of its answers.
    pub output_tokens: u32,
}

/// What is asked for.
pub(super) struct Generation {
    pub kind: Kind,
    /// The model's name as served.
    pub model: String,
    pub prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub n: u32,
    /// The limit that the request set.
    pub max_tokens: Option<u32>,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    /// `request_id` of the body.
    pub id: Option<String>,
}

/// What requests are read against.
pub(super) struct Reader<'a> {
    pub config: &'a EngineConfig,
    pub tokenizer: &'a Tokenizer,
}

impl Reader<'_> {
    pub fn generation(&self, kind: Kind, body: &[u8]) -> Result<Generation, ApiError> {
        let body = object(body)?;
        let fields = Fields(&body);
        if kind == Kind::Chat {
            messages(&fields)?;
        }
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let options = &body.get("stream_options").unwrap_or(&Value::Null);
        if !options.is_null() && !stream {
            let message = "Stream options can only be defined when `stream=True`.";
            return Err(ApiError::parameter("stream_options", None, message));
        }
        let include_usage = options["include_usage"] == true;
        let salt = fields.string("cache_salt")?;
        if salt == Some("") {
            let message = "Parameter 'cache_salt' must be a non-empty string if provided.";
            return Err(ApiError::parameter("cache_salt", None, message));
        }
        let model = self.model(&fields)?;
        let max_tokens = limit(kind, &fields)?;
        let n = choices(&fields)?;
        temperature(&fields)?;
        if !matches!(body.get("suffix"), None | Some(Value::Null)) && kind == Kind::Completion {
            let message = "suffix is only supported for models with FIM completion rendering";
            return Err(ApiError::bad_request(message, Some("suffix")));
        }
        let namespace = [model.as_str(), salt.unwrap_or_default()];
        let prompts = match kind {
            Kind::Chat => vec![self.text_prompt(&chat_text(&fields)?, &namespace, max_tokens, kind)?],
            Kind::Completion => self.prompts(&body, &namespace, max_tokens)?,
        };
        Ok(Generation {
            kind,
            model,
            prompts,
            n,
            max_tokens,
            stream,
            include_usage,
            continuous_usage: include_usage && options["continuous_usage_stats"] == true,
            id: fields.string("request_id")?.map(str::to_owned),
        })
    }

    /// The tokens of a `/tokenize` body and, if it wants them, their texts.
    pub fn tokens(&self, body: &[u8]) -> Result<(Vec<u32>, Option<Vec<String>>), ApiError> {
        let body = object(body)?;
        let fields = Fields(&body);
        self.model(&fields)?;
        let text = match fields.string("prompt")? {
            Some(prompt) => prompt.to_owned(),
            None => chat_text(&fields)?,
        };
        let pieces = super::tokenizer::pieces(&text).inspect(|piece| self.tokenizer.remember(piece));
        let shown = |piece: &str| piece.replace(' ', "\u{120}").replace('\n', "\u{10a}");
        let texts: Vec<String> = pieces.map(shown).collect();
        let wanted = fields.boolean("return_token_strs")?.unwrap_or(false);
        Ok((self.tokenizer.ids(&text), wanted.then_some(texts)))
    }

    /// The token ids of a `/detokenize` body.
    pub fn detokenized(&self, body: &[u8]) -> Result<String, ApiError> {
        let body = object(body)?;
        self.model(&Fields(&body))?;
        match body.get("tokens") {
            Some(Value::Array(tokens)) => Ok(self.tokenizer.text(&self.token_ids(tokens)?)),
            Some(other) => Err(wrong_type("list_type", "tokens", "Input should be a valid list", other)),
            None => Err(missing(&body, "tokens")),
        }
    }

    /// The served name that is asked for; none asked for is the model.
    fn model(&self, fields: &Fields<'_>) -> Result<String, ApiError> {
        let asked = fields.string("model")?.unwrap_or_default();
        let known = asked.is_empty() || asked == self.config.model;
        if !known && !self.config.lora_modules.iter().any(|name| name == asked) {
            return Err(ApiError::unknown_model(asked, &self.config.model));
        }
        Ok(if asked.is_empty() { self.config.model.clone() } else { asked.to_owned() })
    }

    fn prompts(
        &self,
        body: &Map<String, Value>,
        namespace: &[&str],
        limit: Option<u32>,
    ) -> Result<Vec<Prompt>, ApiError> {
        let nothing = || {
            let message = "Either prompt or prompt_embeds must be provided and non-empty.";
            ApiError::parameter("prompt", None, message)
        };
        let text = |text: &str| self.text_prompt(text, namespace, limit, Kind::Completion);
        let ids = |ids: &[Value]| self.id_prompt(ids, namespace, limit);
        match body.get("prompt") {
            None | Some(Value::Null) => Err(nothing()),
            Some(Value::String(prompt)) if prompt.is_empty() => Err(nothing()),
            Some(Value::String(prompt)) => Ok(vec![text(prompt)?]),
            Some(Value::Array(list)) => match list.first() {
                None => Err(ApiError::bad_request("You must pass at least one prompt", None)),
                Some(Value::Number(_)) => Ok(vec![ids(list)?]),
                Some(_) => {
                    let one = |prompt: &Value| match prompt {
                        Value::String(prompt) => text(prompt),
                        Value::Array(tokens) => ids(tokens),
                        other => {
                            Err(wrong_type("string_type", "prompt", "Input should be a valid string", other))
                        }
                    };
                    list.iter().map(one).collect()
                }
            },
            Some(other) => Err(wrong_type("string_type", "prompt", "Input should be a valid string", other)),
        }
    }

    fn text_prompt(
        &self,
        text: &str,
        namespace: &[&str],
        limit: Option<u32>,
        kind: Kind,
    ) -> Result<Prompt, ApiError> {
        let context = self.config.max_model_len();
        let most = context as usize * CHARACTERS_A_TOKEN;
        let characters = if text.len() > most { text.chars().count() } else { 0 };
        if characters > most {
            let message = format!(
                "This model's maximum context length is {context} tokens. However, your prompt contains {characters} \
                 characters (more than {most} characters, which is the upper bound for {context} input tokens). Please \
                 reduce the length of the input prompt."
            );
            return Err(ApiError::parameter("input_text", Some(characters.to_string()), &message));
        }
        self.prompt(&self.tokenizer.ids(text), namespace, limit, kind)
    }

    fn id_prompt(&self, ids: &[Value], namespace: &[&str], limit: Option<u32>) -> Result<Prompt, ApiError> {
        self.prompt(&self.token_ids(ids)?, namespace, limit, Kind::Completion)
    }

    fn token_ids(&self, ids: &[Value]) -> Result<Vec<u32>, ApiError> {
        let one = |id: &Value| {
            let small = id.as_u64().and_then(|id| u32::try_from(id).ok());
            small.filter(|&id| id < self.tokenizer.vocab_size()).ok_or_else(|| match id {
                Value::Number(id) => {
                    ApiError::bad_request(&format!("Token id {id} is out of vocabulary"), None)
                }
                other => wrong_type("int_type", "prompt", "Input should be a valid integer", other),
            })
        };
        ids.iter().map(one).collect()
    }

    fn prompt(
        &self,
        ids: &[u32],
        namespace: &[&str],
        limit: Option<u32>,
        kind: Kind,
    ) -> Result<Prompt, ApiError> {
        if ids.is_empty() {
            return Err(ApiError::bad_request("The decoder prompt cannot be empty", None));
        }
        let context = self.config.max_model_len();
        let room = u64::from(context).saturating_sub(ids.len() as u64) as u32;
        if room == 0 {
            let value = context + 1;
            let message = format!(
                "This model's maximum context length is {context} tokens. However, your prompt contains at least {value} \
                 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the \
                 input prompt."
            );
            return Err(ApiError::parameter("input_tokens", Some(value.to_string()), &message));
        }
        let unlimited =
            if kind == Kind::Chat { self.config.answer_tokens } else { DEFAULT_COMPLETION_TOKENS };
        let mut chain = Chain::new(self.config.engine.block_size, namespace);
        ids.iter().for_each(|&id| chain.push(id));
        Ok(Prompt { tokens: ids.len() as u32, chain, output_tokens: limit.unwrap_or(unlimited).min(room) })
    }
}

/// `max_tokens` of a completion that sets none, as OpenAI has it.
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

/// The fields of a body, as the types that they should have. Null counts as absent.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let message = "Input should be a valid boolean";
        self.get(name)
            .map(|v| v.as_bool().ok_or_else(|| wrong_type("bool_type", name, message, v)))
            .transpose()
    }

    fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let message = "Input should be a valid integer";
        self.get(name).map(|v| v.as_i64().ok_or_else(|| wrong_type("int_type", name, message, v))).transpose()
    }

    fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let message = "Input should be a valid string";
        self.get(name)
            .map(|v| v.as_str().ok_or_else(|| wrong_type("string_type", name, message, v)))
            .transpose()
    }
}

fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if body.is_empty() {
        return Err(ApiError::validation("missing", "body", "'msg': 'Field required', 'input': 'None'"));
    }
    let text = std::str::from_utf8(body).map_err(|_| ApiError::undecodable_body())?;
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let place = offset(text, &error);
        let rest =
            "'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}";
        ApiError::validation("json_invalid", &format!("body.{place}"), rest)
    })?;
    match value {
        Value::Object(body) => Ok(body),
        other => {
            let message = "Input should be a valid dictionary or object to extract fields from";
            let rest = format!("'msg': '{message}', 'input': '{}'", printed(&other));
            Err(ApiError::validation("model_attributes_type", "body", &rest))
        }
    }
}

/// Characters before the place where JSON stopped making sense.
fn offset(text: &str, error: &serde_json::Error) -> usize {
    if error.is_eof() {
        return text.chars().count();
    }
    let before: usize = text.split_inclusive('\n').take(error.line() - 1).map(str::len).sum();
    let at = (before + error.column().saturating_sub(1)).min(text.len());
    text.bytes().take(at).filter(|byte| byte & 0xc0 != 0x80).count()
}

/// A value as vLLM's validation messages print it.
fn printed(value: &Value) -> String {
    match value {
        Value::Object(fields) => format!("<dict of {} items>", fields.len()),
        Value::Array(items) => format!("<list of {} items>", items.len()),
        Value::String(text) => text.chars().take(100).collect(),
        Value::Null => "None".to_owned(),
        Value::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
        Value::Number(number) => number.to_string(),
    }
}

fn wrong_type(kind: &str, field: &str, message: &str, value: &Value) -> ApiError {
    let rest = format!("'msg': '{message}', 'input': '{}'", printed(value));
    ApiError::validation(kind, &format!("body.{field}"), &rest)
}

fn missing(body: &Map<String, Value>, field: &str) -> ApiError {
    let rest = format!("'msg': 'Field required', 'input': '<dict of {} items>'", body.len());
    ApiError::validation("missing", &format!("body.{field}"), &rest)
}

fn messages<'a>(fields: &Fields<'a>) -> Result<&'a [Value], ApiError> {
    match fields.0.get("messages") {
        Some(Value::Array(messages)) => match messages.iter().find(|message| !message.is_object()) {
            Some(other) => {
                Err(wrong_type("dict_type", "messages", "Input should be a valid dictionary", other))
            }
            None => Ok(messages),
        },
        Some(other) => Err(wrong_type("list_type", "messages", "Input should be a valid list", other)),
        None => Err(missing(fields.0, "messages")),
    }
}

fn chat_text(fields: &Fields<'_>) -> Result<String, ApiError> {
    let messages = messages(fields)?;
    if messages.is_empty() {
        let message = "Cannot apply chat template to an empty conversation. Provide at least one message.";
        return Err(ApiError::bad_request(message, None));
    }
    let tools = fields.get("tools").and_then(Value::as_array);
    Ok(template::render(&Chat {
        messages,
        tools: tools.map_or(&[], Vec::as_slice),
        add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
        continue_final_message: fields.boolean("continue_final_message")?.unwrap_or(false),
    }))
}

/// The limit on output tokens; a chat may call it by its newer name.
fn limit(kind: Kind, fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let newer = if kind == Kind::Chat { fields.integer("max_completion_tokens")? } else { None };
    let Some(limit) = newer.map_or_else(|| fields.integer("max_tokens"), |limit| Ok(Some(limit)))? else {
        return Ok(None);
    };
    if limit < 1 {
        let message = format!("max_tokens must be at least 1, got {limit}.");
        return Err(ApiError::parameter("max_tokens", Some(limit.to_string()), &message));
    }
    Ok(Some(u32::try_from(limit).unwrap_or(u32::MAX)))
}

fn choices(fields: &Fields<'_>) -> Result<u32, ApiError> {
    let n = fields.integer("n")?.unwrap_or(1);
    if n < 1 {
        return Err(ApiError::bad_request(&format!("n must be at least 1, got {n}."), None));
    }
    if n > MOST_CHOICES {
        return Err(ApiError::bad_request(&format!("n must be at most {MOST_CHOICES}, got {n}."), None));
    }
    Ok(n as u32)
}

fn temperature(fields: &Fields<'_>) -> Result<(), ApiError> {
    let temperature = fields.get("temperature").and_then(Value::as_f64).unwrap_or(0.0);
    if temperature < 0.0 {
        let value = format!("{temperature:?}");
        let message = format!("temperature must be non-negative, got {value}.");
        return Err(ApiError::parameter("temperature", Some(value), &message));
    }
    Ok(())
}
