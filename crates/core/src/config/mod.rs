//! What a model is, independent of the file format that says so.
//!
//! [`ModelConfig`] is the neutral form; [`hf`] reads it from a Hugging Face `config.json`, the
//! `weights` crate reads it from GGUF metadata. **Invariant:** every field that changes the
//! mathematics is explicit; a file that asks for anything else is refused by key, never defaulted.

pub mod hf;

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// A model family: which layers, which names. One file per family in the `model` crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2 / 3.x and plain Llama checkpoints (SmolLM2, Yi).
    Llama,
    /// Qwen2 / Qwen2.5: Llama with biases on q, k, v.
    Qwen2,
    /// Qwen3 dense: Llama with per-head RMSNorm on q and k.
    Qwen3,
}

impl Family {
    /// The name in messages and `/server_info`.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }
}

/// Rotary position embedding (Su et al. 2021), with the half-split pairing of Hugging Face:
/// dimension `i` turns with dimension `i + head_dim/2`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the inverse frequencies.
    pub theta: f64,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Rope types of the supported families.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Plain rope.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Context multiplier.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length before scaling, in tokens.
        original_max_position: usize,
    },
    /// Frequencies multiplied one by one, as GGUF files store Llama 3 scaling (`rope_freqs`).
    Divisors {
        /// One divisor per inverse frequency, `[head_dim / 2]`.
        divisors: Vec<f64>,
    },
}

impl RopeConfig {
    /// Inverse frequencies `[head_dim / 2]` in radians per position.
    ///
    /// The llama3 bands follow transformers `modeling_rope_utils.py`, computed in f64.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeScaling::Divisors { divisors } => plain.zip(divisors).map(|(f, d)| f / d).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let original = *original_max_position as f64;
                plain
                    .map(|f| {
                        let wavelength = 2.0 * std::f64::consts::PI / f;
                        if wavelength > original / low_freq_factor {
                            f / factor
                        } else if wavelength < original / high_freq_factor {
                            f
                        } else {
                            let smooth = (original / wavelength - low_freq_factor)
                                / (high_freq_factor - low_freq_factor);
                            (1.0 - smooth) * f / factor + smooth * f
                        }
                    })
                    .collect()
            }
        }
    }
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
    /// Inner width of the MLP.
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
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
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
    /// Longest sequence the model was made for, in tokens.
    pub max_position: usize,
    /// Beginning-of-text token, if the file names one.
    pub bos_token: Option<TokenId>,
    /// End tokens named by this file; other sources (generation_config.json, tokenizer) add theirs.
    pub eos_tokens: Vec<TokenId>,
}

impl ModelConfig {
    /// Checks what no model may violate; called by every reader before it returns a config.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position),
        ];
        for (key, value) in positive {
            if value == 0 || value > 1 << 28 {
                return Err(ConfigError::BadValue {
                    key: key.into(),
                    got: value.to_string(),
                    want: "1..2^28".into(),
                });
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(ConfigError::BadValue {
                key: "num_key_value_heads".into(),
                got: self.num_kv_heads.to_string(),
                want: format!("a divisor of num_attention_heads {}", self.num_heads),
            });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::BadValue {
                key: "head_dim".into(),
                got: self.head_dim.to_string(),
                want: "an even number (rope turns pairs)".into(),
            });
        }
        Ok(())
    }

    /// Bytes of K and V that one token takes on a rank with `local_kv_heads`, f32 cache.
    pub fn kv_bytes_per_token(&self, local_kv_heads: usize) -> usize {
        2 * self.num_layers * local_kv_heads * self.head_dim * size_of::<f32>()
    }
}

/// Why a model description is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key without which the mathematics is unknown.
    #[error("config has no {key}, which {family} models need; download the model again or add the key")]
    Missing {
        /// The key.
        key: String,
        /// Who needs it.
        family: String,
    },
    /// A value of the wrong type or range.
    #[error("config key {key} is {got}, expected {want}")]
    BadValue {
        /// The key.
        key: String,
        /// What the file says.
        got: String,
        /// What is accepted.
        want: String,
    },
    /// A feature that would change the answers and is not implemented.
    #[error(
        "config key {key} asks for {got}, which Lockstep does not implement for {family} models ({want})"
    )]
    Unsupported {
        /// The key.
        key: String,
        /// What the file asks for.
        got: String,
        /// The family.
        family: String,
        /// What is supported.
        want: String,
    },
    /// A family that is not on the list.
    #[error("model architecture {got} is not supported; supported are {supported}")]
    UnknownFamily {
        /// The file's name for it.
        got: String,
        /// The list.
        supported: String,
    },
    /// Not JSON, or not an object.
    #[error("config is not a JSON object: {0}")]
    NotJson(String),
    /// A tensor-parallel size the model cannot be cut into.
    #[error("--tp {tp_size} {reason}; tp sizes that work for this model: {legal}")]
    IllegalTpSize {
        /// What was asked for, as typed.
        tp_size: i64,
        /// The broken rule.
        reason: String,
        /// Sizes that work, comma-separated.
        legal: String,
    },
}
