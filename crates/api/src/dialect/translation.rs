//! A request on its way into OpenAI's words.

use crate::openapi::requests::ENGINE;
use serde_json::{Map, Value};

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
