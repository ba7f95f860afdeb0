//! The gated MLP of Llama-like models: `down(silu(gate(x)) * up(x))` (Shazeer 2020, SwiGLU).

use crate::Result;
use crate::layers::linear::{ColumnParallel, Projection, RowParallel};
use crate::loader::Loader;
use lockstep_backend::Backend;
use lockstep_core::shard;

/// gate and up fused column-parallel, down row-parallel.
pub struct GatedMlp<B: Backend> {
    gate_up: ColumnParallel<B>,
    /// The down projection; the decoder runs it together with the residual add and next norm.
    pub down: RowParallel<B>,
}

impl<B: Backend> GatedMlp<B> {
    /// Loads `{prefix}.{gate,up,down}_proj`.
    pub fn load(loader: &Loader<'_, B>, prefix: &str) -> Result<Self> {
        let (config, p) = (loader.config(), loader.parallel());
        let inner = config.intermediate_size;
        let part = |name: &str| Projection {
            name: format!("{prefix}.{name}"),
            global_out: inner,
            rows: shard::even(inner, p.tp_rank, p.tp_size),
        };
        let parts = vec![part("gate_proj"), part("up_proj")];
        Ok(Self {
            gate_up: ColumnParallel::load(loader, parts, config.hidden_size, config.mlp_bias)?,
            down: RowParallel::load(
                loader,
                &format!("{prefix}.down_proj"),
                config.hidden_size,
                inner,
                config.mlp_bias,
            )?,
        })
    }

    /// Columns of the fused gate|up activation; the gated product is half as wide.
    pub fn gate_up_cols(&self) -> usize {
        self.gate_up.local_out()
    }

    /// Everything before the down projection, `[rows, hidden]` to `[rows, local_inner]`.
    pub fn forward(
        &self,
        backend: &mut B,
        x: &B::Tensor,
        rows: usize,
        gate_up: &mut B::Tensor,
        out: &mut B::Tensor,
    ) {
        self.gate_up.forward(backend, x, rows, gate_up);
        backend.silu_mul(gate_up, rows, out);
    }
}
