//! GGUF metadata to the neutral [`ModelConfig`].
//!
//! Follows llama.cpp `llama-model.cpp` (`load_hparams`) and the converters of its `conversion`
//! folder: keys are prefixed with the architecture, optional ones have that loader's defaults. What
//! would change the mathematics and is not implemented is refused by key.
//!
//! What differs from a `config.json`: Gemma's norm weights stand in the file with the 1 added (so
//! `norm_offset` is false), Gemma 3's sliding layers turn with a base that no key gives, a 27B
//! Gemma scales attention by its width per head, and Qwen3-MoE always renormalises unless a key
//! says otherwise. Phi-3's window counts where the key gives one, as in transformers (llama.cpp
//! leaves it out).

use super::Metadata;
use super::header::RawTensor;
use super::keys::{Reader, Result};
pub(crate) use super::rope::RopeTensors;
use lockstep_core::config::Dimensions;
use lockstep_core::limits::{MODEL_EXPERTS_MAX, MODEL_LAYERS_MAX};
use lockstep_core::{Activation, ConfigError, Family, ModelConfig, MoeConfig};
use std::cell::RefCell;

/// Architectures of `general.architecture` that are read. A Mistral is a `llama` here.
const ARCHITECTURES: [Family; 7] = [
    Family::Llama,
    Family::Qwen2,
    Family::Qwen3,
    Family::Qwen3Moe,
    Family::Phi3,
    Family::Gemma2,
    Family::Gemma3,
];

/// Layers of the 27B models, by which llama.cpp knows them.
const GEMMA2_27B_LAYERS: usize = 46;
const GEMMA3_27B_LAYERS: usize = 62;
/// One layer in so many sees everything, unless a key says otherwise.
const GEMMA2_PERIOD: usize = 2;
const GEMMA3_PERIOD: usize = 6;

/// Keys that change the answers; only absent, 0 or false is accepted.
const MUST_BE_OFF: &[&str] = &[
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "expert_shared_count",
    "expert_group_count",
    "leading_dense_block_count",
    "use_parallel_residual",
];
/// Keys that some families read; for the others they must be off.
const FAMILY_KEYS: &[(&str, &[Family])] = &[
    ("expert_count", &[Family::Qwen3Moe]),
    ("attention.sliding_window", &[Family::Phi3, Family::Gemma2, Family::Gemma3]),
    ("attn_logit_softcapping", &[Family::Gemma2]),
    ("final_logit_softcapping", &[Family::Gemma2, Family::Gemma3]),
];
/// Scales that change the answers; only absent, 0 or 1 is accepted.
const MUST_BE_ONE: &[&str] = &["logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"];

/// Builds and validates the config; beside it the keys of the architecture that nobody read.
pub(crate) fn read(
    metadata: &Metadata,
    tensors: &[RawTensor],
    rope: RopeTensors,
) -> Result<(ModelConfig, Vec<String>)> {
    let architecture = metadata.text("general.architecture").unwrap_or("(none named)");
    let Some(family) = ARCHITECTURES.into_iter().find(|f| f.name() == architecture) else {
        let supported = ARCHITECTURES.map(Family::name).join(", ");
        return Err(ConfigError::UnknownFamily { got: architecture.into(), supported });
    };
    let reader = Reader { metadata, tensors, family, asked: RefCell::default() };
    let mut config = reader.plain(rope)?;
    match family {
        Family::Qwen3Moe => reader.experts(&mut config)?,
        Family::Phi3 => reader.window(&mut config, None)?,
        Family::Gemma2 => reader.gemma(&mut config, GEMMA2_27B_LAYERS, GEMMA2_PERIOD)?,
        Family::Gemma3 => {
            reader.gemma(&mut config, GEMMA3_27B_LAYERS, GEMMA3_PERIOD)?;
            config.local_rope = Some(reader.local_rope()?);
        }
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => {}
    }
    config.validate()?;
    Ok((config, reader.unread()?))
}

