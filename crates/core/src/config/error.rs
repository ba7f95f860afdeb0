//! Why a model description is refused.

use serde_json::Value;

/// Characters of a value that a message shows.
const SHOWN_MAX: usize = 80;

/// Why a model description is refused. Every message names the key, what the file says and what is
/// accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key without which the mathematics is unknown.
    #[error("config has no {key}, which {family} models need; download the model again or add the key")]
    Missing {
        /// The key.
        key: String,
        /// Who needs it.
        family: String,
    },
    /// A value of the wrong type or range.
    #[error("config key {key} is {got}, expected {want}; correct the file or download the model again")]
    BadValue {
        /// The key.
        key: String,
        /// What the file says.
        got: String,
        /// What is accepted.
        want: String,
    },
    /// A feature that would change the answers and is not implemented.
    #[error(
        "config key {key} asks for {got}, which Lockstep does not implement for {family} models ({want}); choose \
         another checkpoint, or correct the file if it is wrong"
    )]
    Unsupported {
        /// The key.
        key: String,
        /// What the file asks for.
        got: String,
        /// The family.
        family: String,
        /// What is supported.
        want: String,
    },
    /// A family that is not on the list.
    #[error("model architecture {got} is not supported; choose a model of one of these: {supported}")]
    UnknownFamily {
        /// The file's name for it.
        got: String,
        /// The list.
        supported: String,
    },
    /// Not JSON, or not an object.
    #[error("config is not a JSON object: {0}")]
    NotJson(String),
    /// A tensor-parallel size the model cannot be cut into.
    #[error("--tp {tp_size} {reason}; tp sizes that work for this model: {legal}")]
    IllegalTpSize {
        /// What was asked for, as typed.
        tp_size: i64,
        /// The broken rule.
        reason: String,
        /// Sizes that work, comma-separated.
        legal: String,
    },
    /// Pipeline stages that the model cannot be cut into: a whole sentence.
    #[error("{0}")]
    IllegalStages(String),
}

impl ConfigError {
    /// A [`BadValue`](Self::BadValue) of a JSON file.
    pub(crate) fn bad(key: &str, got: &Value, want: &str) -> Self {
        Self::BadValue { key: key.into(), got: shown(got), want: want.into() }
    }

    /// An [`Unsupported`](Self::Unsupported) of a JSON file.
    pub(crate) fn unsupported(key: &str, got: &Value, family: &str, want: &str) -> Self {
        Self::Unsupported { key: key.into(), got: shown(got), family: family.into(), want: want.into() }
    }
}

/// The value as the file has it, cut where it is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_MAX) {
        None => text,
        Some((end, _)) => format!("{} ...", &text[..end]),
    }
}
