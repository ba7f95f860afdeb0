//! Ended requests as OTLP's JSON: trace service request, protocol 1.x.
//!
//! Names of attributes are OpenTelemetry's where it has one (`gen_ai.*`, `http.*`), else begin with `lockstep.`.

use super::context::Ids;
use super::{Course, Record, Traced};
use crate::statistics::End;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const KIND_INTERNAL: u8 = 1;
const KIND_SERVER: u8 = 2;
const STATUS_ERROR: u8 = 2;

/// What all spans say of the server.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) model: String,
    pub(crate) version: String,
}

/// The body that tells a collector of `records`.
pub(super) fn body(about: &About, records: &[Record], ids: &Ids) -> String {
    let spans: Vec<Value> = records.iter().flat_map(|record| spans(about, record, ids)).collect();
    let resource = [
        text("service.name", "lockstep"),
        text("service.version", &about.version),
        number("process.pid", std::process::id().into()),
    ];
    let scope = json!({ "name": "lockstep", "version": about.version });
    json!({
        "resourceSpans": [{
            "resource": { "attributes": resource },
            "scopeSpans": [{ "scope": scope, "spans": spans }],
        }],
    })
    .to_string()
}

/// A request's span and those of its phases.
fn spans(about: &About, record: &Record, ids: &Ids) -> Vec<Value> {
    let Record { traced, course } = record;
    let own = ids.next();
    let mut spans = vec![request_span(about, traced, course, own)];
    let phases = phases(course);
    spans.extend(phases.into_iter().map(|(name, from, to)| {
        json!({
            "traceId": trace_id(traced), "spanId": span_id(ids.next()), "parentSpanId": span_id(own),
            "name": name, "kind": KIND_INTERNAL,
            "startTimeUnixNano": unix_nanos(traced.started + from),
            "endTimeUnixNano": unix_nanos(traced.started + to),
        })
    }));
    spans
}

fn request_span(about: &About, traced: &Traced, course: &Course, own: u64) -> Value {
    let usage = course.usage;
    let reason = course.end.name();
    let mut attributes = vec![
        text("http.request.method", "POST"),
        text("http.route", &traced.path),
        text("gen_ai.request.model", &about.model),
        text("lockstep.request", &course.request.to_string()),
        text("lockstep.end", reason),
        number("gen_ai.usage.input_tokens", usage.prompt_tokens.into()),
        number("gen_ai.usage.output_tokens", usage.completion_tokens.into()),
        number("lockstep.cached_tokens", usage.cached_tokens.into()),
    ];
    if course.end.is_finish() {
        let reasons = json!({ "arrayValue": { "values": [{ "stringValue": reason }] } });
        attributes.push(json!({ "key": "gen_ai.response.finish_reasons", "value": reasons }));
    }
    let names = traced.x_request_id.iter();
    attributes.extend(names.map(|name| text("http.request.header.x-request-id", name)));
    let mut span = json!({
        "traceId": trace_id(traced), "spanId": span_id(own),
        "name": format!("POST {}", traced.path), "kind": KIND_SERVER,
        "startTimeUnixNano": unix_nanos(traced.started),
        "endTimeUnixNano": unix_nanos(traced.started + course.total),
        "attributes": attributes,
    });
    if let Some(parent) = traced.context.parent {
        span["parentSpanId"] = span_id(parent).into();
    }
    if !traced.context.state.is_empty() {
        span["traceState"] = traced.context.state.as_str().into();
    }
    if matches!(course.end, End::NoToken | End::Refused | End::Failed) {
        span["status"] = json!({ "code": STATUS_ERROR, "message": reason });
    }
    span
}

/// Name, begin and end of the phases that a request came to.
fn phases(course: &Course) -> Vec<(&'static str, Duration, Duration)> {
    let Some(first_token) = course.first_token else { return vec![("queue", Duration::ZERO, course.total)] };
    let launched = course.prefill.map_or(Duration::ZERO, |prefill| first_token.saturating_sub(prefill));
    vec![
        ("queue", Duration::ZERO, launched),
        ("prefill", launched, first_token),
        ("decode", first_token, course.total.max(first_token)),
    ]
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

/// Numbers of 64 bits are text in OTLP's JSON.
fn number(key: &str, value: u64) -> Value {
    json!({ "key": key, "value": { "intValue": value.to_string() } })
}

fn trace_id(traced: &Traced) -> String {
    format!("{:032x}", traced.context.trace)
}

fn span_id(id: u64) -> String {
    format!("{id:016x}")
}

fn unix_nanos(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}
