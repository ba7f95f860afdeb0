//! Typed access to the keys of one architecture, with errors that name key and value.

use super::Metadata;
use super::header::RawTensor;
use lockstep_core::config::unknown::{UNKNOWN_KEY_WANT, noted};
use lockstep_core::{ConfigError, Family};
use std::cell::RefCell;
use std::collections::BTreeSet;

pub(super) type Result<T> = std::result::Result<T, ConfigError>;

/// Keys of the architecture that converters write and that change nothing here, or nothing without the keys that make
/// them count.
const WITHOUT_EFFECT: &[&str] = &[
    "attention.layer_norm_epsilon", // every family here has an RMS epsilon of its own
    "attention.sliding_window_pattern",
    "expert_used_count",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",
];

/// The metadata of a model of one family.
pub(super) struct Reader<'a> {
    pub metadata: &'a Metadata,
    /// Of all parts of the file.
    pub tensors: &'a [RawTensor],
    pub family: Family,
    /// Full names of the keys of the architecture that were asked for so far, there or not.
    pub asked: RefCell<BTreeSet<String>>,
}

impl Reader<'_> {
    /// Whether the file has a tensor of this GGUF name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// `key` with the architecture before it; whoever asks for it counts as its reader.
    pub fn key(&self, key: &str) -> String {
        let full = format!("{}.{key}", self.family.name());
        self.asked.borrow_mut().insert(full.clone());
        full
    }

    /// The keys of the architecture that were not asked for, in order; call it when everything is read.
    ///
    /// One that is switched on and whose name speaks of the mathematics is refused, the others are for a warning.
    pub fn unread(&self) -> Result<Vec<String>> {
        let asked = self.asked.borrow().clone();
        let prefix = self.key("");
        let own = self.metadata.keys().filter_map(|full| Some((full, full.strip_prefix(&prefix)?)));
        let unknown = own.filter(|(full, key)| !asked.contains(*full) && !WITHOUT_EFFECT.contains(key));
        match noted(unknown.map(|(full, key)| (key, !self.is_off(full)))) {
            Ok(noted) => Ok(noted.into_iter().map(|key| self.key(key)).collect()),
            Err(key) => Err(self.unsupported(key, UNKNOWN_KEY_WANT)),
        }
    }

    /// Whether the key of this full name says false or 0.
    pub fn is_off(&self, full: &str) -> bool {
        self.metadata.flag(full) == Some(false) || self.metadata.number(full) == Some(0.0)
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
