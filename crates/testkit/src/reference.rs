//! A slow, plain forward pass in f64 for Llama, Qwen2 and Qwen3, one token at a time, with a
//! *simulated* tensor-parallel cut in which single mistakes can be switched on.
//!
//! It is what the fixtures' answers come from, and the proof that they tell right from wrong: a
//! fixture names the mistakes it is meant to catch, and each must change its answer.
//! Formulas: RMSNorm (Zhang & Sennrich 2019), RoPE with half-split pairs (Su et al. 2021), SwiGLU
//! (Shazeer 2020), grouped-query attention (Ainslie et al. 2023), the cut of Megatron-LM (Shoeybi
//! et al. 2019). Nothing is fused, cached across requests or reordered.

use crate::spec::{ModelSpec, RMS_NORM_EPS, RopeSpec};
use crate::tensor::{Tensor, Weights};
use std::ops::Range;

/// A mistake of a tensor-parallel engine or a loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Every rank uses rank 0's slice of the column-parallel projections.
    Rank0Shard,
    /// The bias of a row-parallel layer is added on every rank.
    RowBiasDup,
    /// Rows of the concatenated q|k|v are cut into equal pieces before they are told apart.
    FusedQkvChunk,
    /// Replicated KV heads are dealt round robin (`rank % kv_heads`).
    KvReplicaWrong,
    /// The head is zero (a tied head that was not tied).
    HeadZero,
    /// The vocabulary is cut into `floor(vocab / tp)` rows per rank; the last ids are lost.
    VocabFloor,
    /// Position scaling is ignored.
    NoScaling,
    /// `rope_theta` is not read; 10000 without scaling is used.
    ThetaDefault,
    /// The norms on q and k are left out.
    NoQkNorm,
    /// The biases of q, k and v are left out.
    NoQkvBias,
}

impl Fault {
    /// The name in `expect.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::Rank0Shard => "rank0_shard",
            Fault::RowBiasDup => "row_bias_dup",
            Fault::FusedQkvChunk => "fused_qkv_chunk",
            Fault::KvReplicaWrong => "kv_rep_wrong",
            Fault::HeadZero => "head_zero",
            Fault::VocabFloor => "vocab_floor",
            Fault::NoScaling => "no_scaling",
            Fault::ThetaDefault => "theta_default",
            Fault::NoQkNorm => "no_qk_norm",
            Fault::NoQkvBias => "no_qkv_bias",
        }
    }
}

/// A greedy continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Greedy {
    /// The tokens chosen, an end token included.
    pub ids: Vec<u32>,
    /// Smallest difference between the best and the second-best logit over all choices.
    pub min_margin: f64,
}

/// Output rows of one rank's share of a column-parallel projection, with their biases.
struct Projection<'a> {
    rows: Vec<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl Projection<'_> {
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let bias = |i: usize| self.bias.map_or(0.0, |b| f64::from(b[i]));
        self.rows.iter().enumerate().map(|(i, row)| dot(row, x) + bias(i)).collect()
    }
}

/// What one simulated rank holds of one layer.
struct LayerShard<'a> {
    q: Projection<'a>,
    k: Projection<'a>,
    v: Projection<'a>,
    gate: Projection<'a>,
    up: Projection<'a>,
    /// Input columns of o_proj and of down_proj.
    o_columns: Range<usize>,
    down_columns: Range<usize>,
}

/// K and V of all positions so far, of one rank in one layer.
#[derive(Clone, Default)]
struct KvRows {
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
}

/// A model with the tokens it has read so far.
pub struct Reference<'a> {
    spec: &'a ModelSpec,
    weights: &'a Weights,
    tp_size: usize,
    fault: Option<Fault>,
    inverse_frequencies: Vec<f64>,
    /// `[layer][rank]`.
    shards: Vec<Vec<LayerShard<'a>>>,
    /// `[layer][rank]`.
    cache: Vec<Vec<KvRows>>,
}

impl<'a> Reference<'a> {
    /// The right model, uncut.
    pub fn new(spec: &'a ModelSpec, weights: &'a Weights) -> Self {
        Self::with_fault(spec, weights, 1, None)
    }

