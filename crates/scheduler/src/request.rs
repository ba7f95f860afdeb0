//! What a scheduler is told about one request.

use lockstep_core::{RequestId, SamplingParams, TokenId};

/// A tokenized request, as every rank submits it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its id everywhere, unique among the requests the scheduler knows.
    pub id: RequestId,
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen and when to stop.
    pub sampling: SamplingParams,
    /// Namespace of cached prefixes; requests share KV only within one.
    pub cache_salt: Option<String>,
    /// Larger runs earlier; 0 is normal.
    pub priority: i32,
    /// Aborted when rank 0's stamp passes this; see [`Scheduler::advance`](crate::Scheduler::advance).
    pub deadline_ms: Option<u64>,
}

impl Request {
    /// A request without salt, priority or deadline.
    pub fn new(id: RequestId, prompt: Vec<TokenId>, sampling: SamplingParams) -> Self {
        Self { id, prompt, sampling, cache_salt: None, priority: 0, deadline_ms: None }
    }
}
