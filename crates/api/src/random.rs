//! Random numbers of tests.

/// A small generator (xorshift64*), so that a failing seed can be run again.
pub(crate) struct Rng(u64);

impl Rng {
    /// The numbers of `seed`; neighbouring seeds have nothing in common.
    pub(crate) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// A number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit
    }

    /// One of `of`, which is not empty.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}
