//! Chat templates: messages to the prompt text that the model was trained on.
//!
//! The dialect is Jinja2 as transformers runs it (utils/chat_template_utils.py): `trim_blocks`,
//! `lstrip_blocks`, loop controls, Python methods on strings and dicts, `raise_exception`,
//! `strftime_now`, `tojson` without HTML escaping, `{% generation %}`. Rendering is bounded by fuel,
//! recursion and the length of the prompt, so that no request can hold a tokenizer or fill its memory.
//!
//! Of Jinja there is no `%` on strings (the filter `format` is there), no `lipsum`, `truncate`,
//! `wordcount` or access to methods as values; no known model uses them. More lenient than Jinja: a
//! loop over none is empty. Differs: a float below 1e-4 or from 1e16 that is joined with `~` or printed
//! inside a list is written without exponent.
//!
//! **Invariant:** a template that cannot be parsed is reported once, at load; chat requests are then
//! refused with that sentence and completions still work.
//!
//! Reading order: this file, `messages` and `probe` (what a template is given), `prefill`, then the
//! dialect: `syntax`, `methods`, `json`, `clock`. Golden texts: `tests/templates` of the repository.

mod clock;
mod json;
mod messages;
mod methods;
mod prefill;
mod probe;
mod sources;
mod syntax;

pub(crate) use sources::TemplateSources;

use lockstep_core::Refusal;
use lockstep_wire::ChatMessages;
use messages::MessageForm;
use minijinja::value::{Rest, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value as Jinja};
use prefill::Prefill;
use serde_json::{Map, Value as Json};
use sources::{DEFAULT, RAG, TOOL_USE};
use std::collections::BTreeMap;
use std::io;

/// What one rendering may cost, in instructions or 64 bytes of text that any of them makes: some two hundred times what
/// a long chat needs, a second or two, and an eighth of a gigabyte at most for a template that doubles a text.
const FUEL_MAX: u64 = 4_000_000;
const RECURSION_MAX: usize = 200;
/// Bytes of a prompt; a request's body may have as many.
const PROMPT_BYTES_MAX: usize = 32 << 20;

/// A model's compiled chat templates.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    /// Every template's name, and how it wants its messages.
    forms: BTreeMap<String, MessageForm>,
    /// `bos_token`, `eos_token`, ... as templates see them.
    special_tokens: BTreeMap<String, String>,
}

/// What a template said through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The keyword arguments of one rendering that are not variables of the template. They travel among
/// `chat_template_kwargs`, as they do in `apply_chat_template`.
#[derive(Default)]
struct Choices {
    /// Name of the template to use (`chat_template`).
    template: Option<String>,
    /// Field of the last message to continue (`continue_final_message`: true means `content`).
    prefill_field: Option<String>,
}

impl ChatTemplate {
    /// Compiles the templates. The error is a sentence for `chat_error`: why, and what to do.
    pub(crate) fn compile(
        sources: TemplateSources,
        special_tokens: BTreeMap<String, String>,
        unix_seconds: fn() -> u64,
    ) -> Result<Self, String> {
        let Some(named) = sources.with_default() else {
            return Err(
                "the model has no chat template, so chat requests are refused; use /v1/completions or \
                        pass a template with --chat-template"
                    .into(),
            );
        };
        let mut environment = environment(unix_seconds);
        for (name, source) in &named {
            let source = syntax::rewrite_generation_tags(source);
            environment.add_template_owned(name.clone(), source).map_err(|error| {
                format!(
                    "the model's chat template `{name}` cannot be parsed ({}), so chat requests are refused; \
                     use /v1/completions or pass another template with --chat-template",
                    describe(&error)
                )
            })?;
        }
        let mut compiled = Self { environment, forms: BTreeMap::new(), special_tokens };
        compiled.forms =
            named.iter().map(|(name, source)| (name.clone(), compiled.probe(name, source))).collect();
        Ok(compiled)
    }

    fn probe(&self, name: &str, source: &str) -> MessageForm {
        probe::find_form(source, |mut messages, tools, form| {
            messages::normalise(&mut messages, form).ok()?;
            let mut variables = self.variables(messages, tools.unwrap_or(Json::Null));
            variables.insert("add_generation_prompt".into(), true.into());
            self.render_with(name, &variables).ok()
        })
    }

    /// The prompt text of a chat. Refusals are 400s: invalid JSON, or the template's own message.
    ///
    /// `template_kwargs_json` holds what transformers' `apply_chat_template` takes by keyword: besides
    /// variables of the template, `documents`, `continue_final_message` (true, or the name of a field
    /// of the last message; no generation prompt is added then) and `chat_template` (the name of one of
    /// the model's templates). Without that name, tools select `tool_use` and documents `rag`, where
    /// the model has them.
    pub(crate) fn render(&self, chat: &ChatMessages) -> Result<String, Refusal> {
        let mut messages: Json = parse("messages", &chat.messages_json)?;
        let tools: Json = chat.tools_json.as_deref().map_or(Ok(Json::Null), |text| parse("tools", text))?;
        let mut kwargs: Map<String, Json> = match &chat.template_kwargs_json {
            Some(text) => parse("chat_template_kwargs", text)?,
            None => Map::new(),
        };
        let choices = Choices::take(&mut kwargs)?;
        let has_tools = is_filled(&tools);
        let has_documents = kwargs.get("documents").is_some_and(is_filled);
        let name = self.choose(choices.template.as_deref(), has_tools, has_documents)?;
        messages::normalise(&mut messages, self.forms.get(name).copied().unwrap_or_default())?;
        let prefill = choices.prefill_field.map(|field| Prefill::mark(&mut messages, &field)).transpose()?;
        let mut variables = self.variables(messages, if has_tools { tools } else { Json::Null });
        let adds_prompt = chat.add_generation_prompt && prefill.is_none();
        variables.insert("add_generation_prompt".into(), adds_prompt.into());
        variables.extend(kwargs);
        let text = self.render_with(name, &variables).map_err(|error| refusal_of(&error))?;
        match prefill {
            Some(prefill) => prefill.cut(text),
            None => Ok(text),
        }
    }

