//! A slow, plain forward pass in f64 for every family, one token at a time, with a *simulated*
//! tensor-parallel cut in which single mistakes can be switched on.
//!
//! It is what the fixtures' answers come from, and the proof that they tell right from wrong: a
//! fixture names the mistakes it is meant to catch, and each must change its answer.
//! Formulas: RMSNorm (Zhang & Sennrich 2019), RoPE with half-split pairs (Su et al. 2021), SwiGLU
//! (Shazeer 2020), grouped-query attention (Ainslie et al. 2023), the cut of Megatron-LM (Shoeybi
//! et al. 2019), mixtures of experts (Shazeer et al. 2017), and what transformers' model code says of
//! Gemma and Phi. Nothing is fused, cached across requests or reordered.

mod cut;
mod math;
mod rope;

use crate::spec::ModelSpec;
use crate::tensor::{Tensor, Weights};
use cut::{Cutter, LayerShard};
use math::{
    KvRows, Scores, add, attend, best_and_margin, capped, dot, gelu_tanh, rms_norm, row_parallel, silu,
    softmax,
};
use rope::Rope;

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
    /// cos and sin are not multiplied by the attention factor of yarn or longrope.
    NoAttentionFactor,
    /// The window is ignored.
    NoWindow,
    /// The window is one position too long.
    WindowOffByOne,
    /// The cap of the scores is ignored.
    NoScoreCap,
    /// Scores are divided by the root of the head's size although the file names another scale.
    HeadDimScale,
    /// Embeddings are not scaled.
    NoEmbeddingScale,
    /// The 1 is not added to the norm weights.
    NoNormOffset,
    /// The norms on the outputs of attention and MLP are left out.
    NoOutputNorms,
    /// silu in place of gelu.
    SiluForGelu,
    /// Window layers use the rope of the others.
    OneRope,
    /// Rope turns the whole head although the file names a part.
    WholeRotary,
    /// The chosen experts' probabilities are normalised where they must not be, or the other way.
    TopkNormFlipped,
    /// One expert too few.
    OneExpertLess,
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
            Fault::NoAttentionFactor => "no_attention_factor",
            Fault::NoWindow => "no_window",
            Fault::WindowOffByOne => "window_off_by_one",
            Fault::NoScoreCap => "no_score_cap",
            Fault::HeadDimScale => "head_dim_scale",
            Fault::NoEmbeddingScale => "no_embedding_scale",
            Fault::NoNormOffset => "no_norm_offset",
            Fault::NoOutputNorms => "no_output_norms",
            Fault::SiluForGelu => "silu_for_gelu",
            Fault::OneRope => "one_rope",
            Fault::WholeRotary => "whole_rotary",
            Fault::TopkNormFlipped => "topk_norm_flipped",
            Fault::OneExpertLess => "one_expert_less",
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

