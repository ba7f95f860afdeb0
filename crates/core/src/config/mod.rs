//! What a model is, independent of the file format that says so.
//!
//! [`ModelConfig`] is the neutral form; [`hf`] reads it from a Hugging Face `config.json`, the
//! `weights` crate reads it from GGUF metadata. **Invariant:** every field that changes the
//! mathematics is explicit; a file that asks for anything else is refused by key, never defaulted.
//!
//! Reading order: this file, [`rope`], [`hf`], [`quantization`], [`unknown`], [`error`].

pub mod error;
pub mod hf;
pub mod quantization;
pub mod rope;
pub mod unknown;

pub use error::ConfigError;
pub use quantization::QuantizationConfig;
pub use rope::{RopeConfig, RopeFrequencies, RopeScaling};

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// A model family: which layers, which names. One file per family in the `model` crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2 / 3.x and plain Llama checkpoints (SmolLM2, Yi).
    Llama,
    /// Mistral: Llama with a sliding window where the config asks for one.
    Mistral,
    /// Qwen2 / Qwen2.5: Llama with biases on q, k, v.
    Qwen2,
    /// Qwen3 dense: Llama with per-head RMSNorm on q and k.
    Qwen3,
    /// Qwen3 with a mixture of experts in place of some or all MLPs.
    Qwen3Moe,
    /// Phi-3, Phi-3.5 and Phi-4: Llama whose files hold q|k|v and gate|up fused.
    Phi3,
    /// Gemma 2: sandwich norms, soft caps, every other layer with a sliding window.
    Gemma2,
    /// Gemma 3 text: sandwich norms, q/k norms, sliding layers with a rope of their own.
    Gemma3,
}

impl Family {
    /// Every family, in the order of the documentation.
    pub const ALL: [Family; 8] = [
        Family::Llama,
        Family::Mistral,
        Family::Qwen2,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::Phi3,
        Family::Gemma2,
        Family::Gemma3,
    ];

    /// The name in messages, `/server_info` and GGUF metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Qwen3Moe => "qwen3moe",
            Family::Phi3 => "phi3",
            Family::Gemma2 => "gemma2",
            Family::Gemma3 => "gemma3",
        }
    }
}

/// The activation of a gated MLP, `act(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, PyTorch's gelu with `approximate="tanh"`.
    GeluTanh,
}

/// A mixture of experts. All counts are global.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoeConfig {
    /// Experts of each sparse layer.
    pub num_experts: usize,
    /// Experts that each token visits.
    pub experts_per_token: usize,
    /// Inner width of each expert.
    pub expert_intermediate_size: usize,
    /// The chosen experts' probabilities are divided by their sum.
    pub norm_topk_prob: bool,
    /// Which layers have experts; the others have a dense MLP, `[num_layers]`.
    pub sparse_layers: Vec<bool>,
}

/// The sizes that every model has, for [`ModelConfig::plain`]. All counts are global.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimensions {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements per head; need not be `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Rows of the embedding that exist in the file.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub max_position: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
}

