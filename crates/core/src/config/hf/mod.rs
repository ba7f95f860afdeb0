//! Reads a Hugging Face `config.json`, in the spellings of transformers 4 and 5.
//!
//! Follows the configuration classes of transformers (`LlamaConfig`, `MistralConfig`, ...); differs
//! in that nothing that changes the mathematics has a default here unless that class gives it one
//! and files leave it out, and in that what is not understood is refused by key.
//!
//! Reading order: this file (which family, which object), `families` (what each family's keys
//! mean), `layers` (windows and experts), `rope`, `foreign` (keys of other models, keys that nobody knows), `reader`
//! (typed access to keys).

mod families;
mod foreign;
mod layers;
mod reader;
mod rope;
#[cfg(test)]
mod tests;

use super::{ConfigError, Family, ModelConfig, QuantizationConfig};
use crate::dtype::DType;
use crate::ids::TokenId;
use reader::Reader;
use serde_json::{Map, Value};
use std::cell::RefCell;

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
    parse_noting(text).map(|(config, _)| config)
}

/// [`parse`], and the keys of the text model that it neither reads nor knows to be without effect, in order. Their names
/// do not speak of the mathematics (such a key is refused), but one may mean something all the same.
pub fn parse_noting(text: &[u8]) -> Result<(ModelConfig, Vec<String>)> {
    let map = object(text)?;
    quantization_of(&map)?;
    let (family, architecture) = family_of(&map)?;
    let text_config = match map.get("text_config") {
        None | Some(Value::Null) => None,
        Some(Value::Object(nested)) => {
            refuse_two_descriptions(&map, nested)?;
            Some(nested)
        }
        Some(v) => return Err(ConfigError::bad("text_config", v, "an object")),
    };
    let asked = RefCell::default();
    let reader = Reader { map: text_config.unwrap_or(&map), outer: &map, family, asked };
    let config = families::read(&reader, architecture)?;
    config.validate()?;
    Ok((config, foreign::unread(&reader)?))
}

/// The `quantization_config` of a `config.json`, if it has one; [`parse`] refuses the methods that
/// this refuses.
pub fn quantization(text: &[u8]) -> Result<Option<QuantizationConfig>> {
    quantization_of(&object(text)?)
}

/// The element type that a `config.json` names in the spelling of transformers 4 or 5, if it names one.
pub fn dtype(text: &[u8]) -> Result<Option<DType>> {
    let map = object(text)?;
    let nested = map.get("text_config").and_then(Value::as_object);
    let keyed = |map: &Map<String, Value>| ["dtype", "torch_dtype"].map(|key| map.get(key).cloned());
    let said = nested.into_iter().flat_map(keyed).chain(keyed(&map));
    match said.flatten().find(|v| !v.is_null()) {
        None => Ok(None),
        Some(v) => match v.as_str().map(|name| name.trim_start_matches("torch.")) {
            Some("float32" | "float") => Ok(Some(DType::F32)),
            Some("float16" | "half") => Ok(Some(DType::F16)),
            Some("bfloat16") => Ok(Some(DType::Bf16)),
            _ => Err(ConfigError::bad("dtype", &v, "float32, float16 or bfloat16 (or give --dtype)")),
        },
    }
}

fn quantization_of(map: &Map<String, Value>) -> Result<Option<QuantizationConfig>> {
    let nested = || map.get("text_config").and_then(|t| t.get("quantization_config"));
    match map.get("quantization_config").or_else(nested) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(quantization)) => QuantizationConfig::parse(quantization).map(Some),
        Some(v) => Err(ConfigError::bad("quantization_config", v, "an object")),
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
    let id = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    id.ok_or_else(|| ConfigError::bad(key, value, "a token id"))
}

/// The family that `architectures` names, or else `model_type`; where both are there they must agree.
fn family_of(map: &Map<String, Value>) -> Result<(Family, String)> {
    let text = |key: &str, value: Option<&'_ Value>, want: &str| match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(v) => Err(ConfigError::bad(key, v, want)),
    };
    let first = match map.get("architectures") {
        None | Some(Value::Null) => None,
        Some(Value::Array(names)) => names.first(),
        Some(v) => return Err(ConfigError::bad("architectures", v, "a list of names")),
    };
    let named = text("architectures", first, "a list of names")?;
    let model_type = text("model_type", map.get("model_type"), "a name")?;
    let found = match &named {
        Some(name) => ARCHITECTURES.iter().find(|(known, ..)| known == name),
        None => ARCHITECTURES.iter().find(|(.., known)| Some(*known) == model_type.as_deref()),
    };
    let Some((name, family, own_type)) = found else {
        return Err(ConfigError::UnknownFamily {
            got: named.or(model_type).unwrap_or("(none named)".into()),
            supported: ARCHITECTURES.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(", "),
        });
    };
    let is_own =
        |model_type: &str| ARCHITECTURES.iter().any(|(_, f, known)| f == family && *known == model_type);
    match model_type.filter(|model_type| !is_own(model_type)) {
        None => Ok((*family, (*name).to_owned())),
        Some(got) => Err(ConfigError::BadValue {
            key: "model_type".into(),
            got: format!("\"{got}\""),
            want: format!("\"{own_type}\", because architectures names {name}"),
        }),
    }
}

/// A nested `text_config` describes the model; sizes beside it must not say something else.
fn refuse_two_descriptions(outer: &Map<String, Value>, nested: &Map<String, Value>) -> Result<()> {
    const SIZES: [&str; 6] = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ];
    let differs = |key: &&&str| {
        let beside = outer.get(**key).filter(|v| !v.is_null());
        beside.is_some() && beside != nested.get(**key)
    };
    match SIZES.iter().find(differs) {
        None => Ok(()),
        Some(key) => {
            let got = nested.get(*key).unwrap_or(&Value::Null);
            let want = format!("{}, as {key} beside text_config says", outer[*key]);
            Err(ConfigError::bad(&format!("text_config.{key}"), got, &want))
        }
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
