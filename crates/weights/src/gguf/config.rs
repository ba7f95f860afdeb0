//! GGUF metadata to the neutral [`ModelConfig`].
//!
//! Follows llama.cpp `llama-model.cpp` (`load_hparams`): keys are prefixed with the architecture,
//! optional ones have that loader's defaults. What would change the mathematics and is not
//! implemented is refused by key.

use super::Metadata;
use super::header::RawTensor;
use lockstep_core::config::Dimensions;
use lockstep_core::{ConfigError, Family, ModelConfig, RopeConfig, RopeScaling};

type Result<T> = std::result::Result<T, ConfigError>;

/// Architectures of `general.architecture` that are read.
const ARCHITECTURES: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

/// llama.cpp's value for files without `rope.freq_base` (written before the key existed).
const ROPE_THETA_DEFAULT: f64 = 10_000.0;

/// Keys that change the answers; only absent, 0 or false is accepted.
const MUST_BE_OFF: &[&str] = &[
    "expert_count",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "use_parallel_residual",
];
/// Scales that change the answers; only absent, 0 or 1 is accepted.
const MUST_BE_ONE: &[&str] = &["logit_scale", "residual_scale", "embedding_scale"];

/// The divisors of `rope_freqs.weight`, which only the opener can read.
pub(crate) type RopeDivisors = Option<Vec<f64>>;

/// Builds and validates the config.
pub(crate) fn read(
    metadata: &Metadata,
    tensors: &[RawTensor],
    divisors: RopeDivisors,
) -> Result<ModelConfig> {
    let architecture = metadata.text("general.architecture").unwrap_or("(none named)");
    let Some(family) = ARCHITECTURES.into_iter().find(|f| f.name() == architecture) else {
        let supported = ARCHITECTURES.map(Family::name).join(", ");
        return Err(ConfigError::UnknownFamily { got: architecture.into(), supported });
    };
    let reader = Reader { metadata, tensors, family };
    let config = reader.config(divisors)?;
    config.validate()?;
    Ok(config)
}

struct Reader<'a> {
    metadata: &'a Metadata,
    tensors: &'a [RawTensor],
    family: Family,
}

impl Reader<'_> {
    fn config(&self, divisors: RopeDivisors) -> Result<ModelConfig> {
        let hidden_size = self.count("embedding_length")?;
        let num_heads = self.count("attention.head_count")?;
        let head_dim = self.head_dim(hidden_size, num_heads)?;
        self.refuse_unsupported(head_dim)?;
        let sizes = Dimensions {
            hidden_size,
            intermediate_size: self.count("feed_forward_length")?,
            num_layers: self.count("block_count")?,
            num_heads,
            num_kv_heads: self.optional_count("attention.head_count_kv")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.vocab_size()?,
            max_position: self.count("context_length")?,
            rms_norm_eps: self
                .number("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| self.missing("attention.layer_norm_rms_epsilon"))?
                as f32,
        };
        Ok(ModelConfig {
            tie_word_embeddings: !self.has("output.weight"),
            qkv_bias: self.has("blk.0.attn_q.bias"),
            o_bias: self.has("blk.0.attn_output.bias"),
            mlp_bias: self.has("blk.0.ffn_down.bias"),
            qk_norm: self.family == Family::Qwen3,
            bos_token: self.metadata.bos_token(),
            eos_tokens: self.metadata.end_tokens().collect(),
            ..ModelConfig::plain(self.family, sizes, self.rope(head_dim, divisors)?)
        })
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

    fn rope(&self, head_dim: usize, divisors: RopeDivisors) -> Result<RopeConfig> {
        let theta = self.number("rope.freq_base")?.unwrap_or(ROPE_THETA_DEFAULT);
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self.bad("rope.freq_base", "a positive number"));
        }
        let linear = match self.metadata.text(&self.key("rope.scaling.type")) {
            Some("none") => None,
            Some("linear") => self.number("rope.scaling.factor")?,
            // Files written before `rope.scaling.type` existed.
            None => self.number("rope.scaling.factor")?.or(self.number("rope.scale_linear")?),
            Some(_) => return Err(self.unsupported("rope.scaling.type", "none and linear are")),
        };
        if linear.is_some_and(|f| !(f.is_finite() && f > 0.0)) {
            return Err(self.bad("rope.scaling.factor", "a positive number"));
        }
        let scaling = match (linear.filter(|f| *f != 1.0), divisors) {
            (None, None) => RopeScaling::None,
            (Some(factor), None) => RopeScaling::Linear { factor },
            (Some(_), Some(_)) => {
                return Err(self.unsupported("rope.scaling.factor", "not together with rope_freqs.weight"));
            }
            (None, Some(divisors)) => {
                if divisors.len() != head_dim / 2 || !divisors.iter().all(|d| d.is_finite() && *d > 0.0) {
                    return Err(ConfigError::BadValue {
                        key: "rope_freqs.weight".into(),
                        got: format!("{} divisors from {:?}", divisors.len(), divisors.first()),
                        want: format!("{} positive divisors (half the head size)", head_dim / 2),
                    });
                }
                RopeScaling::Divisors { divisors }
            }
        };
        Ok(RopeConfig { theta, scaling })
    }

    fn refuse_unsupported(&self, head_dim: usize) -> Result<()> {
        for key in MUST_BE_OFF {
            let full = self.key(key);
            let off = self.metadata.flag(&full) == Some(false) || self.metadata.number(&full) == Some(0.0);
            if self.metadata.contains(&full) && !off {
                return Err(self.unsupported(key, "only absent or 0"));
            }
        }
        for key in MUST_BE_ONE {
            let full = self.key(key);
            if self.metadata.contains(&full) && !matches!(self.metadata.number(&full), Some(0.0 | 1.0)) {
                return Err(self.unsupported(key, "only absent or 1"));
            }
        }
        for key in ["attention.value_length", "rope.dimension_count"] {
            if self.optional_count(key)?.is_some_and(|n| n != head_dim) {
                return Err(self.unsupported(key, &format!("only the head size {head_dim}")));
            }
        }
        if self.family != Family::Qwen3 && self.has("blk.0.attn_q_norm.weight") {
            return Err(ConfigError::Unsupported {
                key: "tensor blk.0.attn_q_norm.weight".into(),
                got: "a norm on q".into(),
                family: self.family.name().into(),
                want: "only qwen3 has one".into(),
            });
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.family.name())
    }

    fn count(&self, key: &str) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let full = self.key(key);
        if !self.metadata.contains(&full) {
            return Ok(None);
        }
        match self.metadata.integer(&full).filter(|n| *n > 0) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.bad(key, "a positive whole number")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let full = self.key(key);
        match self.metadata.number(&full) {
            None if self.metadata.contains(&full) => Err(self.bad(key, "a number")),
            number => Ok(number),
        }
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: self.key(key), family: self.family.name().into() }
    }

    fn bad(&self, key: &str, want: &str) -> ConfigError {
        let key = self.key(key);
        ConfigError::BadValue { got: self.metadata.describe(&key), key, want: want.into() }
    }

    fn unsupported(&self, key: &str, want: &str) -> ConfigError {
        let key = self.key(key);
        ConfigError::Unsupported {
            got: self.metadata.describe(&key),
            key,
            family: self.family.name().into(),
            want: want.into(),
        }
    }
}
