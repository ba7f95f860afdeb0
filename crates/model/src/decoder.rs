//! The decoder-only transformer that all families share.
//!
//! What sets a family apart is a fact of [`ModelConfig`] (biases, norms, windows, caps, ropes,
//! experts) or of its [`families`](crate::families) layout (names, fused tensors). Residual
//! blocks; every half layer ends in one `reduce_add_norm`, which also makes the input of the next
//! half layer, so that a device can fuse all-reduce, residual add and norm.

use crate::Result;
use crate::layers::attention::{Attention, AttentionStep, RopeTables};
use crate::layers::feed_forward::{FeedForward, FeedForwardBuffers};
use crate::layers::norm::Norm;
use crate::layers::residual::{HalfLayerEnd, ResidualStream};
use crate::layers::vocab::VocabParallel;
use crate::loader::Loader;
use crate::rules::{LayerRules, ModelRules};
use lockstep_backend::{Backend, ForwardInput};
use lockstep_comm::collective::Collective;
use lockstep_core::shard::{self, HeadShard, VocabShard, WeightRule};
use lockstep_core::{ModelConfig, ParallelInfo};

/// One rank's part of a model: of every layer, or of those of its pipeline stage.
pub struct Decoder<B: Backend> {
    /// On the first stage.
    embedding: Option<VocabParallel<B>>,
    embedding_scale: Option<f32>,
    layers: Vec<Layer<B>>,
    /// On the last stage.
    final_norm: Option<Norm<B>>,
    /// On the last stage, where it is not the embedding above.
    head: Option<VocabParallel<B>>,
    logit_softcap: Option<f32>,
    vocab_shard: VocabShard,
    ropes: RopeTables<B>,
}

struct Layer<B: Backend> {
    input_norm: Norm<B>,
    attention: Attention<B>,
    attention_output_norm: Option<Norm<B>>,
    mlp_input_norm: Norm<B>,
    feed_forward: FeedForward<B>,
    mlp_output_norm: Option<Norm<B>>,
}

/// Shown the residual stream `[tokens, hidden]` after the embedding or as received (0) and after each of the rank's
/// layers (1, 2, ...).
pub type Observer<'a, B> = &'a mut dyn FnMut(usize, &mut B, &<B as Backend>::Tensor);

/// Activations of one step, allocated once.
pub struct Workspace<B: Backend> {
    residual: B::Tensor,
    normed: B::Tensor,
    qkv: B::Tensor,
    attended: B::Tensor,
    partial: B::Tensor,
    feed_forward: FeedForwardBuffers<B>,
    last: Last<B>,
    logits: B::Tensor,
    logits_max: usize,
}

/// What becomes logits, `[logits_max, ..]` each.
struct Last<B: Backend> {
    attended: B::Tensor,
    residual: B::Tensor,
    normed: B::Tensor,
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
            feed_forward: FeedForwardBuffers::new(backend, config, parallel, tokens_max)?,
            last: Last {
                attended: backend.tensor(logits_max, widths.heads)?,
                residual: backend.tensor(logits_max, config.hidden_size)?,
                normed: backend.tensor(logits_max, config.hidden_size)?,
            },
            logits: backend.tensor_f32(logits_max, widths.vocab)?,
            logits_max,
        })
    }

    /// This rank's logits of the last step, `[logit_tokens, local_vocab]`.
    pub fn logits(&self) -> &B::Tensor {
        &self.logits
    }

    /// The residual stream, `[tokens, hidden]`: what a stage passes on, and what the next one goes on with.
    pub fn residual(&self) -> &B::Tensor {
        &self.residual
    }

    /// The same, for what the stage before passed on.
    pub fn residual_mut(&mut self) -> &mut B::Tensor {
        &mut self.residual
    }

    /// The logits, for whoever changes them before a token is chosen.
    pub fn logits_mut(&mut self) -> &mut B::Tensor {
        &mut self.logits
    }

    /// Rows of logits that a step may want.
    pub fn logits_max(&self) -> usize {
        self.logits_max
    }

    /// Bytes that [`Workspace::new`] asks for.
    pub fn bytes(
        config: &ModelConfig,
        parallel: ParallelInfo,
        tokens_max: usize,
        logits_max: usize,
    ) -> usize {
        let w = Widths::new(config, parallel);
        let per_token = 3 * config.hidden_size + w.qkv + w.heads;
        let elements = tokens_max * per_token + logits_max * (2 * config.hidden_size + w.heads + w.vocab);
        elements * size_of::<f32>() + FeedForwardBuffers::<B>::bytes(config, parallel, tokens_max)
    }
}

