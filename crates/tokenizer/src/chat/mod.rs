//! Chat templates: messages to the prompt text that the model was trained on.
//!
//! The dialect is Jinja2 as transformers runs it (utils/chat_template_utils.py): `trim_blocks`,
//! `lstrip_blocks`, loop controls, Python methods on strings and dicts, `raise_exception`,
//! `strftime_now`, `tojson` without HTML escaping, `{% generation %}`. Rendering is bounded by fuel and
//! recursion, so that no request can hold a tokenizer.
//!
//! **Invariant:** a template that cannot be parsed is reported once, at load; chat requests are then
//! refused with that sentence and completions still work.

mod clock;
mod json;
mod syntax;

use lockstep_core::Refusal;
use lockstep_wire::ChatMessages;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value as Jinja};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;

/// Instructions one rendering may execute: about a thousand times what a long chat needs.
const FUEL_MAX: u64 = 20_000_000;
const RECURSION_MAX: usize = 200;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The source texts of a model's templates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TemplateSources {
    /// Used unless the next one applies.
    pub(crate) default: Option<String>,
    /// Used for requests with tools (the template named `tool_use`).
    pub(crate) tool_use: Option<String>,
}

/// A model's compiled chat templates.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    has_tool_use: bool,
    /// `bos_token`, `eos_token`, ... as templates see them.
    special_tokens: BTreeMap<String, String>,
}

/// What a template said through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles the templates. The error is a sentence for `chat_error`: why, and what to do.
    pub(crate) fn compile(
        sources: TemplateSources,
        special_tokens: BTreeMap<String, String>,
        unix_seconds: fn() -> u64,
    ) -> Result<Self, String> {
        let Some(default) = sources.default.or_else(|| sources.tool_use.clone()) else {
            return Err(
                "the model has no chat template, so chat requests are refused; use /v1/completions or \
                        pass a template with --chat-template"
                    .into(),
            );
        };
        let mut environment = environment(unix_seconds);
        let has_tool_use = sources.tool_use.is_some();
        for (name, source) in [(DEFAULT, Some(default)), (TOOL_USE, sources.tool_use)] {
            let Some(source) = source else { continue };
            let source = syntax::rewrite_generation_tags(&source);
            environment.add_template_owned(name, source).map_err(|error| {
                format!(
                    "the model's chat template cannot be parsed ({}), so chat requests are refused; use \
                     /v1/completions or pass another template with --chat-template",
                    describe(&error)
                )
            })?;
        }
        Ok(Self { environment, has_tool_use, special_tokens })
    }

    /// The prompt text of a chat. Refusals are 400s: invalid JSON, or the template's own message.
    pub(crate) fn render(&self, chat: &ChatMessages) -> Result<String, Refusal> {
        let mut messages: Json = parse("messages", &chat.messages_json)?;
        normalise_messages(&mut messages)?;
        let tools: Json = chat.tools_json.as_deref().map_or(Ok(Json::Null), |text| parse("tools", text))?;
        let has_tools = tools.as_array().is_some_and(|list| !list.is_empty());
        let mut variables: Map<String, Json> =
            self.special_tokens.iter().map(|(name, token)| (name.clone(), token.clone().into())).collect();
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), if has_tools { tools } else { Json::Null });
        variables.insert("documents".into(), Json::Null);
        variables.insert("add_generation_prompt".into(), chat.add_generation_prompt.into());
        if let Some(text) = &chat.template_kwargs_json {
            let kwargs: Map<String, Json> = parse("chat_template_kwargs", text)?;
            variables.extend(kwargs);
        }
        let name = if has_tools && self.has_tool_use { TOOL_USE } else { DEFAULT };
        let template = self.environment.get_template(name).map_err(|e| Refusal::internal(describe(&e)))?;
        template.render(Jinja::from(Serde(&variables))).map_err(|error| refusal_of(&error))
    }
}

fn environment(unix_seconds: fn() -> u64) -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("invariant: default delimiters are valid"));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_fuel(Some(FUEL_MAX));
    env.set_recursion_limit(RECURSION_MAX);
    env.add_filter("tojson", json::tojson);
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function("strftime_now", move |format: String| clock::strftime(&format, unix_seconds()));
    env
}

/// The clock of `strftime_now` in service.
pub(crate) fn system_clock() -> u64 {
    clock::unix_seconds()
}

fn parse<T: serde::de::DeserializeOwned>(param: &str, text: &str) -> Result<T, Refusal> {
    serde_json::from_str(text)
        .map_err(|e| Refusal::invalid_param(param, format!("`{param}` is not the expected JSON: {e}")))
}

/// Two things that clients send and templates do not expect, treated as SGLang and vLLM do:
/// `content: null` beside tool calls means no content (never the word "None"), and
/// tool-call arguments arrive as JSON text where templates want the object.
fn normalise_messages(messages: &mut Json) -> Result<(), Refusal> {
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
        let content = message.entry("content").or_insert(Json::Null);
        if content.is_null() {
            *content = Json::String(String::new());
        }
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(text) = arguments.as_str()
                && let Ok(object @ Json::Object(_)) = serde_json::from_str(text)
            {
                *arguments = object;
            }
        }
    }
    Ok(())
}

fn refusal_of(error: &Error) -> Refusal {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return Refusal::invalid_param(
                "messages",
                format!("the model's chat template refuses these messages: {message}"),
            );
        }
        source = inner.source();
    }
    let reason = match error.kind() {
        ErrorKind::OutOfFuel => format!("it ran for more than {FUEL_MAX} instructions; send fewer messages"),
        _ => describe(error),
    };
    Refusal::invalid_param("messages", format!("the model's chat template fails on these messages: {reason}"))
}

/// One line: what, and where in the template.
fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind()));
    error.line().map_or(what.clone(), |line| format!("{what}, line {line}"))
}

#[cfg(test)]
mod tests;
