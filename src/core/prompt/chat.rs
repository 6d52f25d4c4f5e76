//! The prompt of `/v1/chat/completions`, and the messages and contents that other endpoints share with it.

use crate::core::prompt::Opaque;
use crate::core::prompt::canon::{
    CALL_ID, CALLS, CONTENT, CONTINUES, Canon, DOCUMENTS, MESSAGE, Medium, NAME, NO_GENERATION_PROMPT,
    REASONING, REFERENCE, Sink, TASK, TOOLS, UNKNOWN, write_json,
};
use crate::core::prompt::json::Value;
use crate::core::prompt::request::{Request, member};
use crate::core::prompt::text::Text;

/// Claude Code opens its system prompt with a line that changes with every request. vLLM leaves it out for that reason.
pub(super) const BILLING_LINE: &str = "x-anthropic-billing-header";

pub(super) fn write<S: Sink>(request: &Request, messages: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    canon.tagged(TOOLS, unless_empty(request.get(member!("tools"))));
    canon.tagged(DOCUMENTS, unless_empty(request.get(member!("documents"))));
    for message in messages.items().ok_or(Opaque::Shape)? {
        write_message(message, canon)?;
    }
    // These change the last tokens only, and so does their place here.
    if request.get(member!("add_generation_prompt")).is_some_and(Value::is_false) {
        canon.tag(NO_GENERATION_PROMPT);
    }
    if request.get(member!("continue_final_message")).is_some_and(Value::is_true) {
        canon.tag(CONTINUES);
    }
    Ok(())
}

/// One message, its members in one order whatever theirs was. `refusal`, `audio` and whatever else is not named here
/// reaches no template.
pub(super) fn write_message<S: Sink>(message: Value, canon: &mut Canon<S>) -> Result<(), Opaque> {
    let [role, name, reasoning, older_reasoning, content, calls, call_id, tools, task] = message.members([
        "role",
        "name",
        "reasoning",
        "reasoning_content",
        "content",
        "tool_calls",
        "tool_call_id",
        "tools",
        "task",
    ]);
    let role = role.and_then(Value::text).ok_or(Opaque::Shape)?;
    canon.tag(MESSAGE);
    canon.text(role);
    canon.tagged(NAME, name);
    canon.tagged(REASONING, reasoning.or(older_reasoning));
    write_content(role.is("system"), content, canon)?;
    canon.tagged(CALLS, unless_empty(calls));
    canon.tagged(CALL_ID, call_id);
    canon.tagged(TOOLS, unless_empty(tools));
    canon.tagged(TASK, task);
    Ok(())
}

/// Content as text, as parts, or none. One text is written alike whether it comes bare or as the only part, and no content as
/// an empty text.
pub(super) fn write_content<S: Sink>(
    system: bool,
    content: Option<Value>,
    canon: &mut Canon<S>,
) -> Result<(), Opaque> {
    canon.tag(CONTENT);
    let written = match content.map(|content| (content.text(), content.items())) {
        None => false,
        Some((Some(text), _)) => write_text(text, system, canon),
        Some((None, Some(parts))) => {
            let mut written = false;
            for part in parts {
                written |= write_part(part, system, canon)?;
            }
            written
        }
        Some((None, None)) => return Err(Opaque::Shape),
    };
    if !written {
        canon.word("");
    }
    Ok(())
}

/// Writes a text unless nothing is left of it; answers whether it did. So do those below.
fn write_text<S: Sink>(text: Text, system: bool, canon: &mut Canon<S>) -> bool {
    let text = if system { without_billing_line(text) } else { Some(text) };
    if let Some(text) = text {
        canon.text(text);
    }
    text.is_some()
}

/// `None` if nothing is left.
pub(super) fn without_billing_line(text: Text) -> Option<Text> {
    if !text.starts_with(BILLING_LINE) {
        return Some(text);
    }
    text.after_first_line().filter(|rest| !rest.is_empty())
}

/// The members by which media come, in the order in which vLLM looks for them.
const MEDIA: [(&str, Medium); 8] = [
    ("image_url", Medium::Image),
    ("image_embeds", Medium::Image),
    ("audio_embeds", Medium::Audio),
    ("video_embeds", Medium::Video),
    ("prompt_embeds", Medium::Embeddings),
    ("audio_url", Medium::Audio),
    ("input_audio", Medium::Audio),
    ("video_url", Medium::Video),
];

