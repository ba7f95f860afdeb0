//! Why a model description is refused.

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
    #[error("config key {key} is {got}, expected {want}")]
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
        "config key {key} asks for {got}, which Lockstep does not implement for {family} models ({want})"
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
    #[error("model architecture {got} is not supported; supported are {supported}")]
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
}
