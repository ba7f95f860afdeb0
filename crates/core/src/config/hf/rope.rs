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
    let object = one_of(reader, scaling, parameters)?;
    if let Some(key) = object.and_then(|o| o.keys().find(|key| key.ends_with("_attention"))) {
        return Err(reader.unsupported("rope_parameters", &Value::from(key.as_str()), "one rope for all"));
    }
    let one = RopeObject { reader, object, max_position: sizes.max_position };
    let theta = match one.agreed("rope_theta", "rope_theta")? {
        Some(theta) => theta,
        None => return Err(reader.missing("rope_theta (or rope_parameters.rope_theta)")),
    };
    let partial = one.agreed("partial_rotary_factor", "partial_rotary_factor")?;
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

/// The rope object of transformers 4 or 5; a file with both must say the same twice.
fn one_of<'a>(
    reader: &Reader<'_>,
    scaling: Option<&'a Map<String, Value>>,
    parameters: Option<&'a Map<String, Value>>,
) -> Result<Option<&'a Map<String, Value>>> {
    match (scaling, parameters) {
        (Some(scaling), Some(parameters)) => {
            let differs = |(key, v): &(&String, &Value)| parameters.get(*key) != Some(*v);
            match scaling.iter().find(differs) {
                None => Ok(Some(parameters)),
                Some((key, v)) => {
                    let said = parameters.get(key).unwrap_or(&Value::Null);
                    Err(reader.bad(
                        &format!("rope_scaling.{key}"),
                        v,
                        &format!("{said}, as in rope_parameters"),
                    ))
                }
            }
        }
        (one, other) => Ok(one.or(other)),
    }
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
        let theta = one.agreed("rope_theta", theta_key)?.unwrap_or(class_default);
        Ok(RopeConfig { theta, scaling: one.scaling()? })
    };
    Ok(Ropes {
        rope: rope(one_of(reader, scaling, nested("full_attention")?)?, "rope_theta", 1_000_000.0)?,
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
        let rope_type = self.rope_type()?;
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

    /// The name of the rope type, in either spelling.
    fn rope_type(&self) -> Result<&str> {
        let name = |key: &str| {
            let named = self.get(key).map(|v| v.as_str().ok_or_else(|| self.reader.bad(key, v, "a name")));
            // Phi3Config renames its older spellings.
            let phi3 = self.reader.family == Family::Phi3;
            let renamed = |name| if phi3 && matches!(name, "su" | "yarn") { "longrope" } else { name };
            named.transpose().map(|name| name.map(renamed))
        };
        match (name("rope_type")?, name("type")?) {
            (Some(new), Some(old)) if new != old => {
                let want = format!("\"{new}\", as rope_type beside it says");
                Err(self.reader.bad("rope type", &Value::from(old), &want))
            }
            (None, None) if self.get("factor").is_some() => Err(self.reader.missing("rope_type")),
            (new, old) => Ok(new.or(old).unwrap_or("default")),
        }
    }

    fn llama3(&self) -> Result<RopeScaling> {
        let (low, high) = (self.required("low_freq_factor")?, self.required("high_freq_factor")?);
        if low >= high {
            let want = format!("more than low_freq_factor {low}");
            return Err(self.reader.bad("rope high_freq_factor", &Value::from(high), &want));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.required("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position: self.original_max_position()?,
        })
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let original_max_position = self.original_max_position()?;
        let factor = self.factor_or_ratio(original_max_position)?;
        let strength =
            || Ok(yarn_attention_factor(factor, self.number("mscale")?, self.number("mscale_all_dim")?));
        let beta_fast = self.positive("beta_fast")?.unwrap_or(32.0); // class defaults
        let beta_slow = self.positive("beta_slow")?.unwrap_or(1.0);
        if beta_fast <= beta_slow {
            let want = format!("more than beta_slow {beta_slow}");
            return Err(self.reader.bad("rope beta_fast", &Value::from(beta_fast), &want));
        }
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position,
            beta_fast,
            beta_slow,
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
        Ok(self.agreed(KEY, KEY)?.map_or(self.max_position, |n| n as usize))
    }

    /// A positive number of the rope object or, as `outer`, beside it; where both are there they must be the same.
    fn agreed(&self, key: &str, outer: &str) -> Result<Option<f64>> {
        match (self.positive(key)?, self.reader.positive(outer)?) {
            (Some(own), Some(beside)) if own != beside => {
                let want = format!("{beside}, as {outer} beside it says");
                Err(self.reader.bad(&format!("rope {key}"), &Value::from(own), &want))
            }
            (own, beside) => Ok(own.or(beside)),
        }
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