fn write_part<S: Sink>(part: Value, system: bool, canon: &mut Canon<S>) -> Result<bool, Opaque> {
    if let Some(text) = part.text() {
        return Ok(write_text(text, system, canon));
    }
    if !part.is_object() {
        return Err(Opaque::Shape);
    }
    let [kind, text, uuid] = part.members(["type", "text", "uuid"]);
    let kind = kind.and_then(Value::text);
    let is = |name: &str| kind.is_some_and(|kind| kind.is(name));
    let text = match text {
        _ if is("text") || is("input_text") || is("output_text") => text,
        _ if is("refusal") => part.members(["refusal"])[0],
        _ if is("thinking") => part.members(["thinking"])[0],
        _ => return write_other_part(part, kind, uuid, canon),
    };
    // A text part without a text is left out, as vLLM does.
    let Some(text) = text else { return Ok(false) };
    Ok(write_text(text.text().ok_or(Opaque::Shape)?, system, canon))
}

/// A part that is no text: media by digest, anything else by its JSON.
fn write_other_part<S: Sink>(
    part: Value,
    kind: Option<Text>,
    uuid: Option<Value>,
    canon: &mut Canon<S>,
) -> Result<bool, Opaque> {
    if kind.is_some_and(|kind| kind.is("tool_reference")) {
        let [name] = part.members(["name"]);
        canon.tagged(REFERENCE, name);
        return Ok(name.is_some());
    }
    if kind.is_some_and(|kind| kind.is("prompt_embeds")) {
        let [data] = part.members(["data"]);
        let data = data.ok_or(Opaque::Shape)?;
        canon.media(Medium::Embeddings, |hasher| write_json(data, hasher));
        return Ok(true);
    }
    let found = part.members(MEDIA.map(|(name, _)| name));
    let mut media =
        found.iter().zip(MEDIA).filter_map(|(value, (_, medium))| value.map(|value| (value, medium)));
    match (media.next(), uuid) {
        // Whoever names media answers for the name: the engine does not look further.
        (found, Some(uuid)) => {
            let medium = found.map_or(Medium::Image, |(_, medium)| medium);
            canon.media(medium, |hasher| {
                hasher.put(b"uuid ");
                write_json(uuid, hasher);
            });
        }
        (Some((value, medium)), None) => {
            let value = value.members(["url"])[0].unwrap_or(value);
            canon.media(medium, |hasher| write_json(value, hasher));
        }
        (None, None) => canon.tagged(UNKNOWN, Some(part)),
    }
    Ok(true)
}

