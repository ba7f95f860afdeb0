//! What a scheduler reports: tokens, ends of requests, counters.

use lockstep_core::{FinishReason, RequestId, TokenId};
use serde::{Deserialize, Serialize};

/// Something a client must hear of. Each request gets any number of `Token`s and exactly one
/// event with a finish reason, after which its id is not mentioned again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// One generated token.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: TokenId,
        /// It is an end token that ends the request: counted, but without text.
        is_eos: bool,
        /// Set on the request's last event.
        finish: Option<FinishReason>,
        /// Counts including this token.
        usage: Usage,
    },
    /// The request ended without a further token (abort, deadline, no token that could follow).
    Finished {
        /// The request.
        id: RequestId,
        /// Why.
        finish: FinishReason,
        /// Counts of what was reported before.
        usage: Usage,
    },
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the cache when the request was first admitted: a multiple of
    /// the page size, at most `prompt_tokens - 1`, and not counted again after a retraction.
    pub cached_tokens: u32,
    /// Generated tokens so far, the end token included.
    pub completion_tokens: u32,
    /// Times the request was put back into the queue because pages ran out.
    pub retractions: u32,
}

/// Gauges and totals for metrics and `/server_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Requests in the queue, retracted ones included.
    pub waiting: usize,
    /// Requests prefilling or decoding.
    pub running: usize,
    /// Ended requests whose last launched step has not completed.
    pub draining: usize,
    /// Pages with no content worth keeping.
    pub pages_free: usize,
    /// Pages of cached prefixes that no request holds; available like free ones.
    pub pages_cached: usize,
    /// Pages of running and draining requests.
    pub pages_held: usize,
    /// All pages: free + cached + held.
    pub pages_total: usize,
    /// Prompt tokens of requests at their first admission.
    pub prompt_tokens: u64,
    /// Of these, tokens found in the cache.
    pub hit_tokens: u64,
    /// Tokens generated and reported.
    pub generated_tokens: u64,
    /// Tokens computed by planned steps, prefill and decode.
    pub computed_tokens: u64,
    /// Requests put back into the queue because pages ran out.
    pub retractions: u64,
    /// Pages taken from cached prefixes for new content.
    pub evicted_pages: u64,
    /// Times a request put off its admission to share a prefix in flight.
    pub prefix_waits: u64,
    /// Steps planned.
    pub steps: u64,
    /// Steps planned and not completed.
    pub steps_in_flight: usize,
}
