//! Sampling defaults that a model's author put beside the weights.

use crate::gguf::Metadata;
use lockstep_core::ConfigError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Defaults for requests that leave a field out; `None` where the author says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationDefaults {
    /// `false` asks for greedy decoding whatever the other fields say.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Keep the most likely tokens; 0 means all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens with this probability.
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this part of the most likely one.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that have appeared (CTRL, Keskar et al. 2019).
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// From a `generation_config.json`; null counts as absent, unknown keys are ignored.
    pub(crate) fn from_json(map: &Map<String, Value>) -> Result<Self, ConfigError> {
        let get = |key: &str| map.get(key).filter(|v| !v.is_null());
        let bad = |key: &str, got: &Value, want: &str| ConfigError::BadValue {
            key: key.into(),
            got: got.to_string(),
            want: want.into(),
        };
        let number = |key: &str| match get(key) {
            None => Ok(None),
            Some(v) => match v.as_f64().filter(|n| *n >= 0.0 && *n <= f64::from(f32::MAX)) {
                Some(n) => Ok(Some(n as f32)),
                None => Err(bad(key, v, "a number of at least 0")),
            },
        };
        let top_k = match get("top_k") {
            None => None,
            Some(v) => {
                let k = v.as_u64().and_then(|k| u32::try_from(k).ok());
                Some(k.ok_or_else(|| bad("top_k", v, "a whole number of at least 0"))?)
            }
        };
        let do_sample = match get("do_sample") {
            None => None,
            Some(v) => Some(v.as_bool().ok_or_else(|| bad("do_sample", v, "true or false"))?),
        };
        Ok(Self {
            do_sample,
            temperature: number("temperature")?,
            top_k,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }

    /// From the `general.sampling.*` keys of newer GGUF files; anything odd is left out.
    pub(crate) fn from_gguf(metadata: &Metadata) -> Self {
        let number = |key: &str| {
            metadata.number(&format!("general.sampling.{key}")).filter(|n| *n >= 0.0).map(|n| n as f32)
        };
        Self {
            do_sample: None,
            temperature: number("temp"),
            top_k: metadata.integer("general.sampling.top_k").and_then(|k| u32::try_from(k).ok()),
            top_p: number("top_p"),
            min_p: number("min_p"),
            repetition_penalty: number("penalty_repeat"),
        }
    }
}