    /// The model cut over `tp_size` simulated ranks, with one mistake switched on. Panics when the
    /// tp size is illegal for the model.
    pub fn with_fault(
        spec: &'a ModelSpec,
        weights: &'a Weights,
        tp_size: usize,
        fault: Option<Fault>,
    ) -> Self {
        let shards: Vec<Vec<LayerShard>> = (0..spec.layers)
            .map(|layer| (0..tp_size).map(|r| cut_layer(spec, weights, layer, (r, tp_size), fault)).collect())
            .collect();
        let cache = vec![vec![KvRows::default(); tp_size]; spec.layers];
        let inverse_frequencies = inverse_frequencies(spec, fault);
        Self { spec, weights, tp_size, fault, inverse_frequencies, shards, cache }
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.cache = vec![vec![KvRows::default(); self.tp_size]; self.spec.layers];
    }

    /// Reads `ids` and returns the logits `[vocab]` after the last one. Panics when `ids` is empty.
    pub fn logits(&mut self, ids: &[u32]) -> Vec<f64> {
        let mut hidden = Vec::new();
        for &id in ids {
            hidden = self.push(id);
        }
        assert!(!hidden.is_empty(), "logits of no token");
        self.head(&hidden)
    }

    /// Continues `prompt` by at most `steps` tokens from an empty context, always choosing the
    /// best logit (the lowest id on a tie), until one of `eos` was chosen.
    pub fn greedy(&mut self, prompt: &[u32], steps: usize, eos: &[u32]) -> Greedy {
        self.reset();
        let mut answer = Greedy { ids: Vec::new(), min_margin: f64::INFINITY };
        let mut logits = self.logits(prompt);
        while answer.ids.len() < steps {
            let (best, margin) = best_and_margin(&logits);
            answer.ids.push(best);
            answer.min_margin = answer.min_margin.min(margin);
            if eos.contains(&best) || answer.ids.len() == steps {
                break;
            }
            logits = self.logits(&[best]);
        }
        answer
    }

    /// Reads one token and returns the final normed hidden state.
    fn push(&mut self, id: u32) -> Vec<f64> {
        let mut x = self.embed(id);
        for layer in 0..self.spec.layers {
            let partial = self.attention(layer, &x);
            add(&mut x, &partial);
            let partial = self.mlp(layer, &x);
            add(&mut x, &partial);
        }
        rms_norm(&x, &self.weights["model.norm.weight"].data)
    }

    fn rows_kept(&self) -> usize {
        match self.fault {
            Some(Fault::VocabFloor) => self.spec.vocab / self.tp_size * self.tp_size,
            _ => self.spec.vocab,
        }
    }

    fn embed(&self, id: u32) -> Vec<f64> {
        if id as usize >= self.rows_kept() {
            return vec![0.0; self.spec.hidden];
        }
        widen(self.weights["model.embed_tokens.weight"].row(id as usize))
    }

    fn head(&self, hidden: &[f64]) -> Vec<f64> {
        let name = if self.spec.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = &self.weights[name];
        let logit = |row: usize| match self.fault {
            Some(Fault::HeadZero) => 0.0,
            _ if row >= self.rows_kept() => f64::NEG_INFINITY,
            _ => dot(head.row(row), hidden),
        };
        (0..self.spec.vocab).map(logit).collect()
    }

    fn layer_tensor(&self, layer: usize, name: &str) -> Option<&'a Tensor> {
        self.weights.get(&format!("model.layers.{layer}.{name}"))
    }

    fn norm_of(&self, layer: usize, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.layer_tensor(layer, name).expect("invariant: every layer has its norms");
        rms_norm(x, &weight.data)
    }

    /// The sum over ranks of what attention adds to the residual stream at the newest position.
    fn attention(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let h = self.norm_of(layer, "input_layernorm.weight", x);
        let position = self.cache[layer][0].k.len();
        let o = self.layer_tensor(layer, "self_attn.o_proj.weight").expect("invariant: o_proj");
        let bias = self.layer_tensor(layer, "self_attn.o_proj.bias");
        let mut sum = vec![0.0; self.spec.hidden];
        for rank in 0..self.tp_size {
            let shard = &self.shards[layer][rank];
            let (mut q, mut k, v) = (shard.q.apply(&h), shard.k.apply(&h), shard.v.apply(&h));
            self.norm_and_turn(layer, "self_attn.q_norm.weight", position, &mut q);
            self.norm_and_turn(layer, "self_attn.k_norm.weight", position, &mut k);
            let columns = shard.o_columns.clone();
            let cache = &mut self.cache[layer][rank];
            cache.k.push(k);
            cache.v.push(v);
            let out = attend(&q, cache, self.spec.head_dim);
            let bias = bias.filter(|_| rank == 0 || self.fault == Some(Fault::RowBiasDup));
            add(&mut sum, &row_parallel(o, columns, bias, &out));
        }
        sum
    }

    /// Per-head norm (if the model has it) and rope, on all heads of q or k of one position.
    fn norm_and_turn(&self, layer: usize, norm: &str, position: usize, heads: &mut [f64]) {
        let dim = self.spec.head_dim;
        let weight = self.layer_tensor(layer, norm).filter(|_| self.fault != Some(Fault::NoQkNorm));
        for head in heads.chunks_mut(dim) {
            if let Some(weight) = weight {
                head.copy_from_slice(&rms_norm(head, &weight.data));
            }
            for (i, frequency) in self.inverse_frequencies.iter().enumerate() {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + dim / 2]);
                head[i] = a * cos - b * sin;
                head[i + dim / 2] = b * cos + a * sin;
            }
        }
    }

    /// The sum over ranks of what the MLP adds to the residual stream.
    fn mlp(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let h = self.norm_of(layer, "post_attention_layernorm.weight", x);
        let down = self.layer_tensor(layer, "mlp.down_proj.weight").expect("invariant: down_proj");
        let bias = self.layer_tensor(layer, "mlp.down_proj.bias");
        let mut sum = vec![0.0; self.spec.hidden];
        for (rank, shard) in self.shards[layer].iter().enumerate() {
            let gate = shard.gate.apply(&h);
            let up = shard.up.apply(&h);
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let bias = bias.filter(|_| rank == 0 || self.fault == Some(Fault::RowBiasDup));
            add(&mut sum, &row_parallel(down, shard.down_columns.clone(), bias, &inner));
        }
        sum
    }
}

