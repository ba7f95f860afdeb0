//! Ollama's requests in OpenAI's words.

use crate::ApiConfig;
use crate::fields::{Fields, kind};
use crate::request::{Endpoint, limits::TOP_LOGPROBS_MAX, policy::shorten};
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};

/// What Ollama's clients put behind a model's name that has no tag.
const DEFAULT_TAG: &str = ":latest";

/// Whether `name` is the served model's, with Ollama's default tag or without.
pub(super) fn is_served(name: &str, config: &ApiConfig) -> bool {
    let served = config.served_model_name.as_str();
    name == served || name.strip_suffix(DEFAULT_TAG) == Some(served)
}

/// The sampling fields; Ollama's own defaults are not filled in, the model's are.
pub(super) fn options(options: &Map<String, Value>) -> Result<Map<String, Value>, Refusal> {
    let fields = Fields::new(options, "options.");
    let mut translated = Map::new();
    for (theirs, ours) in [
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("stop", "stop"),
    ] {
        translated.extend(fields.get(theirs).map(|value| (ours.into(), value.clone())));
    }
    // A window of no tokens turns penalties off; any other is taken for the whole text.
    if fields.integer("repeat_last_n", -1..=i64::MAX.into())? != Some(0) {
        for (theirs, ours) in [
            ("repeat_penalty", "repetition_penalty"),
            ("presence_penalty", "presence_penalty"),
            ("frequency_penalty", "frequency_penalty"),
        ] {
            translated.extend(fields.get(theirs).map(|value| (ours.into(), value.clone())));
        }
    }
    // -1 and -2 mean: until an end token or the context is full.
    if let Some(limit) = fields.integer("num_predict", -2..=i64::MAX.into())?
        && limit >= 0
    {
        translated.insert("max_tokens".into(), json!(limit as i64));
    }
    // Checked only: the context is the server's.
    fields.integer("num_ctx", 1..=i64::MAX.into())?;
    Ok(translated)
}

/// The fields that both endpoints have.
pub(super) fn common(
    fields: &Fields<'_>,
    config: &ApiConfig,
    translated: &mut Map<String, Value>,
) -> Result<(), Refusal> {
    if let Some(name) = fields.string("model")? {
        let name = if is_served(name, config) { config.served_model_name.as_str() } else { name };
        translated.insert("model".into(), name.into());
    }
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?.unwrap_or(0);
    if top > 0 && !logprobs {
        return Err(fields.invalid("top_logprobs", "needs logprobs: true"));
    }
    if logprobs {
        translated.insert("logprobs".into(), true.into());
        translated.insert("top_logprobs".into(), json!(top as i64));
    }
    // The last line tells where the time went.
    translated.insert("timing".into(), true.into());
    translated.insert("stream".into(), fields.boolean("stream")?.unwrap_or(true).into());
    match fields.get("format") {
        None => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) if text == "json" => {
            translated.insert("response_format".into(), json!({"type": "json_object"}));
        }
        Some(schema @ Value::Object(_)) => {
            let schema = json!({"name": "format", "schema": schema});
            translated
                .insert("response_format".into(), json!({"type": "json_schema", "json_schema": schema}));
        }
        Some(other) => {
            let message = format!("must be \"json\" or a JSON schema, got {}", kind(other));
            return Err(fields.invalid("format", message));
        }
    }
    think(fields, config, translated)
}

/// `think` as the variables that chat templates know it by.
fn think(
    fields: &Fields<'_>,
    config: &ApiConfig,
    translated: &mut Map<String, Value>,
) -> Result<(), Refusal> {
    let mut kwargs = Map::new();
    let is_wanted = match fields.get("think") {
        None => return Ok(()),
        Some(Value::Bool(is_wanted)) => *is_wanted,
        Some(Value::String(level)) if matches!(level.as_str(), "low" | "medium" | "high") => {
            kwargs.insert("reasoning_effort".into(), level.as_str().into());
            true
        }
        Some(other) => {
            let got = other.as_str().map_or(kind(other).into(), |text| format!("{:?}", shorten(text)));
            let message = format!("must be true, false, \"low\", \"medium\" or \"high\", got {got}");
            return Err(fields.invalid("think", message));
        }
    };
    if is_wanted && config.parsers.reasoning.is_none() {
        let message =
            "cannot be used: the model's chat template shows no reasoning; leave it out or send false";
        return Err(fields.invalid("think", message).with_code("unsupported_field"));
    }
    kwargs.insert("enable_thinking".into(), is_wanted.into());
    kwargs.insert("thinking".into(), is_wanted.into());
    translated.insert("chat_template_kwargs".into(), Value::Object(kwargs));
    Ok(())
}

