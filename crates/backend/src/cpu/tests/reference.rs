//! The documented formulas in plain scalar code, and the same in f64.

use crate::cpu::simd::LANES;
use half::{bf16, f16};
use lockstep_core::DType;

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

pub fn silu_mul(gate: f32, up: f32) -> f32 {
    gate / (1.0 + exp(-gate)) * up
}

/// Rotates a head in place.
pub fn rope(head: &mut [f32], frequencies: &[f64], position: u32) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = f64::from(position) * frequencies[i];
        let (cos, sin) = (angle.cos() as f32, angle.sin() as f32);
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

/// Attention of one query over the positions given.
pub fn attention(q: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f32> {
    let scale = 1.0 / (q.len() as f32).sqrt();
    let (mut max, mut total, mut sums) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; q.len()]);
    for (keys, values) in keys.chunks(64).zip(values.chunks(64)) {
        let scores: Vec<f32> = keys.iter().map(|k| dot(q, k) * scale).collect();
        let new = scores.iter().fold(max, |a, &b| if a > b { a } else { b });
        let rescale = exp(max - new);
        let mut lanes = [0.0f32; LANES];
        let weights: Vec<f32> = scores.iter().map(|s| exp(s - new)).collect();
        for (i, w) in weights.iter().enumerate() {
            lanes[i % LANES] += w;
        }
        total = total.mul_add(rescale, tree(lanes));
        for (d, sum) in sums.iter_mut().enumerate() {
            *sum *= rescale;
            for (w, v) in weights.iter().zip(values) {
                *sum = w.mul_add(v[d], *sum);
            }
        }
        max = new;
    }
    sums.iter().map(|s| s / total).collect()
}

/// The same in f64, in any order.
pub fn attention_f64(q: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f64> {
    let score = |k: &&[f32]| q.iter().zip(*k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let scores: Vec<f64> = keys.iter().map(|k| score(k) / (q.len() as f64).sqrt()).collect();
    let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let out = |d: usize| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / total;
    (0..q.len()).map(out).collect()
}
