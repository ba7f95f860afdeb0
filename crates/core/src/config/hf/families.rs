//! What the keys of each family mean: the facts of its transformers config class and model code.

use super::reader::Reader;
use super::{Result, eos_tokens, foreign, layers, rope, token_id};
use crate::config::{Activation, Dimensions, Family, ModelConfig};
use crate::limits::MODEL_LAYERS_MAX;
use serde_json::Value;

/// The whole config of `reader.family`, not yet validated.
pub(super) fn read(reader: &Reader<'_>, architecture: String) -> Result<ModelConfig> {
    foreign::refuse(reader)?;
    let sizes = sizes(reader)?;
    let ropes = rope::read(reader, &sizes)?;
    let mut config = ModelConfig::plain(reader.family, sizes, ropes.rope);
    config.architecture = architecture;
    config.local_rope = ropes.local;
    config.rotary_dim = ropes.rotary_dim;
    config.activation = activation(reader)?;
    config.tie_word_embeddings = match reader.get_anywhere("tie_word_embeddings") {
        Some(v) => reader.as_flag("tie_word_embeddings", v)?,
        None => matches!(reader.family, Family::Gemma2 | Family::Gemma3), // the class default
    };
    config.bos_token =
        reader.get_anywhere("bos_token_id").map(|v| token_id("bos_token_id", v)).transpose()?;
    config.eos_tokens = eos_tokens(reader.map)?;
    config.eos_tokens.extend(eos_tokens(reader.outer)?);
    config.eos_tokens.sort_unstable();
    config.eos_tokens.dedup();
    layers::read_windows(reader, &mut config)?;
    adapt(reader, &mut config)?;
    Ok(config)
}

/// What sets the family apart from a plain Llama.
fn adapt(reader: &Reader<'_>, config: &mut ModelConfig) -> Result<()> {
    let attention_bias = reader.flag("attention_bias")?.unwrap_or(false);
    (config.qkv_bias, config.o_bias) = (attention_bias, attention_bias);
    match reader.family {
        Family::Llama => config.mlp_bias = reader.flag("mlp_bias")?.unwrap_or(false),
        Family::Mistral | Family::Phi3 => {}
        Family::Qwen2 => {
            if reader.flag("qkv_bias")? == Some(false) {
                return Err(reader.unsupported(
                    "qkv_bias",
                    &Value::Bool(false),
                    "only true, as in all of them",
                ));
            }
            (config.qkv_bias, config.o_bias) = (true, false);
        }
        Family::Qwen3 => config.qk_norm = true,
        Family::Qwen3Moe => {
            config.qk_norm = true;
            config.moe = Some(layers::read_experts(reader, config.num_layers)?);
        }
        Family::Gemma2 | Family::Gemma3 => gemma(reader, config)?,
    }
    Ok(())
}

fn gemma(reader: &Reader<'_>, config: &mut ModelConfig) -> Result<()> {
    config.norm_offset = true;
    config.sandwich_norms = true;
    config.embedding_scale = Some((config.hidden_size as f64).sqrt() as f32);
    let scalar = reader.positive("query_pre_attn_scalar")?.unwrap_or(256.0); // the class default
    config.attention_scale = scalar.powf(-0.5) as f32;
    config.logit_softcap = reader.positive("final_logit_softcapping")?.map(|cap| cap as f32);
    if reader.family == Family::Gemma2 {
        config.attention_softcap = reader.positive("attn_logit_softcapping")?.map(|cap| cap as f32);
    } else {
        config.qk_norm = true;
    }
    // Null turns a cap off; without the key Gemma 2 has its class defaults.
    if reader.family == Family::Gemma2 {
        let absent = |key: &str| !reader.map.contains_key(key);
        if absent("final_logit_softcapping") {
            config.logit_softcap = Some(30.0);
        }
        if absent("attn_logit_softcapping") {
            config.attention_softcap = Some(50.0);
        }
    }
    Ok(())
}

/// The sizes. Gemma 3's nested `text_config` leaves out what equals its class default.
fn sizes(reader: &Reader<'_>) -> Result<Dimensions> {
    let gemma3 = |default: usize| (reader.family == Family::Gemma3).then_some(default);
    let hidden_size = reader.count("hidden_size", gemma3(2304))?;
    let num_heads = reader.count("num_attention_heads", gemma3(8))?;
    let head_dim = match (reader.optional_count("head_dim")?, reader.family) {
        (Some(d), _) => d,
        (None, Family::Qwen3) => 128, // class defaults that are not hidden/heads
        (None, Family::Gemma2 | Family::Gemma3) => 256,
        (None, _) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        (None, _) => {
            let want = format!("a multiple of num_attention_heads {num_heads}, or an explicit head_dim");
            return Err(reader.bad("hidden_size", &Value::from(hidden_size), &want));
        }
    };
    // Null means one KV head per query head; so does an absent key where the class default is null.
    let kv_default = match reader.family {
        _ if reader.map.contains_key("num_key_value_heads") => Some(num_heads),
        Family::Llama | Family::Phi3 => Some(num_heads),
        _ => gemma3(4),
    };
    let eps_default = (reader.family == Family::Gemma3).then_some(1e-6);
    let eps = reader.positive("rms_norm_eps")?.or(eps_default);
    Ok(Dimensions {
        hidden_size,
        intermediate_size: reader.count("intermediate_size", gemma3(9216))?,
        num_layers: reader.list_length("num_hidden_layers", gemma3(26), MODEL_LAYERS_MAX)?,
        num_heads,
        num_kv_heads: reader.count("num_key_value_heads", kv_default)?,
        head_dim,
        vocab_size: reader.count("vocab_size", gemma3(262_208))?,
        max_position: reader.count("max_position_embeddings", gemma3(131_072))?,
        rms_norm_eps: eps.ok_or_else(|| reader.missing("rms_norm_eps"))? as f32,
    })
}

/// Gemma reads `hidden_activation` and ignores `hidden_act`; the others read `hidden_act`.
fn activation(reader: &Reader<'_>) -> Result<Activation> {
    let (key, default) = match reader.family {
        Family::Gemma2 | Family::Gemma3 => ("hidden_activation", Activation::GeluTanh),
        _ => ("hidden_act", Activation::Silu),
    };
    match reader.get(key) {
        None => Ok(default),
        Some(v) => match v.as_str() {
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            _ => Err(reader.unsupported(key, v, "only silu and gelu_pytorch_tanh")),
        },
    }
}
