//! The prompt of `/v1/responses`: instructions and input items, which the engine turns into chat messages.

use crate::core::prompt::Opaque;
use crate::core::prompt::canon::{CALL_ID, CALLS, Canon, MESSAGE, REASONING, Sink, TOOLS, UNKNOWN};
use crate::core::prompt::chat::{unless_empty, write_content, write_message};
use crate::core::prompt::json::Value;
use crate::core::prompt::request::{Request, member};

pub(super) fn write<S: Sink>(request: &Request, input: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    canon.tagged(TOOLS, unless_empty(request.get(member!("tools"))));
    canon.tagged(UNKNOWN, unless_empty(request.get(member!("previous_input_messages"))));
    if let Some(instructions) = request.get(member!("instructions")).filter(|text| !text.is("")) {
        write_said("system", instructions, canon)?;
    }
    if input.text().is_some() {
        return write_said("user", input, canon);
    }
    for item in input.items().ok_or(Opaque::Shape)? {
        write_item(item, canon)?;
    }
    Ok(())
}

fn write_said<S: Sink>(role: &str, content: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    canon.tag(MESSAGE);
    canon.word(role);
    write_content(role == "system", Some(content), canon)
}

/// One item by what the engine takes from it; ids and states of items are not rendered.
fn write_item<S: Sink>(item: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    if !item.is_object() {
        return Err(Opaque::Shape);
    }
    let [kind, role] = item.members(["type", "role"]);
    let is = |name: &str| kind.is_some_and(|kind| kind.is(name));
    if role.is_some() && (kind.is_none() || is("message")) {
        return write_message(item, canon);
    }
    if is("function_call") || is("custom_tool_call") {
        canon.list(CALLS, item.members(["call_id", "namespace", "name", "arguments", "input"]));
    } else if is("function_call_output") || is("custom_tool_call_output") {
        let [output, call_id] = item.members(["output", "call_id"]);
        canon.tag(MESSAGE);
        canon.word("tool");
        write_content(false, output, canon)?;
        canon.tagged(CALL_ID, call_id);
    } else if is("reasoning") {
        let [content, summary] = item.members(["content", "summary"]).map(unless_empty);
        let first = content.or(summary).and_then(Value::items).and_then(|mut texts| texts.next());
        canon.tagged(REASONING, first.and_then(|first| first.members(["text"])[0]));
    } else {
        canon.tagged(UNKNOWN, Some(item));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::core::prompt::Endpoint::{Chat, Responses};
    use crate::core::prompt::Opaque;
    use crate::core::prompt::tests::{alike, apart, canonical, opaque, unrelated};

    fn input(input: &str) -> String {
        format!(r#"{{"model":"m","input":{input}}}"#)
    }

    #[test]
    fn a_bare_input_is_a_message_of_the_user() {
        alike(Responses, &input(r#""hello""#), &input(r#"[{"role":"user","content":"hello"}]"#));
        alike(
            Responses,
            &input(r#""hello""#),
            &input(
                r#"[{"type":"message","id":"x","status":"completed","role":"user","content":[{"type":"input_text","text":"hello"}]}]"#,
            ),
        );
    }

    #[test]
    fn plain_conversations_are_those_of_chat() {
        let responses = r#"{"model":"m","instructions":"Be brief.","input":[{"role":"user","content":"a"},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[]}]},
            {"type":"function_call_output","call_id":"1","output":"c"}],"reasoning":{"effort":"low","summary":"auto"}}"#;
        let chat = r#"{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"a"},
            {"role":"assistant","content":"b"},{"role":"tool","tool_call_id":"1","content":"c"}],"reasoning_effort":"low"}"#;
        assert_eq!(canonical(Responses, responses), canonical(Chat, chat));
    }

    #[test]
    fn instructions_and_tools_count() {
        let plain = input(r#""a text that has some blocks""#);
        for member in [r#""instructions":"Be brief.""#, r#""tools":[{"type":"function","name":"f"}]"#] {
            unrelated(Responses, &plain, &plain.replacen('{', &format!("{{{member},"), 1));
        }
        for member in
            [r#""instructions":"""#, r#""tools":[]"#, r#""truncation":"disabled","store":false,"text":{}"#]
        {
            alike(Responses, &plain, &plain.replacen('{', &format!("{{{member},"), 1));
        }
    }

    #[test]
    fn items_count_by_what_is_rendered() {
        let call = |id: &str, arguments: &str| {
            input(&format!(
                r#"[{{"type":"function_call","id":"{id}","call_id":"c","name":"f","arguments":"{arguments}"}}]"#
            ))
        };
        alike(Responses, &call("1", "{}"), &call("2", "{}"));
        apart(Responses, &call("1", "{}"), &call("1", "[]"));
        let thought = |text: &str| {
            input(&format!(r#"[{{"type":"reasoning","content":[{{"text":"{text}"}}],"summary":[]}}]"#))
        };
        apart(Responses, &thought("a"), &thought("b"));
        alike(Responses, &thought("a"), &input(r#"[{"type":"reasoning","summary":[{"text":"a"}]}]"#));
        let picture = |url: &str| {
            input(&format!(r#"[{{"role":"user","content":[{{"type":"input_image","image_url":"{url}"}}]}}]"#))
        };
        apart(Responses, &picture("a"), &picture("b"));
        apart(
            Responses,
            &input(r#"[{"type":"of tomorrow","x":1}]"#),
            &input(r#"[{"type":"of tomorrow","x":2}]"#),
        );
    }

    #[test]
    fn what_only_a_worker_has_is_opaque() {
        opaque(Responses, r#"{"input":"x","previous_response_id":"resp_1"}"#, Opaque::Stored);
        for bad in [
            r#"{"input":null}"#,
            r#"{"input":1}"#,
            r#"{"input":{}}"#,
            r#"{"input":[1]}"#,
            r#"{"messages":[]}"#,
        ] {
            opaque(Responses, bad, Opaque::Shape);
        }
    }
}