pub(super) fn unless_empty(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use crate::core::prompt::Endpoint::Chat;
    use crate::core::prompt::Opaque;
    use crate::core::prompt::tests::{alike, apart, canonical, chain, opaque, read_bytes, unrelated};

    fn messages(messages: &str) -> String {
        format!(r#"{{"model":"m","messages":[{messages}]}}"#)
    }

    fn user(content: &str) -> String {
        messages(&format!(r#"{{"role":"user","content":{content}}}"#))
    }

    #[test]
    fn the_stream_is_as_documented() {
        let body = r#"{"model":"m","cache_salt":"s","tools":[{"type": "function"}],"messages":[
            {"role":"system","content":"be\nbrief"},
            {"role":"assistant","name":"a","reasoning":"hm","content":null,"tool_calls":[{"id":"1"}]},
            {"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"x"},{"type":"text","text":"y"}]}],
            "continue_final_message":true,"add_generation_prompt":false}"#;
        let (namespace, stream) = canonical(Chat, body);
        assert_eq!(namespace, "chat\nmodel \"m\"\nsalt \"s\"");
        assert_eq!(
            stream,
            r#"t[{"type":"function"}]m"system"c"be\nbrief"m"assistant"n"a"r"hm"c""k[{"id":"1"}]m"tool"c"x""y"i"1"go"#
        );
    }

    #[test]
    fn a_longer_conversation_keeps_the_blocks_of_a_shorter_one() {
        let first = r#"{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"What is it?"}"#;
        let more = r#"{"role":"assistant","content":"It is what it is."},{"role":"user","content":"And why is that so?"}"#;
        let (short, long) =
            (chain(Chat, &messages(first)), chain(Chat, &messages(&format!("{first},{more}"))));
        assert!(short.len() >= 3 && long.len() > short.len());
        assert_eq!(short, long[..short.len()]);
    }

    #[test]
    fn a_bare_text_is_the_only_part_of_a_list() {
        alike(Chat, &user(r#""some text""#), &user(r#"[{"type":"text","text":"some text"}]"#));
        alike(
            Chat,
            &user(r#""some text""#),
            &user(r#"[{"text":"some text","cache_control":{"a":1},"type":"text"}]"#),
        );
        alike(Chat, &user(r#""some text""#), &user(r#"["some text"]"#));
        alike(Chat, &user(r#""some text""#), &user(r#"[{"type":"refusal","refusal":"some text"}]"#));
        alike(Chat, &user(r#""some text""#), &user(r#"[{"type":"input_text","text":"some text"}]"#));
    }

    #[test]
    fn nothing_is_an_empty_text() {
        for nothing in ["null", "[]", r#"[{"type":"text","text":""}]"#, r#"[{"type":"text","text":null}]"#] {
            alike(Chat, &user(r#""""#), &user(nothing));
        }
        alike(Chat, &user(r#""""#), &messages(r#"{"role":"user"}"#));
    }

    #[test]
    fn edges_between_parts_messages_and_members_are_seen() {
        let part = |texts: &[&str]| {
            let parts: Vec<_> =
                texts.iter().map(|text| format!(r#"{{"type":"text","text":"{text}"}}"#)).collect();
            user(&format!("[{}]", parts.join(",")))
        };
        apart(Chat, &part(&["ab"]), &part(&["a", "b"]));
        apart(Chat, &part(&["ab", "c"]), &part(&["a", "bc"]));
        apart(Chat, &part(&["a"]), &part(&["a", ""]));
        apart(Chat, &part(&[r#"a\"\"b"#]), &part(&["a", "b"]));
        let (one, two) = (r#"{"role":"user","content":"a"}"#, r#"{"role":"user","content":"b"}"#);
        apart(Chat, &messages(&format!("{one},{two}")), &user(r#""am\"user\"cb""#));
        apart(Chat, &messages(&format!("{one},{two}")), &messages(&format!("{two},{one}")));
        for member in ["name", "tool_call_id", "reasoning", "task"] {
            let with = messages(&format!(r#"{{"role":"user","content":"a","{member}":"b"}}"#));
            apart(Chat, &with, &user(r#""a""#));
            apart(Chat, &with, &user(r#""ab""#));
        }
    }

    #[test]
    fn roles_and_names_count() {
        let from = |role: &str, name: &str| {
            messages(&format!(r#"{{"role":"{role}","name":{name},"content":"a text that has some blocks"}}"#))
        };
        apart(Chat, &from("user", "null"), &from("system", "null"));
        apart(Chat, &from("user", r#""a""#), &from("user", r#""b""#));
        apart(Chat, &from("user", r#""a""#), &from("user", "null"));
    }

    #[test]
    fn what_no_template_sees_does_not_count() {
        let plain = user(r#""a text""#);
        for unseen in [
            r#"{"role":"user","content":"a text","refusal":null,"audio":null,"annotations":[]}"#,
            r#"{"role":"user","content":"a text","tool_calls":[],"function_call":null,"refusal":"no"}"#,
        ] {
            alike(Chat, &plain, &messages(unseen));
        }
        for unseen in [
            r#""temperature":0.5"#,
            r#""user":"u","metadata":{"a":"b"},"prompt_cache_key":"k","zzz_future":1"#,
            r#""tool_choice":"auto","stream":true,"n":2,"stop":["x"],"seed":1"#,
            r#""response_format":{"type":"json_object"},"parallel_tool_calls":false"#,
            r#""tools":[],"documents":null,"chat_template_kwargs":{ },"add_special_tokens":false"#,
            r#""add_generation_prompt":true,"continue_final_message":false,"reasoning_effort":null"#,
        ] {
            alike(Chat, &plain, &plain.replacen('{', &format!("{{{unseen},"), 1));
        }
    }

    #[test]
    fn what_changes_the_rendering_from_its_start_roots_the_chain() {
        let plain = user(r#""a text that has some blocks""#);
        for root in [
            r#""chat_template":"{{ messages }}""#,
            r#""chat_template_kwargs":{"enable_thinking":false}"#,
            r#""chat_template_kwargs":{"enable_thinking":true}"#,
            r#""reasoning_effort":"high""#,
            r#""add_special_tokens":true"#,
            r#""mm_processor_kwargs":{"a":1}"#,
            r#""media_io_kwargs":{"video":{"num_frames":4}}"#,
            r#""truncate_prompt_tokens":100"#,
        ] {
            unrelated(Chat, &plain, &plain.replacen('{', &format!("{{{root},"), 1));
        }
    }

    #[test]
    fn what_changes_the_end_keeps_the_beginning() {
        let plain = user(r#""a text that has some blocks""#);
        for end in [r#""add_generation_prompt":false"#, r#""continue_final_message":true"#] {
            let other = plain.replacen('{', &format!("{{{end},"), 1);
            apart(Chat, &plain, &other);
            assert_eq!(chain(Chat, &plain)[..2], chain(Chat, &other)[..2]);
        }
    }

    #[test]
    fn tools_count_by_structure() {
        let with = |tools: &str| user(r#""hi""#).replacen('{', &format!(r#"{{"tools":{tools},"#), 1);
        let compact = r#"[{"type":"function","function":{"name":"f","parameters":{"b":1,"a":[1.0,true,null,"é/\n"]}}}]"#;
        let spaced = r#" [ { "type" : "function" , "function" : { "name" : "\u0066" , "parameters" :
            { "b" : 1 , "a" : [ 1.0 , true , null , "\u00e9\/\n" ] } } } ] "#;
        alike(Chat, &with(compact), &with(spaced));
        apart(
            Chat,
            &with(compact),
            &with(&compact.replace(r#""b":1,"#, "").replace(r#"]}}"#, r#"],"b":1}}"#)),
        );
        apart(Chat, &with(compact), &with(&compact.replace("1.0", "1.00")));
        apart(Chat, &with(r#"[{"a":"b,c"}]"#), &with(r#"[{"a":"b","c":""}]"#));
        apart(Chat, &with(compact), &with(&compact.replace(r#""name":"f""#, r#""name":"g""#)));
        unrelated(Chat, &with(compact), &user(r#""some more text, so that it has blocks""#));
    }

    #[test]
    fn documents_count() {
        let with = |title: &str| {
            user(r#""hi""#).replacen('{', &format!(r#"{{"documents":[{{"title":"{title}"}}],"#), 1)
        };
        apart(Chat, &with("a"), &with("b"));
        apart(Chat, &with("a"), &user(r#""hi""#));
    }

    #[test]
    fn reasoning_has_two_names() {
        let with = |members: &str| messages(&format!(r#"{{"role":"assistant","content":"a",{members}}}"#));
        alike(Chat, &with(r#""reasoning":"r""#), &with(r#""reasoning_content":"r""#));
        alike(Chat, &with(r#""reasoning":"r""#), &with(r#""reasoning_content":"other","reasoning":"r""#));
        apart(Chat, &with(r#""reasoning":"r""#), &with(r#""reasoning":"s""#));
    }

    #[test]
    fn calls_count() {
        let with = |arguments: &str| {
            messages(&format!(
                r#"{{"role":"assistant","content":null,"tool_calls":[{{"id":"1","type":"function",
                "function":{{"name":"f","arguments":"{arguments}"}}}}]}}"#
            ))
        };
        apart(Chat, &with(r#"{\"a\":1}"#), &with(r#"{\"a\":2}"#));
        alike(Chat, &with(r#"{\"a\":1}"#), &with(r#"{\u0022a\":1}"#));
    }

    /// A data URL of some hundred kilobytes whose end is `end`.
    fn picture(end: &str) -> String {
        format!("data:image/png;base64,{}{end}", "iVBORw0KGgoAAAANSUhEUgAA".repeat(20_000))
    }

    #[test]
    fn pictures_count_by_what_they_show() {
        let with = |url: &str| {
            user(&format!(
                r#"[{{"type":"text","text":"What?"}},{{"type":"image_url","image_url":{{"url":"{url}"}}}}]"#
            ))
        };
        let (a, b) = (with(&picture("A")), with(&picture("B")));
        apart(Chat, &a, &b);
        alike(Chat, &a, &with(&picture("A")));
        alike(Chat, &a, &with(&picture("A").replace('/', r"\/")));
        assert!(chain(Chat, &a).len() > 100, "a picture fills blocks, as its embeddings do");
        apart(Chat, &with("https://a/1.png"), &with("https://a/2.png"));
        alike(
            Chat,
            &with("https://a/1.png"),
            &with("https://a/1.png").replace(r#"{"url":"https://a/1.png"}"#, r#""https://a/1.png""#),
        );
        alike(Chat, &with("u"), &with("u").replace(r#""type":"image_url","#, ""));
        let reading = read_bytes(Chat, a.as_bytes());
        assert!(reading.media);
        assert!(reading.chain.unwrap().bytes < 3000, "not by its data");
        assert!(!read_bytes(Chat, user(r#""hi""#).as_bytes()).media);
    }

    #[test]
    fn many_small_media_do_not_make_a_long_chain() {
        let part = |at: usize| format!(r#"{{"type":"image_url","image_url":"{at}"}}"#);
        let with = |count: usize| user(&format!("[{}]", (0..count).map(part).collect::<Vec<_>>().join(",")));
        let bytes = |count| read_bytes(Chat, with(count).as_bytes()).chain.unwrap().bytes;
        assert!(bytes(64) > 64 * 2048);
        assert_eq!(bytes(164) - bytes(64), 100 * 33);
        apart(Chat, &with(100), &with(100).replace(r#""99""#, r#""x""#));
        alike(Chat, &with(100), &with(100));
    }

    #[test]
    fn other_media_count_too() {
        let with = |part: &str| user(&format!("[{part}]"));
        let parts = [
            r#"{"type":"image_url","image_url":{"url":"x"}}"#,
            r#"{"type":"audio_url","audio_url":{"url":"x"}}"#,
            r#"{"type":"video_url","video_url":{"url":"x"}}"#,
            r#"{"type":"input_audio","input_audio":{"data":"x","format":"wav"}}"#,
            r#"{"type":"input_audio","input_audio":{"data":"y","format":"wav"}}"#,
            r#"{"type":"image_embeds","image_embeds":"z"}"#,
            r#"{"type":"prompt_embeds","data":"x"}"#,
            r#"{"type":"image_url","image_url":null,"uuid":"x"}"#,
            r#"{"type":"image_url","image_url":null,"uuid":"y"}"#,
            r#"{"type":"tool_reference","name":"x"}"#,
            r#"{"type":"of tomorrow","x":1}"#,
            r#"{"type":"of tomorrow","x":2}"#,
            r#"{"type":"text","text":"x"}"#,
        ];
        for (at, left) in parts.iter().enumerate() {
            for right in &parts[..at] {
                apart(Chat, &with(left), &with(right));
            }
        }
        let named = r#"{"type":"image_url","image_url":{"url":"https://a"},"uuid":"x"}"#;
        alike(Chat, &with(parts[7]), &with(named));
    }

    #[test]
    fn the_line_that_changes_with_every_request_is_left_out() {
        let system = |content: &str| messages(&format!(r#"{{"role":"system","content":{content}}}"#));
        let line = |hash: &str| format!("x-anthropic-billing-header: cc_version=1; cch={hash};");
        alike(
            Chat,
            &system(&format!(r#""{}\nYou are.""#, line("1"))),
            &system(&format!(r#""{}\nYou are.""#, line("2"))),
        );
        alike(Chat, &system(&format!(r#""{}\nYou are.""#, line("1"))), &system(r#""You are.""#));
        alike(Chat, &system(&format!(r#""{}""#, line("1"))), &system(r#""""#));
        alike(
            Chat,
            &system(&format!(
                r#"[{{"type":"text","text":"{}"}},{{"type":"text","text":"You are."}}]"#,
                line("1")
            )),
            &system(r#""You are.""#),
        );
        let (one, two) = (format!(r#""{}""#, line("1")), format!(r#""{}""#, line("2")));
        apart(Chat, &user(&one), &user(&two));
    }

    #[test]
    fn what_vllm_refuses_is_opaque() {
        for bad in [
            r#"{"messages":null}"#,
            r#"{"messages":"x"}"#,
            r#"{"messages":{}}"#,
            r#"{"messages":[1]}"#,
            r#"{"messages":[{}]}"#,
            r#"{"messages":[{"role":1}]}"#,
            r#"{"messages":[{"role":"user","content":1}]}"#,
            r#"{"messages":[{"role":"user","content":{}}]}"#,
            r#"{"messages":[{"role":"user","content":[1]}]}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":1}]}]}"#,
            r#"{"prompt":"x"}"#,
        ] {
            opaque(Chat, bad, Opaque::Shape);
        }
    }
}
