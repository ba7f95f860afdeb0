//! Reads a Hugging Face `config.json`, in the spellings of transformers 4 and 5.
//!
//! Follows the configuration classes of transformers (`LlamaConfig`, `Qwen2Config`,
//! `Qwen3Config`); differs in that nothing that changes the mathematics has a default here unless
//! that class gives it one.

use super::{ConfigError, Family, ModelConfig, RopeConfig, RopeScaling};
use crate::ids::TokenId;
use serde_json::{Map, Value};

type Result<T> = std::result::Result<T, ConfigError>;

/// Architectures this reader knows, with their family.
const ARCHITECTURES: &[(&str, Family)] = &[
    ("LlamaForCausalLM", Family::Llama),
    ("Qwen2ForCausalLM", Family::Qwen2),
    ("Qwen3ForCausalLM", Family::Qwen3),
];

/// Parses the text of a `config.json`.
///
/// Errors name the key, what the file says and what is accepted.
pub fn parse(text: &[u8]) -> Result<ModelConfig> {
    let value: Value = serde_json::from_slice(text).map_err(|e| ConfigError::NotJson(e.to_string()))?;
    let Value::Object(map) = value else {
        return Err(ConfigError::NotJson(format!("it is {}", kind_of(&value))));
    };
    let (family, architecture) = family_of(&map)?;
    let reader = Reader { map: &map, family };
    let config = reader.config(architecture)?;
    config.validate()?;
    Ok(config)
}

/// End tokens of a `config.json`, `generation_config.json` or any object with `eos_token_id` as a
/// number, a list or null.
pub fn eos_tokens(map: &Map<String, Value>) -> Result<Vec<TokenId>> {
    match map.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(|v| token_id("eos_token_id", v)).collect(),
        Some(v) => Ok(vec![token_id("eos_token_id", v)?]),
    }
}

fn token_id(key: &str, value: &Value) -> Result<TokenId> {
    value.as_u64().and_then(|id| TokenId::try_from(id).ok()).ok_or_else(|| ConfigError::BadValue {
        key: key.into(),
        got: value.to_string(),
        want: "a token id".into(),
    })
}

