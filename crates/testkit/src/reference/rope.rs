//! Rope frequencies, written from the papers: each dimension by the turns it makes over the
//! original context.

use super::Fault;
use crate::spec::{ModelSpec, RopeSpec, SpecFamily};
use std::f64::consts::PI;

/// Turns pairs of dimensions by position.
pub(super) struct Rope {
    /// Radians per position of each pair.
    frequencies: Vec<f64>,
    /// Multiplies the turned pair.
    strength: f64,
}

impl Rope {
    /// The rope of `layer`.
    pub fn new(spec: &ModelSpec, layer: usize, fault: Option<Fault>) -> Self {
        let dim = if fault == Some(Fault::WholeRotary) { spec.head_dim } else { spec.rotary_dim() };
        let local = spec.family == SpecFamily::Gemma3 && spec.slides(layer);
        let theta = match fault {
            Some(Fault::ThetaDefault) => 10_000.0,
            Some(Fault::OneRope) => spec.rope_theta,
            _ if local => spec.local_theta,
            _ => spec.rope_theta,
        };
        let plain: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        let unscaled = matches!(fault, Some(Fault::ThetaDefault | Fault::NoScaling))
            || (local && fault != Some(Fault::OneRope));
        if unscaled {
            return Self { frequencies: plain, strength: 1.0 };
        }
        let (frequencies, strength) = scaled(spec, plain, theta);
        let strength = if fault == Some(Fault::NoAttentionFactor) { 1.0 } else { strength };
        Self { frequencies, strength }
    }

    /// Turns dimension `i` of a head with dimension `i + n`, `n` pairs in all; the rest stays.
    pub fn turn(&self, position: usize, head: &mut [f64]) {
        let n = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (head[i], head[i + n]);
            head[i] = self.strength * (a * cos - b * sin);
            head[i + n] = self.strength * (b * cos + a * sin);
        }
    }
}

/// Frequencies and strength after scaling.
fn scaled(spec: &ModelSpec, plain: Vec<f64>, theta: f64) -> (Vec<f64>, f64) {
    let turns = |frequency: f64, original: usize| original as f64 * frequency / (2.0 * PI);
    match spec.rope {
        RopeSpec::Default | RopeSpec::Dynamic(_) => (plain, 1.0),
        RopeSpec::Linear(factor) => (plain.iter().map(|f| f / factor).collect(), 1.0),
        RopeSpec::Llama3(factor, low, high, original) => {
            let keep = |f: f64| ((turns(f, original) - low) / (high - low)).clamp(0.0, 1.0);
            (plain.iter().map(|&f| f * keep(f) + f / factor * (1.0 - keep(f))).collect(), 1.0)
        }
        RopeSpec::Yarn(factor, original, strength) => {
            // The (fractional) pair that makes 32 turns, and the one that makes 1.
            let pairs = plain.len() as f64;
            let pair = |turns: f64| pairs * (original as f64 / (2.0 * PI * turns)).log(theta);
            let (first, last) = (pair(32.0).floor().max(0.0), pair(1.0).ceil().min(2.0 * pairs - 1.0));
            let divide = |i: usize| ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
            let mix = |(i, f): (usize, &f64)| f * (1.0 - divide(i) * (1.0 - 1.0 / factor));
            let frequencies = plain.iter().enumerate().map(mix).collect();
            (frequencies, strength.unwrap_or(1.0 + factor.ln() / 10.0))
        }
        RopeSpec::LongRope(short, long, original) => {
            let divisors = if spec.max_position > original { long } else { short };
            let extension = spec.max_position as f64 / original as f64;
            let strength = (1.0 + extension.max(1.0).log(original as f64)).sqrt();
            (plain.iter().zip(divisors).map(|(f, d)| f / d).collect(), strength)
        }
    }
}
