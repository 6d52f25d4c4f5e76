//! The outermost object of a body: its prompt, what roots the chain, and the few facts that placement needs besides.

use crate::core::prompt::canon::{Canon, Sink, write_json};
use crate::core::prompt::completions::Plain;
use crate::core::prompt::json::Value;
use crate::core::prompt::{Endpoint, Opaque, chat, completions, messages, responses};

/// Model names are shown to people; longer ones are nobody's.
const MOST_MODEL_BYTES: usize = 1024;

/// Every member of the outermost object that is read, on whatever endpoint. They are looked up together, once.
const MEMBERS: [&str; 33] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "input",
    "instructions",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "media_io_kwargs",
    "messages",
    "mm_processor_kwargs",
    "model",
    "output_config",
    "previous_input_messages",
    "previous_response_id",
    "priority",
    "prompt",
    "prompt_embeds",
    "reasoning",
    "reasoning_effort",
    "stream",
    "stream_options",
    "suffix",
    "system",
    "thinking",
    "tools",
    "truncate_prompt_tokens",
    "truncation",
    "truncation_side",
];

/// A request as its outermost object has it; `null` is as absent.
pub(super) struct Request<'d> {
    endpoint: Endpoint,
    members: [Option<Value<'d>>; MEMBERS.len()],
}

/// One of [`MEMBERS`].
#[derive(Copy, Clone)]
pub(super) struct Member(usize);

impl Member {
    /// By its name, which must be among them: in a constant, as all are, that is looked up and refused by the compiler.
    pub const fn named(name: &str) -> Member {
        let mut at = 0;
        while !is_same(MEMBERS[at].as_bytes(), name.as_bytes()) {
            at += 1;
        }
        Member(at)
    }
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// The [`Member`] of that name.
macro_rules! member {
    ($name:literal) => {
        const { $crate::core::prompt::request::Member::named($name) }
    };
}
pub(super) use member;

/// Where the prompt is.
#[derive(Copy, Clone)]
pub(super) enum Prompt<'d> {
    /// Rendered by the model's chat template.
    Chat(Value<'d>),
    /// Given to the tokenizer, or past it, as it is.
    Plain(Plain<'d>),
}

/// What changes the rendering from its start: its label in the namespace, the member (of the body, or one inside that), and how
/// its defaults are spelled. `null`, `{}` and `[]` count as absent everywhere.
struct Root {
    label: &'static str,
    member: Member,
    inner: &'static str,
    defaults: &'static [&'static str],
}

const fn root(label: &'static str, member: &'static str) -> Root {
    Root { label, member: Member::named(member), inner: "", defaults: &[] }
}

const KWARGS: Root = root("template_kwargs", "chat_template_kwargs");
const PROCESSOR: Root = root("processor", "mm_processor_kwargs");
const MEDIA_IO: Root = root("media_io", "media_io_kwargs");
const TRUNCATE: Root = root("truncate", "truncate_prompt_tokens");
const SIDE: Root = root("side", "truncation_side");
const SPECIAL_TOKENS: Root = root("special_tokens", "add_special_tokens");
/// The templates that know an effort say it in their first lines (gpt-oss), so it is a root like the others.
const EFFORT: Root = root("effort", "reasoning_effort");

const ALL_ROOTS: [Root; 2] = [root("model", "model"), root("salt", "cache_salt")];
const CHAT_ROOTS: [Root; 8] = [
    root("template", "chat_template"),
    KWARGS,
    EFFORT,
    Root { defaults: &["false"], ..SPECIAL_TOKENS },
    PROCESSOR,
    MEDIA_IO,
    TRUNCATE,
    SIDE,
];
const COMPLETION_ROOTS: [Root; 4] = [
    Root { defaults: &["true"], ..SPECIAL_TOKENS },
    // Text around a gap is rendered by a template of its own.
    root("suffix", "suffix"),
    TRUNCATE,
    SIDE,
];
const RESPONSES_ROOTS: [Root; 5] = [
    KWARGS,
    Root { member: member!("reasoning"), inner: "effort", ..EFFORT },
    PROCESSOR,
    MEDIA_IO,
    Root { member: member!("truncation"), defaults: &["disabled"], ..TRUNCATE },
];
const MESSAGES_ROOTS: [Root; 3] = [
    KWARGS,
    Root { member: member!("output_config"), inner: "effort", ..EFFORT },
    // Only switching it off is rendered; the budget is kept by the engine.
    Root {
        label: "thinking",
        member: member!("thinking"),
        inner: "type",
        defaults: &["enabled", "adaptive"],
    },
];

impl<'d> Request<'d> {
    pub fn new(endpoint: Endpoint, root: Value<'d>) -> Request<'d> {
        Request { endpoint, members: root.members(MEMBERS) }
    }

    /// A member of the outermost object.
    pub fn get(&self, Member(at): Member) -> Option<Value<'d>> {
        self.members[at]
    }