/// A decoder-only transformer, as far as the engine must know it. All counts are global.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Which layers and tensor names.
    pub family: Family,
    /// The file's own name for the architecture, for messages.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements per head; need not be `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Rows of the embedding that exist in the file.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub max_position: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// Norm weights are stored as `w - 1` (Gemma); the loader adds the 1.
    pub norm_offset: bool,
    /// Attention and MLP outputs are normed before they join the residual stream (Gemma).
    pub sandwich_norms: bool,
    /// Embeddings are multiplied by this (Gemma: `sqrt(hidden_size)`).
    pub embedding_scale: Option<f32>,
    /// Multiplies `q·k`; `head_dim^-0.5` unless the file says otherwise.
    pub attention_scale: f32,
    /// Scores become `cap * tanh(score / cap)` before the softmax.
    pub attention_softcap: Option<f32>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    /// Positions that a token of a sliding layer sees, itself included.
    pub sliding_window: Option<usize>,
    /// Which layers have the sliding window, `[num_layers]`.
    pub sliding_layers: Vec<bool>,
    /// Rotary embedding of all layers, or of those without a window where [`local_rope`] is set.
    ///
    /// [`local_rope`]: ModelConfig::local_rope
    pub rope: RopeConfig,
    /// Rotary embedding of the sliding layers, where it differs (Gemma 3).
    pub local_rope: Option<RopeConfig>,
    /// Leading elements of each head that rope turns; the rest passes (Phi-4-mini: 3/4 of the head).
    pub rotary_dim: usize,
    /// The head is the embedding matrix; the file has no `lm_head`.
    pub tie_word_embeddings: bool,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The attention output projection has a bias.
    pub o_bias: bool,
    /// gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// RMSNorm over each head of q and k before rope.
    pub qk_norm: bool,
    /// Activation of the gated MLP, dense or expert.
    pub activation: Activation,
    /// Experts, if the model has any.
    pub moe: Option<MoeConfig>,
    /// Beginning-of-text token, if the file names one.
    pub bos_token: Option<TokenId>,
    /// End tokens named by this file; other sources (generation_config.json, tokenizer) add theirs.
    pub eos_tokens: Vec<TokenId>,
}

impl ModelConfig {
    /// A plain Llama of these sizes: SwiGLU, pre-norms, one rope on whole heads, no bias, no window,
    /// an untied head. Readers change what their file says differently.
    pub fn plain(family: Family, sizes: Dimensions, rope: RopeConfig) -> Self {
        Self {
            family,
            architecture: family.name().into(),
            hidden_size: sizes.hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_layers: sizes.num_layers,
            num_heads: sizes.num_heads,
            num_kv_heads: sizes.num_kv_heads,
            head_dim: sizes.head_dim,
            vocab_size: sizes.vocab_size,
            max_position: sizes.max_position,
            rms_norm_eps: sizes.rms_norm_eps,
            norm_offset: false,
            sandwich_norms: false,
            embedding_scale: None,
            attention_scale: (sizes.head_dim as f64).powf(-0.5) as f32,
            attention_softcap: None,
            logit_softcap: None,
            sliding_window: None,
            sliding_layers: vec![false; sizes.num_layers],
            rope,
            local_rope: None,
            rotary_dim: sizes.head_dim,
            tie_word_embeddings: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            activation: Activation::Silu,
            moe: None,
            bos_token: None,
            eos_tokens: Vec::new(),
        }
    }

