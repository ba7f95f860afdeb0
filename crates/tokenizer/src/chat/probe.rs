//! Finds out how a template wants its messages, by rendering small chats and looking for their words.
//!
//! Templates of the same age disagree: one concatenates tool-call arguments as text, one walks them as
//! an object, one asks for `content is none` before it looks at tool calls, one reads content as a list
//! of parts. Trying is exact where reading the source would be a guess. Runs once per template, at load.

use super::messages::MessageForm;
use serde_json::{Value, json};

const TEXT: &str = "zqprobetext";
const FUNCTION: &str = "zqprobefunction";
const KEY: &str = "zqprobekey";
const ARGUMENT: &str = "zqprobeargument";
/// An id as OpenAI's clients send it.
const ID: &str = "call_zq0123456789probe";

/// The form in which `render` shows everything that the probes say.
///
/// `render` takes messages, tools and the form to bring the messages into; `None` stands for any
/// failure. A template that shows no tool calls in any form gets the default.
pub(super) fn find_form(
    source: &str,
    render: impl Fn(Value, Option<Value>, MessageForm) -> Option<String>,
) -> MessageForm {
    let mut form = MessageForm {
        developer_is_system: !source.contains("developer"),
        content_as_parts: false,
        ..MessageForm::default()
    };
    let chat = json!([{"role": "user", "content": TEXT}]);
    let shows_text = |form| render(chat.clone(), None, form).is_some_and(|text| text.contains(TEXT));
    if !shows_text(form) && shows_text(MessageForm { content_as_parts: true, ..form }) {
        form.content_as_parts = true;
    }
    // Few templates without a word about calls can show one; most models need no further probes.
    if !source.contains("tool_calls") {
        return form;
    }
    for choice in 0..8_u8 {
        let tried = MessageForm {
            absent_content_is_none: choice & 1 != 0,
            arguments_as_text: choice & 2 != 0,
            short_ids: choice & 4 != 0,
            ..form
        };
        if render(calling_chat(), Some(tools()), tried).is_some_and(|text| shows_call(&text)) {
            return tried;
        }
    }
    form
}

fn calling_chat() -> Value {
    let arguments = json!({ KEY: ARGUMENT }).to_string();
    json!([
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": ID, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}},
        ]},
        {"role": "tool", "tool_call_id": ID, "name": FUNCTION, "content": TEXT},
    ])
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": []});
    json!([{"type": "function", "function": {"name": "zqother", "description": "d", "parameters": parameters}}])
}

/// Name, key and value are there, and neither as Python's spelling of a dict nor as JSON inside a string.
fn shows_call(text: &str) -> bool {
    let is_python = text.contains(&format!("'{KEY}'"));
    let is_doubled = text.contains(&format!("\\\"{KEY}"));
    [FUNCTION, KEY, ARGUMENT].iter().all(|word| text.contains(word)) && !is_python && !is_doubled
}