    /// Finds the prompt, without reading it.
    pub fn prompt(&self) -> Result<Prompt<'d>, Opaque> {
        match self.endpoint {
            Endpoint::Completions => completions::find(self).map(Prompt::Plain),
            Endpoint::Responses if self.get(member!("previous_response_id")).is_some() => Err(Opaque::Stored),
            Endpoint::Responses => self.get(member!("input")).map(Prompt::Chat).ok_or(Opaque::Shape),
            Endpoint::Chat | Endpoint::Messages => {
                self.get(member!("messages")).map(Prompt::Chat).ok_or(Opaque::Shape)
            }
        }
    }

    /// Model, salt, and every root that differs from its default.
    pub fn write_namespace(&self, prompt: Prompt<'d>, sink: &mut impl Sink) {
        sink.put(match prompt {
            Prompt::Chat(_) => b"chat",
            Prompt::Plain(plain) => plain.namespace(),
        });
        let roots: &[Root] = match self.endpoint {
            Endpoint::Chat => &CHAT_ROOTS,
            Endpoint::Completions => &COMPLETION_ROOTS,
            Endpoint::Responses => &RESPONSES_ROOTS,
            Endpoint::Messages => &MESSAGES_ROOTS,
        };
        for root in ALL_ROOTS.iter().chain(roots) {
            let value = match root.inner {
                "" => self.get(root.member),
                inner => self.get(root.member).and_then(|value| value.members([inner])[0]),
            };
            let usual = |value: Value| value.is_empty() || root.defaults.iter().any(|usual| value.is(usual));
            let Some(value) = value.filter(|value| !usual(*value)) else { continue };
            sink.put(b"\n");
            sink.put(root.label.as_bytes());
            sink.put(b" ");
            write_json(value, sink);
        }
    }

    pub fn write_stream<S: Sink>(&self, prompt: Prompt<'d>, canon: &mut Canon<S>) -> Result<(), Opaque> {
        match (prompt, self.endpoint) {
            (Prompt::Plain(plain), _) => completions::write(plain, canon),
            (Prompt::Chat(messages), Endpoint::Messages) => messages::write(self, messages, canon),
            (Prompt::Chat(input), Endpoint::Responses) => responses::write(self, input, canon),
            (Prompt::Chat(messages), _) => chat::write(self, messages, canon),
        }
    }

    pub fn model(&self) -> String {
        let text = self.get(member!("model")).and_then(Value::text);
        text.map_or_else(String::new, |text| text.display(MOST_MODEL_BYTES))
    }

    pub fn streams(&self) -> bool {
        self.get(member!("stream")).is_some_and(Value::is_true)
    }

    pub fn includes_usage(&self) -> bool {
        let asked =
            self.get(member!("stream_options")).and_then(|options| options.members(["include_usage"])[0]);
        let always = matches!(self.endpoint, Endpoint::Responses | Endpoint::Messages);
        always || asked.is_some_and(Value::is_true)
    }

    pub fn max_tokens(&self) -> Option<u64> {
        let number = |member| self.get(member)?.number()?.parse().ok();
        match self.endpoint {
            Endpoint::Chat => {
                number(member!("max_completion_tokens")).or_else(|| number(member!("max_tokens")))
            }
            Endpoint::Completions => number(member!("max_tokens")).or(Some(16)),
            Endpoint::Responses => number(member!("max_output_tokens")),
            Endpoint::Messages => number(member!("max_tokens")),
        }
    }

    pub fn priority(&self) -> i64 {
        self.get(member!("priority"))
            .and_then(Value::number)
            .and_then(|number| number.parse().ok())
            .unwrap_or(0)
    }
}
