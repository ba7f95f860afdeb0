//! The per-step fingerprint that ranks compare, and the hash it is made of.

use lockstep_core::StepId;

/// What a rank decided and saw, in four words. Ranks exchange it with the next message count; the first
/// difference stops the server.
///
/// `plan_hash` and `page_hash` describe the last planned step, `token_hash` the last completed one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepDigest {
    /// The last planned step.
    pub step: StepId,
    /// Rows, inputs, queue lengths and pool counts of that step.
    pub plan_hash: u64,
    /// Page tables of that step's rows.
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

/// A 64-bit hash over words, the same on every machine and in every version of this crate's wire format.
///
/// Each word is folded with xor, a multiplication by the odd constant of splitmix64
/// (Steele, Lea, Flood 2014) and a rotation. Order matters; nothing is random or secret.
#[derive(Clone, Copy, Debug)]
pub struct Hasher64(u64);

impl Hasher64 {
    /// A hasher whose first input is `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(0x9E37_79B9_7F4A_7C15 ^ seed)
    }

    /// Folds one word in.
    #[inline]
    pub const fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(29);
    }

    /// The hash of all words so far.
    #[inline]
    pub const fn finish(self) -> u64 {
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }
}
