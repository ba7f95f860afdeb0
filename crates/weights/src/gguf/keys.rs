//! Typed access to the keys of one architecture, with errors that name key and value.

use super::Metadata;
use super::header::RawTensor;
use lockstep_core::{ConfigError, Family};

pub(super) type Result<T> = std::result::Result<T, ConfigError>;

/// The metadata of a model of one family.
pub(super) struct Reader<'a> {
    pub metadata: &'a Metadata,
    /// Of all parts of the file.
    pub tensors: &'a [RawTensor],
    pub family: Family,
}

impl Reader<'_> {
    /// Whether the file has a tensor of this GGUF name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// `key` with the architecture before it.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.family.name())
    }

    /// A positive whole number that must be there.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    /// A positive whole number.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let full = self.key(key);
        if !self.metadata.contains(&full) {
            return Ok(None);
        }
        match self.metadata.integer(&full).filter(|n| *n > 0) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.bad(key, "a positive whole number")),
        }
    }

    /// A number; 0 and `false` count as absent, which is how converters write "off".
    pub fn switch(&self, key: &str) -> Result<Option<f64>> {
        let full = self.key(key);
        if self.metadata.flag(&full) == Some(false) {
            return Ok(None);
        }
        Ok(self.number(key)?.filter(|n| *n != 0.0))
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let full = self.key(key);
        match self.metadata.number(&full) {
            None if self.metadata.contains(&full) => Err(self.bad(key, "a number")),
            number => Ok(number),
        }
    }

    /// A positive finite number.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(n) if !(n.is_finite() && n > 0.0) => Err(self.bad(key, "a positive number")),
            number => Ok(number),
        }
    }

    /// The key is not there, although the family needs it.
    pub fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: self.key(key), family: self.family.name().into() }
    }

    /// The value has the wrong type or range.
    pub fn bad(&self, key: &str, want: &str) -> ConfigError {
        let key = self.key(key);
        ConfigError::BadValue { got: self.metadata.describe(&key), key, want: want.into() }
    }

    /// The value asks for something that is not implemented.
    pub fn unsupported(&self, key: &str, want: &str) -> ConfigError {
        let key = self.key(key);
        ConfigError::Unsupported {
            got: self.metadata.describe(&key),
            key,
            family: self.family.name().into(),
            want: want.into(),
        }
    }
}