/// Local widths of the activations.
struct Widths {
    qkv: usize,
    heads: usize,
    vocab: usize,
}

impl Widths {
    fn new(config: &ModelConfig, p: ParallelInfo) -> Self {
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        Self {
            qkv: (heads.query_heads.len() + 2 * heads.kv_heads.len()) * config.head_dim,
            heads: heads.query_heads.len() * config.head_dim,
            vocab: VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size).padded.len(),
        }
    }
}

impl<B: Backend> Decoder<B> {
    /// Loads this rank's shard of its stage. `positions_max` bounds the rope tables; longrope chooses its
    /// frequencies by it, so it must be the same on all ranks.
    ///
    /// The tp size and the headers of the stage's tensors are checked before any weight is read; at the end, that every
    /// parameter was filled.
    pub fn load(loader: &Loader<'_, B>, positions_max: usize) -> Result<Self> {
        let (config, stage, p) = (loader.config(), loader.stage(), loader.parallel());
        shard::check_tp_size(config, p.tp_size as i64)?;
        let rules = ModelRules::of_stage(config, stage);
        loader.check_headers(&rules)?;
        let parts = stage.count() + 2;
        let vocabulary = |rule: &Option<WeightRule>| {
            rule.as_ref().map(|rule| VocabParallel::load(loader, rule)).transpose()
        };
        let embedding = vocabulary(&rules.embedding)?;
        loader.report(1, parts);
        let mut layers = Vec::with_capacity(stage.count());
        for (layer, rules) in stage.range().zip(&rules.layers) {
            layers.push(Layer::load(loader, rules, layer)?);
            loader.report(layers.len() + 1, parts);
        }
        let final_norm = Norm::load_optional(loader, &rules.final_norm)?;
        let head = vocabulary(&rules.head)?;
        loader.check_complete(&rules)?;
        loader.report(parts, parts);
        Ok(Self {
            embedding,
            embedding_scale: config.embedding_scale,
            layers,
            final_norm,
            head,
            logit_softcap: config.logit_softcap,
            vocab_shard: VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size),
            ropes: RopeTables::new(loader.backend(), config, positions_max)?,
        })
    }

    /// The vocabulary rows whose logits this rank computes, on the last stage.
    pub fn vocab_shard(&self) -> &VocabShard {
        &self.vocab_shard
    }

    /// Runs one step; gives this rank's logits `[logit_tokens, local_vocab]`. A stage that is not the first goes on with
    /// the residual stream in `work`; one that is not the last gives the stream.
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
        self.run(ctx, input, cache, work, None)
    }

    /// [`forward`](Self::forward), showing the residual stream on the way: to find where two runs part. The last layer
    /// goes on with all tokens then.
    pub fn forward_observed<'w>(
        &self,
        ctx: (&mut B, &dyn Collective),
        input: &ForwardInput<'_>,
        cache: &mut B::KvCache,
        work: &'w mut Workspace<B>,
        observe: Observer<'_, B>,
    ) -> Result<&'w B::Tensor> {
        self.run(ctx, input, cache, work, Some(observe))
    }

    fn run<'w>(
        &self,
        ctx: (&mut B, &dyn Collective),
        input: &ForwardInput<'_>,
        cache: &mut B::KvCache,
        work: &'w mut Workspace<B>,
        mut observe: Option<Observer<'_, B>>,
    ) -> Result<&'w B::Tensor> {
        let (backend, tp) = ctx;
        let tokens = input.token_ids.len();
        if let Some(embedding) = &self.embedding {
            embedding.embed(backend, tp, input.token_ids, &mut work.residual)?;
            if let Some(factor) = self.embedding_scale {
                backend.scale(&mut work.residual, factor, tokens);
            }
        }
        if let Some(observe) = &mut observe {
            observe(0, backend, &work.residual);
        }
        let first = &self.layers[0].input_norm;
        backend.rms_norm(&work.residual, &first.weight, first.eps, tokens, &mut work.normed);
        let step = AttentionStep {
            ropes: &self.ropes,
            positions: input.positions,
            slots: input.slots,
            batch: input.batch,
        };
        let is_last_stage = self.final_norm.is_some();
        // Behind the last attention no token needs another, and only some become logits: of a prompt, one.
        let wanted = input.logit_tokens;
        let narrows = is_last_stage && observe.is_none() && wanted.len() < tokens;
        for (i, layer) in self.layers.iter().enumerate() {
            // Behind the last layer of a stage comes another stage's norm, which norms the stream itself: any will do here.
            let after = self.final_norm.as_ref().unwrap_or(first);
            let next_norm = self.layers.get(i + 1).map_or(after, |l| &l.input_norm);
            layer.attention.forward(backend, &step, &work.normed, cache, (&mut work.qkv, &mut work.attended));
            if narrows && i + 1 == self.layers.len() {
                if !wanted.is_empty() {
                    backend.gather_rows(&work.attended, wanted, &mut work.last.attended);
                    backend.gather_rows(&work.residual, wanted, &mut work.last.residual);
                    layer.after_attention(
                        (&mut *backend, tp),
                        next_norm,
                        work.last_tokens(),
                        wanted.len(),
                    )?;
                }
            } else {
                layer.after_attention((&mut *backend, tp), next_norm, work.all_tokens(), tokens)?;
            }
            if let Some(observe) = &mut observe {
                observe(i + 1, backend, &work.residual);
            }
        }
        let head = self.head.as_ref().or(self.embedding.as_ref()).filter(|_| is_last_stage);
        let Some(head) = head else { return Ok(&work.residual) };
        if !narrows {
            backend.gather_rows(&work.normed, wanted, &mut work.last.normed);
        }
        head.logits(backend, &work.last.normed, wanted.len(), &mut work.logits);
        if let Some(cap) = self.logit_softcap {
            backend.softcap(&mut work.logits, cap, wanted.len());
        }
        Ok(&work.logits)
    }
}

