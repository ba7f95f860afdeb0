//! Column- and row-parallel linears (Shoeybi et al. 2019, §3).

use crate::Result;
use crate::loader::{Loader, MatrixPlan, Part};
use lockstep_backend::{Backend, ReduceAddNorm};
use lockstep_comm::collective::Collective;
use lockstep_core::shard;
use std::ops::Range;

/// A linear whose outputs are cut over the ranks: `[local_out, in]`, no communication.
///
/// Fused projections (q|k|v, gate|up) are sliced *before* they are joined, so that each rank's
/// matrix holds its own part of every projection.
pub struct ColumnParallel<B: Backend> {
    weight: B::Linear,
    bias: Option<B::Vector>,
    local_out: usize,
}

/// One projection of a fused column-parallel linear.
pub struct Projection {
    /// Name without `.weight` / `.bias`.
    pub name: String,
    /// Outputs over all ranks.
    pub global_out: usize,
    /// Outputs of this rank (global indices); ranks may share rows (KV-head replication).
    pub rows: Range<usize>,
}

impl<B: Backend> ColumnParallel<B> {
    /// Loads this rank's rows of each projection, `in_features` wide.
    pub fn load(
        loader: &Loader<'_, B>,
        parts: Vec<Projection>,
        in_features: usize,
        bias: bool,
    ) -> Result<Self> {
        let named = |suffix: &str| -> Vec<Part> {
            let part = |p: &Projection| Part {
                name: format!("{}.{suffix}", p.name),
                global_rows: p.global_out,
                rows: p.rows.clone(),
            };
            parts.iter().map(part).collect()
        };
        let weight = loader.linear(MatrixPlan {
            parts: named("weight"),
            padding_rows: 0,
            global_cols: in_features,
            cols: 0..in_features,
            leaves: vec![0, in_features],
        })?;
        let bias = if bias { Some(loader.fused_vector(&named("bias"))?) } else { None };
        Ok(Self { weight, bias, local_out: parts.iter().map(|p| p.rows.len()).sum() })
    }

    /// Outputs of this rank.
    pub fn local_out(&self) -> usize {
        self.local_out
    }

    /// `out = x · Wᵀ + b`, `[rows, local_out]`.
    pub fn forward(&self, backend: &mut B, x: &B::Tensor, rows: usize, out: &mut B::Tensor) {
        backend.matmul(&self.weight, x, self.bias.as_ref(), rows, out);
    }
}

/// A linear whose inputs are cut over the ranks: `[out, local_in]`. Each rank computes a partial
/// sum; the reduction adds the bias once.
pub struct RowParallel<B: Backend> {
    weight: B::Linear,
    bias: Option<B::Vector>,
}

impl<B: Backend> RowParallel<B> {
    /// Loads this rank's columns of `name` (`[out, global_in]`).
    pub fn load(
        loader: &Loader<'_, B>,
        name: &str,
        out: usize,
        global_in: usize,
        bias: bool,
    ) -> Result<Self> {
        let p = loader.parallel();
        let weight = loader.linear(MatrixPlan {
            parts: vec![Part { name: format!("{name}.weight"), global_rows: out, rows: 0..out }],
            padding_rows: 0,
            global_cols: global_in,
            cols: shard::even(global_in, p.tp_rank, p.tp_size),
            leaves: shard::leaf_bounds(global_in, 1, p.tp_rank, p.tp_size),
        })?;
        let bias = if bias { Some(loader.vector(&format!("{name}.bias"), out, 0..out)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// The whole end of a half layer: partial sums reduced over the TP group, bias added once, added
    /// to the residual stream, normed for the next half layer.
    ///
    /// **Collective: all ranks of the TP group.**
    pub fn forward_add_norm(
        &self,
        ctx: (&mut B, &dyn Collective),
        x: &B::Tensor,
        norm: &Norm<B>,
        stream: ResidualStream<'_, B>,
        rows: usize,
    ) -> Result<()> {
        let (backend, collective) = ctx;
        backend.matmul(&self.weight, x, None, rows, stream.partial);
        let args = ReduceAddNorm { bias: self.bias.as_ref(), norm_weight: &norm.weight, norm_eps: norm.eps };
        let streams = (stream.residual, stream.normed);
        Ok(backend.reduce_add_norm(collective, args, stream.partial, streams, rows)?)
    }
}

/// The buffers that pass from one half layer to the next, `[tokens, hidden]` each.
pub struct ResidualStream<'a, B: Backend> {
    /// Scratch for this rank's partial sums.
    pub partial: &'a mut B::Tensor,
    /// The residual stream, updated.
    pub residual: &'a mut B::Tensor,
    /// Its norm: the input of the next half layer.
    pub normed: &'a mut B::Tensor,
}

/// RMSNorm (Zhang & Sennrich 2019), replicated.
pub struct Norm<B: Backend> {
    /// `[width]`.
    pub weight: B::Vector,
    /// Added to the mean square.
    pub eps: f32,
}

impl<B: Backend> Norm<B> {
    /// Loads `{name}.weight` of `width` elements.
    pub fn load(loader: &Loader<'_, B>, name: &str, width: usize) -> Result<Self> {
        let weight = loader.vector(&format!("{name}.weight"), width, 0..width)?;
        Ok(Self { weight, eps: loader.config().rms_norm_eps })
    }
}
