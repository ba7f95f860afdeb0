//! The messages of `/v1/chat/completions`: checked, content parts joined, everything else passed
//! on to the model's chat template.
//!
//! What changes on the way: a list of text parts becomes one string, null content (an assistant
//! turn that only calls tools) becomes "", other null fields are left out, and the arguments of
//! tool calls become the object they spell, which is what chat templates expect. Roles reach the
//! template as sent, `developer` too: whether it means `system` is the template's to say.

use super::tools::Tools;
use crate::ApiConfig;
use crate::fields::{Fields, kind};
use lockstep_core::Refusal;
use lockstep_wire::{ChatMessages, Prompt};
use serde_json::{Map, Value};

/// Roles of OpenAI's API that have a meaning for a text model.
const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool"];

/// The prompt, and whether it ends inside reasoning.
pub(super) fn prompt(
    fields: &Fields<'_>,
    config: &ApiConfig,
    tools: Option<&Tools>,
) -> Result<(Prompt, bool), Refusal> {
    if let Some(reason) = &config.chat_error {
        return Err(Refusal::invalid(reason.clone()).with_code("chat_template_missing"));
    }
    let Some(list) = fields.list("messages")? else {
        return Err(fields.invalid("messages", "is required: a list of messages"));
    };
    if list.is_empty() {
        return Err(fields.invalid("messages", "is empty; send at least one message"));
    }
    let messages =
        list.iter().enumerate().map(|(i, item)| message(i, item)).collect::<Result<Vec<_>, _>>()?;
    let kwargs = template_kwargs(fields)?;
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let begins_in_reasoning = add_generation_prompt && config.parsers.begins_in_reasoning(&kwargs);
    let prompt = Prompt::Chat(ChatMessages {
        messages_json: Value::Array(messages).to_string(),
        tools_json: tools.map(|tools| tools.json.clone()),
        template_kwargs_json: (!kwargs.is_empty()).then(|| crate::respond::to_json(&kwargs)),
        add_generation_prompt,
    });
    Ok((prompt, begins_in_reasoning))
}

/// `chat_template_kwargs` and the fields of the request that reach the template the same way.
fn template_kwargs(fields: &Fields<'_>) -> Result<Map<String, Value>, Refusal> {
    let mut kwargs = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(name) = fields.string("chat_template")? {
        kwargs.insert("chat_template".into(), name.into());
    }
    if let Some(effort) = fields.string("reasoning_effort")? {
        reasoning_effort(effort, &mut kwargs);
    }
    if let Some(documents) = fields.list("documents")?.filter(|list| !list.is_empty()) {
        if let Some(other) = documents.iter().find(|document| !document.is_object()) {
            return Err(fields.invalid("documents", format!("must hold objects only, got {}", kind(other))));
        }
        kwargs.insert("documents".into(), documents.into());
    }
    if fields.boolean("continue_final_message")? == Some(true) {
        if fields.boolean("add_generation_prompt")? == Some(true) {
            let message = "goes on with the last message, so add_generation_prompt cannot be true beside it";
            return Err(fields.invalid("continue_final_message", message));
        }
        kwargs.insert("continue_final_message".into(), true.into());
    }
    Ok(kwargs)
}

/// How much the model is to reason: a variable of the templates that know it. Where a template only has a
/// switch, `none` turns it off.
fn reasoning_effort(effort: &str, kwargs: &mut Map<String, Value>) {
    kwargs.entry("reasoning_effort").or_insert(effort.into());
    if effort == "none" {
        for switch in ["enable_thinking", "thinking"] {
            kwargs.entry(switch).or_insert(false.into());
        }
    }
}

fn message(index: usize, item: &Value) -> Result<Value, Refusal> {
    let path = format!("messages[{index}].");
    let fields = Fields::of_item(item, &path, "role and content")?;
    let Some(role) = fields.string("role")? else {
        return Err(fields.invalid("role", format!("is required: one of {}", ROLES.join(", "))));
    };
    if !ROLES.contains(&role) {
        let got = super::policy::shorten(role);
        return Err(fields.invalid("role", format!("must be one of {}, got {got:?}", ROLES.join(", "))));
    }
    fields.string("name")?;
    let tool_calls = fields.list("tool_calls")?.filter(|calls| !calls.is_empty());
    let content = match fields.get("content") {
        Some(content) => content_text(&fields, content)?,
        None if role == "assistant" && tool_calls.is_some() => String::new(),
        None => return Err(fields.invalid("content", "is required: a string or a list of text parts")),
    };
    let mut clean = Map::new();
    for (name, value) in fields.map() {
        match name.as_str() {
            "content" => clean.insert(name.clone(), Value::String(content.clone())),
            "tool_calls" => {
                tool_calls.and_then(|calls| clean.insert(name.clone(), with_argument_objects(calls)))
            }
            _ if value.is_null() => None,
            _ => clean.insert(name.clone(), value.clone()),
        };
    }
    clean.entry("content").or_insert(Value::String(content));
    Ok(Value::Object(clean))
}

fn content_text(fields: &Fields<'_>, content: &Value) -> Result<String, Refusal> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let parts = parts.iter().enumerate().map(|(i, part)| part_text(fields, i, part));
            parts.collect::<Result<Vec<&str>, _>>().map(|texts| texts.concat())
        }
        other => {
            let message = format!("must be a string or a list of text parts, got {}", kind(other));
            Err(fields.invalid("content", message))
        }
    }
}

fn part_text<'a>(fields: &Fields<'_>, index: usize, part: &'a Value) -> Result<&'a str, Refusal> {
    let name = format!("content[{index}]");
    match part.get("type").and_then(Value::as_str) {
        Some("text") => part
            .get("text")
            .and_then(Value::as_str)
            .ok_or_else(|| fields.invalid(&name, "is a text part without a string in its field text")),
        Some(other) => {
            let got = super::policy::shorten(other);
            Err(fields
                .invalid(&name, format!("is a part of type {got:?}, but this model takes text parts only")))
        }
        None => Err(fields.invalid(&name, "must be an object like {\"type\": \"text\", \"text\": \"...\"}")),
    }
}

/// OpenAI sends `function.arguments` as JSON text; templates write it out as an object. Text that
/// is not an object stays as it is.
fn with_argument_objects(calls: &[Value]) -> Value {
    let mut calls = calls.to_vec();
    for call in &mut calls {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
        if let Some(object @ Value::Object(_)) = parsed {
            *arguments = object;
        }
    }
    Value::Array(calls)
}
