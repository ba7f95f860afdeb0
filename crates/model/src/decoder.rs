//! The decoder-only transformer of the Llama, Qwen2 and Qwen3 families.
//!
//! The families differ only in facts of [`ModelConfig`]: biases (Qwen2: q, k, v; Llama: by
//! config) and per-head q/k norms (Qwen3). Pre-norm residual blocks; every half layer ends in one
//! `reduce_add_norm`, which also makes the input of the next half layer, so that a device can
//! fuse all-reduce, residual add and norm.

use crate::Result;
use crate::layers::attention::{Attention, AttentionStep};
use crate::layers::linear::{Norm, ResidualStream};
use crate::layers::mlp::GatedMlp;
use crate::layers::vocab::{self, VocabParallel};
use crate::loader::Loader;
use lockstep_backend::{AttentionBatch, Backend};
use lockstep_comm::collective::Collective;
use lockstep_core::shard::{self, HeadShard, VocabShard};
use lockstep_core::{ModelConfig, ParallelInfo, TokenId};

/// One rank's part of a model.
pub struct Decoder<B: Backend> {
    embedding: VocabParallel<B>,
    layers: Vec<Layer<B>>,
    final_norm: Norm<B>,
    /// `None` when tied to the embedding.
    head: Option<VocabParallel<B>>,
    rope: B::RopeTable,
}

struct Layer<B: Backend> {
    input_norm: Norm<B>,
    attention: Attention<B>,
    post_norm: Norm<B>,
    mlp: GatedMlp<B>,
}

/// The tokens of one step and where they stand.
pub struct ForwardInput<'a> {
    /// Input tokens of all rows, flattened.
    pub token_ids: &'a [TokenId],
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// KV slot of each token, `page * page_size + offset`.
    pub slots: &'a [u32],
    /// Which tokens belong to which request.
    pub batch: AttentionBatch<'a>,
    /// Indices of the tokens whose logits are wanted, ascending.
    pub logit_tokens: &'a [u32],
}

/// Activations of one step, allocated once.
pub struct Workspace<B: Backend> {
    residual: B::Tensor,
    normed: B::Tensor,
    qkv: B::Tensor,
    attended: B::Tensor,
    partial: B::Tensor,
    gate_up: B::Tensor,
    gated: B::Tensor,
    last: B::Tensor,
    logits: B::Tensor,
}

impl<B: Backend> Workspace<B> {
    /// Buffers for steps of at most `tokens_max` tokens and `logits_max` rows of logits.
    pub fn new(
        backend: &B,
        config: &ModelConfig,
        parallel: ParallelInfo,
        tokens_max: usize,
        logits_max: usize,
    ) -> Result<Self> {
        let widths = Widths::new(config, parallel);
        let t = |cols| backend.tensor(tokens_max, cols);
        Ok(Self {
            residual: t(config.hidden_size)?,
            normed: t(config.hidden_size)?,
            qkv: t(widths.qkv)?,
            attended: t(widths.heads)?,
            partial: t(config.hidden_size)?,
            gate_up: t(2 * widths.inner)?,
            gated: t(widths.inner)?,
            last: backend.tensor(logits_max, config.hidden_size)?,
            logits: backend.tensor(logits_max, widths.vocab)?,
        })
    }

    /// Bytes that [`Workspace::new`] asks for, f32.
    pub fn bytes(
        config: &ModelConfig,
        parallel: ParallelInfo,
        tokens_max: usize,
        logits_max: usize,
    ) -> usize {
        let w = Widths::new(config, parallel);
        let per_token = 3 * config.hidden_size + w.qkv + w.heads + 3 * w.inner;
        size_of::<f32>() * (tokens_max * per_token + logits_max * (config.hidden_size + w.vocab))
    }
}

/// Local widths of the activations.
struct Widths {
    qkv: usize,
    heads: usize,
    inner: usize,
    vocab: usize,
}

impl Widths {
    fn new(config: &ModelConfig, p: ParallelInfo) -> Self {
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        Self {
            qkv: (heads.query_heads.len() + 2 * heads.kv_heads.len()) * config.head_dim,
            heads: heads.query_heads.len() * config.head_dim,
            inner: shard::even(config.intermediate_size, p.tp_rank, p.tp_size).len(),
            vocab: VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size).padded.len(),
        }
    }
}