/// The messages of a chat. One that ends with the assistant's is continued.
pub(super) fn messages(fields: &Fields<'_>, translated: &mut Map<String, Value>) -> Result<(), Refusal> {
    let Some(list) = fields.list("messages")? else {
        return Err(fields.invalid("messages", "is required: a list of messages"));
    };
    let messages =
        list.iter().enumerate().map(|(i, item)| message(i, item)).collect::<Result<Vec<_>, _>>()?;
    let is_prefill = messages.last().is_some_and(|last| {
        last.get("role").is_some_and(|role| role == "assistant") && last.get("tool_calls").is_none()
    });
    if is_prefill {
        translated.insert("continue_final_message".into(), true.into());
        translated.insert("add_generation_prompt".into(), false.into());
    }
    translated.insert("messages".into(), messages.into());
    Ok(())
}

/// A message under the names that chat templates know; what is wrong with it validation says.
fn message(index: usize, item: &Value) -> Result<Value, Refusal> {
    let Some(map) = item.as_object() else { return Ok(item.clone()) };
    let path = format!("messages[{index}].");
    let fields = Fields::new(map, &path);
    if !fields.list("images")?.unwrap_or_default().is_empty() {
        return Err(fields.invalid("images", "are not supported: this model takes text only"));
    }
    let mut message = Map::new();
    for (name, value) in map {
        match name.as_str() {
            "images" => {}
            "thinking" => drop(message.insert("reasoning_content".into(), value.clone())),
            "tool_name" => drop(message.insert("name".into(), value.clone())),
            "tool_calls" => drop(message.insert(name.clone(), calls(&fields)?)),
            _ => drop(message.insert(name.clone(), value.clone())),
        }
    }
    Ok(Value::Object(message))
}

/// Calls with OpenAI's `type`, which templates may look at.
fn calls(fields: &Fields<'_>) -> Result<Value, Refusal> {
    let Some(list) = fields.list("tool_calls")?.filter(|list| !list.is_empty()) else {
        return Ok(Value::Null);
    };
    let typed = |call: &Value| {
        let mut call = call.clone();
        if let Some(map) = call.as_object_mut() {
            map.entry("type").or_insert_with(|| "function".into());
        }
        call
    };
    Ok(list.iter().map(typed).collect())
}

/// The prompt of `/api/generate`: a chat of one message, or the text itself where it is `raw` or the model has no
/// chat template (then Ollama passes the prompt through as well).
pub(super) fn prompt(
    fields: &Fields<'_>,
    config: &ApiConfig,
    translated: &mut Map<String, Value>,
) -> Result<Endpoint, Refusal> {
    let Some(prompt) = fields.string("prompt")? else {
        return Err(fields.invalid("prompt", "is required: a string"));
    };
    let system = fields.string("system")?.filter(|system| !system.is_empty());
    let is_raw = fields.boolean("raw")?.unwrap_or(false);
    if is_raw || config.chat_error.is_some() {
        if system.is_some() {
            let why = if is_raw { "raw: true" } else { "a model without a chat template" };
            return Err(fields.invalid("system", format!("has no place in the prompt with {why}")));
        }
        translated.remove("chat_template_kwargs");
        // A completion has one field for both.
        let top = translated.remove("top_logprobs");
        translated.remove("logprobs");
        translated.extend(top.map(|top| ("logprobs".into(), top)));
        translated.insert("prompt".into(), prompt.into());
        // A completion would end after a few tokens otherwise.
        translated.entry("max_tokens").or_insert_with(|| config.context_max.into());
        return Ok(Endpoint::Completions);
    }
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<Value> =
        system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
    translated.insert("messages".into(), messages.into());
    Ok(Endpoint::Chat)
}
