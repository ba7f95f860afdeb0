//! Deterministic random numbers: SplitMix64 (Steele et al. 2014) and Box–Muller normals.
//!
//! **Invariant:** the same seed and name give the same numbers on every machine and release, as
//! the fixtures' fixed answers depend on them. Used for weights and for randomised tests.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
    spare_normal: Option<f64>,
}

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed, spare_normal: None }
    }

    /// A stream of its own for `name` under `seed`, so that adding one tensor to a model leaves
    /// the values of all others alone. The name is hashed by FNV-1a.
    pub fn named(seed: u64, name: &str) -> Self {
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        let mut mixed = Self::new(seed ^ hash);
        Self::new(mixed.next_u64())
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number in `0..n`. Panics when `n` is 0. The bias is below `n / 2^64`.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "below(0) has no answer");
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `[0, 1)` with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A standard normal number.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare_normal.take() {
            return spare;
        }
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let (sin, cos) = (2.0 * std::f64::consts::PI * self.unit()).sin_cos();
        self.spare_normal = Some(radius * sin);
        radius * cos
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_matches_its_published_values() {
        // First outputs of the reference implementation for seed 1234567.
        let mut random = Random::new(1_234_567);
        let seen: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(seen, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let mut random = Random::named(7, "x");
        let values: Vec<f64> = (0..20_000).map(|_| random.normal()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.04, "mean {mean}, variance {variance}");
    }

    #[test]
    fn names_separate_streams_and_below_stays_below() {
        assert_ne!(Random::named(1, "a").next_u64(), Random::named(1, "b").next_u64());
        assert_eq!(Random::named(1, "a").next_u64(), Random::named(1, "a").next_u64());
        let mut random = Random::new(3);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[random.below(5) as usize] = true;
        }
        assert_eq!(seen, [true; 5]);
    }
}
