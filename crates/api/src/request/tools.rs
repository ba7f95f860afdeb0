//! Tools of a chat: what the request offers, what it wants called, and how its answers are taken apart.
//!
//! A request without tools is parsed for reasoning only, and only if the model's chat template shows any.
//! An answer that is held to a form (`response_format` and its kin) holds neither calls nor reasoning: the
//! form begins with the first token.

use super::forced;
use super::limits::{FUNCTION_NAME_LEN_MAX, TOOLS_MAX};
use super::policy::shorten;
use crate::ApiConfig;
use crate::fields::{Fields, kind};
use crate::parsers::{AnswerSetup, Function, ReasoningFormat, ToolFormat};
use lockstep_core::{Grammar, Refusal, SamplingParams};
use lockstep_wire::TextParams;
use serde_json::{Map, Value};

/// The tools that a request offers its model.
#[derive(Debug)]
pub(super) struct Tools {
    /// For the chat template, a list.
    pub(super) json: String,
    functions: Vec<Function>,
    wish: Wish,
    format: ToolFormat,
    /// `parallel_tool_calls: false`, or one function was named.
    one_call: bool,
}

impl Tools {
    /// The functions that the request wants called, or may have called.
    fn wanted(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| match &self.wish {
            Wish::Named(name) => function.name == *name,
            Wish::Auto | Wish::Required => true,
        })
    }
}

/// What the request wants called.
#[derive(Clone, Debug, PartialEq)]
enum Wish {
    /// What the model finds right.
    Auto,
    /// At least one function.
    Required,
    /// This one.
    Named(String),
}

/// How the answers of a request are taken apart.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parsing {
    /// For every choice, but for the seed of its ids.
    pub(crate) setup: AnswerSetup,
    /// Calls behind the first one are left out.
    pub(crate) one_call: bool,
    /// Reasoning is left out.
    pub(crate) hides_reasoning: bool,
}

/// What becomes of an answer's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReasoningWish {
    /// It is told apart from the text.
    Separate,
    /// It is left out: vLLM's `include_reasoning: false`.
    Hide,
    /// It stays in the text as the model writes it: SGLang's `separate_reasoning: false`.
    Leave,
}

/// An answer's reasoning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reasoning {
    /// The prompt ended with the tag that opens it.
    pub(super) begins: bool,
    /// What becomes of it.
    pub(super) wish: ReasoningWish,
}

/// `separate_reasoning` and `include_reasoning`.
pub(super) fn reasoning_wish(fields: &Fields<'_>) -> Result<ReasoningWish, Refusal> {
    let separate = fields.boolean("separate_reasoning")?.unwrap_or(true);
    match (separate, fields.boolean("include_reasoning")?.unwrap_or(true)) {
        (true, true) => Ok(ReasoningWish::Separate),
        (true, false) => Ok(ReasoningWish::Hide),
        (false, true) => Ok(ReasoningWish::Leave),
        (false, false) => {
            Err(fields.invalid("include_reasoning", "cannot be false beside separate_reasoning: false"))
        }
    }
}

/// The tools of a request; `None` when it offers none or wants none called. Then the template does not
/// see them either, so that the model does not try.
pub(super) fn read(fields: &Fields<'_>, config: &ApiConfig) -> Result<Option<Tools>, Refusal> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > TOOLS_MAX {
        return Err(fields.invalid("tools", format!("has {} tools, accepted are {TOOLS_MAX}", list.len())));
    }
    let tools = list.iter().enumerate().map(|(i, tool)| tool_of(i, tool)).collect::<Result<Vec<_>, _>>()?;
    let functions: Vec<Function> = tools.iter().filter_map(Function::from_tool).collect();
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let Some(wish) = wish(fields, &functions)? else { return Ok(None) };
    if tools.is_empty() {
        return Ok(None);
    }
    let Some(format) = config.parsers.tools else {
        let message = "cannot be used: the model's chat template shows no way of writing tool calls that this \
            server reads; start it with --tool-call-parser, or leave tools out";
        return Err(fields.invalid("tools", message).with_code("unsupported_field"));
    };
    let one_call = !parallel || matches!(wish, Wish::Named(_));
    Ok(Some(Tools { json: Value::Array(tools).to_string(), functions, wish, format, one_call }))
}

/// A tool in OpenAI's shape, without its null fields.
fn tool_of(index: usize, tool: &Value) -> Result<Value, Refusal> {
    let path = format!("tools[{index}].");
    let fields = Fields::of_item(tool, &path, "type and function")?;
    if fields.string("type")?.unwrap_or("function") != "function" {
        return Err(fields.invalid("type", "must be \"function\": other tools run on OpenAI's servers"));
    }
    let Some(function) = fields.object("function")? else {
        return Err(fields.invalid("function", "is required: {\"name\": ..., \"parameters\": {...}}"));
    };
    check_function(function, &fields.path_of("function"))?;
    let mut clean = without_nulls(fields.map());
    clean.insert("type".into(), "function".into());
    clean.insert("function".into(), Value::Object(without_nulls(function)));
    Ok(Value::Object(clean))
}

