//! The prompt of `/v1/messages`, Anthropic's protocol. Blocks are read member by member, never whole: clients move
//! `cache_control` marks from block to block with every turn, and the engine knows nothing of them.

use crate::core::prompt::Opaque;
use crate::core::prompt::canon::{
    CALL_ID, CALLS, CONTENT, Canon, MESSAGE, Medium, REASONING, REFERENCE, Sink, TOOLS, UNKNOWN, write_json,
};
use crate::core::prompt::chat::{BILLING_LINE, unless_empty, without_billing_line};
use crate::core::prompt::json::Value;
use crate::core::prompt::request::{Request, member};
use crate::core::prompt::text::Text;

pub(super) fn write<S: Sink>(request: &Request, messages: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    if let Some(tools) = unless_empty(request.get(member!("tools"))) {
        for tool in tools.items().ok_or(Opaque::Shape)? {
            let members = ["name", "description", "input_schema", "strict", "defer_loading"];
            canon.list(TOOLS, tool.members(members));
        }
    }
    if let Some(system) = request.get(member!("system")) {
        match system.text() {
            Some(text) => write_system(without_billing_line(text).into_iter(), canon),
            None => write_system(texts(system)?, canon),
        }
    }
    for message in messages.items().ok_or(Opaque::Shape)? {
        write_message(message, canon)?;
    }
    Ok(())
}

/// The texts of a text, or of the text blocks in a list, those of a billing line left out.
fn texts(content: Value) -> Result<impl Iterator<Item = Text>, Opaque> {
    let (text, blocks) = (content.text(), content.items());
    if text.is_none() && blocks.is_none() {
        return Err(Opaque::Shape);
    }
    let texts = text.into_iter().chain(blocks.into_iter().flatten().filter_map(text_of_block));
    Ok(texts.filter(|text| !text.starts_with(BILLING_LINE)))
}

fn text_of_block(block: Value) -> Option<Text> {
    let [kind, text] = block.members(["type", "text"]);
    text.filter(|_| kind.is_some_and(|kind| kind.is("text"))).and_then(Value::text)
}

/// System texts, which the engine runs into one; without any there is no message.
fn write_system<'d, S: Sink>(texts: impl Iterator<Item = Text<'d>>, canon: &mut Canon<S>) {
    let mut texts = texts.filter(|text| !text.is_empty()).peekable();
    if texts.peek().is_some() {
        canon.tag(MESSAGE);
        canon.word("system");
        canon.tag(CONTENT);
        canon.joined(texts);
    }
}

fn write_message<S: Sink>(message: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    let [role, content] = message.members(["role", "content"]);
    let role = role.and_then(Value::text).ok_or(Opaque::Shape)?;
    let content = content.ok_or(Opaque::Shape)?;
    if role.is("system") {
        write_system(texts(content)?, canon);
        return Ok(());
    }
    canon.tag(MESSAGE);
    canon.text(role);
    write_content(content, canon)
}

/// Text, or blocks in their order.
fn write_content<S: Sink>(content: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    canon.tag(CONTENT);
    if let Some(text) = content.text() {
        canon.text(text);
        return Ok(());
    }
    for block in content.items().ok_or(Opaque::Shape)? {
        let [kind, result] = block.members(["type", "content"]);
        let kind = kind.and_then(Value::text).ok_or(Opaque::Shape)?;
        write_block(kind, block, canon)?;
        if kind.is("tool_result") {
            write_result(result, canon)?;
        }
    }
    Ok(())
}

fn write_block<S: Sink>(kind: Text, block: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    if kind.is("text") {
        let text = block.members(["text"])[0].and_then(Value::text);
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            canon.text(text);
        }
    } else if kind.is("image") {
        write_image(block.members(["source"])[0].ok_or(Opaque::Shape)?, canon);
    } else if kind.is("thinking") {
        canon.tagged(REASONING, block.members(["thinking"])[0]);
    } else if kind.is("tool_use") {
        canon.list(CALLS, block.members(["id", "name", "input"]));
    } else if kind.is("tool_result") {
        canon.tagged(CALL_ID, block.members(["tool_use_id"])[0]);
    } else if kind.is("tool_reference") {
        let [tool, name] = block.members(["tool_name", "name"]);
        canon.tagged(REFERENCE, tool.or(name));
    } else if !kind.is("redacted_thinking") {
        canon.tagged(UNKNOWN, Some(block));
    }
    Ok(())
}

/// What a tool gave back: text, or blocks, in which no more results are looked for.
fn write_result<S: Sink>(result: Option<Value>, canon: &mut Canon<S>) -> Result<(), Opaque> {
    canon.tag(CONTENT);
    let Some(result) = result else { return Ok(()) };
    if let Some(text) = result.text() {
        canon.text(text);
        return Ok(());
    }
    for block in result.items().ok_or(Opaque::Shape)? {
        let kind = block.members(["type"])[0].and_then(Value::text).ok_or(Opaque::Shape)?;
        write_block(kind, block, canon)?;
    }
    Ok(())
}

/// As an URL, as the engine has it: the same image by `/v1/chat/completions` has the same digest.
fn write_image<S: Sink>(source: Value, canon: &mut Canon<S>) {
    let [kind, url, media_type, data] = source.members(["type", "url", "media_type", "data"]);
    canon.media(Medium::Image, |hasher| {
        if kind.is_some_and(|kind| kind.is("url")) {
            return write_json(url.unwrap_or(source), hasher);
        }
        hasher.put(b"\"data:");
        match media_type.and_then(Value::text) {
            Some(text) => text.write(hasher),
            None => hasher.put(b"image/jpeg"),
        }
        hasher.put(b";base64,");
        if let Some(text) = data.and_then(Value::text) {
            text.write(hasher);
        }
        hasher.put(b"\"");
    });
}

