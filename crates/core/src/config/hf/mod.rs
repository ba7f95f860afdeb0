//! Reads a Hugging Face `config.json`, in the spellings of transformers 4 and 5.
//!
//! Follows the configuration classes of transformers (`LlamaConfig`, `MistralConfig`, ...); differs
//! in that nothing that changes the mathematics has a default here unless that class gives it one
//! and files leave it out, and in that what is not understood is refused by key.
//!
//! Reading order: this file (which family, which object), `families` (what each family's keys
//! mean), `layers` (windows and experts), `rope`, `reader` (typed access to keys).

mod families;
mod layers;
mod reader;
mod rope;
#[cfg(test)]
mod tests;

use super::{ConfigError, Family, ModelConfig, QuantizationConfig};
use crate::ids::TokenId;
use reader::Reader;
use serde_json::{Map, Value};

type Result<T> = std::result::Result<T, ConfigError>;

/// Architectures this reader knows, with their family and `model_type`.
const ARCHITECTURES: &[(&str, Family, &str)] = &[
    ("LlamaForCausalLM", Family::Llama, "llama"),
    ("MistralForCausalLM", Family::Mistral, "mistral"),
    ("Qwen2ForCausalLM", Family::Qwen2, "qwen2"),
    ("Qwen3ForCausalLM", Family::Qwen3, "qwen3"),
    ("Qwen3MoeForCausalLM", Family::Qwen3Moe, "qwen3_moe"),
    ("Phi3ForCausalLM", Family::Phi3, "phi3"),
    ("Gemma2ForCausalLM", Family::Gemma2, "gemma2"),
    ("Gemma3ForCausalLM", Family::Gemma3, "gemma3_text"),
    ("Gemma3ForConditionalGeneration", Family::Gemma3, "gemma3"),
];

/// Parses the text of a `config.json`.
///
/// A model with a nested `text_config` (Gemma 3 with vision) is read as its text part. Errors name
/// the key, what the file says and what is accepted.
pub fn parse(text: &[u8]) -> Result<ModelConfig> {
    let map = object(text)?;
    quantization_of(&map)?;
    let (family, architecture) = family_of(&map)?;
    let text_config = match map.get("text_config") {
        None | Some(Value::Null) => None,
        Some(Value::Object(nested)) => Some(nested),
        Some(v) => {
            return Err(ConfigError::BadValue {
                key: "text_config".into(),
                got: v.to_string(),
                want: "an object".into(),
            });
        }
    };
    let reader = Reader { map: text_config.unwrap_or(&map), outer: &map, family };
    let config = families::read(&reader, architecture)?;
    config.validate()?;
    Ok(config)
}

/// The `quantization_config` of a `config.json`, if it has one; [`parse`] refuses the methods that
/// this refuses.
pub fn quantization(text: &[u8]) -> Result<Option<QuantizationConfig>> {
    quantization_of(&object(text)?)
}

fn quantization_of(map: &Map<String, Value>) -> Result<Option<QuantizationConfig>> {
    let nested = || map.get("text_config").and_then(|t| t.get("quantization_config"));
    match map.get("quantization_config").or_else(nested) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(quantization)) => QuantizationConfig::parse(quantization).map(Some),
        Some(v) => Err(ConfigError::BadValue {
            key: "quantization_config".into(),
            got: v.to_string(),
            want: "an object".into(),
        }),
    }
}

fn object(text: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(text).map_err(|e| ConfigError::NotJson(e.to_string()))? {
        Value::Object(map) => Ok(map),
        other => Err(ConfigError::NotJson(format!("it is {}", kind_of(&other)))),
    }
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
    let model_type = map.get("model_type").and_then(Value::as_str);
    let found = match named {
        Some(name) => ARCHITECTURES.iter().find(|(known, ..)| *known == name),
        None => ARCHITECTURES.iter().find(|(.., known)| Some(*known) == model_type),
    };
    match found {
        Some((name, family, _)) => Ok((*family, (*name).to_owned())),
        None => Err(ConfigError::UnknownFamily {
            got: named.or(model_type).unwrap_or("(none named)").into(),
            supported: ARCHITECTURES.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(", "),
        }),
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
