//! Messages to rank 0 of a replica, and through it to the scheduler of every rank.

use crate::to_tokenizer::TextParams;
use lockstep_core::{RequestId, SamplingParams, TokenId};
use serde::{Deserialize, Serialize};

/// What rank 0 receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToScheduler {
    /// A tokenized request.
    Submit(Box<SubmitRequest>),
    /// Release a request in whatever state it is; unknown ids are ignored.
    Abort(RequestId),
    /// Report counters to the api (`ToApi::EngineInfo` with the same number).
    Info {
        /// Echoed in the reply.
        query: u64,
    },
    /// Every rank writes its flight recorder to a file; rank 0 reports to the api
    /// (`ToApi::FlightWritten` with the same number).
    WriteFlight {
        /// Echoed in the reply.
        query: u64,
    },
    /// Forget all cached prefixes that no request holds.
    FlushCache,
    /// Stop after the running step; every rank exits with code 0.
    Shutdown,
}

/// A request ready for the scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubmitRequest {
    /// Its id everywhere.
    pub id: RequestId,
    /// The prompt, at least one token.
    #[serde(with = "crate::token_bytes")]
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Passed on to the detokenizer when the request is accepted.
    pub text: TextParams,
    /// Requests share cached prefixes only within one namespace.
    pub cache_salt: Option<String>,
    /// Larger runs earlier; 0 is normal.
    pub priority: i32,
}
