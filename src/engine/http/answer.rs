//! One request's answer: what has been generated of each choice, and how it is told, streamed or whole. The order of fields
//! and every null are vLLM's.

use std::fmt::Write;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc::UnboundedSender;

use super::request::{Generation, Kind};
use super::words;

const FINGERPRINT: &str = "vllm-0.32.0-5e5e5e5e";

/// One of a request's answers.
#[derive(Copy, Clone)]
pub(super) struct Choice {
    /// Which prompt it answers.
    pub prompt: usize,
    /// What its words are made from.
    pub seed: u64,
    pub tokens: u32,
    told: u32,
}

/// A request's answer in the making.
pub(super) struct Answer {
    kind: Kind,
    stream: bool,
    include_usage: bool,
    continuous_usage: bool,
    /// Whether `usage` tells cached tokens.
    details: bool,
    block_size: u32,
    /// Whether the request set a limit: it then ends with `length`, else with `stop`.
    limited: bool,
    pub choices: Vec<Choice>,
    unfinished: usize,
    /// Tokens of each prompt and how many of them were cached, as its first choice found it.
    prompts: Vec<(u32, Option<u32>)>,
    /// Up to the number of the choice.
    head: String,
    roles_told: bool,
    out: UnboundedSender<Bytes>,
}

/// What an answer is told under.
pub(super) struct Label<'a> {
    pub id: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    pub details: bool,
    pub block_size: u32,
}

