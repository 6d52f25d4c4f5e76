//! Request bodies out of random bytes: mostly such as clients send, sometimes not; spelled in any of JSON's ways.

use super::Tree;

/// Random bytes, spent one choice at a time; when they are gone every choice is the first.
pub struct Choices<'b>(pub &'b [u8]);

impl Choices<'_> {
    fn of(&mut self, options: usize) -> usize {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        usize::from(*first) % options
    }

    fn one<'o>(&mut self, options: &[&'o str]) -> &'o str {
        options[self.of(options.len())]
    }
}

/// What belongs in a member.
#[derive(Copy, Clone)]
enum Shape {
    Text,
    Kind,
    Flag,
    Any,
    Anys,
    /// Text or parts.
    Content,
    /// Text or messages.
    Messages,
    Prompt,
    /// An object with one text, of this name.
    With(&'static str),
    Source,
}

const BODY: [(&str, Shape); 26] = [
    ("messages", Shape::Messages),
    ("model", Shape::Text),
    ("prompt", Shape::Prompt),
    ("input", Shape::Messages),
    ("cache_salt", Shape::Text),
    ("prompt_embeds", Shape::Prompt),
    ("instructions", Shape::Content),
    ("system", Shape::Content),
    ("tools", Shape::Anys),
    ("documents", Shape::Anys),
    ("chat_template", Shape::Text),
    ("chat_template_kwargs", Shape::Any),
    ("mm_processor_kwargs", Shape::Any),
    ("media_io_kwargs", Shape::Any),
    ("reasoning_effort", Shape::Text),
    ("add_special_tokens", Shape::Flag),
    ("truncate_prompt_tokens", Shape::Any),
    ("truncation", Shape::Text),
    ("truncation_side", Shape::Text),
    ("add_generation_prompt", Shape::Flag),
    ("continue_final_message", Shape::Flag),
    ("reasoning", Shape::With("effort")),
    ("output_config", Shape::With("effort")),
    ("thinking", Shape::With("type")),
    ("suffix", Shape::Text),
    ("previous_input_messages", Shape::Anys),
];

const MESSAGE: [(&str, Shape); 16] = [
    ("role", Shape::Text),
    ("content", Shape::Content),
    ("type", Shape::Kind),
    ("name", Shape::Text),
    ("reasoning", Shape::Text),
    ("reasoning_content", Shape::Text),
    ("tool_calls", Shape::Anys),
    ("tool_call_id", Shape::Text),
    ("tools", Shape::Anys),
    ("task", Shape::Text),
    ("refusal", Shape::Text),
    ("call_id", Shape::Text),
    ("arguments", Shape::Text),
    ("output", Shape::Content),
    ("summary", Shape::Content),
    ("id", Shape::Any),
];

const PART: [(&str, Shape); 17] = [
    ("type", Shape::Kind),
    ("text", Shape::Text),
    ("refusal", Shape::Text),
    ("thinking", Shape::Text),
    ("image_url", Shape::With("url")),
    ("video_url", Shape::Text),
    ("input_audio", Shape::Any),
    ("image_embeds", Shape::Text),
    ("data", Shape::Text),
    ("uuid", Shape::Text),
    ("source", Shape::Source),
    ("id", Shape::Text),
    ("name", Shape::Text),
    ("input", Shape::Any),
    ("tool_use_id", Shape::Text),
    ("content", Shape::Content),
    ("tool_name", Shape::Text),
];

const SOURCE: [(&str, Shape); 4] =
    [("type", Shape::Text), ("url", Shape::Text), ("media_type", Shape::Text), ("data", Shape::Text)];

const KINDS: [&str; 19] = [
    "text",
    "message",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "image_url",
    "input_image",
    "prompt_embeds",
    "tool_reference",
    "image",
    "tool_use",
    "tool_result",
    "redacted_thinking",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "reasoning",
    "of tomorrow",
];

const WORDS: [&str; 16] = [
    "user",
    "system",
    "",
    "assistant",
    "disabled",
    "enabled",
    "url",
    "x-anthropic-billing-header: 1",
    "x-anthropic-billing-header: 1\nrest",
    "a\nb",
    "\"\\/\u{8}\u{c}\r\t\0\u{1f}\u{7f}",
    "é中😀\u{d7ff}\u{e000}\u{ffff}",
    "\\ud83d",
    "\",\"role\":\"",
    "x\n",
    "fffffff",
];

const NUMBERS: [&str; 8] = ["0", "1", "42", "4294967295", "4294967296", "-0", "1.0", "-2.50e+7"];

impl Choices<'_> {
    pub fn body(&mut self) -> Tree {
        self.object(&BODY, 4, 8)
    }

