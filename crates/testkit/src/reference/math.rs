//! The formulas, one row at a time, in f64.

use crate::spec::RMS_NORM_EPS;
use crate::tensor::Tensor;
use std::ops::Range;

/// K and V of all positions so far, of one rank in one layer.
#[derive(Clone, Default)]
pub(super) struct KvRows {
    pub k: Vec<Vec<f64>>,
    pub v: Vec<Vec<f64>>,
}

/// How scores are made.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub head_dim: usize,
    /// Multiplies the dot products.
    pub scale: f64,
    pub cap: Option<f64>,
    /// Positions that are seen, the newest included.
    pub window: Option<usize>,
}

/// Softmax attention of the heads in `q` over the cached positions; heads share KV in groups.
pub(super) fn attend(q: &[f64], cache: &KvRows, scores: Scores) -> Vec<f64> {
    let head_dim = scores.head_dim;
    let local_heads = q.len() / head_dim;
    let local_kv_heads = cache.k[0].len() / head_dim;
    let first = cache.k.len() - scores.window.unwrap_or(usize::MAX).min(cache.k.len());
    let mut out = vec![0.0; q.len()];
    for head in 0..local_heads {
        let kv = head * local_kv_heads / local_heads;
        let columns = kv * head_dim..(kv + 1) * head_dim;
        let query = &q[head * head_dim..(head + 1) * head_dim];
        let score = |k: &Vec<f64>| {
            let dot: f64 = query.iter().zip(&k[columns.clone()]).map(|(a, b)| a * b).sum();
            capped(dot * scores.scale, scores.cap)
        };
        let weights = softmax(&cache.k[first..].iter().map(score).collect::<Vec<f64>>());
        for (p, v) in weights.iter().zip(&cache.v[first..]) {
            for (o, x) in out[head * head_dim..].iter_mut().zip(&v[columns.clone()]) {
                *o += p * x;
            }
        }
    }
    out
}

/// `cap * tanh(x / cap)`.
pub(super) fn capped(x: f64, cap: Option<f64>) -> f64 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

pub(super) fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    scores.iter().map(|s| (s - max).exp() / total).collect()
}

pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// PyTorch's gelu with `approximate="tanh"`.
pub(super) fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// `x · Wᵀ` over some input columns of `W`, plus the bias.
pub(super) fn row_parallel(w: &Tensor, columns: Range<usize>, bias: Option<&Tensor>, x: &[f64]) -> Vec<f64> {
    (0..w.shape[0])
        .map(|i| dot(&w.row(i)[columns.clone()], x) + bias.map_or(0.0, |b| f64::from(b.data[i])))
        .collect()
}

/// `offset` is added to the weights.
pub(super) fn rms_norm(x: &[f64], weight: &[f32], offset: f64) -> Vec<f64> {
    let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean_square + RMS_NORM_EPS).sqrt();
    x.iter().zip(weight).map(|(v, w)| v * scale * (f64::from(*w) + offset)).collect()
}

pub(super) fn dot(row: &[f32], x: &[f64]) -> f64 {
    assert_eq!(row.len(), x.len(), "shapes disagree");
    row.iter().zip(x).map(|(w, v)| f64::from(*w) * v).sum()
}

pub(super) fn add(to: &mut [f64], from: &[f64]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += f;
    }
}

/// The lowest id with the best logit, and how far the second-best lies below.
pub(super) fn best_and_margin(logits: &[f64]) -> (u32, f64) {
    let mut best = 0;
    let mut second = f64::NEG_INFINITY;
    for (i, &logit) in logits.iter().enumerate().skip(1) {
        if logit > logits[best] {
            second = logits[best];
            best = i;
        } else {
            second = second.max(logit);
        }
    }
    (best as u32, logits[best] - second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_and_ties() {
        assert_eq!(best_and_margin(&[1.0, 3.0, 2.5]), (1, 0.5));
        assert_eq!(best_and_margin(&[2.0, 2.0]), (0, 0.0));
    }

    #[test]
    fn activations_have_their_known_values() {
        assert!((silu(1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        // 0.841192 is torch.nn.functional.gelu(1., approximate="tanh").
        assert!((gelu_tanh(1.0) - 0.841_191_99).abs() < 1e-6);
    }
}
