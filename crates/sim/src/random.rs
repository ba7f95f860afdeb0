//! The simulator's random numbers: one stream per run, from the seed alone.

use lockstep_core::random::splitmix64;

/// The same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give shifted copies of one stream.
        let mut mixer = Self(seed ^ 0x6C6F_636B_7374_6570);
        Self(mixer.next())
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    /// A number in `0..n`; `n` is at least 1.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// An index into `0..n`.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }
}
