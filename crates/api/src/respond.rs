//! From refusals and values to HTTP answers.

use crate::errors::ErrorForm;
use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use lockstep_core::Refusal;
use serde::Serialize;

/// An HTTP answer.
pub(crate) type Answer = Response<Body>;

/// Seconds a client is told to wait after a 429 or 503.
const RETRY_AFTER_S: &str = "1";

/// The answer for a refused request; see [`errors`](crate::errors) for its form.
pub(crate) fn refuse(refusal: &Refusal) -> Answer {
    let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json_text(status, ErrorForm::OpenAi.json(refusal));
    answer.extensions_mut().insert(refusal.clone());
    if matches!(refusal.status, 429 | 503) {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
    }
    answer
}

/// A 200 with a JSON body.
pub(crate) fn json(body: &impl Serialize) -> Answer {
    json_text(StatusCode::OK, to_json(body))
}

/// A 200 with a JSON body, or the refusal.
pub(crate) fn json_or_refusal(result: Result<impl Serialize, Refusal>) -> Answer {
    match result {
        Ok(body) => json(&body),
        Err(refusal) => refuse(&refusal),
    }
}

/// An answer whose body is JSON text already.
pub(crate) fn json_text(status: StatusCode, text: String) -> Answer {
    json_body(status, Body::from(text))
}

/// An answer whose body will be JSON.
pub(crate) fn json_body(status: StatusCode, body: Body) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// JSON text of one of our own types.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("invariant: answer types have string keys and no failing Serialize")
}