impl<B: Backend> Layer<B> {
    fn load(loader: &Loader<'_, B>, rules: &LayerRules, layer: usize) -> Result<Self> {
        Ok(Self {
            input_norm: Norm::load(loader, &rules.input_norm)?,
            attention: Attention::load(loader, &rules.attention, layer)?,
            attention_output_norm: Norm::load_optional(loader, &rules.attention_output_norm)?,
            mlp_input_norm: Norm::load(loader, &rules.mlp_input_norm)?,
            feed_forward: FeedForward::load(loader, &rules.feed_forward)?,
            mlp_output_norm: Norm::load_optional(loader, &rules.mlp_output_norm)?,
        })
    }

    /// From the attention's output to the input of the layer whose norm is `next_norm`, for `rows` tokens.
    fn after_attention(
        &self,
        ctx: (&mut B, &dyn Collective),
        next_norm: &Norm<B>,
        tokens: Tokens<'_, B>,
        rows: usize,
    ) -> Result<()> {
        let (backend, tp) = ctx;
        let Tokens { attended, feed_forward, mut stream } = tokens;
        self.attention.output.forward(backend, attended, rows, stream.partial);
        let end = HalfLayerEnd {
            bias: self.attention.output.bias.as_ref(),
            output_norm: self.attention_output_norm.as_ref(),
            next_norm: &self.mlp_input_norm,
        };
        end.run((&mut *backend, tp), &mut stream, rows)?;
        self.feed_forward.forward(backend, stream.normed, rows, feed_forward, stream.partial);
        let end = HalfLayerEnd {
            bias: self.feed_forward.bias(),
            output_norm: self.mlp_output_norm.as_ref(),
            next_norm,
        };
        end.run((backend, tp), &mut stream, rows)
    }
}

/// What a layer needs of the workspace behind its attention.
struct Tokens<'a, B: Backend> {
    attended: &'a B::Tensor,
    feed_forward: &'a mut FeedForwardBuffers<B>,
    stream: ResidualStream<'a, B>,
}

impl<B: Backend> Workspace<B> {
    /// All tokens of the step.
    fn all_tokens(&mut self) -> Tokens<'_, B> {
        let (partial, residual, normed) = (&mut self.partial, &mut self.residual, &mut self.normed);
        let stream = ResidualStream { partial, residual, normed };
        Tokens { attended: &self.attended, feed_forward: &mut self.feed_forward, stream }
    }

    /// Those that become logits.
    fn last_tokens(&mut self) -> Tokens<'_, B> {
        let Last { attended, residual, normed } = &mut self.last;
        let stream = ResidualStream { partial: &mut self.partial, residual, normed };
        Tokens { attended, feed_forward: &mut self.feed_forward, stream }
    }
}