/// What rank `r` of `tp` holds of one layer, by the rules of the design or with one mistake.
fn cut_layer<'a>(
    spec: &ModelSpec,
    weights: &'a Weights,
    layer: usize,
    (rank, tp_size): (usize, usize),
    fault: Option<Fault>,
) -> LayerShard<'a> {
    assert!(
        spec.heads.is_multiple_of(tp_size) && spec.intermediate.is_multiple_of(tp_size),
        "illegal tp size"
    );
    let tensor = |name: String| weights.get(&format!("model.layers.{layer}.{name}"));
    let weight =
        |name: &str| tensor(format!("{name}.weight")).expect("invariant: every projection has a weight");
    let bias = |name: &str| tensor(format!("{name}.bias")).map(|t| t.data.as_slice());
    let cut = |name: &str, rows: Range<usize>| Projection {
        rows: rows.clone().map(|i| weight(name).row(i)).collect(),
        bias: bias(name)
            .filter(|_| fault != Some(Fault::NoQkvBias) || name.starts_with("mlp"))
            .map(|b| &b[rows]),
    };
    let column_rank = if fault == Some(Fault::Rank0Shard) { 0 } else { rank };
    let part = |len: usize, r: usize| r * len / tp_size..(r + 1) * len / tp_size;

    let local_kv_heads = (spec.kv_heads / tp_size).max(1);
    let first_kv_head = match fault {
        Some(Fault::KvReplicaWrong) => column_rank % spec.kv_heads,
        _ => column_rank * spec.kv_heads / tp_size,
    };
    let kv_rows = first_kv_head * spec.head_dim..(first_kv_head + local_kv_heads) * spec.head_dim;
    let q_len = spec.heads * spec.head_dim;
    let mut shard = LayerShard {
        q: cut("self_attn.q_proj", part(q_len, column_rank)),
        k: cut("self_attn.k_proj", kv_rows.clone()),
        v: cut("self_attn.v_proj", kv_rows),
        gate: cut("mlp.gate_proj", part(spec.intermediate, column_rank)),
        up: cut("mlp.up_proj", part(spec.intermediate, column_rank)),
        o_columns: part(q_len, rank),
        down_columns: part(spec.intermediate, rank),
    };
    if fault == Some(Fault::FusedQkvChunk) {
        let fused: Vec<&[f32]> = ["q", "k", "v"]
            .iter()
            .flat_map(|z| {
                let w = weight(&format!("self_attn.{z}_proj"));
                (0..w.shape[0]).map(|i| w.row(i))
            })
            .collect();
        let mut rows = fused[part(fused.len(), rank)].iter().copied();
        shard.q.rows = rows.by_ref().take(q_len / tp_size).collect();
        shard.k.rows = rows.by_ref().take(local_kv_heads * spec.head_dim).collect();
        shard.v.rows = rows.collect();
    }
    shard
}

