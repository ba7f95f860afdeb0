//! Errors in the words of the API whose endpoint was called.
//!
//! Every answer to a [`Refusal`] is made in OpenAI's form and carries the refusal itself
//! ([`refuse`](crate::respond::refuse)); the outermost layer, [`in_the_endpoints_form`], rewrites it where the
//! path belongs to another API. So keys, limits, unknown paths and panics are told in the right form too.

use crate::dialect::anthropic_models;
use crate::respond::{Answer, to_json};
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use lockstep_core::Refusal;
use serde::Serialize;

/// How an API writes errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    /// `{"error": {"message", "type", "param", "code"}}`
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
    /// `{"error": "..."}`
    Ollama,
}

#[derive(Serialize)]
struct OpenAiBody<'a> {
    error: OpenAiFields<'a>,
}

#[derive(Serialize)]
struct OpenAiFields<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

#[derive(Serialize)]
struct AnthropicBody<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicFields<'a>,
}

#[derive(Serialize)]
struct AnthropicFields<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
}

#[derive(Serialize)]
struct OllamaBody<'a> {
    error: &'a str,
}

impl ErrorForm {
    /// The form of the API that has `path`, known or not.
    pub(crate) fn of_path(path: &str) -> Self {
        let is_under =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if is_under("/v1/messages") {
            Self::Anthropic
        } else if is_under("/api") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }

    /// The form of the API that a request belongs to: that of its path, or of its client where APIs share the path.
    fn of_request(request: &Request) -> Self {
        let path = request.uri().path();
        let is_shared = path == "/v1/models" || path.starts_with("/v1/models/");
        match is_shared && anthropic_models::is_asked(request.headers()) {
            true => Self::Anthropic,
            false => Self::of_path(path),
        }
    }

    /// The body of an error, one line of JSON.
    pub(crate) fn json(self, refusal: &Refusal) -> String {
        let Refusal { status, kind, code, param, message } = refusal;
        match self {
            Self::OpenAi => to_json(&OpenAiBody {
                error: OpenAiFields { message, kind, param: param.as_deref(), code: code.as_deref() },
            }),
            Self::Anthropic => to_json(&AnthropicBody {
                kind: "error",
                error: AnthropicFields { kind: anthropic_kind(*status), message },
            }),
            Self::Ollama => to_json(&OllamaBody { error: message }),
        }
    }
}

/// Anthropic's `error.type` for a status.
fn anthropic_kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// The layer around every endpoint.
pub(crate) async fn in_the_endpoints_form(request: Request, next: Next) -> Answer {
    let form = ErrorForm::of_request(&request);
    let mut answer = next.run(request).await;
    if let Some(refusal) = answer.extensions_mut().remove::<Refusal>()
        && form != ErrorForm::OpenAi
    {
        answer.headers_mut().remove(header::CONTENT_LENGTH);
        *answer.body_mut() = Body::from(form.json(&refusal));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_decides_the_form() {
        let refusal = Refusal::invalid_param("stop", "stop is \"bad\"");
        let json = |path| ErrorForm::of_path(path).json(&refusal);
        let openai = r#"{"error":{"message":"stop is \"bad\"","type":"invalid_request_error","param":"stop","code":null}}"#;
        let anthropic =
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"stop is \"bad\""}}"#;
        let ollama = r#"{"error":"stop is \"bad\""}"#;
        for (path, expected) in [
            ("/v1/chat/completions", openai),
            ("/v1/messages", anthropic),
            ("/v1/messages/count_tokens", anthropic),
            ("/v1/messagesx", openai),
            ("/api/chat", ollama),
            ("/apis", openai),
        ] {
            assert_eq!(json(path), expected, "{path}");
        }
    }
}
