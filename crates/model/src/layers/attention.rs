//! Grouped-query attention of one layer (Ainslie et al. 2023) over the paged KV cache.

use crate::Result;
use crate::layers::linear::{ColumnParallel, Norm, Projection, RowParallel};
use crate::loader::Loader;
use lockstep_backend::{self as backend_api, Backend, QkvShape, RopeAndStore};
use lockstep_core::shard::HeadShard;

/// q, k, v fused column-parallel by heads; KV heads cut or replicated; output row-parallel.
pub struct Attention<B: Backend> {
    qkv: ColumnParallel<B>,
    qk_norm: Option<(Norm<B>, Norm<B>)>,
    /// The output projection; the decoder runs it together with the residual add and next norm.
    pub output: RowParallel<B>,
    shape: QkvShape,
    local_layer: usize,
}

/// What one step's attention needs besides weights.
pub struct AttentionStep<'a, B: Backend> {
    /// cos/sin.
    pub rope: &'a B::RopeTable,
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// KV slot of each token.
    pub slots: &'a [u32],
    /// Rows and page tables.
    pub batch: backend_api::AttentionBatch<'a>,
}

impl<B: Backend> Attention<B> {
    /// Loads `{prefix}.{q,k,v,o}_proj` and, where the family has them, `{q,k}_norm`.
    /// `local_layer` is the layer's index in this rank's KV cache.
    pub fn load(loader: &Loader<'_, B>, prefix: &str, local_layer: usize) -> Result<Self> {
        let (config, p) = (loader.config(), loader.parallel());
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let dim = config.head_dim;
        let projection = |name: &str, heads_total: usize, mine: &std::ops::Range<usize>| Projection {
            name: format!("{prefix}.{name}"),
            global_out: heads_total * dim,
            rows: mine.start * dim..mine.end * dim,
        };
        let parts = vec![
            projection("q_proj", config.num_heads, &heads.query_heads),
            projection("k_proj", config.num_kv_heads, &heads.kv_heads),
            projection("v_proj", config.num_kv_heads, &heads.kv_heads),
        ];
        let norm = |name: &str| Norm::load(loader, &format!("{prefix}.{name}"), dim);
        Ok(Self {
            qkv: ColumnParallel::load(loader, parts, config.hidden_size, config.qkv_bias)?,
            qk_norm: if config.qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None },
            output: RowParallel::load(
                loader,
                &format!("{prefix}.o_proj"),
                config.hidden_size,
                config.num_heads * dim,
                config.o_bias,
            )?,
            shape: QkvShape {
                local_heads: heads.query_heads.len(),
                local_kv_heads: heads.kv_heads.len(),
                head_dim: dim,
                norm_eps: config.rms_norm_eps,
            },
            local_layer,
        })
    }

    /// Columns of the fused q|k|v activation.
    pub fn qkv_cols(&self) -> usize {
        self.qkv.local_out()
    }

    /// Everything before the output projection: `x` `[tokens, hidden]` to `out`
    /// `[tokens, local_heads*head_dim]`, storing this step's K and V on the way.
    pub fn forward(
        &self,
        backend: &mut B,
        step: &AttentionStep<'_, B>,
        x: &B::Tensor,
        cache: &mut B::KvCache,
        buffers: (&mut B::Tensor, &mut B::Tensor), // (qkv, out)
    ) {
        let (qkv, out) = buffers;
        self.qkv.forward(backend, x, step.positions.len(), qkv);
        let store = RopeAndStore {
            layer: self.local_layer,
            shape: self.shape,
            qk_norm: self.qk_norm.as_ref().map(|(q, k)| (&q.weight, &k.weight)),
            rope: step.rope,
            positions: step.positions,
            slots: step.slots,
        };
        backend.rope_and_store(store, qkv, cache);
        let args = backend_api::Attention { layer: self.local_layer, shape: self.shape, batch: step.batch };
        backend.attention(args, qkv, cache, out);
    }
}
