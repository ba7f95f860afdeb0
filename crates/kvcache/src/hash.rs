//! The 64-bit hash behind page-table fingerprints and step digests.

use serde::{Deserialize, Serialize};

/// A hash over words, the same on every machine; ranks compare its values, so a change of the
/// function is a change of the protocol between ranks.
///
/// Each word is folded with xor, a multiplication by an odd constant of splitmix64
/// (Steele, Lea, Flood 2014) and a rotation. Order matters; nothing is random or secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// The hash of all words so far; more words may follow.
    #[inline]
    pub const fn finish(self) -> u64 {
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }
}

impl Default for Hasher64 {
    fn default() -> Self {
        Self::new(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_every_bit_count() {
        let hash = |words: &[u64]| {
            let mut h = Hasher64::default();
            words.iter().for_each(|&w| h.word(w));
            h.finish()
        };
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        assert_ne!(hash(&[]), hash(&[0]));
        for bit in 0..64 {
            assert_ne!(hash(&[7, 0, 9]), hash(&[7, 1 << bit, 9]), "bit {bit}");
        }
    }
}
