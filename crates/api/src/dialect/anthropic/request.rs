//! Anthropic's request in the words of a chat request.

use super::super::translation::{Translation, picked, tools};
use super::content;
use crate::ApiConfig;
use crate::fields::Fields;
use crate::request::policy::shorten;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};

/// What a request says about the length of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// There must be a limit.
    Required,
    /// There is no answer.
    Absent,
}

/// The same request for `/v1/chat/completions`.
pub(super) fn translate(
    body: &Map<String, Value>,
    config: &ApiConfig,
    length: Length,
) -> Result<Map<String, Value>, Refusal> {
    let fields = Fields::new(body, "");
    if length == Length::Required && fields.get("max_tokens").is_none() {
        return Err(fields.invalid("max_tokens", "is required: the most tokens that the answer may have"));
    }
    let own = ["max_tokens", "temperature", "top_p", "chat_template", "chat_template_kwargs"];
    let mut request = Translation::of(body, &own);
    request.set("stop", fields.list("stop_sequences")?);
    let (messages, ends_open) = content::messages(&fields)?;
    request.set("messages", Some(messages));
    if ends_open {
        request.set("continue_final_message", Some(true));
        request.set("add_generation_prompt", Some(false));
    }
    request.set("tools", tools(&fields, "name and input_schema", function)?);
    tool_choice(&fields, &mut request)?;
    thinking(&fields, config, &mut request)?;
    output_config(&fields, &mut request)?;
    Ok(request.body())
}

/// The function of a tool.
fn function(tool: &Fields<'_>) -> Result<Map<String, Value>, Refusal> {
    if let Some(other) = tool.string("type")?.filter(|kind| *kind != "custom") {
        let got = shorten(other);
        let message =
            format!("is {got:?}, a tool that only Anthropic's models know; describe it with a schema");
        return Err(tool.invalid("type", message));
    }
    let Some(schema) = tool.object("input_schema")? else {
        return Err(tool.invalid("input_schema", "is required: a JSON schema of type object"));
    };
    let mut function = picked(tool, &["name", "description", "strict"]);
    function.insert("parameters".into(), schema.clone().into());
    Ok(function)
}

fn tool_choice(fields: &Fields<'_>, request: &mut Translation) -> Result<(), Refusal> {
    let Some(map) = fields.object("tool_choice")? else { return Ok(()) };
    let choice = Fields::new(map, "tool_choice.");
    let translated = match choice.string("type")? {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => match choice.string("name")? {
            Some(name) => json!({"type": "function", "function": {"name": name}}),
            None => return Err(choice.invalid("name", "is required: the tool to use")),
        },
        _ => return Err(choice.invalid("type", "must be one of auto, any, tool, none")),
    };
    request.set("tool_choice", Some(translated));
    let one = choice.boolean("disable_parallel_tool_use")?;
    request.set("parallel_tool_calls", one.map(|one| !one));
    Ok(())
}

/// `thinking`: whether the model reasons is its template's to say, where it has a switch. How long it does is
/// the model's.
fn thinking(fields: &Fields<'_>, config: &ApiConfig, request: &mut Translation) -> Result<(), Refusal> {
    let Some(map) = fields.object("thinking")? else { return Ok(()) };
    let thinking = Fields::new(map, "thinking.");
    thinking.integer("budget_tokens", 1..=i64::MAX.into())?;
    let is_on = match thinking.string("type")? {
        Some("adaptive") => return Ok(()),
        Some("disabled") => false,
        Some("enabled") if config.parsers.reasoning.is_none() => {
            let message = "is \"enabled\", but this model's chat template shows no reasoning; send \"disabled\", \
                or start the server with --reasoning-parser";
            return Err(thinking.invalid("type", message).with_code("unsupported_field"));
        }
        Some("enabled") => true,
        _ => return Err(thinking.invalid("type", "must be one of enabled, disabled, adaptive")),
    };
    // Qwen's and GLM's name, then DeepSeek's and Granite's.
    request.set_template_variable("enable_thinking", is_on);
    request.set_template_variable("thinking", is_on);
    Ok(())
}

fn output_config(fields: &Fields<'_>, request: &mut Translation) -> Result<(), Refusal> {
    let Some(map) = fields.object("output_config")? else { return Ok(()) };
    let output = Fields::new(map, "output_config.");
    request.set("reasoning_effort", output.string("effort")?);
    let Some(map) = output.object("format")? else { return Ok(()) };
    let format = Fields::new(map, "output_config.format.");
    if format.string("type")? != Some("json_schema") {
        return Err(format.invalid("type", "must be \"json_schema\""));
    }
    let schema = format.object("schema")?;
    request.set("response_format", Some(json!({"type": "json_schema", "json_schema": {"schema": schema}})));
    Ok(())
}
