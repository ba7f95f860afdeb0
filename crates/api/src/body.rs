//! Reading a request body: content type, size, JSON.

use crate::config::{ApiConfig, Patience};
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, header};
use futures::StreamExt;
use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// How much of an oversized body is read and thrown away, in multiples of the limit, and for how
/// long. A client that is still writing when the connection closes gets a reset instead of the 413.
const DISCARD_FACTOR: usize = 8;
const DISCARD_TIME: Duration = Duration::from_secs(5);

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
        take_room(chunk.len())?;
        bytes.extend_from_slice(&chunk);
    }
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
        Err(e) => Err(Refusal::invalid(format!("the request body is not valid JSON: {e}"))),
    }
}