    /// An object whose first `usual` members are mostly there, and the others now and then.
    fn object(&mut self, members: &[(&str, Shape)], usual: usize, seldom: usize) -> Tree {
        let mut object = Vec::new();
        for (at, (name, shape)) in members.iter().enumerate() {
            let there = if at < usual { self.of(32) != 31 } else { self.of(seldom) == 1 };
            if there {
                object.push(((*name).to_owned(), self.member(*shape)));
            }
        }
        // The same key twice, once in a while.
        if self.of(16) == 1 && !object.is_empty() {
            let (name, shape) = members[self.of(members.len())];
            object.push((name.to_owned(), self.member(shape)));
        }
        Tree::Object(object)
    }

    fn member(&mut self, shape: Shape) -> Tree {
        if self.of(100) == 99 {
            return self.any(2);
        }
        match shape {
            Shape::Text => self.text(),
            Shape::Kind => Tree::Text(self.one(&KINDS).to_owned()),
            Shape::Flag => Tree::Bool(self.of(2) == 1),
            Shape::Any => self.any(3),
            Shape::Anys => self.list(|choices| choices.any(2)),
            Shape::With(name) => Tree::Object(vec![(name.to_owned(), self.text())]),
            Shape::Source => self.object(&SOURCE, 1, 2),
            Shape::Content if self.of(2) == 0 => self.text(),
            Shape::Content => self.list(|choices| match choices.of(32) {
                31 => choices.text(),
                _ => choices.object(&PART, 2, 10),
            }),
            Shape::Messages if self.of(8) == 7 => self.text(),
            Shape::Messages => self.list(|choices| choices.object(&MESSAGE, 2, 10)),
            Shape::Prompt => match self.of(4) {
                0 => self.text(),
                1 => self.list(Choices::text),
                2 => self.ids(),
                _ => self.list(Choices::ids),
            },
        }
    }

    fn ids(&mut self) -> Tree {
        self.list(|choices| Tree::Number((choices.of(256) * choices.of(256) * 70_000).to_string()))
    }

    fn list(&mut self, mut item: impl FnMut(&mut Self) -> Tree) -> Tree {
        Tree::List((0..self.of(4)).map(|_| item(self)).collect())
    }

    fn text(&mut self) -> Tree {
        let text: String = (0..=self.of(3)).map(|_| self.one(&WORDS)).collect();
        Tree::Text(if self.of(12) == 11 { text.repeat(40) } else { text })
    }

    fn any(&mut self, depth: usize) -> Tree {
        match self.of(if depth > 0 { 7 } else { 4 }) {
            0 => Tree::Null,
            1 => Tree::Bool(self.of(2) == 1),
            2 => Tree::Number(self.one(&NUMBERS).to_owned()),
            3 | 4 => self.text(),
            5 => self.list(|choices| choices.any(depth - 1)),
            _ => {
                let keys = ["a", "", "b\n", "text", "type", "url", "input"];
                let mut member = |_| (self.one(&keys).to_owned(), self.any(depth - 1));
                Tree::Object((0..3).map(&mut member).collect())
            }
        }
    }

    /// JSON in one of its spellings; without choices left, the shortest.
    pub fn spell(&mut self, tree: &Tree) -> String {
        let mut out = String::new();
        self.spell_into(tree, &mut out);
        self.space(&mut out);
        out
    }

    fn space(&mut self, out: &mut String) {
        *out += ["", "", "", " ", "\n", "\t\r\n  "][self.of(6)];
    }

    fn sign(&mut self, sign: char, out: &mut String) {
        self.space(out);
        out.push(sign);
    }

    fn spell_into(&mut self, tree: &Tree, out: &mut String) {
        self.space(out);
        match tree {
            Tree::Text(text) => self.spell_text(text, out),
            Tree::List(items) => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        self.sign(',', out);
                    }
                    self.spell_into(item, out);
                }
                self.sign(']', out);
            }
            Tree::Object(members) => {
                out.push('{');
                for (at, (key, value)) in members.iter().enumerate() {
                    if at > 0 {
                        self.sign(',', out);
                    }
                    self.space(out);
                    self.spell_text(key, out);
                    self.sign(':', out);
                    self.spell_into(value, out);
                }
                self.sign('}', out);
            }
            _ => *out += &tree.compact(),
        }
    }

    fn spell_text(&mut self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match (self.of(8), character) {
                (1, _) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        *out += &format!("\\u{unit:04X}");
                    }
                }
                (2, '/') => *out += "\\/",
                _ => *out += super::escaped(&character.to_string()).as_str(),
            }
        }
        out.push('"');
    }
}
