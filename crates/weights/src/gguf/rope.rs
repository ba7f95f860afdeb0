//! Rope keys and tensors to [`RopeConfig`].
//!
//! Follows llama.cpp (`llama-model.cpp`, `load_hparams`; the converters of its `conversion` folder):
//! `rope.scaling.*` keys, `rope_freqs.weight` (Llama 3's bands as divisors) and
//! `rope_factors_{short,long}.weight` (LongRoPE). Its attention factor for yarn multiplies
//! `0.1 ln(factor) + 1` into the one of the file, LongRoPE's stands in the file.

use super::keys::{Reader, Result};
use lockstep_core::config::rope::{longrope_attention_factor, yarn_attention_factor};
use lockstep_core::{ConfigError, RopeConfig, RopeScaling};

/// llama.cpp's base for files without `rope.freq_base`, and for Gemma 3's sliding layers.
const THETA_DEFAULT: f64 = 10_000.0;
/// YaRN's own values for files that give none.
const BETA_FAST_DEFAULT: f64 = 32.0;
const BETA_SLOW_DEFAULT: f64 = 1.0;

/// Divisors that are stored as tensors, which only the opener can read.
#[derive(Debug, Default)]
pub(crate) struct RopeTensors {
    /// `rope_freqs.weight`.
    pub freqs: Option<Vec<f64>>,
    /// `rope_factors_short.weight`.
    pub short: Option<Vec<f64>>,
    /// `rope_factors_long.weight`.
    pub long: Option<Vec<f64>>,
}

impl RopeTensors {
    /// GGUF names of `freqs`, `short` and `long`.
    pub const NAMES: [&str; 3] =
        ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];
}

impl Reader<'_> {
    /// The rope of all layers that have no rope of their own.
    pub fn rope(&self, tensors: RopeTensors, max_position: usize) -> Result<RopeConfig> {
        let theta = self.positive("rope.freq_base")?.unwrap_or(THETA_DEFAULT);
        let scaling = match (self.keyed_scaling(max_position)?, tensors) {
            (scaling, RopeTensors { freqs: None, short: None, long: None }) => {
                let text = self.metadata.text(&self.key("rope.scaling.type"));
                if text == Some("longrope") {
                    return Err(self.unsupported("rope.scaling.type", "only with rope_factors tensors"));
                }
                scaling
            }
            (RopeScaling::None, RopeTensors { freqs: Some(divisors), short: None, long: None }) => {
                RopeScaling::Divisors { divisors }
            }
            (RopeScaling::None, RopeTensors { freqs: None, short: Some(short), long: Some(long) }) => {
                self.long_rope(short, long, max_position)?
            }
            (RopeScaling::None, _) => {
                return Err(
                    self.unsupported_tensors("rope_freqs, or rope_factors_short and rope_factors_long")
                );
            }
            (_, _) => return Err(self.unsupported_tensors("none together with rope.scaling keys")),
        };
        let scaled = matches!(scaling, RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. });
        if !scaled && self.attention_factor()?.is_some_and(|factor| factor != 1.0) {
            return Err(self.unsupported("rope.scaling.attn_factor", "only 1 without yarn or longrope"));
        }
        Ok(RopeConfig { theta, scaling })
    }

    /// The rope of Gemma 3's sliding layers, which is never scaled.
    pub fn local_rope(&self) -> Result<RopeConfig> {
        Ok(RopeConfig::plain(self.positive("rope.freq_base_swa")?.unwrap_or(THETA_DEFAULT)))
    }

    /// What the `rope.scaling.*` keys ask for.
    fn keyed_scaling(&self, max_position: usize) -> Result<RopeScaling> {
        let factor = self.positive("rope.scaling.factor")?;
        let linear = |factor: Option<f64>| match factor.filter(|f| *f != 1.0) {
            Some(factor) => RopeScaling::Linear { factor },
            None => RopeScaling::None,
        };
        match self.metadata.text(&self.key("rope.scaling.type")) {
            Some("none" | "longrope") => Ok(RopeScaling::None),
            Some("linear") => Ok(linear(factor)),
            Some("yarn") => self.yarn(factor, max_position),
            // Files written before `rope.scaling.type` existed.
            None => Ok(linear(factor.or(self.positive("rope.scale_linear")?))),
            Some(_) => Err(self.unsupported("rope.scaling.type", "none, linear, yarn and longrope are")),
        }
    }

    fn yarn(&self, factor: Option<f64>, max_position: usize) -> Result<RopeScaling> {
        let factor = factor.ok_or_else(|| self.missing("rope.scaling.factor"))?;
        for (key, neutral) in [("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)] {
            let key = format!("rope.scaling.{key}");
            if self.number(&key)?.is_some_and(|n| n != neutral) {
                return Err(self.unsupported(&key, &format!("only absent or {neutral}")));
            }
        }
        let beta = |key: &str, default: f64| Ok(self.positive(key)?.unwrap_or(default));
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position: self
                .optional_count("rope.scaling.original_context_length")?
                .unwrap_or((max_position as f64 / factor) as usize),
            beta_fast: beta("rope.scaling.yarn_beta_fast", BETA_FAST_DEFAULT)?,
            beta_slow: beta("rope.scaling.yarn_beta_slow", BETA_SLOW_DEFAULT)?,
            attention_factor: self.attention_factor()?.unwrap_or(1.0)
                * yarn_attention_factor(factor, None, None),
            truncate: true,
        })
    }

    fn long_rope(&self, short: Vec<f64>, long: Vec<f64>, max_position: usize) -> Result<RopeScaling> {
        let original = self.optional_count("rope.scaling.original_context_length")?.unwrap_or(max_position);
        let computed = longrope_attention_factor(max_position as f64 / original as f64, original);
        Ok(RopeScaling::LongRope {
            short_factor: short,
            long_factor: long,
            original_max_position: original,
            attention_factor: self.attention_factor()?.unwrap_or(computed),
        })
    }

    /// The file's multiplier of cos and sin, in either of its two spellings.
    fn attention_factor(&self) -> Result<Option<f64>> {
        Ok(self.positive("rope.scaling.attn_factor")?.or(self.positive("rope.scaling.yarn_attn_factor")?))
    }

    fn unsupported_tensors(&self, want: &str) -> ConfigError {
        let held = RopeTensors::NAMES.iter().filter(|name| self.has(name));
        ConfigError::Unsupported {
            key: "rope tensors".into(),
            got: held.copied().collect::<Vec<_>>().join(", "),
            family: self.family.name().into(),
            want: want.into(),
        }
    }
}
