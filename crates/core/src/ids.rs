//! Identifiers that cross process boundaries.

use serde::{Deserialize, Serialize};

/// A vocabulary entry. Ids at or above the model's `vocab_size` are padding and never sampled.
pub type TokenId = u32;

/// Stands for a sampled token where none could be chosen: the request's constraints left none. It ends the request
/// ([`FinishReason::NoToken`](crate::FinishReason::NoToken)) and is never an input of the model.
pub const NO_TOKEN: TokenId = TokenId::MAX;

/// A page of the KV pool; the same number means the same tokens on every rank of a replica.
pub type PageId = u32;

/// A scheduler step, counted from 0 since the rank group started; equal on every rank.
pub type StepId = u64;

/// A generation request, unique for the life of one server. Assigned by the API process in
/// order of arrival, so a smaller id arrived earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "r{}", self.0)
    }
}
