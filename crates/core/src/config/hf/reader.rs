//! Typed access to the keys of one config file; every error names the key.

use super::Result;
use crate::config::{ConfigError, Family};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// One config file being read for one family.
pub(super) struct Reader<'a> {
    /// The object that describes the text model.
    pub map: &'a Map<String, Value>,
    /// The whole file; the same as `map` unless that is a nested `text_config`.
    pub outer: &'a Map<String, Value>,
    pub family: Family,
    /// Keys that were asked for so far, there or not.
    pub asked: RefCell<BTreeSet<String>>,
}

impl<'a> Reader<'a> {
    /// The value of `key`; null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// The value of `key` in the text part or else in the whole file.
    pub fn get_anywhere(&self, key: &str) -> Option<&'a Value> {
        self.get(key).or_else(|| self.outer.get(key).filter(|v| !v.is_null()))
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(v) => Err(self.bad(key, v, "an object")),
        }
    }

    /// A key that must be there, unless the class has a default for it (`Some`).
    pub fn count(&self, key: &str, class_default: Option<usize>) -> Result<usize> {
        self.optional_count(key)?.or(class_default).ok_or_else(|| self.missing(key))
    }

    /// A [`count`](Self::count) that sizes a list, so it is bounded before the rest is known.
    pub fn list_length(&self, key: &str, class_default: Option<usize>, max: usize) -> Result<usize> {
        match self.count(key, class_default)? {
            length if length <= max => Ok(length),
            length => Err(self.bad(key, &Value::from(length), &format!("1 to {max}"))),
        }
    }

    pub fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_u64().filter(|n| *n > 0) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.bad(key, v, "a positive whole number")),
        }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|v| v.as_f64().ok_or_else(|| self.bad(key, v, "a number"))).transpose()
    }

    /// A number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        let number = self.number(key)?;
        match number {
            Some(n) if !(n.is_finite() && n > 0.0) => {
                Err(self.bad(key, &Value::from(n), "a positive number"))
            }
            _ => Ok(number),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| self.as_flag(key, v)).transpose()
    }

    pub fn as_flag(&self, key: &str, value: &Value) -> Result<bool> {
        value.as_bool().ok_or_else(|| self.bad(key, value, "true or false"))
    }

    pub fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: key.into(), family: self.family.name().into() }
    }

    pub fn bad(&self, key: &str, got: &Value, want: &str) -> ConfigError {
        ConfigError::bad(key, got, want)
    }

    pub fn unsupported(&self, key: &str, got: &Value, want: &str) -> ConfigError {
        ConfigError::unsupported(key, got, self.family.name(), want)
    }
}
