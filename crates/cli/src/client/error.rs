//! What can go wrong between a client and its server.

use std::time::Duration;

/// Why there is no (whole) answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClientError {
    /// The address is none.
    #[error("--url {url} cannot be used: {reason}; give one such as http://127.0.0.1:1919")]
    Url {
        /// As given.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// Nobody listens there, or it cannot be reached.
    #[error("cannot reach {base}: {reason}; check the address and that the server runs")]
    Connect {
        /// The server.
        base: String,
        /// The system's words.
        reason: String,
    },
    /// The connection ended before the answer did.
    #[error("the connection to {base} broke: {reason}")]
    Broken {
        /// The server.
        base: String,
        /// The cause.
        reason: String,
    },
    /// The answer took too long.
    #[error("no answer from {base} within {seconds} s")]
    Timeout {
        /// The server.
        base: String,
        /// The limit.
        seconds: f64,
    },
    /// The server refused, or failed while it answered.
    #[error("the server answered {status}: {message}")]
    Status {
        /// HTTP status.
        status: u16,
        /// The server's message.
        message: String,
        /// When the server may be asked again.
        retry_after: Option<Duration>,
    },
    /// An error event inside a stream that had begun.
    #[error("the answer was cut: {0}")]
    Event(String),
    /// The answer is not what the API promises.
    #[error("the answer of {base} is not understood: {reason}")]
    Protocol {
        /// The server.
        base: String,
        /// What was expected.
        reason: String,
    },
}

impl ClientError {
    /// A short name of the kind, to count by.
    pub fn kind(&self) -> String {
        match self {
            Self::Url { .. } => "url".into(),
            Self::Connect { .. } => "connect".into(),
            Self::Broken { .. } => "broken".into(),
            Self::Timeout { .. } => "timeout".into(),
            Self::Status { status, .. } => format!("status {status}"),
            Self::Event(_) => "error event".into(),
            Self::Protocol { .. } => "protocol".into(),
        }
    }
}
