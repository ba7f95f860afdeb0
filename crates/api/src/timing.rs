//! `x-lockstep-timing`: answers that say where their time went.
//!
//! Asked for by the header `x-lockstep-timing: 1` or, for clients that cannot set headers, by the field `"timing":
//! true`. The figures are rank 0's ([`Timing`]); only the total is the api's own.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use lockstep_core::Refusal;
use lockstep_wire::{Timing, Usage};
use serde::Serialize;
use std::time::Duration;

/// On requests: asks for timing. On whole answers: the timing of the choice that ended last.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-lockstep-timing");

/// Whether the header asks; a 400 when it says neither yes nor no.
pub(crate) fn is_asked(headers: &HeaderMap) -> Result<bool, Refusal> {
    match headers.get(HEADER).map(HeaderValue::as_bytes) {
        None | Some(b"" | b"0" | b"false") => Ok(false),
        Some(b"1" | b"true") => Ok(true),
        Some(_) => {
            let message =
                "the header x-lockstep-timing is neither 1 nor 0; send 1 to be told where time goes";
            Err(Refusal::invalid_param(HEADER.as_str(), message))
        }
    }
}

/// A choice's timing as clients see it; times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct TimingBody {
    /// From rank 0's taking the request to the launch of its first step.
    queue_ms: f64,
    /// From there to its first token.
    prefill_ms: f64,
    /// From its first token to its last.
    pub(crate) decode_ms: f64,
    /// Queue and prefill.
    pub(crate) time_to_first_token_ms: f64,
    /// From the api's taking the request to the choice's end, tokenizing and detokenizing included.
    pub(crate) total_ms: f64,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    retractions: u32,
    prefill_chunks: u32,
    steps: u32,
    batch_size: BatchSize,
}

/// Requests in the steps that held this one.
#[derive(Clone, Copy, Debug, Serialize)]
struct BatchSize {
    min: u32,
    mean: f64,
    max: u32,
}

impl TimingBody {
    /// `total` is the api's measure.
    pub(crate) fn new(timing: &Timing, usage: Usage, total: Duration) -> Self {
        let ms = |us: u64| us as f64 / 1e3;
        let mean = timing.batch_sum as f64 / f64::from(timing.steps.max(1));
        Self {
            queue_ms: ms(timing.queue_us),
            prefill_ms: ms(timing.prefill_us),
            decode_ms: ms(timing.decode_us),
            time_to_first_token_ms: ms(timing.queue_us + timing.prefill_us),
            total_ms: ms(total.as_micros() as u64),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            retractions: timing.retractions,
            prefill_chunks: timing.prefill_chunks,
            steps: timing.steps,
            batch_size: BatchSize {
                min: timing.batch_min,
                mean: (mean * 100.0).round() / 100.0,
                max: timing.batch_max,
            },
        }
    }

    /// The header of a whole answer.
    pub(crate) fn header(&self) -> HeaderValue {
        HeaderValue::try_from(crate::respond::to_json(self)).expect("invariant: names and numbers are ASCII")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_says_yes_no_or_is_refused() {
        let asked = |value: &'static str| {
            is_asked(&HeaderMap::from_iter([(HEADER, HeaderValue::from_static(value))]))
        };
        assert!(!is_asked(&HeaderMap::new()).unwrap());
        assert!(asked("1").unwrap() && asked("true").unwrap());
        assert!(!asked("0").unwrap() && !asked("false").unwrap() && !asked("").unwrap());
        assert_eq!(asked("yes").unwrap_err().param.as_deref(), Some("x-lockstep-timing"));
    }

    #[test]
    fn a_request_that_never_ran_has_zeros_and_no_division_by_them() {
        let body = TimingBody::new(&Timing::default(), Usage::default(), Duration::ZERO);
        assert!(body.header().to_str().unwrap().contains(r#""batch_size":{"min":0,"mean":0.0,"max":0}"#));
    }
}
