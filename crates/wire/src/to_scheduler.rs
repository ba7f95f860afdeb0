//! Messages to rank 0 of a replica, and through it to the scheduler of every rank.

use crate::to_tokenizer::TextParams;
use lockstep_core::{Grammar, RequestId, SamplingParams, TokenId};
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
    /// The model's vocabulary; a tokenizer sends it before its first request with a grammar. The same from
    /// every tokenizer: ranks need the first only.
    Vocabulary(Box<Vocabulary>),
    /// Begin to prepare a grammar; rank 0 makes it of a request with one, which follows once all ranks have
    /// done so.
    Prepare(Box<Grammar>),
    /// Forget all cached prefixes that no request holds; rank 0 tells the api how many pages that freed
    /// (`ToApi::CacheFlushed` with the same number).
    FlushCache {
        /// Echoed in the reply.
        query: u64,
    },
    /// Stop after the running step; every rank exits with code 0.
    Shutdown,
}

/// What each token adds to a text, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// All tokens' bytes, joined.
    #[serde(with = "serde_bytes")]
    bytes: Vec<u8>,
    /// Where each token ends in `bytes`.
    #[serde(with = "crate::token_bytes")]
    ends: Vec<u32>,
    /// The special tokens, ascending.
    #[serde(with = "crate::token_bytes")]
    special: Vec<TokenId>,
}

impl Vocabulary {
    /// Adds the token with the next id; one that does not exist has no bytes.
    pub fn push(&mut self, bytes: &[u8], is_special: bool) {
        if is_special {
            self.special.push(self.ends.len() as TokenId);
        }
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len() as u32);
    }

    /// Bytes of each token, and whether it is special; by id. A damaged vocabulary has empty tokens.
    pub fn tokens(&self) -> impl Iterator<Item = (&[u8], bool)> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).enumerate().map(|(id, (start, &end))| {
            let bytes = self.bytes.get(start as usize..end as usize).unwrap_or_default();
            (bytes, self.special.binary_search(&(id as TokenId)).is_ok())
        })
    }
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
