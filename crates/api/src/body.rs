//! Reading a request body: content type, size, JSON. What is left of a body that is refused is `unread`'s.

use crate::config::{ApiConfig, Patience};
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, header};
use futures::StreamExt;
use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// Bytes of all request bodies that are being read, so that many large ones cannot take all memory.
const BODIES_BYTES_MAX: usize = 512 << 20;

/// The room for request bodies that are being read.
#[derive(Debug)]
pub(crate) struct Bodies(Semaphore);

impl Default for Bodies {
    fn default() -> Self {
        Self(Semaphore::new(BODIES_BYTES_MAX))
    }
}

impl Bodies {
    /// Room for `bytes` more, until the permit is dropped.
    fn take(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Refusal> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.0.try_acquire_many(permits).map_err(|_| {
            let message = format!(
                "the server is reading {} MiB of request bodies, its limit; try again later",
                BODIES_BYTES_MAX >> 20
            );
            Refusal::unavailable(message).with_code("too_many_bodies")
        })
    }
}

/// Levels of nesting that `serde_json` accepts.
const JSON_DEPTH_MAX: usize = 127;

/// Reads the JSON object that a request carries; nothing else is acceptable.
pub(crate) async fn read_object(
    request: Request<Body>,
    config: &ApiConfig,
    bodies: &Bodies,
) -> Result<Map<String, Value>, Refusal> {
    check_headers(request.headers(), config.body_bytes_max)?;
    let mut room = bodies.take(0)?;
    let bytes = read_bytes(request.into_body(), config, |bytes| {
        room.merge(bodies.take(bytes)?);
        Ok(())
    });
    let bytes = bytes.await?;
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
    // At once, not when so much has come.
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limit) { Err(too_large(limit)) } else { Ok(()) }
}

fn unsupported_media(message: impl Into<String>) -> Refusal {
    Refusal::with_status(415, "invalid_request_error", message).with_code("unsupported_media_type")
}

fn too_large(limit: usize) -> Refusal {
    let message = format!("the request body is larger than {limit} bytes, this server's limit; send less");
    Refusal::with_status(413, "invalid_request_error", message).with_code("request_too_large")
}

/// The whole body; `take_room` is asked before each of its parts is kept.
async fn read_bytes(
    body: Body,
    config: &ApiConfig,
    mut take_room: impl FnMut(usize) -> Result<(), Refusal>,
) -> Result<Vec<u8>, Refusal> {
    let (limit, patience) = (config.body_bytes_max, config.patience.body);
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    let begin = Instant::now();
    loop {
        let earned = Duration::from_secs((bytes.len() / Patience::BODY_BYTES_PER_S) as u64);
        let next = tokio::time::timeout_at(begin + patience + earned, chunks.next()).await;
        let Some(chunk) = next.map_err(|_| too_slow(patience, bytes.len()))? else { return Ok(bytes) };
        let chunk: Bytes = chunk.map_err(|e| unreadable(&e, bytes.len()))?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        take_room(chunk.len())?;
        bytes.extend_from_slice(&chunk);
    }
}

/// A body that ends early, or whose chunks are not what HTTP/1.1 makes them.
fn unreadable(error: &axum::Error, got: usize) -> Refusal {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Refusal::invalid(format!(
        "the request body cannot be read behind its first {got} bytes: {cause}; send all of it, with its Content-Length \
         or in chunks as HTTP/1.1 writes them"
    ))
}

fn too_slow(patience: Duration, got: usize) -> Refusal {
    let message = format!(
        "the request body was not complete after {} s, of which {got} bytes had come; send it at {} KiB/s at least",
        patience.as_secs_f32(),
        Patience::BODY_BYTES_PER_S >> 10
    );
    Refusal::with_status(408, "invalid_request_error", message).with_code("request_timeout")
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
        // The library has no kind of its own for this, only the words.
        Err(e) if e.to_string().starts_with("recursion limit") => Err(Refusal::invalid(format!(
            "the request body nests lists and objects deeper than {JSON_DEPTH_MAX} levels (column {} of line {}); \
             send a flatter one",
            e.column(),
            e.line()
        ))),
        Err(e) => Err(Refusal::invalid(match lone_surrogate(bytes) {
            Some((escape, line, column)) => format!(
                "the request body holds {escape} (column {column} of line {line}), one half of a character that JSON \
                 writes as two escapes (a surrogate pair); send both halves, or the character itself"
            ),
            None => format!("the request body is not valid JSON: {e}"),
        })),
    }
}

/// The first escape of half a surrogate pair without its other half, in a string of `bytes`, with its line and column
/// (in bytes, both from 1). Looks at strings only, so what else is wrong does not matter.
fn lone_surrogate(bytes: &[u8]) -> Option<(&str, usize, usize)> {
    let unit = |at: usize| {
        let escape = std::str::from_utf8(bytes.get(at..at + ESCAPE_LEN)?).ok()?;
        u16::from_str_radix(escape.strip_prefix("\\u")?, 16).ok()
    };
    let (mut in_string, mut at) = (false, 0);
    while let Some(&byte) = bytes.get(at) {
        match (byte, (in_string && byte == b'\\').then(|| unit(at)).flatten()) {
            (b'\\', Some(0xD800..=0xDBFF)) if matches!(unit(at + ESCAPE_LEN), Some(0xDC00..=0xDFFF)) => {
                at += 2 * ESCAPE_LEN;
            }
            (b'\\', Some(0xD800..=0xDFFF)) => {
                let before = &bytes[..at];
                let line_start = before.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
                let line = before.iter().filter(|b| **b == b'\n').count() + 1;
                let escape = std::str::from_utf8(&bytes[at..at + ESCAPE_LEN]).ok()?;
                return Some((escape, line, at - line_start + 1));
            }
            (b'\\', _) if in_string => at += 2,
            (b'"', _) => {
                in_string = !in_string;
                at += 1;
            }
            _ => at += 1,
        }
    }
    None
}

/// Bytes of `\uXXXX`.
const ESCAPE_LEN: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_character_is_named_with_its_place() {
        let refused = |text: &str| parse_object(text.as_bytes()).unwrap_err().message;
        for (text, escape, place) in [
            (r#"{"a": "\ud800"}"#, r"\ud800", "column 8 of line 1"),
            ("{\n \"a\": \"\\ud83d\\ude00 x\\uDC00\"}", r"\uDC00", "column 22 of line 2"),
            (r#"{"a": "\ud800\u0041"}"#, r"\ud800", "column 8 of line 1"),
            (r#"{"a": "\\\ud800\\"}"#, r"\ud800", "column 10 of line 1"),
        ] {
            let message = refused(text);
            assert!(message.contains(escape) && message.contains(place), "{text}: {message}");
        }
        // Neither an escaped backslash nor what is no JSON at all is one.
        assert!(parse_object(br#"{"a": "\\ud800 \ud83d\ude00"}"#).is_ok());
        assert!(refused(r#"{"a": \ud800}"#).contains("not valid JSON"));
        assert!(refused(r#"{"a": "\u12"}"#).contains("not valid JSON"));
    }
}
