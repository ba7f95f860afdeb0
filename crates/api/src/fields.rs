//! Typed reading of a JSON object in which `null` means absent.
//!
//! Every error is a 400 that names the field. Numbers: an integer may be written `5` or `5.0`.

use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// An object, and where it stands in the request (empty at the top, else e.g. `stream_options.`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { map, path }
    }

    /// The fields of an item of a list, whose path is `path`, say `tools[0].`; a 400 that says what it `holds`
    /// unless it is an object.
    pub(crate) fn of_item(item: &'a Value, path: &'a str, holds: &str) -> Result<Self, Refusal> {
        let Some(map) = item.as_object() else {
            let name = path.trim_end_matches('.');
            let message = format!("{name} must be an object with {holds}, got {}", kind(item));
            return Err(Refusal::invalid_param(name, message));
        };
        Ok(Self::new(map, path))
    }

    /// The whole object.
    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// The value of a field that is there and not null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// The path of the fields of a field.
    pub(crate) fn path_of(&self, name: &str) -> String {
        format!("{}{name}.", self.path)
    }

    /// A 400 that names the field.
    pub(crate) fn invalid(&self, name: &str, message: impl AsRef<str>) -> Refusal {
        let name = format!("{}{name}", self.path);
        let message = format!("{name} {}", message.as_ref());
        Refusal::invalid_param(name, message)
    }

    fn wrong_kind(&self, name: &str, wanted: &str, got: &Value) -> Refusal {
        self.invalid(name, format!("must be {wanted}, got {}", kind(got)))
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong_kind(name, "true or false", value))
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong_kind(name, "a string", value))
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.wrong_kind(name, "an object", value))
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value
            .as_array()
            .map(|list| Some(list.as_slice()))
            .ok_or_else(|| self.wrong_kind(name, "a list", value))
    }

    /// An integer inside `range`.
    pub(crate) fn integer(&self, name: &str, range: RangeInclusive<i128>) -> Result<Option<i128>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = integer(value).ok_or_else(|| match value {
            Value::Number(number) => self.invalid(name, format!("must be an integer, got {number}")),
            other => self.wrong_kind(name, "an integer", other),
        })?;
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (least, most) = (range.start(), range.end());
        Err(self.invalid(name, format!("must be in {least}..={most}, got {number}")))
    }

    /// A number inside `range`, which must be finite.
    pub(crate) fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| self.wrong_kind(name, "a number", value))?;
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (least, most) = (range.start(), range.end());
        Err(self.invalid(name, format!("must be in {least}..={most}, got {number}")))
    }
}

/// The integer a JSON value holds, if it holds one.
pub(crate) fn integer(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    if let Some(n) = number.as_i64() {
        return Some(n.into());
    }
    if let Some(n) = number.as_u64() {
        return Some(n.into());
    }
    let number = number.as_f64().filter(|n| n.fract() == 0.0)?;
    // Saturates for huge values, which no range accepts. What was written as an integer and fits 64 bits is above:
    // whatever rounds to the least of them is less.
    Some(if number <= i64::MIN as f64 { (number as i128).saturating_sub(1) } else { number as i128 })
}

/// A JSON value's kind in words, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
