//! From a request body to the canonical prompt that keys its cache blocks, without a tree of the body. What cannot be read is
//! [`Opaque`], routed by load; reading never fails a request.

use crate::core::blocks::{Chain, HashKey};

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
    /// JSON nested deeper than the reader follows.
    Depth,
    /// No prompt field, or one of a shape that vLLM refuses.
    Shape,
}

/// What placement needs of one request body.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// As sent; empty if absent (vLLM then serves its default model).
    pub model: String,
    pub chain: Chain,
    /// The answer is streamed.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// `max_completion_tokens`, else `max_tokens`.
    pub max_tokens: Option<u64>,
}

/// Reads `body` for `endpoint`. The error keeps what could be read before it (model and stream are often known).
pub fn read(
    _endpoint: Endpoint,
    _body: &[u8],
    _key: &HashKey,
    _block_bytes: usize,
) -> Result<Prompt, Opaque> {
    Err(Opaque::Shape)
}
