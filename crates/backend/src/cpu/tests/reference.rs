//! The documented formulas in plain scalar code, and the same in f64.

use crate::cpu::simd::LANES;
use half::{bf16, f16};
use lockstep_core::DType;
use lockstep_core::config::{Activation, RopeFrequencies};

/// Lane by lane sum of the fixed tree.
pub fn tree(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Sum of products, lane `i mod 16`.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for i in 0..a.len() {
        lanes[i % LANES] = a[i].mul_add(b[i], lanes[i % LANES]);
    }
    tree(lanes)
}

/// `exp` as documented.
pub fn exp(x: f32) -> f32 {
    if x < -86.0 {
        return 0.0;
    }
    let clamped = if 89.0 < x { 89.0 } else { x };
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, 12_582_912.0);
    let n = rounded - 12_582_912.0;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-355.0 / 512.0, clamped));
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, c);
    }
    let p = (r * r).mul_add(p, r) + 1.0;
    p * 2f32.powi(n as i32 - 1) * 2.0
}

pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| (x * scale) * w).collect()
}

/// `act(gate) * up`.
pub fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    let exponent = match activation {
        Activation::Silu => -gate,
        Activation::GeluTanh => ((gate * gate) * gate).mul_add(0.044_715, gate) * -1.595_769,
    };
    gate / (1.0 + exp(exponent)) * up
}

/// The same in f64, in the usual form.
pub fn gated_f64(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Silu => gate / (1.0 + (-gate).exp()) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
    }
}

/// `tanh` as documented.
pub fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let result = if size < 0.625 {
        let square = size * size;
        let mut p = -5.704_988_7e-3f32;
        for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
            p = p.mul_add(square, c);
        }
        (square * size).mul_add(p, size)
    } else {
        1.0 - 2.0 / (exp(size + size) + 1.0)
    };
    if x < 0.0 { -result } else { result }
}

/// `cap * tanh(x / cap)`.
pub fn softcap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// Rotates a head in place.
pub fn rope(head: &mut [f32], frequencies: &RopeFrequencies, position: u32) {
    let half = frequencies.inverse.len();
    for i in 0..half {
        let angle = f64::from(position) * frequencies.inverse[i];
        let (cos, sin) = (
            (angle.cos() * frequencies.attention_factor) as f32,
            (angle.sin() * frequencies.attention_factor) as f32,
        );
        let (lo, hi) = (head[i], head[i + half]);
        head[i] = lo * cos - hi * sin;
        head[i + half] = hi * cos + lo * sin;
    }
}

/// A weight as stored and widened again.
pub fn stored(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// The bytes of weights in a file.
pub fn file_bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    let element = |&v: &f32| match dtype {
        DType::F32 => v.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(v).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(element).collect()
}

/// One output of a matrix product.
pub fn product(x: &[f32], w: &[f32], leaves: &[usize], bias: Option<f32>) -> f32 {
    let mut sums: Vec<f32> = leaves
        .windows(2)
        .map(|ends| (ends[0]..ends[1]).fold(0.0f32, |acc, k| x[k].mul_add(w[k], acc)))
        .collect();
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    bias.map_or(sums[0], |b| sums[0] + b)
}

/// How the scores of attention are formed.
#[derive(Clone, Copy)]
pub struct Scores {
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
}

impl Scores {
    /// The positions that the last of `positions` sees.
    fn visible(&self, positions: usize) -> std::ops::Range<usize> {
        self.window.map_or(0, |w| positions.saturating_sub(w))..positions
    }
}

/// Online softmax so far: maximum, total, sums.
struct State(f32, f32, Vec<f32>);

/// Softmax of router logits.
pub fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
    let weights: Vec<f32> = logits.iter().map(|l| exp(l - max)).collect();
    let mut lanes = [0.0f32; LANES];
    for (i, w) in weights.iter().enumerate() {
        lanes[i % LANES] += w;
    }
    let total = tree(lanes);
    weights.iter().map(|w| w / total).collect()
}

/// Attention of one query, at the last of the positions given.
pub fn attention(q: &[f32], keys: &[&[f32]], values: &[&[f32]], form: Scores) -> Vec<f32> {
    let visible = form.visible(keys.len());
    let mut joined: Option<State> = None;
    for split in (visible.start / 512 * 512..visible.end).step_by(512) {
        let (from, to) = (visible.start.max(split), visible.end.min(split + 512));
        let next = walk(q, keys, values, form, from..to);
        joined = Some(match joined {
            None => next,
            Some(state) => join(state, &next),
        });
    }
    let State(_, total, sums) = joined.unwrap();
    sums.iter().map(|s| s / total).collect()
}

/// The state of one split.
fn walk(
    q: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    form: Scores,
    positions: std::ops::Range<usize>,
) -> State {
    let (mut max, mut total, mut sums) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; q.len()]);
    let mut from = positions.start;
    while from < positions.end {
        let to = positions.end.min((from / 64 + 1) * 64);
        let score = |p: usize| {
            let score = dot(q, keys[p]) * form.scale;
            form.softcap.map_or(score, |cap| softcap(score, cap))
        };
        let scores: Vec<f32> = (from..to).map(score).collect();
        let new = scores.iter().fold(max, |a, &b| if a > b { a } else { b });
        let rescale = exp(max - new);
        let weights: Vec<f32> = scores.iter().map(|s| exp(s - new)).collect();
        let mut lanes = [0.0f32; LANES];
        for (p, weight) in (from..to).zip(&weights) {
            lanes[p % LANES] += weight;
        }
        total = total.mul_add(rescale, tree(lanes));
        for (d, sum) in sums.iter_mut().enumerate() {
            *sum *= rescale;
            for (p, weight) in (from..to).zip(&weights) {
                *sum = weight.mul_add(values[p][d], *sum);
            }
        }
        (max, from) = (new, to);
    }
    State(max, total, sums)
}

/// Adds the state of the next split.
fn join(State(m1, l1, o1): State, State(m2, l2, o2): &State) -> State {
    let max = if m1 > *m2 { m1 } else { *m2 };
    let (a, b) = (exp(m1 - max), exp(m2 - max));
    State(max, l1.mul_add(a, l2 * b), o1.iter().zip(o2).map(|(x, y)| x.mul_add(a, y * b)).collect())
}

/// The same in f64, in any order.
pub fn attention_f64(q: &[f32], keys: &[&[f32]], values: &[&[f32]], form: Scores) -> Vec<f64> {
    let visible = form.visible(keys.len());
    let (keys, values) = (&keys[visible.clone()], &values[visible]);
    let score = |k: &&[f32]| {
        let dot = q.iter().zip(*k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let score = dot * f64::from(form.scale);
        form.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let out = |d: usize| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / total;
    (0..q.len()).map(out).collect()
}
