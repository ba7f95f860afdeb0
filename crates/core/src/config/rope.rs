//! Rotary position embedding: every rope type of the supported families, computed in f64.
//!
//! Follows transformers `modeling_rope_utils.py`; differs in that a table is made once for the
//! longest context served, so `dynamic` and `longrope` never change a frequency under a cached key.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Rotary position embedding (Su et al. 2021), with the half-split pairing of Hugging Face:
/// dimension `i` turns with dimension `i + rotary_dim/2`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the inverse frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Rope types of the supported families.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Plain rope.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Context multiplier.
        factor: f64,
    },
    /// NTK-aware scaling that starts beyond `max_position`. The context is limited to
    /// `max_position`, inside which it is plain rope.
    Dynamic,
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length before scaling, in tokens.
        original_max_position: usize,
    },
    /// YaRN (Peng et al. 2023): a ramp between divided and kept frequencies, and stronger attention.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context length before scaling, in tokens.
        original_max_position: usize,
        /// Dimensions that turn more often than this over the original context are kept.
        beta_fast: f64,
        /// Dimensions that turn less often than this over the original context are divided.
        beta_slow: f64,
        /// Multiplies cos and sin; see [`yarn_attention_factor`] where a file gives none.
        attention_factor: f64,
        /// The ramp starts and ends on whole dimensions.
        truncate: bool,
    },
    /// LongRoPE (Ding et al. 2024): one divisor per frequency, a short and a long set.
    #[serde(rename = "longrope")]
    LongRope {
        /// Divisors of a server whose context is at most `original_max_position`,
        /// `[rotary_dim / 2]`.
        short_factor: Vec<f64>,
        /// Divisors of a server with a longer context, `[rotary_dim / 2]`.
        long_factor: Vec<f64>,
        /// Context length before scaling, in tokens.
        original_max_position: usize,
        /// Multiplies cos and sin; see [`longrope_attention_factor`] where a file gives none.
        attention_factor: f64,
    },
    /// Frequencies divided one by one, as GGUF files store Llama 3 scaling (`rope_freqs`).
    Divisors {
        /// One divisor per inverse frequency, `[rotary_dim / 2]`.
        divisors: Vec<f64>,
    },
}

/// What a rope table is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Inverse frequencies in radians per position, `[rotary_dim / 2]`.
    pub inverse: Vec<f64>,
    /// Multiplies cos and sin (1 unless yarn or longrope).
    pub attention_factor: f64,
}

impl RopeConfig {
    /// Plain rope of base `theta`.
    pub const fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::None }
    }

    /// The frequencies of the first `rotary_dim` elements of each head.
    ///
    /// `context` is the longest position count this server will hold; longrope chooses its divisors
    /// by it, so it must be the same on all ranks.
    pub fn frequencies(&self, rotary_dim: usize, context: usize) -> RopeFrequencies {
        let plain: Vec<f64> =
            (0..rotary_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
        let divided = |divisors: &[f64]| plain.iter().zip(divisors).map(|(f, d)| f / d).collect();
        let mut attention_factor = 1.0;
        let inverse = match &self.scaling {
            RopeScaling::None | RopeScaling::Dynamic => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|f| f / factor).collect(),
            RopeScaling::Divisors { divisors } => divided(divisors),
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                original_max_position,
                attention_factor: factor,
            } => {
                attention_factor = *factor;
                divided(if context > *original_max_position { long_factor } else { short_factor })
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let bands = (*low_freq_factor, *high_freq_factor, *original_max_position as f64);
                plain.iter().map(|f| llama3_frequency(*f, *factor, bands)).collect()
            }
            RopeScaling::Yarn {
                factor,
                original_max_position,
                beta_fast,
                beta_slow,
                attention_factor: strength,
                truncate,
            } => {
                attention_factor = *strength;
                let dim_of = |turns: f64| {
                    let turns_at_one = *original_max_position as f64 / (turns * 2.0 * PI);
                    rotary_dim as f64 * turns_at_one.ln() / (2.0 * self.theta.ln())
                };
                let ramp = yarn_ramp(dim_of(*beta_fast), dim_of(*beta_slow), *truncate, rotary_dim);
                let mixed = |(i, f): (usize, &f64)| f / factor * ramp(i) + f * (1.0 - ramp(i));
                plain.iter().enumerate().map(mixed).collect()
            }
        };
        RopeFrequencies { inverse, attention_factor }
    }
}