impl Reader<'_> {
    /// What all families share.
    fn plain(&self, rope: RopeTensors) -> Result<ModelConfig> {
        let hidden_size = self.count("embedding_length")?;
        let num_heads = self.count("attention.head_count")?;
        let head_dim = self.head_dim(hidden_size, num_heads)?;
        let rotary_dim = self.rotary_dim(head_dim)?;
        self.refuse_unsupported(head_dim)?;
        let sizes = Dimensions {
            hidden_size,
            intermediate_size: self.intermediate_size()?,
            num_layers: self.num_layers()?,
            num_heads,
            num_kv_heads: self.optional_count("attention.head_count_kv")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.vocab_size()?,
            max_position: self.count("context_length")?,
            rms_norm_eps: self
                .positive("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| self.missing("attention.layer_norm_rms_epsilon"))?
                as f32,
        };
        let rope = self.rope(rope, sizes.max_position)?;
        let mut config = ModelConfig {
            tie_word_embeddings: !self.has("output.weight"),
            qkv_bias: self.has("blk.0.attn_q.bias") || self.has("blk.0.attn_qkv.bias"),
            o_bias: self.has("blk.0.attn_output.bias"),
            mlp_bias: self.has("blk.0.ffn_down.bias"),
            qk_norm: self.has_qk_norm(),
            rotary_dim,
            bos_token: self.metadata.bos_token(),
            eos_tokens: self.metadata.end_tokens().collect(),
            ..ModelConfig::plain(self.family, sizes, rope)
        };
        if let Some(scale) = self.switch("attention.scale")? {
            config.attention_scale = scale as f32;
        }
        Ok(config)
    }

    /// Gemma 2 and 3. One layer in `period` sees everything; models of `wide_layers` layers scale
    /// attention by `hidden_size / num_heads` instead of the head size.
    fn gemma(&self, config: &mut ModelConfig, wide_layers: usize, period: usize) -> Result<()> {
        config.activation = Activation::GeluTanh;
        config.sandwich_norms = true;
        config.embedding_scale = Some((config.hidden_size as f64).sqrt() as f32);
        if config.num_layers == wide_layers && self.switch("attention.scale")?.is_none() {
            let width = (config.hidden_size / config.num_heads) as f64;
            config.attention_scale = width.powf(-0.5) as f32;
        }
        let cap = |key: &str| Ok(self.switch(key)?.map(|cap| cap as f32));
        config.attention_softcap = cap("attn_logit_softcapping")?;
        config.logit_softcap = cap("final_logit_softcapping")?;
        if self.family == Family::Gemma2 {
            for key in ["attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"] {
                self.number(key)?.ok_or_else(|| self.missing(key))?;
            }
        }
        self.window(config, Some(period))
    }

    /// The sliding window and the layers that have it: all but every `period`-th, or all.
    fn window(&self, config: &mut ModelConfig, period: Option<usize>) -> Result<()> {
        let Some(window) = self.switch("attention.sliding_window")? else { return Ok(()) };
        if window < 1.0 || window.fract() != 0.0 {
            return Err(self.bad("attention.sliding_window", "a whole number of tokens"));
        }
        const PATTERN: &str = "attention.sliding_window_pattern";
        let key = self.key(PATTERN);
        let period = match self.metadata.integer(&key) {
            Some(period) if period >= 0 => Some(period as usize),
            Some(_) => return Err(self.bad(PATTERN, "a whole number of at least 0, or a list")),
            None => period,
        };
        config.sliding_window = Some(window as usize);
        config.sliding_layers = match self.metadata.flags(&key) {
            Some(layers) => layers.collect(),
            None if self.metadata.contains(&key) && self.metadata.integer(&key).is_none() => {
                return Err(self.bad(PATTERN, "a whole number of at least 0, or a list of true and false"));
            }
            None => (0..config.num_layers)
                .map(|layer| period.is_none_or(|period| period == 0 || layer % period + 1 != period))
                .collect(),
        };
        Ok(())
    }

    /// Qwen3-MoE's experts; a layer is sparse where it has a router.
    fn experts(&self, config: &mut ModelConfig) -> Result<()> {
        const SOFTMAX: f64 = 1.0;
        if self.switch("expert_gating_func")?.is_some_and(|f| f != SOFTMAX) {
            return Err(self.unsupported("expert_gating_func", "only 1 (softmax)"));
        }
        let num_experts = self.count("expert_count")?;
        if num_experts > MODEL_EXPERTS_MAX {
            return Err(self.bad("expert_count", &format!("at most {MODEL_EXPERTS_MAX}")));
        }
        config.moe = Some(MoeConfig {
            num_experts,
            experts_per_token: self.count("expert_used_count")?,
            expert_intermediate_size: self.count("expert_feed_forward_length")?,
            norm_topk_prob: self.metadata.flag(&self.key("expert_weights_norm")).unwrap_or(true),
            sparse_layers: (0..config.num_layers)
                .map(|layer| self.has(&format!("blk.{layer}.ffn_gate_inp.weight")))
                .collect(),
        });
        Ok(())
    }

    fn has_qk_norm(&self) -> bool {
        matches!(self.family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3)
    }

    fn num_layers(&self) -> Result<usize> {
        match self.count("block_count")? {
            layers if layers <= MODEL_LAYERS_MAX => Ok(layers),
            _ => Err(self.bad("block_count", &format!("at most {MODEL_LAYERS_MAX}"))),
        }
    }

    /// Width of the dense MLP; a model of sparse layers alone may leave it out.
    fn intermediate_size(&self) -> Result<usize> {
        match self.optional_count("feed_forward_length")? {
            Some(size) => Ok(size),
            None if self.family == Family::Qwen3Moe => self.count("expert_feed_forward_length"),
            None => Err(self.missing("feed_forward_length")),
        }
    }

    fn head_dim(&self, hidden_size: usize, num_heads: usize) -> Result<usize> {
        match self.optional_count("attention.key_length")? {
            Some(head_dim) => Ok(head_dim),
            None if hidden_size.is_multiple_of(num_heads) => Ok(hidden_size / num_heads),
            None => Err(ConfigError::BadValue {
                key: self.key("embedding_length"),
                got: hidden_size.to_string(),
                want: format!("a multiple of attention.head_count {num_heads}, or attention.key_length"),
            }),
        }
    }

    /// Elements of each head that rope turns; llama.cpp's order of q and k rows takes whole heads.
    fn rotary_dim(&self, head_dim: usize) -> Result<usize> {
        match self.optional_count("rope.dimension_count")? {
            None => Ok(head_dim),
            Some(n) if n == head_dim || (n < head_dim && self.family != Family::Llama) => Ok(n),
            Some(_) => {
                Err(self.unsupported("rope.dimension_count", &format!("only the head size {head_dim}")))
            }
        }
    }

    /// Rows of the embedding; a tokenizer may name fewer, never more.
    fn vocab_size(&self) -> Result<usize> {
        let rows = self.tensors.iter().find(|t| t.name == "token_embd.weight").map(|t| t.info.rows());
        let tokens = self.metadata.tokens().map(|t| t.len());
        match (rows, tokens) {
            (Some(rows), Some(tokens)) if tokens > rows => Err(ConfigError::BadValue {
                key: "tokenizer.ggml.tokens".into(),
                got: format!("{tokens} tokens"),
                want: format!("at most the {rows} rows of token_embd.weight"),
            }),
            (Some(rows), _) => Ok(rows),
            // The missing tensor is reported by whoever loads it.
            (None, Some(tokens)) => Ok(tokens),
            (None, None) => self.count("vocab_size"),
        }
    }

    fn refuse_unsupported(&self, head_dim: usize) -> Result<()> {
        let foreign = FAMILY_KEYS.iter().filter(|(_, families)| !families.contains(&self.family));
        for key in MUST_BE_OFF.iter().chain(foreign.map(|(key, _)| key)) {
            let full = self.key(key);
            if self.metadata.contains(&full) && !self.is_off(&full) {
                return Err(self.unsupported(key, "only absent or 0"));
            }
        }
        for key in MUST_BE_ONE {
            let full = self.key(key);
            if self.metadata.contains(&full) && !matches!(self.metadata.number(&full), Some(0.0 | 1.0)) {
                return Err(self.unsupported(key, "only absent or 1"));
            }
        }
        if self.metadata.flag(&self.key("attention.causal")) == Some(false) {
            return Err(self.unsupported("attention.causal", "only absent or true"));
        }
        if self.optional_count("attention.value_length")?.is_some_and(|n| n != head_dim) {
            return Err(self.unsupported("attention.value_length", &format!("only the head size {head_dim}")));
        }
        if !self.has_qk_norm() && self.has("blk.0.attn_q_norm.weight") {
            return Err(ConfigError::Unsupported {
                key: "tensor blk.0.attn_q_norm.weight".into(),
                got: "a norm on q".into(),
                family: self.family.name().into(),
                want: "only qwen3, qwen3moe and gemma3 have one".into(),
            });
        }
        Ok(())
    }
}
