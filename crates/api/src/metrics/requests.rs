//! What clients get: requests by how they ended, their times and their sizes.

use super::{HttpErrors, counter, counters};
use crate::statistics::{Measure, Statistics};
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Writes the metrics of all requests so far. `http_errors` has the error answers by status.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    statistics: &Statistics,
    http_errors: &HttpErrors,
) -> std::fmt::Result {
    counter(
        encoder,
        "requests",
        "Requests handed to the engine; each choice of an answer is one.",
        statistics.requests(),
    )?;
    let help = "Requests by how they ended: stop, length, abort (asked for, or out of time), no_token (nothing left to \
                choose), refused (by a tokenizer or rank 0), failed (the server ended them), left (the client did).";
    let ends: Vec<_> = statistics.ends().map(|(end, count)| (end.name(), count)).collect();
    counters(encoder, "requests_ended", help, "reason", &ends)?;
    let statuses: Vec<_> =
        http_errors.counts().into_iter().map(|(status, n)| (status.to_string(), n)).collect();
    let statuses: Vec<_> = statuses.iter().map(|(status, n)| (status.as_str(), *n)).collect();
    counters(encoder, "http_errors", "HTTP answers with a status of 400 or more.", "status", &statuses)?;
    let help = "Times that the engine failed and its processes were started again.";
    counter(encoder, "engine_restarts", help, statistics.restarts())?;
    Measure::ALL.into_iter().try_for_each(|measure| {
        let (name, help) = described(measure);
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let histogram = statistics.histogram(measure);
        let (sum, count) = (histogram.sum(), histogram.count());
        metric.encode_histogram::<NoLabelSet>(sum, count, &histogram.buckets(), None)
    })
}

/// Name and help of a measure.
const fn described(measure: Measure) -> (&'static str, &'static str) {
    match measure {
        Measure::TimeToFirstToken => {
            ("time_to_first_token_seconds", "From handing a request to the engine to its first token.")
        }
        Measure::InterTokenLatency => ("inter_token_latency_seconds", "Between two tokens of a request."),
        Measure::EndToEnd => {
            ("e2e_request_latency_seconds", "From handing a request to the engine to its finish.")
        }
        Measure::Queue => (
            "request_queue_time_seconds",
            "From rank 0's taking a request to the launch of its first step; of requests that came to a token.",
        ),
        Measure::Prefill => {
            ("request_prefill_time_seconds", "From the first step of a request to its first token.")
        }
        Measure::Decode => {
            ("request_decode_time_seconds", "From the first token of a request to its finish.")
        }
        Measure::PromptTokens => ("request_prompt_tokens", "Prompt tokens of a request that finished."),
        Measure::GeneratedTokens => {
            ("request_generation_tokens", "Tokens generated for a request that finished.")
        }
    }
}