    fn variables(&self, messages: Json, tools: Json) -> Map<String, Json> {
        let mut variables: Map<String, Json> =
            self.special_tokens.iter().map(|(name, token)| (name.clone(), token.clone().into())).collect();
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), tools);
        variables.insert("documents".into(), Json::Null);
        variables
    }

    fn render_with(&self, name: &str, variables: &Map<String, Json>) -> Result<String, Error> {
        let mut prompt = Bounded::default();
        self.environment
            .get_template(name)?
            .render_captured_to(Jinja::from(Serde(variables)), &mut prompt)?;
        Ok(String::from_utf8(prompt.0).expect("invariant: templates write text"))
    }

    /// The template that serves a request.
    fn choose(&self, asked: Option<&str>, has_tools: bool, has_documents: bool) -> Result<&str, Refusal> {
        if let Some(asked) = asked {
            return self.forms.get_key_value(asked).map(|(name, _)| name.as_str()).ok_or_else(|| {
                let names: Vec<&str> = self.forms.keys().map(String::as_str).collect();
                let message = format!(
                    "`chat_template` must name one of this model's templates ({}), got {:?}",
                    names.join(", "),
                    asked.chars().take(40).collect::<String>()
                );
                Refusal::invalid_param("chat_template", message)
            });
        }
        let has = |name| self.forms.contains_key(name);
        Ok(match () {
            () if has_tools && has(TOOL_USE) => TOOL_USE,
            () if has_documents && has(RAG) => RAG,
            () => DEFAULT,
        })
    }
}

/// The prompt while it is written, up to its limit.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > PROMPT_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Choices {
    /// Takes the arguments that are not template variables out of `kwargs`.
    fn take(kwargs: &mut Map<String, Json>) -> Result<Self, Refusal> {
        let wrong = |name: &str, wanted: &str| {
            Err(Refusal::invalid_param(
                name,
                format!("`{name}` must be {wanted}; send it as that or not at all"),
            ))
        };
        let template = match kwargs.remove("chat_template") {
            None | Some(Json::Null) => None,
            Some(Json::String(name)) => Some(name),
            Some(_) => return wrong("chat_template", "the name of one of the model's templates"),
        };
        let prefill_field = match kwargs.remove("continue_final_message") {
            None | Some(Json::Null | Json::Bool(false)) => None,
            Some(Json::Bool(true)) => Some("content".into()),
            Some(Json::String(field)) => Some(field),
            Some(_) => return wrong("continue_final_message", "true, false or a field of the last message"),
        };
        for name in ["messages", "tools"] {
            if kwargs.contains_key(name) {
                return wrong(name, "a field of the request, not one of `chat_template_kwargs`");
            }
        }
        Ok(Self { template, prefill_field })
    }
}

fn is_filled(list: &Json) -> bool {
    list.as_array().is_some_and(|list| !list.is_empty())
}

fn environment(unix_seconds: fn() -> u64) -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("invariant: default delimiters are valid"));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(methods::unknown_method);
    env.set_fuel(Some(FUEL_MAX));
    env.set_recursion_limit(RECURSION_MAX);
    env.add_filter("tojson", json::tojson);
    // Python spells very small and very large floats with an exponent.
    env.add_filter("string", |value: Jinja| {
        json::float_text(&value).map_or_else(|| string(&value), Jinja::from)
    });
    env.set_formatter(|out, state, value| match json::float_text(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    });
    env.add_function("cycler", |items: Rest<Jinja>| minijinja_contrib::globals::cycler(items.0));
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    // Where Python differs: none is nothing to iterate over, and strings are sequences.
    env.add_test("iterable", |value: &Jinja| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Jinja| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Bytes)
    });
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    env.add_function("strftime_now", move |format: String| clock::strftime(&format, unix_seconds()));
    env
}

fn string(value: &Jinja) -> Jinja {
    if value.as_str().is_some() { value.clone() } else { value.to_string().into() }
}

/// The clock of `strftime_now` in service.
pub(crate) fn system_clock() -> u64 {
    clock::unix_seconds()
}

fn parse<T: serde::de::DeserializeOwned>(param: &str, text: &str) -> Result<T, Refusal> {
    serde_json::from_str(text)
        .map_err(|e| Refusal::invalid_param(param, format!("`{param}` is not the expected JSON: {e}")))
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
        ErrorKind::OutOfFuel => {
            format!(
                "it costs more than {FUEL_MAX} instructions, or 64 times as many bytes; send fewer messages"
            )
        }
        ErrorKind::WriteFailure => {
            format!("it writes a prompt of more than {} MiB; send fewer messages", PROMPT_BYTES_MAX >> 20)
        }
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
mod golden;
#[cfg(test)]
mod tests;
