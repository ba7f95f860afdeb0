//! Grouped-query attention of one layer (Ainslie et al. 2023) over the paged KV cache.

use super::linear::{ColumnParallel, LinearRules, Projections, RowParallel};
use super::norm::{self, Norm};
use crate::Result;
use crate::families::Layout;
use crate::loader::Loader;
use lockstep_backend::{self as backend_api, Backend, QkvShape, RopeAndStore};
use lockstep_core::ModelConfig;
use lockstep_core::shard::{Group, HeadShard, RowCut, WeightRule};

/// The rules of one layer's attention.
#[derive(Clone, Debug)]
pub struct AttentionRules {
    qkv: LinearRules,
    q_norm: Option<WeightRule>,
    k_norm: Option<WeightRule>,
    output: LinearRules,
}

impl AttentionRules {
    /// Query rows cut by heads, key and value rows by KV heads, the output's columns evenly.
    pub fn new(config: &ModelConfig, layout: &Layout, prefix: &str) -> Self {
        let head_dim = config.head_dim;
        let (q, kv) = (config.num_heads * head_dim, config.num_kv_heads * head_dim);
        let kv_cut = RowCut::KvHeads { head_dim };
        let projections = Projections {
            prefix,
            stored: layout.qkv,
            rows: &[(q, RowCut::QueryHeads { head_dim }), (kv, kv_cut), (kv, kv_cut)],
        };
        let norm = |name| config.qk_norm.then(|| norm::rule(&format!("{prefix}.{name}"), head_dim));
        let (hidden, output) = (config.hidden_size, format!("{prefix}.o_proj"));
        Self {
            qkv: LinearRules::column_parallel(Group::Attention, &projections, hidden, config.qkv_bias),
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            output: LinearRules::row_parallel(Group::Attention, &output, hidden, q, config.o_bias),
        }
    }

    /// All rules.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        self.qkv.iter().chain(&self.q_norm).chain(&self.k_norm).chain(self.output.iter())
    }
}

/// q, k, v fused column-parallel by heads; KV heads cut or replicated; output row-parallel.
pub struct Attention<B: Backend> {
    qkv: ColumnParallel<B>,
    qk_norm: Option<(Norm<B>, Norm<B>)>,
    /// The output projection.
    pub output: RowParallel<B>,
    shape: QkvShape,
    layer: LayerAttention,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug)]
struct LayerAttention {
    /// Index in this rank's KV cache.
    local_layer: usize,
    scale: f32,
    softcap: Option<f32>,
    window: Option<usize>,
    /// Takes the rope of sliding layers, where that differs.
    is_sliding: bool,
}

/// cos and sin of all positions.
pub struct RopeTables<B: Backend> {
    /// Of all layers, or of those without a window where `sliding` is set.
    pub main: B::RopeTable,
    /// Of the sliding layers, where it differs (Gemma 3).
    pub sliding: Option<B::RopeTable>,
}

impl<B: Backend> RopeTables<B> {
    /// Tables for positions `0..positions_max`, which is also the context that longrope chooses by.
    pub fn new(backend: &B, config: &ModelConfig, positions_max: usize) -> Result<Self> {
        let table = |rope: &lockstep_core::RopeConfig| {
            backend.rope_table(&rope.frequencies(config.rotary_dim, positions_max), positions_max)
        };
        Ok(Self { main: table(&config.rope)?, sliding: config.local_rope.as_ref().map(table).transpose()? })
    }
}

/// What one step's attention needs besides weights.
pub struct AttentionStep<'a, B: Backend> {
    /// cos/sin.
    pub ropes: &'a RopeTables<B>,
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// KV slot of each token.
    pub slots: &'a [u32],
    /// Rows and page tables.
    pub batch: backend_api::AttentionBatch<'a>,
}

impl<B: Backend> Attention<B> {
    /// Loads the weights of layer `layer` of the model. Its index in this rank's KV cache counts from the stage's first.
    pub fn load(loader: &Loader<'_, B>, rules: &AttentionRules, layer: usize) -> Result<Self> {
        let (config, p) = (loader.config(), loader.parallel());
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let q_norm = Norm::load_optional(loader, &rules.q_norm)?;
        Ok(Self {
            qkv: ColumnParallel::load(loader, &rules.qkv)?,
            qk_norm: q_norm.zip(Norm::load_optional(loader, &rules.k_norm)?),
            output: RowParallel::load(loader, &rules.output)?,
            shape: QkvShape {
                local_heads: heads.query_heads.len(),
                local_kv_heads: heads.kv_heads.len(),
                head_dim: config.head_dim,
                norm_eps: config.rms_norm_eps,
            },
            layer: LayerAttention {
                local_layer: layer - loader.stage().first,
                scale: config.attention_scale,
                softcap: config.attention_softcap,
                window: config.window(layer),
                is_sliding: config.sliding_layers[layer],
            },
        })
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
        let sliding = step.ropes.sliding.as_ref().filter(|_| self.layer.is_sliding);
        let store = RopeAndStore {
            layer: self.layer.local_layer,
            shape: self.shape,
            qk_norm: self.qk_norm.as_ref().map(|(q, k)| (&q.weight, &k.weight)),
            rope: sliding.unwrap_or(&step.ropes.main),
            positions: step.positions,
            slots: step.slots,
        };
        backend.rope_and_store(store, qkv, cache);
        let args = backend_api::Attention {
            layer: self.layer.local_layer,
            shape: self.shape,
            scale: self.layer.scale,
            softcap: self.layer.softcap,
            window: self.layer.window,
            batch: step.batch,
        };
        backend.attention(args, qkv, cache, out);
    }
}