/// Inverse frequencies `[head_dim / 2]` in radians per position; llama3 bands as in transformers
/// `modeling_rope_utils.py`.
fn inverse_frequencies(spec: &ModelSpec, fault: Option<Fault>) -> Vec<f64> {
    let theta = if fault == Some(Fault::ThetaDefault) { 10_000.0 } else { spec.rope_theta };
    let plain = (0..spec.head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / spec.head_dim as f64));
    if matches!(fault, Some(Fault::ThetaDefault | Fault::NoScaling)) {
        return plain.collect();
    }
    match spec.rope {
        RopeSpec::Default => plain.collect(),
        RopeSpec::Linear(factor) => plain.map(|f| f / factor).collect(),
        RopeSpec::Llama3(factor, low, high, original) => plain
            .map(|f| {
                let turns = original as f64 * f / (2.0 * std::f64::consts::PI);
                if turns < low {
                    f / factor
                } else if turns > high {
                    f
                } else {
                    let keep = (turns - low) / (high - low);
                    (1.0 - keep) * f / factor + keep * f
                }
            })
            .collect(),
    }
}

/// Softmax attention of the heads in `q` over all cached positions; heads share KV in groups.
fn attend(q: &[f64], cache: &KvRows, head_dim: usize) -> Vec<f64> {
    let local_heads = q.len() / head_dim;
    let local_kv_heads = cache.k[0].len() / head_dim;
    let mut out = vec![0.0; q.len()];
    for head in 0..local_heads {
        let kv = head * local_kv_heads / local_heads;
        let columns = kv * head_dim..(kv + 1) * head_dim;
        let query = &q[head * head_dim..(head + 1) * head_dim];
        let scores: Vec<f64> = cache
            .k
            .iter()
            .map(|k| {
                query.iter().zip(&k[columns.clone()]).map(|(a, b)| a * b).sum::<f64>()
                    / (head_dim as f64).sqrt()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for (score, v) in scores.iter().zip(&cache.v) {
            let p = (score - max).exp() / total;
            for (o, x) in out[head * head_dim..].iter_mut().zip(&v[columns.clone()]) {
                *o += p * x;
            }
        }
    }
    out
}

/// `x · Wᵀ` over some input columns of `W`, plus the bias.
fn row_parallel(w: &Tensor, columns: Range<usize>, bias: Option<&Tensor>, x: &[f64]) -> Vec<f64> {
    (0..w.shape[0])
        .map(|i| dot(&w.row(i)[columns.clone()], x) + bias.map_or(0.0, |b| f64::from(b.data[i])))
        .collect()
}

fn rms_norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean_square + RMS_NORM_EPS).sqrt();
    x.iter().zip(weight).map(|(v, w)| v * scale * f64::from(*w)).collect()
}

fn dot(row: &[f32], x: &[f64]) -> f64 {
    assert_eq!(row.len(), x.len(), "shapes disagree");
    row.iter().zip(x).map(|(w, v)| f64::from(*w) * v).sum()
}

fn add(to: &mut [f64], from: &[f64]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += f;
    }
}

fn widen(row: &[f32]) -> Vec<f64> {
    row.iter().map(|v| f64::from(*v)).collect()
}

/// The lowest id with the best logit, and how far the second-best lies below.
fn best_and_margin(logits: &[f64]) -> (u32, f64) {
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
    fn a_right_cut_changes_nothing() {
        let spec = ModelSpec {
            heads: 8,
            kv_heads: 2,
            qkv_bias: true,
            o_bias: true,
            mlp_bias: true,
            qk_norm: true,
            ..ModelSpec::default()
        };
        let weights = spec.weights();
        let whole = Reference::new(&spec, &weights).logits(&[5, 6, 7, 300]);
        for tp_size in [2, 4, 8] {
            let cut = Reference::with_fault(&spec, &weights, tp_size, None).logits(&[5, 6, 7, 300]);
            let difference = whole.iter().zip(&cut).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(difference < 1e-9, "tp {tp_size}: {difference}");
        }
    }

    #[test]
    fn reading_in_two_parts_is_reading_at_once() {
        let spec = ModelSpec::default();
        let weights = spec.weights();
        let mut parts = Reference::new(&spec, &weights);
        parts.logits(&[1, 2, 3]);
        assert_eq!(parts.logits(&[4, 5]), Reference::new(&spec, &weights).logits(&[1, 2, 3, 4, 5]));
    }

    #[test]
    fn margins_and_ties() {
        assert_eq!(best_and_margin(&[1.0, 3.0, 2.5]), (1, 0.5));
        assert_eq!(best_and_margin(&[2.0, 2.0]), (0, 0.0));
    }
}