/// One frequency of Llama 3.1; `bands` is (low_freq_factor, high_freq_factor, original context).
fn llama3_frequency(frequency: f64, factor: f64, bands: (f64, f64, f64)) -> f64 {
    let (low, high, original) = bands;
    let wavelength = 2.0 * PI / frequency;
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// How far (0 to 1) the `i`-th frequency is divided, between the dimensions `low` and `high`.
fn yarn_ramp(low: f64, high: f64, truncate: bool, rotary_dim: usize) -> impl Fn(usize) -> f64 {
    let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, mut high) = (low.max(0.0), high.min(rotary_dim as f64 - 1.0));
    if low == high {
        high += 0.001; // as transformers does, so that the ramp stays finite
    }
    move |i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
}

/// YaRN's multiplier of cos and sin for a file that gives none: `0.1 ln(factor) + 1`, or the
/// ratio of the two `mscale` forms where both are given and not 0 (DeepSeek's spelling).
pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
    let strength = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    match (mscale.filter(|m| *m != 0.0), mscale_all_dim.filter(|m| *m != 0.0)) {
        (Some(one), Some(all)) => strength(one) / strength(all),
        _ => strength(1.0),
    }
}

/// LongRoPE's multiplier of cos and sin for a file that gives none:
/// `sqrt(1 + ln(factor) / ln(original_max_position))`, 1 without extension.
pub fn longrope_attention_factor(factor: f64, original_max_position: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original_max_position as f64).ln()).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs().max(1e-300)
    }

    fn yarn(truncate: bool) -> RopeConfig {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_max_position: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: yarn_attention_factor(4.0, None, None),
            truncate,
        };
        RopeConfig { theta: 10_000.0, scaling }
    }

    #[test]
    fn yarn_keeps_fast_dimensions_divides_slow_ones_and_ramps_between() {
        // 16 frequencies; dim_of(32) < 0 and dim_of(1) = 32 ln(64/2pi) / (2 ln 10000) = 4.03.
        let f = yarn(true).frequencies(32, 256);
        let plain = RopeConfig::plain(10_000.0).frequencies(32, 256).inverse;
        assert!(close(f.inverse[0], plain[0]));
        for (i, divided) in [0.2, 0.4, 0.6, 0.8].into_iter().enumerate() {
            assert!(close(f.inverse[i + 1], plain[i + 1] * (divided / 4.0 + 1.0 - divided)), "{i}");
        }
        assert!((5..16).all(|i| close(f.inverse[i], plain[i] / 4.0)));
        assert!((f.attention_factor - 1.138_629_436_111_989).abs() < 1e-15);
        // Without truncation the ramp ends at 4.03 instead of 5.
        let exact = yarn(false).frequencies(32, 256).inverse;
        assert!(exact[3] < f.inverse[3] && close(exact[5], plain[5] / 4.0));
    }

    #[test]
    fn yarn_strength_from_mscale() {
        assert!(close(yarn_attention_factor(40.0, Some(1.0), Some(1.0)), 1.0));
        let ratio = (0.0707 * 40f64.ln() + 1.0) / (0.1 * 40f64.ln() + 1.0);
        assert!(close(yarn_attention_factor(40.0, Some(0.707), Some(1.0)), ratio));
        assert!(close(yarn_attention_factor(40.0, Some(0.707), None), 0.1 * 40f64.ln() + 1.0));
        assert_eq!(yarn_attention_factor(0.5, None, None), 1.0);
    }

    #[test]
    fn longrope_chooses_by_the_context_served() {
        let scaling = RopeScaling::LongRope {
            short_factor: vec![1.0, 2.0],
            long_factor: vec![4.0, 8.0],
            original_max_position: 64,
            attention_factor: longrope_attention_factor(32.0, 4096),
        };
        let rope = RopeConfig { theta: 100.0, scaling };
        assert_eq!(rope.frequencies(4, 64).inverse, [1.0, 0.05]);
        assert_eq!(rope.frequencies(4, 65).inverse, [0.25, 0.0125]);
        // Phi-3-mini-128k: sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12).
        assert!(close(rope.frequencies(4, 1).attention_factor, (17.0f64 / 12.0).sqrt()));
        assert_eq!(longrope_attention_factor(1.0, 4096), 1.0);
    }

    #[test]
    fn linear_and_divisors_divide_and_dynamic_is_plain_inside_its_context() {
        let of = |scaling| RopeConfig { theta: 10_000.0, scaling }.frequencies(8, 64).inverse;
        let plain = of(RopeScaling::None);
        assert_eq!(of(RopeScaling::Dynamic), plain);
        let linear = of(RopeScaling::Linear { factor: 8.0 });
        assert_eq!(linear, of(RopeScaling::Divisors { divisors: vec![8.0; 4] }));
        assert!(linear.iter().zip(&plain).all(|(l, p)| close(*l, p / 8.0)));
    }
}
