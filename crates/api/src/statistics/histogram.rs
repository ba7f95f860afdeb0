//! Values counted by size, for Prometheus.

/// How many values fell between given bounds, and their sum.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    /// Upper bounds, ascending; each belongs to its bucket.
    bounds: &'static [f64],
    /// One more than bounds: the last is for what is above all.
    counts: Box<[u64]>,
    sum: f64,
}

impl Histogram {
    /// One without values.
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1].into(), sum: 0.0 }
    }

    /// `count` times `value`.
    pub(super) fn observe(&mut self, value: f64, count: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += count;
        self.sum += value * count as f64;
    }

    /// Values in all.
    pub(crate) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum.
    pub(crate) fn sum(&self) -> f64 {
        self.sum
    }

    /// Upper bound and values of each bucket, without those of the buckets below; the last bound is `f64::MAX`.
    pub(crate) fn buckets(&self) -> Vec<(f64, u64)> {
        self.bounds.iter().copied().chain([f64::MAX]).zip(self.counts.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for (value, count) in [(0.0, 1), (1.0, 1), (1.5, 3), (2.0, 1), (2.1, 2)] {
            histogram.observe(value, count);
        }
        assert_eq!(histogram.buckets(), [(1.0, 2), (2.0, 4), (f64::MAX, 2)]);
        assert_eq!((histogram.count(), histogram.sum()), (8, 0.0 + 1.0 + 4.5 + 2.0 + 4.2));
    }

    #[test]
    fn all_bounds_ascend() {
        for bounds in [super::super::SECONDS, super::super::TOKEN_SECONDS, super::super::TOKENS] {
            assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{bounds:?}");
        }
    }
}