    /// Positions that a token of `layer` sees, itself included; `None` sees all before it.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.sliding_layers[layer])
    }

    /// The rotary embedding of `layer`.
    pub fn rope_of(&self, layer: usize) -> &RopeConfig {
        match &self.local_rope {
            Some(local) if self.sliding_layers[layer] => local,
            _ => &self.rope,
        }
    }

    /// The experts of `layer`, if it has any.
    pub fn moe_of(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.sparse_layers[layer])
    }

    /// Checks what no model may violate; called by every reader before it returns a config.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_counts()?;
        let bad =
            |key: &str, got: String, want: String| Err(ConfigError::BadValue { key: key.into(), got, want });
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let want = format!("a divisor of num_attention_heads {}", self.num_heads);
            return bad("num_key_value_heads", self.num_kv_heads.to_string(), want);
        }
        if !self.head_dim.is_multiple_of(2) {
            let want = "an even number (rope turns pairs)".into();
            return bad("head_dim", self.head_dim.to_string(), want);
        }
        if self.rotary_dim == 0 || self.rotary_dim > self.head_dim || !self.rotary_dim.is_multiple_of(2) {
            let want = format!("an even number of elements, at most head_dim {}", self.head_dim);
            return bad("rotary dimension", self.rotary_dim.to_string(), want);
        }
        if self.sliding_layers.len() != self.num_layers {
            let want = format!("one entry for each of {} layers", self.num_layers);
            return bad("layer_types", format!("{} entries", self.sliding_layers.len()), want);
        }
        self.check_rope_divisors(&self.rope)?;
        self.local_rope.as_ref().map_or(Ok(()), |rope| self.check_rope_divisors(rope))
    }

    fn check_counts(&self) -> Result<(), ConfigError> {
        use crate::limits::{MODEL_EXPERTS_MAX, MODEL_EXPERTS_TOTAL_MAX, MODEL_LAYERS_MAX};
        use crate::limits::{MODEL_HEADS_MAX, MODEL_TOKENS_MAX, MODEL_WIDTH_MAX};
        let bad = |key: &str, got: usize, want: String| {
            Err(ConfigError::BadValue { key: key.into(), got: got.to_string(), want })
        };
        let mut counts = vec![
            ("hidden_size", self.hidden_size, MODEL_WIDTH_MAX),
            ("intermediate_size", self.intermediate_size, MODEL_WIDTH_MAX),
            ("num_hidden_layers", self.num_layers, MODEL_LAYERS_MAX),
            ("num_attention_heads", self.num_heads, MODEL_HEADS_MAX),
            ("num_key_value_heads", self.num_kv_heads, MODEL_HEADS_MAX),
            ("head_dim", self.head_dim, MODEL_HEADS_MAX),
            ("vocab_size", self.vocab_size, MODEL_TOKENS_MAX),
            ("max_position_embeddings", self.max_position, MODEL_TOKENS_MAX),
            ("sliding_window", self.sliding_window.unwrap_or(1), MODEL_TOKENS_MAX),
        ];
        if let Some(moe) = &self.moe {
            counts.push(("num_experts", moe.num_experts, MODEL_EXPERTS_MAX));
            counts.push(("num_experts_per_tok", moe.experts_per_token, MODEL_EXPERTS_MAX));
            counts.push(("moe_intermediate_size", moe.expert_intermediate_size, MODEL_WIDTH_MAX));
        }
        if let Some((key, value, max)) = counts.into_iter().find(|(_, n, max)| !(1..=*max).contains(n)) {
            return bad(key, value, format!("1 to {max}"));
        }
        let Some(moe) = &self.moe else { return Ok(()) };
        if moe.experts_per_token > moe.num_experts {
            let want = format!("at most num_experts {}", moe.num_experts);
            return bad("num_experts_per_tok", moe.experts_per_token, want);
        }
        let sparse = moe.sparse_layers.iter().filter(|sparse| **sparse).count();
        if sparse * moe.num_experts > MODEL_EXPERTS_TOTAL_MAX {
            let want = format!("at most {MODEL_EXPERTS_TOTAL_MAX} over the {sparse} layers that have them");
            return bad("num_experts", moe.num_experts, want);
        }
        Ok(())
    }

    /// Lists of per-frequency divisors must have one for each frequency.
    fn check_rope_divisors(&self, rope: &RopeConfig) -> Result<(), ConfigError> {
        let lists: &[(&str, &Vec<f64>)] = match &rope.scaling {
            RopeScaling::LongRope { short_factor, long_factor, .. } => {
                &[("rope short_factor", short_factor), ("rope long_factor", long_factor)]
            }
            RopeScaling::Divisors { divisors } => &[("rope_freqs.weight", divisors)],
            _ => &[],
        };
        for (key, list) in lists {
            let count = self.rotary_dim / 2;
            let wrong = list.iter().position(|d| !(d.is_finite() && *d > 0.0));
            let got = match wrong {
                _ if list.len() != count => format!("a list of {}", list.len()),
                Some(i) => format!("a list whose number {} is {}", i + 1, list[i]),
                None => continue,
            };
            let want = format!("{count} positive numbers (half the rotary dimension)");
            return Err(ConfigError::BadValue { key: (*key).into(), got, want });
        }
        Ok(())
    }

    /// Bytes of K and V that one token takes on a rank with `local_kv_heads`, f32 cache.
    pub fn kv_bytes_per_token(&self, local_kv_heads: usize) -> usize {
        2 * self.num_layers * local_kv_heads * self.head_dim * size_of::<f32>()
    }
}