/// A model with the tokens it has read so far.
pub struct Reference<'a> {
    spec: &'a ModelSpec,
    weights: &'a Weights,
    tp_size: usize,
    fault: Option<Fault>,
    /// `[layer]`.
    ropes: Vec<Rope>,
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
        let cut = |layer| (0..tp_size).map(move |rank| Cutter { spec, weights, layer, rank, tp_size, fault });
        let shards = (0..spec.layers).map(|layer| cut(layer).map(|c| c.layer()).collect()).collect();
        let cache = vec![vec![KvRows::default(); tp_size]; spec.layers];
        let ropes = (0..spec.layers).map(|layer| Rope::new(spec, layer, fault)).collect();
        Self { spec, weights, tp_size, fault, ropes, shards, cache }
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
            let out = self.attention(layer, &x);
            self.join(layer, "post_attention_layernorm.weight", &mut x, out);
            let out = self.mlp(layer, &x);
            self.join(layer, "post_feedforward_layernorm.weight", &mut x, out);
        }
        self.norm("model.norm.weight", &x)
    }

    /// Adds the output of half a layer to the residual stream; Gemma norms it first.
    fn join(&self, layer: usize, norm: &str, x: &mut [f64], out: Vec<f64>) {
        let normed = self.spec.is_gemma() && self.fault != Some(Fault::NoOutputNorms);
        add(x, &if normed { self.norm_of(layer, norm, &out) } else { out });
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
        let scaled = self.spec.is_gemma() && self.fault != Some(Fault::NoEmbeddingScale);
        let scale = if scaled { (self.spec.hidden as f64).sqrt() } else { 1.0 };
        let row = self.weights["model.embed_tokens.weight"].row(id as usize);
        row.iter().map(|v| f64::from(*v) * scale).collect()
    }

    fn head(&self, hidden: &[f64]) -> Vec<f64> {
        let name = if self.spec.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = &self.weights[name];
        let logit = |row: usize| match self.fault {
            Some(Fault::HeadZero) => 0.0,
            _ if row >= self.rows_kept() => f64::NEG_INFINITY,
            _ => capped(dot(head.row(row), hidden), self.spec.logit_cap),
        };
        (0..self.spec.vocab).map(logit).collect()
    }

    fn layer_tensor(&self, layer: usize, name: &str) -> Option<&'a Tensor> {
        self.weights.get(&format!("model.layers.{layer}.{name}"))
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let offset = self.spec.is_gemma() && self.fault != Some(Fault::NoNormOffset);
        rms_norm(x, &self.weights[name].data, if offset { 1.0 } else { 0.0 })
    }

    fn norm_of(&self, layer: usize, name: &str, x: &[f64]) -> Vec<f64> {
        self.norm(&format!("model.layers.{layer}.{name}"), x)
    }

    fn scores(&self, layer: usize) -> Scores {
        let spec = self.spec;
        let own_scale = spec.is_gemma() && self.fault != Some(Fault::HeadDimScale);
        let divisor = if own_scale { spec.query_scalar } else { spec.head_dim as f64 };
        let window = match self.fault {
            Some(Fault::NoWindow) => None,
            Some(Fault::WindowOffByOne) => spec.window.map(|w| w + 1),
            _ => spec.window,
        };
        Scores {
            head_dim: spec.head_dim,
            scale: divisor.powf(-0.5),
            cap: spec.score_cap.filter(|_| self.fault != Some(Fault::NoScoreCap)),
            window: window.filter(|_| spec.slides(layer)),
        }
    }

    /// The sum over ranks of attention's output at the newest position.
    fn attention(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let h = self.norm_of(layer, "input_layernorm.weight", x);
        let position = self.cache[layer][0].k.len();
        let o = self.layer_tensor(layer, "self_attn.o_proj.weight").expect("invariant: o_proj");
        let bias = self.layer_tensor(layer, "self_attn.o_proj.bias");
        let scores = self.scores(layer);
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
            let out = attend(&q, cache, scores);
            let bias = bias.filter(|_| rank == 0 || self.fault == Some(Fault::RowBiasDup));
            add(&mut sum, &row_parallel(o, columns, bias, &out));
        }
        sum
    }

    /// Per-head norm (if the model has it) and rope, on all heads of q or k of one position.
    fn norm_and_turn(&self, layer: usize, norm: &str, position: usize, heads: &mut [f64]) {
        let normed = self.layer_tensor(layer, norm).is_some() && self.fault != Some(Fault::NoQkNorm);
        for head in heads.chunks_mut(self.spec.head_dim) {
            if normed {
                head.copy_from_slice(&self.norm_of(layer, norm, head));
            }
            self.ropes[layer].turn(position, head);
        }
    }

    /// The sum over ranks and chosen experts of the MLP's output.
    fn mlp(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let gemma = self.spec.is_gemma();
        let norm = if gemma { "pre_feedforward_layernorm.weight" } else { "post_attention_layernorm.weight" };
        let h = self.norm_of(layer, norm, x);
        let act = if gemma && self.fault != Some(Fault::SiluForGelu) { gelu_tanh } else { silu };
        let bias = self.layer_tensor(layer, "mlp.down_proj.bias");
        let mut sum = vec![0.0; self.spec.hidden];
        for (expert, share) in self.routes(layer, &h) {
            for (rank, shard) in self.shards[layer].iter().enumerate() {
                let mlp = &shard.mlps[expert];
                let (gate, up) = (mlp.gate.apply(&h), mlp.up.apply(&h));
                let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| share * act(*g) * u).collect();
                let bias = bias.filter(|_| rank == 0 || self.fault == Some(Fault::RowBiasDup));
                add(&mut sum, &row_parallel(mlp.down, mlp.columns.clone(), bias, &inner));
            }
        }
        sum
    }

    /// The experts of a token and the share of each; the dense MLP is expert 0 with share 1.
    fn routes(&self, layer: usize, h: &[f64]) -> Vec<(usize, f64)> {
        let Some(experts) = self.spec.experts_of(layer) else { return vec![(0, 1.0)] };
        let router = self.layer_tensor(layer, "mlp.gate.weight").expect("invariant: a router");
        let logits: Vec<f64> = (0..experts.count).map(|e| dot(router.row(e), h)).collect();
        let mut ranked: Vec<(usize, f64)> = softmax(&logits).into_iter().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(experts.per_token - usize::from(self.fault == Some(Fault::OneExpertLess)));
        let flipped = self.fault == Some(Fault::TopkNormFlipped);
        if experts.normalised != flipped {
            let total: f64 = ranked.iter().map(|(_, p)| p).sum();
            ranked.iter_mut().for_each(|(_, p)| *p /= total);
        }
        ranked
    }
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
}
