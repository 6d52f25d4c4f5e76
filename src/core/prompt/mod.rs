//! From a request body to the canonical prompt that keys its cache blocks, without a tree of the body. What cannot be read is
//! [`Opaque`], routed by load; reading never fails a request.
//!
//! Two requests get one chain if vLLM would render them to one prompt, as far as that can be told without its templates and
//! tokenizer. The chain's root is the *namespace*: whatever changes the rendering from its first token on (model, salt, template,
//! its arguments). What is rendered is the *stream*, in the order that most templates have: tools, documents, messages. What
//! vLLM does not render (ids, cache hints, sampling, `tool_choice`) is in neither. The shapes are those of vLLM 0.32's
//! protocols and its `parse_chat_messages`.

use crate::core::blocks::{Chain, ChainBuilder, HashKey};
use crate::core::prompt::canon::Canon;
use crate::core::prompt::json::Document;
use crate::core::prompt::request::Request;

mod canon;
mod chat;
mod check;
mod completions;
mod json;
mod messages;
mod request;
mod responses;
mod scan;
#[cfg(test)]
mod tests;
mod text;
#[cfg(any(test, feature = "testing"))]
pub mod twin;

/// The endpoints whose bodies have a prompt that vLLM caches.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages` (Anthropic)
    Messages,
}

/// Why a body has no cache key; a closed set, used as a metric label.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Opaque {
    /// Not JSON, or not an object.
    Json,
    /// JSON nested deeper than the reader follows (128).
    Depth,
    /// No prompt field, or one of a shape that vLLM refuses.
    Shape,
    /// The prompt goes on from something that only a worker has (`previous_response_id`).
    Stored,
}

/// What placement needs of one request body. What the body does not say has its default even where the prompt is opaque.
#[derive(Clone, Debug)]
pub struct Reading {
    /// As sent; empty if absent (vLLM then serves its default model). Cut at 1,024 bytes, and never a metric label unchecked.
    pub model: String,
    /// The answer is streamed.
    pub stream: bool,
    /// The stream will end with usage: `stream_options.include_usage`; always so for Responses and Messages.
    pub include_usage: bool,
    /// Most tokens to generate, if the request limits them. Chat: `max_completion_tokens`, else `max_tokens`. Completions: 16 if
    /// absent, as in vLLM.
    pub max_tokens: Option<u64>,
    /// Lower is sooner, 0 is usual; acts only where the engine schedules by priority.
    pub priority: i64,
    /// Images, audio, video or embeddings are in the prompt: each of the first 64 counts a fixed 2,048 bytes in the chain, so its
    /// bytes tell less of its tokens.
    pub media: bool,
    pub chain: Result<Chain, Opaque>,
}

/// Reads `body` for `endpoint`, in time linear in its length. `block_bytes` is the length of a block, at least 1.
pub fn read(endpoint: Endpoint, body: &[u8], key: &HashKey, block_bytes: usize) -> Reading {
    let (document, well_formed) = Document::check(body);
    let request = Request::new(endpoint, document.root());
    let mut media = false;
    let chain = well_formed.and_then(|()| {
        let prompt = request.prompt()?;
        let mut namespace = blake3::Hasher::new_keyed(&key.0);
        request.write_namespace(prompt, &mut namespace);
        let builder = ChainBuilder::rooted(key, block_bytes, *namespace.finalize().as_bytes());
        let mut canon = Canon::new(builder, key);
        request.write_stream(prompt, &mut canon)?;
        media = canon.media > 0;
        Ok(canon.sink.finish())
    });
    Reading {
        model: request.model(),
        stream: request.streams(),
        include_usage: request.includes_usage(),
        max_tokens: request.max_tokens(),
        priority: request.priority(),
        media,
        chain,
    }
}