#[cfg(test)]
mod tests {
    use crate::core::prompt::Endpoint::{Chat, Messages};
    use crate::core::prompt::Opaque;
    use crate::core::prompt::tests::{alike, apart, canonical, opaque, read_bytes, unrelated};

    fn content(blocks: &str) -> String {
        format!(r#"{{"model":"m","max_tokens":9,"messages":[{{"role":"user","content":{blocks}}}]}}"#)
    }

    #[test]
    fn plain_conversations_are_those_of_chat() {
        let messages = r#"{"model":"m","max_tokens":9,"system":[{"type":"text","text":"Be "},
            {"type":"text","text":"brief.","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":"a"},
            {"role":"assistant","content":[{"type":"text","text":"b"}]}],"output_config":{"effort":"low"}}"#;
        let chat = r#"{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"a"},
            {"role":"assistant","content":"b"}],"reasoning_effort":"low"}"#;
        assert_eq!(canonical(Messages, messages), canonical(Chat, chat));
    }

    #[test]
    fn a_picture_is_that_of_chat() {
        let messages = content(
            r#"[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBOR"}}]"#,
        );
        let chat = r#"{"model":"m","messages":[{"role":"user","content":[
            {"type":"image_url","image_url":{"url":"data:image/png;base64,iVBOR"}}]}]}"#;
        assert_eq!(canonical(Messages, &messages), canonical(Chat, chat));
        assert!(read_bytes(Messages, messages.as_bytes()).media);
        let by_url = content(r#"[{"type":"image","source":{"type":"url","url":"https://a/1.png"}}]"#);
        apart(Messages, &by_url, &by_url.replace("1.png", "2.png"));
    }

    #[test]
    fn cache_marks_do_not_count() {
        let mark = r#","cache_control":{"type":"ephemeral"}"#;
        for block in [
            r#"{"type":"text","text":"a"MARK}"#,
            r#"{"type":"tool_use","id":"1","name":"f","input":{"a":1}MARK}"#,
            r#"{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"a"MARK}]MARK}"#,
        ] {
            let with = |mark: &str| content(&format!("[{}]", block.replace("MARK", mark)));
            alike(Messages, &with(mark), &with(""));
        }
        let tools = |mark: &str| {
            content("\"a\"").replacen(
                '{',
                &format!(r#"{{"tools":[{{"name":"f","input_schema":{{}}{mark}}}],"#),
                1,
            )
        };
        alike(Messages, &tools(mark), &tools(""));
    }

    #[test]
    fn blocks_count() {
        let blocks = [
            r#"{"type":"text","text":"a"}"#,
            r#"{"type":"thinking","thinking":"a"}"#,
            r#"{"type":"tool_use","id":"1","name":"a","input":{}}"#,
            r#"{"type":"tool_use","id":"1","name":"a","input":{"x":1}}"#,
            r#"{"type":"tool_result","tool_use_id":"1","content":"a"}"#,
            r#"{"type":"tool_result","tool_use_id":"2","content":"a"}"#,
            r#"{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"b"}]}"#,
            r#"{"type":"tool_result","tool_use_id":"1"}"#,
            r#"{"type":"tool_reference","tool_name":"a"}"#,
            r#"{"type":"of tomorrow","x":1}"#,
        ];
        for (at, left) in blocks.iter().enumerate() {
            for right in &blocks[..at] {
                apart(Messages, &content(&format!("[{left}]")), &content(&format!("[{right}]")));
            }
        }
        alike(
            Messages,
            &content(r#"[{"type":"text","text":"a"},{"type":"redacted_thinking","data":"x"}]"#),
            &content("\"a\""),
        );
    }

    #[test]
    fn system_and_tools_count() {
        let plain = content(r#""a text that has some blocks""#);
        let with = |member: &str| plain.replacen('{', &format!("{{{member},"), 1);
        unrelated(Messages, &plain, &with(r#""system":"Be brief.""#));
        unrelated(Messages, &plain, &with(r#""tools":[{"name":"f","input_schema":{}}]"#));
        unrelated(Messages, &plain, &with(r#""thinking":{"type":"disabled"}"#));
        alike(Messages, &plain, &with(r#""thinking":{"type":"enabled","budget_tokens":2000}"#));
        alike(
            Messages,
            &plain,
            &with(r#""system":"","tools":[],"metadata":{"user_id":"x"},"tool_choice":{"type":"any"}"#),
        );
    }

    #[test]
    fn the_line_that_changes_with_every_request_is_left_out() {
        let system = |hash: &str| {
            content("\"a\"").replacen(
                '{',
                &format!(
                    r#"{{"system":[{{"type":"text","text":"x-anthropic-billing-header: cch={hash}"}},
                {{"type":"text","text":"You are."}}],"#
                ),
                1,
            )
        };
        alike(Messages, &system("1"), &system("2"));
        alike(Messages, &system("1"), &content("\"a\"").replacen('{', r#"{"system":"You are.","#, 1));
    }

    #[test]
    fn what_vllm_refuses_is_opaque() {
        for bad in [
            r#"{"messages":"x"}"#,
            r#"{"messages":[{"role":"user"}]}"#,
            r#"{"messages":[{"role":"user","content":1}]}"#,
            r#"{"messages":[{"role":"user","content":["x"]}]}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"image"}]}]}"#,
            r#"{"messages":[],"system":1}"#,
            r#"{"messages":[],"tools":1}"#,
        ] {
            opaque(Messages, bad, Opaque::Shape);
        }
    }
}
