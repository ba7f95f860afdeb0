//! The random numbers of a workload: from the seed alone.

use lockstep_core::random::splitmix64;

/// The same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The one stream of `seed`.
    pub fn of_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Stream `purpose` of `seed`; streams of neighbouring numbers have nothing in common.
    pub fn new(seed: u64, purpose: u64) -> Self {
        let mut mixer = Self(seed);
        let mixed = mixer.next() ^ purpose.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Self(Self(mixed).next())
    }

    /// 64 random bits.
    pub fn next(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        let width = u128::from(high - low) + 1;
        low + ((u128::from(self.next()) * width) >> 64) as u64
    }

    /// One of `choices`, which are not none.
    pub fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.between(0, choices.len() as u64 - 1) as usize]
    }

    /// A waiting time of a Poisson process with `rate` events per second, in seconds.
    pub fn waiting_s(&mut self, rate: f64) -> f64 {
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        -(1.0 - unit).ln() / rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_times_have_the_mean_of_their_rate() {
        let mut random = Random::new(3, 1);
        let mean = (0..100_000).map(|_| random.waiting_s(4.0)).sum::<f64>() / 100_000.0;
        assert!((mean - 0.25).abs() < 0.005, "{mean}");
    }

    #[test]
    fn numbers_fill_their_range_and_streams_differ() {
        let mut random = Random::new(0, 0);
        let drawn: std::collections::BTreeSet<u64> = (0..1000).map(|_| random.between(3, 9)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), (3..=9).collect::<Vec<_>>());
        assert_eq!(Random::new(0, 0).between(0, u64::MAX), Random::new(0, 0).between(0, u64::MAX));
        assert_ne!(Random::new(0, 1).next(), Random::new(1, 0).next());
    }
}
