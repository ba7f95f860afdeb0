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

/// Keys of transformers' configuration classes that say nothing about the answers of a text model, and those that are
/// read by other means or under conditions only.
const WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "boi_token_index",
    "bos_token_id",
    "cache_implementation",
    "decoder_sparse_step",
    "dtype",
    "embd_pdrop",
    "eoi_token_index",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "image_token_index",
    "initializer_range",
    "is_decoder",
    "layer_types",
    "max_window_layers",
    "mlp_only_layers",
    "mm_tokens_per_image",
    "model_type",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "resid_pdrop",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "router_aux_loss_coef",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_sliding_window",
    "vision_config",
];

/// Parses the text of a `config.json`.
///
/// A model with a nested `text_config` (Gemma 3 with vision) is read as its text part. Errors name
/// the key, what the file says and what is accepted.
pub fn parse(text: &[u8]) -> Result<ModelConfig> {
    parse_noting(text).map(|(config, _)| config)
}

/// [`parse`], and the keys of the text model that it neither reads nor knows to be without effect, in order: most
/// are bookkeeping of a training tool, but one may be newer than this reader and mean something.
pub fn parse_noting(text: &[u8]) -> Result<(ModelConfig, Vec<String>)> {
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
    let asked = RefCell::default();
    let reader = Reader { map: text_config.unwrap_or(&map), outer: &map, family, asked };
    let config = families::read(&reader, architecture)?;
    config.validate()?;
    let asked = reader.asked.into_inner();
    let is_known = |key: &str| asked.contains(key) || WITHOUT_EFFECT.contains(&key) || key.starts_with('_');
    let unread = reader.map.iter().filter(|(key, value)| !value.is_null() && !is_known(key));
    Ok((config, unread.map(|(key, _)| key.clone()).collect()))
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
