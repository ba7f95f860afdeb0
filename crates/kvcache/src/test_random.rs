//! Deterministic random numbers for this crate's tests.

use crate::hash::Hasher64;

/// A counter, hashed; the seed is its start.
pub(crate) struct Random(pub u64);

impl Random {
    /// Uniform in `0..n`, nearly.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 += 1;
        let mut hash = Hasher64::default();
        hash.word(self.0);
        (hash.finish() % n as u64) as usize
    }
}

#[test]
fn all_values_come_up() {
    let (mut random, mut counts) = (Random(1 << 32), [0; 10]);
    (0..10_000).for_each(|_| counts[random.below(10)] += 1);
    assert!(counts.iter().all(|&count| (900..1100).contains(&count)), "{counts:?}");
}
