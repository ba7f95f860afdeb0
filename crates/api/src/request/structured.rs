//! The form an answer is held to: OpenAI's `response_format`, and what vLLM and SGLang call it.
//!
//! Only the shape of the fields is checked here; whether a schema, pattern or grammar can be compiled is the
//! tokenizer's to say, still before rank 0 hears of the request.

use super::gbnf;
use super::limits::ALLOWED_CHOICES_MAX;
use crate::fields::{Fields, kind};
use lockstep_core::{Grammar, Refusal};
use serde_json::Value;

/// The grammar of a request; at most one field may ask for one.
pub(super) fn grammar(fields: &Fields<'_>) -> Result<Option<Grammar>, Refusal> {
    let sources = [
        ("response_format", response_format(fields)?),
        ("structured_outputs", structured_outputs(fields)?),
        ("guided_json", schema(fields, "guided_json")?),
        ("guided_regex", regex(fields, "guided_regex")?),
        ("guided_choice", choice(fields, "guided_choice")?),
        ("guided_grammar", lark(fields, "guided_grammar")?),
        ("json_schema", schema(fields, "json_schema")?),
        ("regex", regex(fields, "regex")?),
        ("ebnf", lark(fields, "ebnf")?),
    ];
    let found = one_of(sources).map_err(|(first, second)| {
        fields.invalid(second, format!("cannot be combined with {first}: an answer has one form"))
    })?;
    let Some(grammar) = found else { return Ok(None) };
    if fields.integer("min_tokens", 0..=u32::MAX.into())?.unwrap_or(0) > 0 {
        return Err(
            fields.invalid("min_tokens", "cannot be combined with a form, which says where answers end")
        );
    }
    if fields.boolean("ignore_eos")? == Some(true) {
        return Err(
            fields.invalid("ignore_eos", "cannot be combined with a form, which says where answers end")
        );
    }
    Ok(Some(grammar))
}

/// The field that asks for the grammar of a request that has one.
pub(super) fn field(fields: &Fields<'_>) -> &'static str {
    FIELDS.iter().copied().find(|name| fields.get(name).is_some()).unwrap_or("response_format")
}

/// What may ask for a grammar besides `response_format`, which may also ask for none.
const FIELDS: &[&str] = &[
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
];

/// The only one that is there, or the names of the first two.
fn one_of<const N: usize>(
    sources: [(&'static str, Option<Grammar>); N],
) -> Result<Option<Grammar>, (&'static str, &'static str)> {
    let mut found: Option<(&str, Grammar)> = None;
    for (name, grammar) in sources {
        match (grammar, &found) {
            (Some(_), Some((first, _))) => return Err((first, name)),
            (Some(grammar), None) => found = Some((name, grammar)),
            (None, _) => {}
        }
    }
    Ok(found.map(|(_, grammar)| grammar))
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Grammar>, Refusal> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    let format = Fields::new(format, "response_format.");
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::JsonObject)),
        Some("json_schema") => {
            let Some(inner) = format.object("json_schema")? else {
                return Err(format.invalid("json_schema", "is required: {\"name\": ..., \"schema\": {...}}"));
            };
            let inner = Fields::new(inner, "response_format.json_schema.");
            // `strict` false asks for less than is always given.
            inner.boolean("strict")?;
            match schema(&inner, "schema")? {
                Some(grammar) => Ok(Some(grammar)),
                None => Err(inner.invalid("schema", "is required: a JSON schema")),
            }
        }
        _ => Err(format.invalid("type", "must be one of text, json_object, json_schema")),
    }
}

/// vLLM's one object with one of several keys.
fn structured_outputs(fields: &Fields<'_>) -> Result<Option<Grammar>, Refusal> {
    let Some(map) = fields.object("structured_outputs")? else { return Ok(None) };
    let inner = Fields::new(map, "structured_outputs.");
    let known = ["json", "regex", "choice", "grammar", "json_object"];
    if let Some(name) = map.keys().find(|name| !known.contains(&name.as_str()) && inner.get(name).is_some()) {
        let name = super::policy::shorten(name);
        return Err(inner.invalid(&name, format!("is not supported; known are {}", known.join(", "))));
    }
    let any_object = inner.boolean("json_object")?.unwrap_or(false);
    let sources = [
        ("json", schema(&inner, "json")?),
        ("regex", regex(&inner, "regex")?),
        ("choice", choice(&inner, "choice")?),
        ("grammar", lark(&inner, "grammar")?),
        ("json_object", any_object.then_some(Grammar::JsonObject)),
    ];
    one_of(sources)
        .map_err(|(first, second)| inner.invalid(second, format!("cannot be combined with {first}")))
}

/// A schema, as an object or as its text.
fn schema(fields: &Fields<'_>, name: &str) -> Result<Option<Grammar>, Refusal> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(Grammar::JsonSchema(text.clone()))),
        Some(value @ Value::Object(_)) => Ok(Some(Grammar::JsonSchema(crate::respond::to_json(value)))),
        Some(other) => Err(fields.invalid(name, format!("must be a JSON schema, got {}", kind(other)))),
    }
}

fn regex(fields: &Fields<'_>, name: &str) -> Result<Option<Grammar>, Refusal> {
    Ok(fields.string(name)?.map(|text| Grammar::Regex(text.into())))
}

fn lark(fields: &Fields<'_>, name: &str) -> Result<Option<Grammar>, Refusal> {
    let Some(text) = fields.string(name)? else { return Ok(None) };
    if !text.contains("::=") {
        return Ok(Some(Grammar::Lark(text.into())));
    }
    let converted = gbnf::to_lark(text).map_err(|why| {
        let message = format!(
            "is read as GBNF because it holds ::=, but {why}; Lark's form (start: rule, with a colon) is read as well"
        );
        fields.invalid(name, message)
    })?;
    Ok(Some(Grammar::Lark(converted)))
}

fn choice(fields: &Fields<'_>, name: &str) -> Result<Option<Grammar>, Refusal> {
    let Some(list) = fields.list(name)? else { return Ok(None) };
    if list.is_empty() || list.len() > ALLOWED_CHOICES_MAX {
        return Err(
            fields.invalid(name, format!("must have 1 to {ALLOWED_CHOICES_MAX} texts, got {}", list.len()))
        );
    }
    let text = |item: &Value| {
        let text = item.as_str().filter(|text| !text.is_empty());
        text.map(str::to_owned).ok_or_else(|| fields.invalid(name, "must hold strings that are not empty"))
    };
    list.iter().map(text).collect::<Result<_, _>>().map(|texts| Some(Grammar::Choice(texts)))
}
