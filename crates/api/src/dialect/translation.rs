//! A request on its way into OpenAI's words.

use crate::fields::Fields;
use crate::openapi::requests::ENGINE;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};

/// The tools of a request in OpenAI's words: `function` gives what a tool, which `holds` so much, calls its function.
pub(super) fn tools(
    fields: &Fields<'_>,
    holds: &str,
    function: impl Fn(&Fields<'_>) -> Result<Map<String, Value>, Refusal>,
) -> Result<Option<Value>, Refusal> {
    let Some(list) = fields.list("tools")? else { return Ok(None) };
    let tool_of = |(index, tool)| {
        let path = format!("tools[{index}].");
        let function = function(&Fields::of_item(tool, &path, holds)?)?;
        Ok(json!({"type": "function", "function": function}))
    };
    list.iter().enumerate().map(tool_of).collect::<Result<_, _>>().map(Some)
}

/// The fields of these names that are there.
pub(super) fn picked(fields: &Fields<'_>, names: &[&str]) -> Map<String, Value> {
    names.iter().filter_map(|name| Some(((*name).to_owned(), fields.get(name)?.clone()))).collect()
}

/// The translated request, field by field. What is not there or null is left out.
#[derive(Debug, Default)]
pub(super) struct Translation(Map<String, Value>);

impl Translation {
    /// Begins with what every API calls the same: how the answer is generated ([`ENGINE`]), `model` and
    /// `stream`, and those of `own` too.
    pub(super) fn of(body: &Map<String, Value>, own: &[&str]) -> Self {
        let mut translation = Self::default();
        let engine = ENGINE.iter().map(|field| field.name);
        for name in ["model", "stream"].iter().chain(own).copied().chain(engine) {
            translation.set(name, body.get(name).cloned());
        }
        translation
    }

    /// Sets a field if there is a value.
    pub(super) fn set(&mut self, name: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value.map(Into::into).filter(|value| !value.is_null()) {
            self.0.insert(name.into(), value);
        }
    }

    /// Sets a variable of the chat template that the request does not set itself.
    pub(super) fn set_template_variable(&mut self, name: &str, value: impl Into<Value>) {
        let variables = self.0.entry("chat_template_kwargs").or_insert_with(|| Map::new().into());
        // Anything but an object is refused by validation, with its own words.
        if let Value::Object(variables) = variables {
            variables.entry(name).or_insert(value.into());
        }
    }

    /// The request, for validation.
    pub(super) fn body(self) -> Map<String, Value> {
        self.0
    }
}