impl Answer {
    pub fn new(generation: &Generation, label: &Label<'_>, out: UnboundedSender<Bytes>) -> Answer {
        let Generation { kind, prompts, n, .. } = generation;
        let mut choices = Vec::with_capacity(prompts.len() * *n as usize);
        for (index, prompt) in prompts.iter().enumerate() {
            for choice in 0..*n {
                let seed = prompt.chain.digest() ^ u64::from(choice).wrapping_mul(0xa076_1d64_78bd_642f);
                choices.push(Choice { prompt: index, seed, tokens: prompt.output_tokens, told: 0 });
            }
        }
        let object = match (kind, generation.stream) {
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Completion, _) => "text_completion",
        };
        let head = format!(
            r#"{}{{"id":{},"object":"{object}","created":{},"model":{},"choices":["#,
            if generation.stream { "data: " } else { "" },
            serde_json::Value::from(label.id),
            label.created,
            serde_json::Value::from(generation.model.as_str()),
        );
        Answer {
            kind: *kind,
            stream: generation.stream,
            include_usage: generation.include_usage,
            continuous_usage: generation.continuous_usage,
            details: label.details,
            block_size: label.block_size,
            limited: generation.max_tokens.is_some() || *kind == Kind::Completion,
            unfinished: choices.len(),
            choices,
            prompts: prompts.iter().map(|prompt| (prompt.tokens, None)).collect(),
            head,
            roles_told: false,
            out,
        }
    }

    pub fn admitted(&mut self, choice: usize, cached_tokens: u32) {
        let prompt = self.choices[choice].prompt;
        self.prompts[prompt].1.get_or_insert(cached_tokens);
    }

    /// Tells the next token of a choice. `arena` lends room for it. An answer that nobody reads any more is told in vain; the
    /// ticket's drop ends it.
    pub fn token(&mut self, choice: usize, arena: &mut BytesMut) {
        let Choice { seed, told, tokens, prompt } = self.choices[choice];
        self.choices[choice].told += 1;
        if !self.stream {
            return;
        }
        if self.kind == Kind::Chat && !std::mem::replace(&mut self.roles_told, true) {
            for index in 0..self.choices.len() {
                self.tell_role(index, arena);
            }
        }
        let before = match self.kind {
            Kind::Chat => r#","delta":{"content":""#,
            Kind::Completion => r#","text":""#,
        };
        let last = told + 1 == tokens;
        let after = match (self.kind, last) {
            (Kind::Chat, false) => r#""},"logprobs":null,"finish_reason":null,"token_ids":null}]"#,
            (Kind::Chat, true) => r#""},"logprobs":null,"finish_reason":""#,
            (Kind::Completion, false) => {
                r#"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]"#
            }
            (Kind::Completion, true) => r#"","logprobs":null,"finish_reason":""#,
        };
        put(arena, &[&self.head, r#"{"index":"#]);
        put_number(arena, choice as u32);
        put(arena, &[before, words::word(seed, told), after]);
        if last {
            let rest = match self.kind {
                Kind::Chat => r#"","stop_reason":null,"token_ids":null}]"#,
                Kind::Completion => r#"","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]"#,
            };
            put(arena, &[self.finish_reason(), rest]);
        }
        if self.continuous_usage {
            let usage = running_usage(self.prompts[prompt].0, told + 1);
            put(arena, &[&usage]);
        }
        if last && !self.include_usage {
            put(arena, &[",\"system_fingerprint\":\"", FINGERPRINT, "\""]);
        }
        put(arena, &["}\n\n"]);
        self.send(arena);
    }

    fn tell_role(&self, index: usize, arena: &mut BytesMut) {
        put(arena, &[&self.head, r#"{"index":"#]);
        put_number(arena, index as u32);
        put(arena, &[r#","delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]"#]);
        if self.continuous_usage {
            put(arena, &[&running_usage(self.prompts[self.choices[index].prompt].0, 0)]);
        }
        put(arena, &[",\"prompt_token_ids\":null,\"prompt_text\":null}\n\n"]);
        self.send(arena);
    }

    /// A choice has its last token. True once all have, and all is told.
    pub fn finished(&mut self, arena: &mut BytesMut) -> bool {
        self.unfinished -= 1;
        if self.unfinished > 0 {
            return false;
        }
        if !self.stream {
            let whole = self.whole();
            put(arena, &[&whole]);
        } else if self.include_usage {
            let usage = self.usage(false);
            let fingerprint = format!(",\"system_fingerprint\":\"{FINGERPRINT}\"}}\n\n");
            put(arena, &[&self.head, "],\"usage\":", &usage, &fingerprint]);
            self.send(arena);
        }
        if self.stream {
            put(arena, &["data: [DONE]\n\n"]);
        }
        self.send(arena);
        true
    }

    fn send(&self, arena: &mut BytesMut) {
        let _ = self.out.send(arena.split().freeze());
    }

    pub fn finish_reason(&self) -> &'static str {
        if self.limited { "length" } else { "stop" }
    }

    /// The body of an answer that is not streamed.
    fn whole(&self) -> String {
        let mut text = self.head.clone();
        for (index, choice) in self.choices.iter().enumerate() {
            let _ = write!(text, r#"{}{{"index":{index},"#, if index > 0 { "," } else { "" });
            text.push_str(match self.kind {
                Kind::Chat => r#""message":{"role":"assistant","content":""#,
                Kind::Completion => r#""text":""#,
            });
            (0..choice.tokens).for_each(|number| text.push_str(words::word(choice.seed, number)));
            if self.kind == Kind::Chat {
                text.push_str(
                    r#"","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"#,
                );
            } else {
                text.push_str(r#"","#);
            }
            let prompt = match self.kind {
                Kind::Chat => "",
                Kind::Completion => r#""prompt_logprobs":null,"prompt_token_ids":null,"#,
            };
            let _ = write!(
                text,
                r#""logprobs":null,"finish_reason":"{}","stop_reason":null,"token_ids":null,{prompt}"routed_experts":null}}"#,
                self.finish_reason()
            );
        }
        let prompt = match self.kind {
            Kind::Chat => r#""prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"#,
            Kind::Completion => "",
        };
        let _ = write!(
            text,
            r#"],"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{},{prompt}"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
            self.usage(true)
        );
        text
    }

    /// The whole request's usage: each prompt counts once, however many answers it has. With `nulls` as in an answer that is
    /// not streamed.
    fn usage(&self, nulls: bool) -> String {
        let prompt: u32 = self.prompts.iter().map(|(tokens, _)| tokens).sum();
        let cached: u32 = self.prompts.iter().filter_map(|(_, cached)| *cached).sum();
        let output: u32 = self.choices.iter().map(|choice| choice.told).sum();
        let full = |tokens: u32| tokens / self.block_size * self.block_size;
        let created: u32 =
            self.prompts.iter().map(|&(tokens, cached)| full(tokens) - cached.unwrap_or(0)).sum();
        let mut usage = format!(
            r#"{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{output}"#,
            prompt + output
        );
        if self.details {
            let _ = write!(usage, r#","prompt_tokens_details":{{"cached_tokens":{cached}"#);
            match (self.kind, nulls) {
                (Kind::Chat, _) => drop(write!(usage, r#","created_cache_tokens":{created}"#)),
                (Kind::Completion, true) => usage.push_str(r#","created_cache_tokens":null"#),
                (Kind::Completion, false) => {}
            }
            usage.push_str(if nulls { r#","multimodal_tokens":null}"# } else { "}" });
        } else if nulls {
            usage.push_str(r#","prompt_tokens_details":null"#);
        }
        usage.push_str(if nulls { r#","completion_tokens_details":null}"# } else { "}" });
        usage
    }
}

/// `continuous_usage_stats` of one choice: never tells cached tokens.
fn running_usage(prompt: u32, output: u32) -> String {
    let total = prompt + output;
    format!(
        r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output},"completion_tokens_details":null}}"#
    )
}

fn put(arena: &mut BytesMut, parts: &[&str]) {
    parts.iter().for_each(|part| arena.extend_from_slice(part.as_bytes()));
}

fn put_number(arena: &mut BytesMut, number: u32) {
    match number {
        0..10 => arena.extend_from_slice(&[b'0' + number as u8]),
        _ => arena.extend_from_slice(number.to_string().as_bytes()),
    }
}
