//! Messages as clients send them, turned into what a template reads.
//!
//! Clients send OpenAI's shapes. Templates differ in what they expect of the same message, and say so
//! nowhere; [`MessageForm`] holds what [`probe`](super::probe) found out by trying.

use lockstep_core::Refusal;
use serde_json::{Map, Value, json};

/// How one template wants its messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageForm {
    /// Tool-call arguments as the JSON text that clients send; otherwise as the object it spells.
    pub(super) arguments_as_text: bool,
    /// Content that is absent beside tool calls as none; otherwise as an empty text.
    pub(super) absent_content_is_none: bool,
    /// Ids of tool calls as nine letters and digits (Mistral's templates refuse all others).
    pub(super) short_ids: bool,
    /// Content as a list of one text part; otherwise as a text.
    pub(super) content_as_parts: bool,
    /// Role `developer` as `system`: the template never mentions the former and would print a role that
    /// the model has not met, or drop the message.
    pub(super) developer_is_system: bool,
}

/// Names under which clients send an assistant's reasoning; templates read the first, a few the second.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Length of the ids that Mistral's templates accept.
const SHORT_ID_LEN: usize = 9;

/// Brings `messages` into `form`. Refuses what is not a list of at least one object.
///
/// As transformers does, fields that are null are dropped and reasoning is copied to the names that
/// templates read.
pub(super) fn normalise(messages: &mut Value, form: MessageForm) -> Result<(), Refusal> {
    let list = messages.as_array_mut().filter(|list| !list.is_empty());
    let Some(list) = list else {
        return Err(Refusal::invalid_param("messages", "`messages` must be a list of at least one message"));
    };
    for message in list {
        let Some(message) = message.as_object_mut() else {
            return Err(Refusal::invalid_param(
                "messages",
                "each of `messages` must be an object with a role",
            ));
        };
        normalise_message(message, form);
    }
    Ok(())
}

fn normalise_message(message: &mut Map<String, Value>, form: MessageForm) {
    message.retain(|name, value| name == "content" || !value.is_null());
    if form.developer_is_system && message.get("role").is_some_and(|role| role == "developer") {
        message.insert("role".into(), "system".into());
    }
    alias_reasoning(message);
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    let has_calls = calls.as_ref().is_some_and(|calls| !calls.is_empty());
    for call in calls.into_iter().flatten() {
        normalise_call(call, form);
    }
    if form.short_ids
        && let Some(id) = message.get_mut("tool_call_id")
    {
        shorten_id(id);
    }
    let content = message.entry("content").or_insert(Value::Null);
    if content.is_null() || content == "" {
        let is_none = has_calls && form.absent_content_is_none;
        *content = if is_none { Value::Null } else { "".into() };
    }
    if form.content_as_parts
        && let Some(text) = content.as_str()
    {
        *content = json!([{ "type": "text", "text": text }]);
    }
}

fn alias_reasoning(message: &mut Map<String, Value>) {
    let Some(reasoning) = REASONING_FIELDS.iter().find_map(|name| message.get(*name)).cloned() else {
        return;
    };
    message.entry("thinking").or_insert_with(|| reasoning.clone());
    message.insert("reasoning_content".into(), reasoning);
}

fn normalise_call(call: &mut Value, form: MessageForm) {
    if form.short_ids
        && let Some(id) = call.get_mut("id")
    {
        shorten_id(id);
    }
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return };
    if form.arguments_as_text {
        if arguments.is_object() {
            *arguments = super::json::dumps(arguments).into();
        }
    } else if let Some(text) = arguments.as_str()
        && let Ok(object @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = object;
    }
}

/// The same nine letters and digits for the same id, so that a result still finds its call.
fn shorten_id(id: &mut Value) {
    let Some(text) = id.as_str() else { return };
    if text.len() == SHORT_ID_LEN && text.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return;
    }
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    // FNV-1a: all that matters is that ids of one chat stay apart.
    let mut hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let mut short = String::with_capacity(SHORT_ID_LEN);
    for _ in 0..SHORT_ID_LEN {
        short.push(char::from(DIGITS[(hash % 36) as usize]));
        hash /= 36;
    }
    *id = short.into();
}