fn check_function(function: &Map<String, Value>, path: &str) -> Result<(), Refusal> {
    let fields = Fields::new(function, path);
    let Some(name) = fields.string("name")? else {
        return Err(fields.invalid("name", "is required: the function's name"));
    };
    let is_ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > FUNCTION_NAME_LEN_MAX || !name.chars().all(is_ok) {
        let got = shorten(name);
        let message =
            format!("must have 1 to {FUNCTION_NAME_LEN_MAX} of letters, digits, _, - and ., got {got:?}");
        return Err(fields.invalid("name", message));
    }
    fields.string("description")?;
    fields.boolean("strict")?;
    let parameters = fields.object("parameters")?;
    if parameters.and_then(|schema| schema.get("type")).is_some_and(|kind| kind != "object") {
        return Err(fields.invalid("parameters", "must be a JSON schema of type object"));
    }
    Ok(())
}

fn without_nulls(map: &Map<String, Value>) -> Map<String, Value> {
    map.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// `tool_choice`; `None` when nothing is to be called.
fn wish(fields: &Fields<'_>, functions: &[Function]) -> Result<Option<Wish>, Refusal> {
    let wish = match fields.get("tool_choice") {
        None => Wish::Auto,
        Some(Value::String(text)) => match text.as_str() {
            "none" => return Ok(None),
            "auto" => Wish::Auto,
            "required" => Wish::Required,
            other => return Err(unknown_choice(fields, &format!("{:?}", shorten(other)))),
        },
        Some(Value::Object(choice)) => {
            let name = choice.get("function").and_then(|function| function.get("name")?.as_str());
            match (choice.get("type").and_then(Value::as_str), name) {
                (Some("function"), Some(name)) => Wish::Named(name.into()),
                _ => return Err(unknown_choice(fields, "another object")),
            }
        }
        Some(other) => return Err(unknown_choice(fields, kind(other))),
    };
    match &wish {
        Wish::Required if functions.is_empty() => Err(fields.invalid("tool_choice", "needs tools")),
        Wish::Named(name) if !functions.iter().any(|function| function.name == *name) => {
            let name = shorten(name);
            Err(fields.invalid("tool_choice", format!("names {name:?}, which is not one of the tools")))
        }
        _ => Ok(Some(wish)),
    }
}

fn unknown_choice(fields: &Fields<'_>, got: &str) -> Refusal {
    let known = "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    fields.invalid("tool_choice", format!("must be {known}, got {got}"))
}

/// How the answers are taken apart; sets the form of a forced call, and lets the detokenizer show the
/// special tokens that parsers look for.
/// `None`: the answer is text.
pub(super) fn parsing(
    tools: Option<Tools>,
    Reasoning { begins: begins_in_reasoning, wish }: Reasoning,
    config: &ApiConfig,
    sampling: &mut SamplingParams,
    text: &mut TextParams,
) -> Result<Option<Parsing>, Refusal> {
    let has_form = sampling.grammar.is_some();
    let reasoning = config.parsers.reasoning.filter(|_| !has_form);
    if let Some(tools) = &tools
        && tools.wish != Wish::Auto
    {
        if has_form {
            let message = "tool_choice cannot force a call in an answer that is held to another form";
            return Err(Refusal::invalid_param("tool_choice", message));
        }
        let opening = reasoning.filter(|_| begins_in_reasoning);
        sampling.grammar = Some(Grammar::Lark(forced_grammar(tools, opening)?));
        refuse_open_end(sampling)?;
    }
    let tools = tools.filter(|_| !has_form);
    let forced = tools.as_ref().filter(|tools| tools.wish != Wish::Auto);
    let forced = forced.map(|tools| tools.wanted().map(|function| function.name.clone()).collect());
    let reasoning = reasoning.filter(|_| wish != ReasoningWish::Leave);
    if tools.is_none() && reasoning.is_none() {
        return Ok(None);
    }
    let one_call = tools.as_ref().is_some_and(|tools| tools.one_call);
    let format = tools.as_ref().map(|tools| tools.format);
    if format.is_some_and(ToolFormat::needs_special_tokens)
        || reasoning.is_some_and(|format| format.needs_special_tokens())
    {
        text.skip_special_tokens = false;
    }
    let setup = AnswerSetup {
        tools: format,
        functions: tools.map(|tools| tools.functions).unwrap_or_default(),
        forced: forced.unwrap_or_default(),
        reasoning,
        begins_in_reasoning,
        id_seed: String::new(),
    };
    Ok(Some(Parsing { setup, one_call, hides_reasoning: wish == ReasoningWish::Hide }))
}

fn forced_grammar(tools: &Tools, opening: Option<ReasoningFormat>) -> Result<String, Refusal> {
    if opening.is_some_and(ReasoningFormat::needs_special_tokens) {
        let message = "tool_choice cannot force a call while this model reasons; send \"auto\" or \"none\"";
        return Err(Refusal::invalid_param("tool_choice", message).with_code("unsupported_field"));
    }
    let functions: Vec<&Function> = tools.wanted().collect();
    forced::grammar(tools.format, &functions, tools.one_call, opening.map(ReasoningFormat::close)).ok_or_else(
        || {
            let message = format!(
                "tool_choice cannot force a call in this model's format ({}); send \"auto\" or \"none\"",
                tools.format.name()
            );
            Refusal::invalid_param("tool_choice", message).with_code("unsupported_field")
        },
    )
}

/// A forced call says itself where the answer ends.
fn refuse_open_end(sampling: &SamplingParams) -> Result<(), Refusal> {
    let name = match sampling {
        SamplingParams { min_tokens: 1.., .. } => "min_tokens",
        SamplingParams { ignore_eos: true, .. } => "ignore_eos",
        _ => return Ok(()),
    };
    Err(Refusal::invalid_param(
        name,
        format!("{name} cannot be combined with a tool_choice that forces a call"),
    ))
}
