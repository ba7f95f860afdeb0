//! Reading a request body: content type, size, JSON.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, header};
use futures::StreamExt;
use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::time::Duration;

/// How much of an oversized body is read and thrown away, in multiples of the limit, and for how
/// long. A client that is still writing when the connection closes gets a reset instead of the 413.
const DISCARD_FACTOR: usize = 8;
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// Reads the JSON object that a request carries; nothing else is acceptable.
pub(crate) async fn read_object(request: Request<Body>, limit: usize) -> Result<Map<String, Value>, Refusal> {
    check_headers(request.headers(), limit)?;
    let bytes = read_bytes(request.into_body(), limit).await?;
    parse_object(&bytes)
}

fn check_headers(headers: &HeaderMap, limit: usize) -> Result<(), Refusal> {
    if let Some(content_type) = headers.get(header::CONTENT_TYPE) {
        // Refusing form and text types also keeps web pages from posting without a preflight.
        let text = content_type.to_str().unwrap_or_default();
        let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if !(essence == "application/json" || essence == "text/json" || essence.ends_with("+json")) {
            return Err(unsupported_media(format!(
                "the body has content type {text:?}; send Content-Type: application/json"
            )));
        }
    }
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(unsupported_media("compressed bodies are not supported; send the JSON as it is"));
    }
    let expects_continue = headers.contains_key(header::EXPECT);
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    match length {
        // The client waits for our word before it sends: nothing to throw away.
        Some(length) if length > limit && expects_continue => Err(too_large(limit)),
        _ => Ok(()),
    }
}

fn unsupported_media(message: impl Into<String>) -> Refusal {
    Refusal::with_status(415, "invalid_request_error", message).with_code("unsupported_media_type")
}

fn too_large(limit: usize) -> Refusal {
    let message = format!("the request body is larger than {limit} bytes, this server's limit; send less");
    Refusal::with_status(413, "invalid_request_error", message).with_code("request_too_large")
}

async fn read_bytes(body: Body, limit: usize) -> Result<Vec<u8>, Refusal> {
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk: Bytes =
            chunk.map_err(|e| Refusal::invalid(format!("the request body is incomplete: {e}")))?;
        if bytes.len() + chunk.len() > limit {
            let mut left = limit.saturating_mul(DISCARD_FACTOR);
            let discard = async {
                while let Some(Ok(chunk)) = chunks.next().await {
                    left = left.saturating_sub(chunk.len());
                    if left == 0 {
                        break;
                    }
                }
            };
            // Either way the answer is the same; the time limit only bounds the courtesy.
            let _ = tokio::time::timeout(DISCARD_TIME, discard).await;
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Parses the whole body as one JSON object. `serde_json` refuses invalid UTF-8, lone surrogates,
/// NaN, trailing data and nesting beyond 128 levels.
pub(crate) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, Refusal> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Refusal::invalid("the request body is empty; send a JSON object"));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => {
            let got = crate::fields::kind(&other);
            Err(Refusal::invalid(format!("the request body is {got}; send a JSON object")))
        }
        Err(e) => Err(Refusal::invalid(format!("the request body is not valid JSON: {e}"))),
    }
}
