//! The answer a client gets when a request cannot be served.

use serde::{Deserialize, Serialize};

/// A refusal on its way to a client, in the terms of OpenAI's error object
/// `{"error": {"message", "type", "param", "code"}}`.
///
/// The message says what, got, limit and what to do, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// OpenAI's `type`, e.g. `invalid_request_error`.
    pub kind: String,
    /// OpenAI's `code`, e.g. `context_length_exceeded`.
    pub code: Option<String>,
    /// The request field at fault.
    pub param: Option<String>,
    /// One sentence for people.
    pub message: String,
}

impl Refusal {
    /// A 400 for a request that can never be served as sent.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::with_status(400, "invalid_request_error", message)
    }

    /// A 400 that names the field at fault.
    pub fn invalid_param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// The 400 for a prompt that does not fit the context.
    ///
    /// `prompt_len` and `context_max` are tokens; one token of room must remain for the answer.
    pub fn context_length(prompt_len: usize, context_max: usize) -> Self {
        Self::invalid_param(
            "messages",
            format!(
                "the prompt has {prompt_len} tokens, but this server's context is {context_max} tokens and one \
                 must remain for the answer; shorten the prompt to at most {} tokens",
                context_max.saturating_sub(1)
            ),
        )
        .with_code("context_length_exceeded")
    }

    /// A 503 while the server cannot take the request.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::with_status(503, "service_unavailable_error", message)
    }

    /// A 500 for a failure that is the server's own.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::with_status(500, "internal_server_error", message)
    }

    /// Any other status.
    pub fn with_status(status: u16, kind: &str, message: impl Into<String>) -> Self {
        Self { status, kind: kind.into(), code: None, param: None, message: message.into() }
    }

    /// The same refusal with OpenAI's `code`.
    pub fn with_code(mut self, code: &str) -> Self {
        self.code = Some(code.into());
        self
    }
}
