//! Column- and row-parallel linears (Shoeybi et al. 2019, §3).

use crate::Result;
use crate::families::Stored;
use crate::loader::Loader;
use lockstep_backend::Backend;
use lockstep_core::config::Activation;
use lockstep_core::shard::{Columns, Group, Piece, RowCut, WeightRule};

/// The rules of a linear's weight and bias.
#[derive(Clone, Debug)]
pub struct LinearRules {
    /// `[out, in]`.
    pub weight: WeightRule,
    /// `[out]`.
    pub bias: Option<WeightRule>,
}

/// Projections joined into one column-parallel linear.
pub struct Projections<'a> {
    /// Name before the projection's own.
    pub prefix: &'a str,
    /// How the file holds them.
    pub stored: Stored,
    /// (Outputs over all ranks, cut) in row order.
    pub rows: &'a [(usize, RowCut)],
}

impl LinearRules {
    /// Outputs cut, inputs whole. Biases are cut like the rows they belong to.
    pub fn column_parallel(
        group: Group,
        projections: &Projections<'_>,
        in_features: usize,
        bias: bool,
    ) -> Self {
        let pieces = |suffix| projections.stored.pieces(projections.prefix, suffix, projections.rows);
        let columns = Columns { global_len: in_features, cut: false };
        Self {
            weight: WeightRule::matrix(group, pieces("weight"), columns),
            bias: bias.then(|| WeightRule { group: Group::Biases, pieces: pieces("bias"), columns: None }),
        }
    }

    /// Inputs cut, outputs whole; the bias is replicated, because it is added once, after the sum.
    pub fn row_parallel(group: Group, name: &str, out: usize, global_in: usize, bias: bool) -> Self {
        let pieces = vec![Piece::whole(format!("{name}.weight"), out, RowCut::Replicated)];
        let bias_of = || WeightRule::vector(Group::Biases, format!("{name}.bias"), out, RowCut::Replicated);
        Self {
            weight: WeightRule::matrix(group, pieces, Columns { global_len: global_in, cut: true }),
            bias: bias.then(bias_of),
        }
    }

    /// Weight and bias.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

/// A linear whose outputs are cut over the ranks: `[local_out, in]`, no communication.
///
/// Fused projections (q|k|v, gate|up) are sliced *before* they are joined, so that each rank's
/// matrix holds its own part of every projection.
pub struct ColumnParallel<B: Backend> {
    weight: B::Linear,
    bias: Option<B::Vector>,
}

impl<B: Backend> ColumnParallel<B> {
    /// Loads this rank's rows of each projection.
    pub fn load(loader: &Loader<'_, B>, rules: &LinearRules) -> Result<Self> {
        let bias = rules.bias.as_ref().map(|rule| loader.vector(rule)).transpose()?;
        Ok(Self { weight: loader.matrix(&rules.weight)?, bias })
    }

    /// `out = x · Wᵀ + b`, `[rows, local_out]`.
    pub fn forward(&self, backend: &mut B, x: &B::Tensor, rows: usize, out: &mut B::Tensor) {
        backend.matmul(&self.weight, x, self.bias.as_ref(), rows, out);
    }

    /// The same of gate|up, and its activation: `[rows, local_out / 2]` into the second of `buffers`, the first of which is
    /// room for the product.
    pub fn forward_gated(
        &self,
        backend: &mut B,
        activation: Activation,
        x: &B::Tensor,
        rows: usize,
        buffers: (&mut B::Tensor, &mut B::Tensor),
    ) {
        backend.gated_matmul(activation, (&self.weight, self.bias.as_ref()), x, rows, buffers);
    }
}

/// A linear whose inputs are cut over the ranks: `[out, local_in]`. Each rank computes a partial
/// sum; the reduction at the end of the half layer adds the bias once.
pub struct RowParallel<B: Backend> {
    weight: B::Linear,
    /// For [`HalfLayerEnd`](super::residual::HalfLayerEnd).
    pub bias: Option<B::Vector>,
}

impl<B: Backend> RowParallel<B> {
    /// Loads this rank's columns.
    pub fn load(loader: &Loader<'_, B>, rules: &LinearRules) -> Result<Self> {
        let bias = rules.bias.as_ref().map(|rule| loader.vector(rule)).transpose()?;
        Ok(Self { weight: loader.matrix(&rules.weight)?, bias })
    }

    /// This rank's partial sums, `[rows, out]`, without the bias.
    pub fn forward(&self, backend: &mut B, x: &B::Tensor, rows: usize, partial: &mut B::Tensor) {
        backend.matmul(&self.weight, x, None, rows, partial);
    }
}
