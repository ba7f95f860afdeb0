//! A request for a response in the words of a chat request, and what the response repeats of it.

use super::super::translation::{Translation, picked, tools};
use super::input;
use crate::ApiConfig;
use crate::fields::{Fields, kind};
use crate::request::policy::shorten;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};

/// The part of `include` that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// What else may be asked for. Reasoning comes in the open; the others are about tools of OpenAI's service.
pub(crate) const INCLUDES: &[&str] = &[
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// The same request for `/v1/chat/completions`.
pub(super) fn translate(body: &Map<String, Value>) -> Result<Map<String, Value>, Refusal> {
    let fields = Fields::new(body, "");
    refuse_memory(&fields)?;
    let own = [
        "temperature",
        "top_p",
        "top_logprobs",
        "stop",
        "parallel_tool_calls",
        "chat_template",
        "chat_template_kwargs",
    ];
    let mut request = Translation::of(body, &own);
    request.set("max_completion_tokens", body.get("max_output_tokens").cloned());
    request.set("messages", Some(input::messages(&fields)?));
    request.set("tools", tools(&fields, "type and name", function)?);
    request.set("tool_choice", tool_choice(&fields)?);
    if includes_logprobs(&fields)? {
        request.set("logprobs", Some(true));
    }
    if let Some(map) = fields.object("reasoning")? {
        request.set("reasoning_effort", Fields::new(map, "reasoning.").string("effort")?);
    }
    text(&fields, &mut request)?;
    Ok(request.body())
}

/// What would need answers that are kept.
fn refuse_memory(fields: &Fields<'_>) -> Result<(), Refusal> {
    fields.boolean("store")?;
    for name in ["previous_response_id", "conversation"] {
        if fields.get(name).is_some() {
            let message =
                "cannot be used, since this server keeps no answers; send the conversation as input";
            return Err(fields.invalid(name, message).with_code("unsupported_field"));
        }
    }
    if fields.boolean("background")? == Some(true) {
        let message = "cannot be true, since this server keeps no answers; wait for this one, or stream it";
        return Err(fields.invalid("background", message).with_code("unsupported_field"));
    }
    Ok(())
}

/// The function of a tool.
fn function(tool: &Fields<'_>) -> Result<Map<String, Value>, Refusal> {
    if tool.string("type")? != Some("function") {
        return Err(tool.invalid("type", "must be \"function\": other tools run on OpenAI's servers"));
    }
    Ok(picked(tool, &["name", "description", "parameters", "strict"]))
}

fn tool_choice(fields: &Fields<'_>) -> Result<Option<Value>, Refusal> {
    let Some(Value::Object(map)) = fields.get("tool_choice") else {
        return Ok(fields.get("tool_choice").cloned());
    };
    let choice = Fields::new(map, "tool_choice.");
    match (choice.string("type")?, choice.string("name")?) {
        (Some("function"), Some(name)) => Ok(Some(json!({"type": "function", "function": {"name": name}}))),
        _ => {
            let message =
                "must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"name\": ...}";
            Err(fields.invalid("tool_choice", message))
        }
    }
}

/// Whether log-probabilities are wanted: asked for, or with a number of alternatives.
fn includes_logprobs(fields: &Fields<'_>) -> Result<bool, Refusal> {
    let list = fields.list("include")?.unwrap_or_default();
    let unknown = list.iter().find(|item| !item.as_str().is_some_and(|name| INCLUDES.contains(&name)));
    if let Some(unknown) = unknown {
        let got =
            unknown.as_str().map_or_else(|| kind(unknown).into(), |name| format!("{:?}", shorten(name)));
        return Err(fields.invalid("include", format!("may hold {}, got {got}", INCLUDES.join(", "))));
    }
    let has_alternatives = fields.get("top_logprobs").is_some_and(|top| top.as_u64() != Some(0));
    Ok(has_alternatives || list.iter().any(|item| item == LOGPROBS))
}

fn text(fields: &Fields<'_>, request: &mut Translation) -> Result<(), Refusal> {
    let Some(map) = fields.object("text")? else { return Ok(()) };
    let text = Fields::new(map, "text.");
    if let Some(other) = text.string("verbosity")?.filter(|verbosity| *verbosity != "medium") {
        let message =
            format!("is not supported by this server; leave it out or send \"medium\", got {other:?}");
        return Err(text.invalid("verbosity", message).with_code("unsupported_field"));
    }
    let Some(map) = text.object("format")? else { return Ok(()) };
    let format = Fields::new(map, "text.format.");
    let translated = match format.string("type")? {
        // What chat keeps in an object of its own.
        Some("json_schema") => json!({"type": "json_schema", "json_schema": map}),
        _ => map.clone().into(),
    };
    request.set("response_format", Some(translated));
    Ok(())
}

/// Fields of every response to this request, in OpenAI's order. What it did not say has the value that counts.
pub(super) fn echo(body: &Map<String, Value>, config: &ApiConfig) -> Map<String, Value> {
    let said = |name: &str| body.get(name).filter(|value| !value.is_null()).cloned();
    let said_or = |name: &str, default: Value| (name.to_owned(), said(name).unwrap_or(default));
    let sampling = config.default_sampling;
    let reasoning = said("reasoning").unwrap_or_default();
    let text = said("text").unwrap_or_default();
    let format = text.get("format").filter(|format| !format.is_null()).cloned();
    let text = json!({"format": format.unwrap_or_else(|| json!({"type": "text"})), "verbosity": "medium"});
    [
        ("background".into(), json!(false)),
        said_or("instructions", Value::Null),
        said_or("max_output_tokens", Value::Null),
        said_or("max_tool_calls", Value::Null),
        said_or("parallel_tool_calls", json!(true)),
        ("previous_response_id".into(), Value::Null),
        said_or("prompt_cache_key", Value::Null),
        ("reasoning".into(), json!({"effort": reasoning.get("effort"), "summary": null})),
        said_or("safety_identifier", Value::Null),
        ("service_tier".into(), json!("default")),
        ("store".into(), json!(false)),
        said_or("temperature", number(sampling.temperature.unwrap_or(1.0))),
        ("text".into(), text),
        said_or("tool_choice", json!("auto")),
        said_or("tools", json!([])),
        said_or("top_logprobs", json!(0)),
        said_or("top_p", number(sampling.top_p.unwrap_or(1.0))),
        ("truncation".into(), json!("disabled")),
        said_or("user", Value::Null),
        said_or("metadata", json!({})),
    ]
    .into_iter()
    .collect()
}

/// A number as short as its 32 bits are written: 0.7, not 0.699999988.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}