fn family_of(map: &Map<String, Value>) -> Result<(Family, String)> {
    let named = map.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    let supported = || ARCHITECTURES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    if let Some(name) = named {
        return match ARCHITECTURES.iter().find(|(known, _)| *known == name) {
            Some((_, family)) => Ok((*family, name.to_owned())),
            None => Err(ConfigError::UnknownFamily { got: name.into(), supported: supported() }),
        };
    }
    let model_type = map.get("model_type").and_then(Value::as_str).unwrap_or("(none named)");
    match ARCHITECTURES.iter().find(|(_, family)| family.name() == model_type) {
        Some((name, family)) => Ok((*family, (*name).to_owned())),
        None => Err(ConfigError::UnknownFamily { got: model_type.into(), supported: supported() }),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// One config file being read for one family.
struct Reader<'a> {
    map: &'a Map<String, Value>,
    family: Family,
}

impl Reader<'_> {
    fn config(&self, architecture: String) -> Result<ModelConfig> {
        self.refuse_unsupported()?;
        let hidden_size = self.count("hidden_size")?;
        let num_heads = self.count("num_attention_heads")?;
        let head_dim = match self.optional_count("head_dim")? {
            Some(d) => d,
            None if self.family == Family::Qwen3 => 128, // Qwen3Config's default
            None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => {
                return Err(ConfigError::BadValue {
                    key: "hidden_size".into(),
                    got: hidden_size.to_string(),
                    want: format!("a multiple of num_attention_heads {num_heads}, or an explicit head_dim"),
                });
            }
        };
        let attention_bias = self.flag("attention_bias")?.unwrap_or(false);
        let (qkv_bias, o_bias) = match self.family {
            Family::Llama | Family::Qwen3 => (attention_bias, attention_bias),
            Family::Qwen2 => (true, false),
        };
        Ok(ModelConfig {
            family: self.family,
            architecture,
            hidden_size,
            intermediate_size: self.count("intermediate_size")?,
            num_layers: self.count("num_hidden_layers")?,
            num_heads,
            num_kv_heads: self.optional_count("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.count("vocab_size")?,
            rms_norm_eps: self.number("rms_norm_eps")?.ok_or_else(|| self.missing("rms_norm_eps"))? as f32,
            rope: self.rope()?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias,
            o_bias,
            mlp_bias: self.family == Family::Llama && self.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: self.family == Family::Qwen3,
            max_position: self.count("max_position_embeddings")?,
            bos_token: match self.get("bos_token_id") {
                None => None,
                Some(v) => Some(token_id("bos_token_id", v)?),
            },
            eos_tokens: eos_tokens(self.map)?,
        })
    }

    /// Keys that would change the answers and are not implemented.
    fn refuse_unsupported(&self) -> Result<()> {
        let unsupported = |key: &str, got: &Value, want: &str| ConfigError::Unsupported {
            key: key.into(),
            got: got.to_string(),
            family: self.family.name().into(),
            want: want.into(),
        };
        if let Some(v) = self.get("hidden_act")
            && v.as_str() != Some("silu")
        {
            return Err(unsupported("hidden_act", v, "only silu"));
        }
        if let Some(v) = self.get("use_sliding_window")
            && v.as_bool() != Some(false)
        {
            return Err(unsupported("use_sliding_window", v, "only false"));
        }
        if let Some(v) = self.get("layer_types")
            && !v.as_array().is_some_and(|l| l.iter().all(|t| t.as_str() == Some("full_attention")))
        {
            return Err(unsupported("layer_types", v, "only full_attention"));
        }
        if let Some(v) = self.get("quantization_config") {
            return Err(unsupported("quantization_config", v, "only f32, f16 and bf16 checkpoints"));
        }
        if let Some(v) = self.get("partial_rotary_factor")
            && v.as_f64() != Some(1.0)
        {
            return Err(unsupported("partial_rotary_factor", v, "only 1"));
        }
        Ok(())
    }

    /// `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
    fn rope(&self) -> Result<RopeConfig> {
        let scaling = self.object("rope_scaling")?;
        let parameters = self.object("rope_parameters")?;
        let theta = match self.number("rope_theta")? {
            Some(theta) => theta,
            None => match parameters.and_then(|p| p.get("rope_theta")) {
                Some(v) => v.as_f64().ok_or_else(|| self.bad("rope_parameters.rope_theta", v, "a number"))?,
                None => return Err(self.missing("rope_theta (or rope_parameters.rope_theta)")),
            },
        };
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self.bad("rope_theta", &Value::from(theta), "a positive number"));
        }
        let Some(p) = scaling.or(parameters) else {
            return Ok(RopeConfig { theta, scaling: RopeScaling::None });
        };
        let rope_type =
            p.get("rope_type").or_else(|| p.get("type")).and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str| {
            p.get(key).and_then(Value::as_f64).filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| {
                self.bad(&format!("rope {key}"), p.get(key).unwrap_or(&Value::Null), "a positive number")
            })
        };
        let scaling = match rope_type {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: number("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position: number("original_max_position_embeddings")? as usize,
            },
            other => {
                return Err(ConfigError::Unsupported {
                    key: "rope_type".into(),
                    got: other.into(),
                    family: self.family.name().into(),
                    want: "default, linear and llama3 are".into(),
                });
            }
        };
        Ok(RopeConfig { theta, scaling })
    }

    /// The value of `key`; null counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn object(&self, key: &str) -> Result<Option<&Map<String, Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(v) => Err(self.bad(key, v, "an object")),
        }
    }

    fn count(&self, key: &str) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_u64().filter(|n| *n > 0) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.bad(key, v, "a positive whole number")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|v| v.as_f64().ok_or_else(|| self.bad(key, v, "a number"))).transpose()
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| self.bad(key, v, "true or false"))).transpose()
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: key.into(), family: self.family.name().into() }
    }

    fn bad(&self, key: &str, got: &Value, want: &str) -> ConfigError {
        ConfigError::BadValue { key: key.into(), got: got.to_string(), want: want.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320,
            "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 512, "eos_token_id": [2, 3]})
    }

    fn with(patch: Value) -> Result<ModelConfig> {
        let mut config = llama();
        for (k, v) in patch.as_object().unwrap() {
            config[k] = v.clone();
        }
        parse(config.to_string().as_bytes())
    }

    #[test]
    fn reads_a_plain_llama() {
        let c = with(json!({})).unwrap();
        assert_eq!((c.head_dim, c.num_kv_heads, c.eos_tokens), (32, 2, vec![2, 3]));
        assert_eq!(c.rope, RopeConfig { theta: 500000.0, scaling: RopeScaling::None });
        assert!(!c.qkv_bias && !c.qk_norm);
    }

    #[test]
    fn head_dim_given_null_or_absent() {
        assert_eq!(with(json!({"head_dim": 48})).unwrap().head_dim, 48);
        assert_eq!(with(json!({"head_dim": null})).unwrap().head_dim, 32);
        assert!(with(json!({"head_dim": 0})).is_err());
        assert!(with(json!({"hidden_size": 130})).unwrap_err().to_string().contains("hidden_size is 130"));
    }

    #[test]
    fn both_rope_spellings_read_the_same() {
        let l3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        let old = with(json!({"rope_scaling": l3})).unwrap();
        let mut new = l3.clone();
        new["rope_theta"] = json!(500000.0);
        assert_eq!(old.rope, with(json!({"rope_theta": null, "rope_parameters": new})).unwrap().rope);
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (patch, word) in [
            (json!({"rope_theta": null}), "rope_theta"),
            (json!({"rope_scaling": {"rope_type": "su", "factor": 2}}), "su"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"quantization_config": {"quant_method": "awq"}}), "quantization_config"),
            (json!({"architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
            (json!({"vocab_size": "many"}), "vocab_size"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        ] {
            let message = with(patch).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
        assert!(parse(b"").unwrap_err().to_string().contains("not a JSON object"));
        assert!(parse(b"[]").unwrap_err().to_string().contains("a list"));
    }

    #[test]
    fn illegal_tp_sizes_say_what_works() {
        let c =
            with(json!({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192})).unwrap();
        let message = crate::shard::check_tp_size(&c, 3).unwrap_err().to_string();
        assert_eq!(
            message,
            "--tp 3 neither divides the model's 2 KV heads nor is a multiple of them (6 query heads); \
             tp sizes that work for this model: 1, 2, 6"
        );
        assert!(crate::shard::check_tp_size(&c, 0).is_err());
        assert!(crate::shard::check_tp_size(&c, 4).unwrap_err().to_string().contains("6 query heads"));
    }
}
