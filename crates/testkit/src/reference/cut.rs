//! What one simulated rank holds of a layer, by the rules of the design or with one mistake.

use super::Fault;
use super::math::dot;
use crate::spec::{ModelSpec, SpecFamily};
use crate::tensor::{Tensor, Weights};
use std::ops::Range;

/// Output rows of one rank's share of a column-parallel projection, with their biases.
pub(super) struct Projection<'a> {
    rows: Vec<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl Projection<'_> {
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        let bias = |i: usize| self.bias.map_or(0.0, |b| f64::from(b[i]));
        self.rows.iter().enumerate().map(|(i, row)| dot(row, x) + bias(i)).collect()
    }
}

/// One rank's share of one MLP, dense or expert.
pub(super) struct MlpShard<'a> {
    pub gate: Projection<'a>,
    pub up: Projection<'a>,
    pub down: &'a Tensor,
    /// Input columns of `down`.
    pub columns: Range<usize>,
}

/// What one simulated rank holds of one layer.
pub(super) struct LayerShard<'a> {
    pub q: Projection<'a>,
    pub k: Projection<'a>,
    pub v: Projection<'a>,
    /// Input columns of o_proj.
    pub o_columns: Range<usize>,
    /// One, or the experts.
    pub mlps: Vec<MlpShard<'a>>,
}

/// Cuts one layer for one rank.
pub(super) struct Cutter<'a> {
    pub spec: &'a ModelSpec,
    pub weights: &'a Weights,
    pub layer: usize,
    pub rank: usize,
    pub tp_size: usize,
    pub fault: Option<Fault>,
}

/// The rows of one projection, and its whole bias.
struct Whole<'a> {
    rows: Vec<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

impl<'a> Cutter<'a> {
    /// Panics when the tp size is illegal.
    pub fn layer(&self) -> LayerShard<'a> {
        let spec = self.spec;
        assert!(spec.heads.is_multiple_of(self.tp_size), "illegal tp size");
        let (q_len, kv_len) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let local_kv_heads = (spec.kv_heads / self.tp_size).max(1);
        let first_kv_head = match self.fault {
            Some(Fault::KvReplicaWrong) => self.column_rank() % spec.kv_heads,
            _ => self.column_rank() * spec.kv_heads / self.tp_size,
        };
        let kv_rows = first_kv_head * spec.head_dim..(first_kv_head + local_kv_heads) * spec.head_dim;
        let whole = |name: &str| match (spec.family, name) {
            (SpecFamily::Phi3, "q") => self.rows_of("self_attn.qkv_proj", 0..q_len),
            (SpecFamily::Phi3, "k") => self.rows_of("self_attn.qkv_proj", q_len..q_len + kv_len),
            (SpecFamily::Phi3, "v") => self.rows_of("self_attn.qkv_proj", q_len + kv_len..q_len + 2 * kv_len),
            (_, name) => self.all_rows(&format!("self_attn.{name}_proj")),
        };
        let mut shard = LayerShard {
            q: self.cut(whole("q"), self.part(q_len, self.column_rank())),
            k: self.cut(whole("k"), kv_rows.clone()),
            v: self.cut(whole("v"), kv_rows),
            o_columns: self.part(q_len, self.rank),
            mlps: self.mlps(),
        };
        if self.fault == Some(Fault::FusedQkvChunk) {
            let fused: Vec<&[f32]> = ["q", "k", "v"].iter().flat_map(|z| whole(z).rows).collect();
            let mut rows = fused[self.part(fused.len(), self.rank)].iter().copied();
            shard.q.rows = rows.by_ref().take(q_len / self.tp_size).collect();
            shard.k.rows = rows.by_ref().take(local_kv_heads * spec.head_dim).collect();
            shard.v.rows = rows.collect();
        }
        shard
    }

    fn mlps(&self) -> Vec<MlpShard<'a>> {
        match self.spec.experts_of(self.layer) {
            None => vec![self.mlp("mlp", self.spec.intermediate)],
            Some(experts) => {
                (0..experts.count).map(|e| self.mlp(&format!("mlp.experts.{e}"), experts.inner)).collect()
            }
        }
    }

    fn mlp(&self, prefix: &str, inner: usize) -> MlpShard<'a> {
        assert!(inner.is_multiple_of(self.tp_size), "illegal tp size");
        let whole = |name: &str, first: usize| match self.spec.family {
            SpecFamily::Phi3 => self.rows_of(&format!("{prefix}.gate_up_proj"), first..first + inner),
            _ => self.all_rows(&format!("{prefix}.{name}_proj")),
        };
        let rows = self.part(inner, self.column_rank());
        MlpShard {
            gate: self.cut(whole("gate", 0), rows.clone()),
            up: self.cut(whole("up", inner), rows),
            down: self.weight(&format!("{prefix}.down_proj")),
            columns: self.part(inner, self.rank),
        }
    }

    fn column_rank(&self) -> usize {
        if self.fault == Some(Fault::Rank0Shard) { 0 } else { self.rank }
    }

    fn part(&self, len: usize, rank: usize) -> Range<usize> {
        rank * len / self.tp_size..(rank + 1) * len / self.tp_size
    }

    fn cut(&self, whole: Whole<'a>, rows: Range<usize>) -> Projection<'a> {
        Projection { rows: whole.rows[rows.clone()].to_vec(), bias: whole.bias.map(|b| &b[rows]) }
    }

    fn all_rows(&self, name: &str) -> Whole<'a> {
        self.rows_of(name, 0..self.weight(name).shape[0])
    }

    fn rows_of(&self, name: &str, rows: Range<usize>) -> Whole<'a> {
        let (weight, bias) = (self.weight(name), self.tensor(&format!("{name}.bias")));
        let kept = self.fault != Some(Fault::NoQkvBias) || name.starts_with("mlp");
        Whole {
            rows: rows.map(|i| weight.row(i)).collect(),
            bias: bias.filter(|_| kept).map(|t| t.data.as_slice()),
        }
    }

    fn weight(&self, name: &str) -> &'a Tensor {
        self.tensor(&format!("{name}.weight")).expect("invariant: every projection has a weight")
    }

    fn tensor(&self, name: &str) -> Option<&'a Tensor> {
        self.weights.get(&format!("model.layers.{}.{name}", self.layer))
    }
}
