//! The per-step fingerprint that ranks compare.

use lockstep_core::StepId;
use serde::{Deserialize, Serialize};

/// What a rank decided and saw, in four words. Ranks exchange it with the next message count; the first
/// difference stops the server.
///
/// `plan_hash` and `page_hash` describe the last planned step, `token_hash` all completed ones. The hash is
/// [`lockstep_kvcache::Hasher64`], the same on every machine; maintaining it costs a few nanoseconds per row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDigest {
    /// The last planned step.
    pub step: StepId,
    /// Rows and their inputs, everything submitted and aborted so far, queue lengths and pool counts.
    pub plan_hash: u64,
    /// Page tables of that step's rows, each with the pages reserved for later chunks.
    pub page_hash: u64,
    /// Tokens of all steps completed so far, chained.
    pub token_hash: u64,
}

impl StepDigest {
    /// The digest as words for the wire.
    pub fn to_words(self) -> [u64; 4] {
        [self.step, self.plan_hash, self.page_hash, self.token_hash]
    }

    /// The inverse of [`to_words`](Self::to_words).
    pub fn from_words([step, plan_hash, page_hash, token_hash]: [u64; 4]) -> Self {
        Self { step, plan_hash, page_hash, token_hash }
    }

    /// The name of the first field that differs, in the order step, plan, pages, tokens.
    pub fn first_difference(&self, other: &Self) -> Option<&'static str> {
        const NAMES: [&str; 4] = ["step", "plan_hash", "page_hash", "token_hash"];
        let (a, b) = (self.to_words(), other.to_words());
        (0..4).find(|&i| a[i] != b[i]).map(|i| NAMES[i])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_in_order() {
        let a = StepDigest { step: 7, plan_hash: 1, page_hash: 2, token_hash: 3 };
        assert_eq!(StepDigest::from_words(a.to_words()), a);
        assert_eq!(a.first_difference(&a), None);
        assert_eq!(a.first_difference(&StepDigest { page_hash: 0, token_hash: 0, ..a }), Some("page_hash"));
        assert_eq!(a.first_difference(&StepDigest { step: 8, ..a }), Some("step"));
    }
}
