//! Rope values: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (transformers 5),
//! and Gemma 3's two ropes in either spelling.
//!
//! Follows `RotaryEmbeddingConfigMixin` of transformers; differs in that a key that the rope type
//! does not have is refused instead of warned about.

use super::Result;
use super::reader::Reader;
use crate::config::rope::{longrope_attention_factor, yarn_attention_factor};
use crate::config::{Dimensions, Family, RopeConfig, RopeScaling};
use serde_json::{Map, Value};

/// The ropes of one model.
pub(super) struct Ropes {
    pub rope: RopeConfig,
    /// Of the sliding layers, where it differs.
    pub local: Option<RopeConfig>,
    pub rotary_dim: usize,
}

/// Keys of every rope object.
const COMMON_KEYS: &[&str] =
    &["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"];

pub(super) fn read(reader: &Reader<'_>, sizes: &Dimensions) -> Result<Ropes> {
    let scaling = reader.object("rope_scaling")?;
    let parameters = reader.object("rope_parameters")?;
    if reader.family == Family::Gemma3 {
        return gemma3(reader, sizes, scaling, parameters);
    }
    let object = scaling.or(parameters);
    if let Some(key) = object.and_then(|o| o.keys().find(|key| key.ends_with("_attention"))) {
        return Err(reader.unsupported("rope_parameters", &Value::from(key.as_str()), "one rope for all"));
    }
    let one = RopeObject { reader, object, max_position: sizes.max_position };
    let theta = match one.positive("rope_theta")?.or(reader.positive("rope_theta")?) {
        Some(theta) => theta,
        None => return Err(reader.missing("rope_theta (or rope_parameters.rope_theta)")),
    };
    let partial = one.positive("partial_rotary_factor")?.or(reader.positive("partial_rotary_factor")?);
    let rotary_dim = match partial {
        None => sizes.head_dim,
        Some(1.0) => sizes.head_dim,
        Some(part) if reader.family == Family::Phi3 && part < 1.0 => (sizes.head_dim as f64 * part) as usize,
        Some(part) => {
            return Err(reader.unsupported("partial_rotary_factor", &Value::from(part), "only 1"));
        }
    };
    Ok(Ropes { rope: RopeConfig { theta, scaling: one.scaling()? }, local: None, rotary_dim })
}

/// One rope for the full layers and one for the sliding ones; `rope_scaling` belongs to the first.
fn gemma3(
    reader: &Reader<'_>,
    sizes: &Dimensions,
    scaling: Option<&Map<String, Value>>,
    parameters: Option<&Map<String, Value>>,
) -> Result<Ropes> {
    let nested = |key: &str| match parameters.and_then(|p| p.get(key)).filter(|v| !v.is_null()) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(v) => Err(reader.bad(&format!("rope_parameters.{key}"), v, "an object")),
    };
    if let Some(key) = parameters
        .and_then(|p| p.keys().find(|key| !["full_attention", "sliding_attention"].contains(&key.as_str())))
    {
        let want = "only full_attention and sliding_attention";
        return Err(reader.unsupported("rope_parameters", &Value::from(key.as_str()), want));
    }
    let rope = |object, theta_key: &str, class_default: f64| {
        let one = RopeObject { reader, object, max_position: sizes.max_position };
        if let Some(part) = one.positive("partial_rotary_factor")?.filter(|part| *part != 1.0) {
            return Err(reader.unsupported("partial_rotary_factor", &Value::from(part), "only 1"));
        }
        let theta = one.positive("rope_theta")?.or(reader.positive(theta_key)?).unwrap_or(class_default);
        Ok(RopeConfig { theta, scaling: one.scaling()? })
    };
    Ok(Ropes {
        rope: rope(scaling.or(nested("full_attention")?), "rope_theta", 1_000_000.0)?,
        local: Some(rope(nested("sliding_attention")?, "rope_local_base_freq", 10_000.0)?),
        rotary_dim: sizes.head_dim,
    })
}

/// One rope object of the file, or none.
struct RopeObject<'a> {
    reader: &'a Reader<'a>,
    object: Option<&'a Map<String, Value>>,
    max_position: usize,
}

