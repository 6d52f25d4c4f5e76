//! A chat template in the manner of Qwen's: tools first, then each message between role header and end mark.

use std::fmt::Write;

use serde_json::Value;

/// What of a chat request shapes its prompt.
pub(super) struct Chat<'a> {
    pub messages: &'a [Value],
    pub tools: &'a [Value],
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
}

/// The prompt text of a chat.
pub(super) fn render(chat: &Chat<'_>) -> String {
    let mut text = String::new();
    let (system, messages) = match chat.messages.split_first() {
        Some((first, rest)) if !chat.tools.is_empty() && role(first) == "system" => (Some(first), rest),
        _ => (None, chat.messages),
    };
    if !chat.tools.is_empty() {
        text.push_str("<|im_start|>system\n# Tools\n\n<tools>\n");
        for tool in chat.tools {
            let _ = writeln!(text, "{tool}");
        }
        text.push_str("</tools>\n\n");
        if let Some(system) = system {
            push_content(&mut text, &system["content"]);
        }
        text.push_str("<|im_end|>\n");
    }
    for (index, message) in messages.iter().enumerate() {
        let _ = writeln!(text, "<|im_start|>{}", role(message));
        push_content(&mut text, &message["content"]);
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let _ = write!(text, "\n<tool_call>\n{}\n</tool_call>", call["function"]);
        }
        if !(chat.continue_final_message && index + 1 == messages.len()) {
            text.push_str("<|im_end|>\n");
        }
    }
    if chat.add_generation_prompt && !chat.continue_final_message {
        text.push_str("<|im_start|>assistant\n");
    }
    text
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

/// Text as it is; anything else (an image, a sound) by its JSON, so that other content is another prompt.
fn push_content(text: &mut String, content: &Value) {
    match content {
        Value::Null => {}
        Value::String(content) => text.push_str(content),
        Value::Array(parts) => {
            for part in parts {
                match part["text"].as_str().or(part.as_str()) {
                    Some(part) => text.push_str(part),
                    None => text.push_str(&part.to_string()),
                }
            }
        }
        other => text.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat(messages: &Value, tools: &Value) -> String {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let (messages, tools) = (list(messages), list(tools));
        let chat = Chat {
            messages: &messages,
            tools: &tools,
            add_generation_prompt: true,
            continue_final_message: false,
        };
        render(&chat)
    }

    #[test]
    fn messages_between_marks() {
        let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
        assert_eq!(
            chat(&messages, &json!(null)),
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn tools_come_first() {
        let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]);
        let text = chat(&messages, &json!([{"type": "function"}]));
        assert!(text.starts_with("<|im_start|>system\n# Tools\n\n<tools>\n{\"type\":\"function\"}\n</tools>\n\nBe kind.<|im_end|>\n<|im_start|>user\n"), "{text}");
    }

    #[test]
    fn the_next_turn_begins_with_this_one_and_its_answer() {
        let now = chat(&json!([{"role": "user", "content": "Hi"}]), &json!(null));
        let next = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " long list"}, {"role": "user", "content": "And?"}]);
        assert!(chat(&next, &json!(null)).starts_with(&format!("{now} long list<|im_end|>")));
    }

    #[test]
    fn images_count_by_what_they_are() {
        let image = |url: &str| json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]);
        assert_ne!(chat(&image("a"), &json!(null)), chat(&image("b"), &json!(null)));
    }
}
