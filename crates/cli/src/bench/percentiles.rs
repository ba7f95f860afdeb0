//! A distribution in a few numbers.

use serde::Serialize;

/// A distribution in five numbers; all 0 when nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Percentiles {
    /// The mean.
    pub(super) mean: f64,
    /// The median.
    pub(super) p50: f64,
    /// Nine of ten are below.
    pub(super) p90: f64,
    /// 99 of 100 are below.
    pub(super) p99: f64,
    /// The largest.
    pub(super) max: f64,
}

impl Percentiles {
    /// Of these values, in any order; between two of them by interpolation.
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (values.len() - 1) as f64;
            let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
            low + (high - low) * place.fract()
        };
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        Self { mean, p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
        let one = Percentiles::of(vec![3.0]);
        assert_eq!((one.mean, one.p50, one.p99, one.max), (3.0, 3.0, 3.0, 3.0));
        let hundred = Percentiles::of((0..=100).rev().map(f64::from).collect());
        assert_eq!((hundred.p50, hundred.p90, hundred.p99, hundred.max), (50.0, 90.0, 99.0, 100.0));
        assert_eq!(Percentiles::of(vec![1.0, 2.0]).p50, 1.5);
    }
}