impl RopeObject<'_> {
    fn scaling(&self) -> Result<RopeScaling> {
        let Some(object) = self.object else { return Ok(RopeScaling::None) };
        let named = self.get("rope_type").or_else(|| self.get("type"));
        let rope_type = match named.map(|v| (v, v.as_str())) {
            None if self.get("factor").is_some() => return Err(self.reader.missing("rope_type")),
            None => "default",
            Some((_, Some(name))) => name,
            Some((v, None)) => return Err(self.reader.bad("rope_type", v, "a name")),
        };
        // Phi3Config renames its older spellings.
        let phi3 = self.reader.family == Family::Phi3;
        let rope_type = if phi3 && matches!(rope_type, "su" | "yarn") { "longrope" } else { rope_type };
        let (scaling, keys): (_, &[&str]) = match rope_type {
            "default" => (RopeScaling::None, &[]),
            "linear" => (RopeScaling::Linear { factor: self.required("factor")? }, &["factor"]),
            "dynamic" => {
                self.required("factor")?;
                (RopeScaling::Dynamic, &["factor"])
            }
            "llama3" => (self.llama3()?, &["factor", "low_freq_factor", "high_freq_factor"]),
            "yarn" => (self.yarn()?, YARN_KEYS),
            "longrope" => (self.longrope()?, &["factor", "attention_factor", "short_factor", "long_factor"]),
            other => {
                let want = "default, linear, dynamic, llama3, yarn and longrope are";
                return Err(self.reader.unsupported("rope_type", &Value::from(other), want));
            }
        };
        let known = |key: &str| COMMON_KEYS.contains(&key) || keys.contains(&key);
        match object.iter().find(|(key, v)| !v.is_null() && !known(key)) {
            None => Ok(scaling),
            Some((key, v)) => {
                let want = format!("rope type {rope_type} does not have it");
                Err(self.reader.unsupported(&format!("rope {key}"), v, &want))
            }
        }
    }

    fn llama3(&self) -> Result<RopeScaling> {
        Ok(RopeScaling::Llama3 {
            factor: self.required("factor")?,
            low_freq_factor: self.required("low_freq_factor")?,
            high_freq_factor: self.required("high_freq_factor")?,
            original_max_position: self.original_max_position()?,
        })
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let original_max_position = self.original_max_position()?;
        let factor = self.factor_or_ratio(original_max_position)?;
        let strength =
            || Ok(yarn_attention_factor(factor, self.number("mscale")?, self.number("mscale_all_dim")?));
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position,
            beta_fast: self.positive("beta_fast")?.unwrap_or(32.0), // class defaults
            beta_slow: self.positive("beta_slow")?.unwrap_or(1.0),
            attention_factor: self.positive("attention_factor")?.map_or_else(strength, Ok)?,
            truncate: match self.get("truncate") {
                None => true,
                Some(v) => self.reader.as_flag("rope truncate", v)?,
            },
        })
    }

    fn longrope(&self) -> Result<RopeScaling> {
        let original_max_position = self.original_max_position()?;
        let factor = self.factor_or_ratio(original_max_position)?;
        let strength = || longrope_attention_factor(factor, original_max_position);
        Ok(RopeScaling::LongRope {
            short_factor: self.list("short_factor")?,
            long_factor: self.list("long_factor")?,
            original_max_position,
            attention_factor: self.positive("attention_factor")?.unwrap_or_else(strength),
        })
    }

    /// `factor`, or how much the context was extended where the file names none.
    fn factor_or_ratio(&self, original_max_position: usize) -> Result<f64> {
        Ok(self.positive("factor")?.unwrap_or(self.max_position as f64 / original_max_position as f64))
    }

    /// Phi-3 keeps it beside the rope values; without it nothing was extended.
    fn original_max_position(&self) -> Result<usize> {
        const KEY: &str = "original_max_position_embeddings";
        let own = self.positive(KEY)?.map(|n| n as usize);
        Ok(self.reader.optional_count(KEY)?.or(own).unwrap_or(self.max_position))
    }

    fn list(&self, key: &str) -> Result<Vec<f64>> {
        let v = self.get(key).ok_or_else(|| self.reader.missing(&format!("rope {key}")))?;
        v.as_array()
            .and_then(|list| list.iter().map(Value::as_f64).collect())
            .ok_or_else(|| self.reader.bad(&format!("rope {key}"), v, "a list of numbers"))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.object?.get(key).filter(|v| !v.is_null())
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let name = || format!("rope {key}");
        self.get(key).map(|v| v.as_f64().ok_or_else(|| self.reader.bad(&name(), v, "a number"))).transpose()
    }

    fn positive(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(n) if !(n.is_finite() && n > 0.0) => {
                Err(self.reader.bad(&format!("rope {key}"), &Value::from(n), "a positive number"))
            }
            number => Ok(number),
        }
    }

    fn required(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| self.reader.missing(&format!("rope {key}")))
    }
}

/// Keys of yarn. `finetuned` is a note of early checkpoints; transformers ignores it too.
const YARN_KEYS: &[&str] = &[
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
];