impl<B: Backend> Decoder<B> {
    /// Loads this rank's shard. `positions_max` bounds the rope table.
    ///
    /// The tp size is checked before any weight is read.
    pub fn load(loader: &Loader<'_, B>, positions_max: usize) -> Result<Self> {
        let config = loader.config();
        shard::check_tp_size(config, loader.parallel().tp_size as i64)?;
        let parts = config.num_layers + 2;
        let embedding = VocabParallel::load(loader, vocab::EMBEDDING)?;
        loader.report(1, parts);
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            layers.push(Layer::load(loader, layer)?);
            loader.report(layer + 2, parts);
        }
        let final_norm = Norm::load(loader, "model.norm", config.hidden_size)?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(VocabParallel::load(loader, vocab::HEAD)?),
        };
        loader.report(parts, parts);
        let frequencies = config.rope.frequencies(config.rotary_dim, positions_max).inverse;
        let rope = loader.backend().rope_table(&frequencies, positions_max)?;
        Ok(Self { embedding, layers, final_norm, head, rope })
    }

    /// The vocabulary rows whose logits this rank computes.
    pub fn vocab_shard(&self) -> &VocabShard {
        self.embedding.shard()
    }

    /// Runs one step; gives this rank's logits `[logit_tokens, local_vocab]`.
    ///
    /// Writes K and V of every input token into `cache`. **Collective: all ranks of the TP group,
    /// with the same input.** Bit-equal on CPU for a token whatever else is in the step.
    pub fn forward<'w>(
        &self,
        ctx: (&mut B, &dyn Collective),
        input: &ForwardInput<'_>,
        cache: &mut B::KvCache,
        work: &'w mut Workspace<B>,
    ) -> Result<&'w B::Tensor> {
        let (backend, tp) = ctx;
        let tokens = input.token_ids.len();
        let step = AttentionStep {
            rope: &self.rope,
            positions: input.positions,
            slots: input.slots,
            batch: input.batch,
        };
        let w = work;
        self.embedding.embed(backend, tp, input.token_ids, &mut w.residual)?;
        let first = &self.layers[0].input_norm;
        backend.rms_norm(&w.residual, &first.weight, first.eps, tokens, &mut w.normed);
        for (i, layer) in self.layers.iter().enumerate() {
            layer.attention.forward(backend, &step, &w.normed, cache, (&mut w.qkv, &mut w.attended));
            let output = &layer.attention.output;
            let stream =
                ResidualStream { partial: &mut w.partial, residual: &mut w.residual, normed: &mut w.normed };
            output.forward_add_norm((backend, tp), &w.attended, &layer.post_norm, stream, tokens)?;
            layer.mlp.forward(backend, &w.normed, tokens, &mut w.gate_up, &mut w.gated);
            let next = self.layers.get(i + 1).map_or(&self.final_norm, |l| &l.input_norm);
            let stream =
                ResidualStream { partial: &mut w.partial, residual: &mut w.residual, normed: &mut w.normed };
            layer.mlp.down.forward_add_norm((backend, tp), &w.gated, next, stream, tokens)?;
        }
        backend.gather_rows(&w.normed, input.logit_tokens, &mut w.last);
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        head.logits(backend, &w.last, input.logit_tokens.len(), &mut w.logits);
        Ok(&w.logits)
    }
}

impl<B: Backend> Layer<B> {
    fn load(loader: &Loader<'_, B>, layer: usize) -> Result<Self> {
        let (prefix, hidden) = (format!("model.layers.{layer}"), loader.config().hidden_size);
        Ok(Self {
            input_norm: Norm::load(loader, &format!("{prefix}.input_layernorm"), hidden)?,
            attention: Attention::load(loader, &format!("{prefix}.self_attn"), layer)?,
            post_norm: Norm::load(loader, &format!("{prefix}.post_attention_layernorm"), hidden)?,
            mlp: GatedMlp::load(loader, &format!("{prefix}.mlp"))?,
        })
    }
}
