//! Keys of other models and of other tools: those that must be neutral, those that say nothing about the answers,
//! and what happens to keys that nobody knows.

use super::Result;
use super::reader::Reader;
use crate::config::Family;
use crate::config::unknown::{UNKNOWN_KEY_WANT, noted};
use serde_json::Value;

/// What a key of other models may say without changing the answers of ours. Null and absent are neutral everywhere.
enum Neutral {
    /// False, 0 or empty.
    Off,
    /// True, where false would be another model.
    On,
    /// A factor of 1.
    One,
    /// A count that only means something above 1.
    AtMostOne,
    /// One of these names for what our families do anyway.
    Named(&'static [&'static str]),
}

/// Keys of other models, and what they may say.
const NEUTRAL: &[(&str, Neutral)] = &[
    ("add_cross_attention", Neutral::Off),
    ("alibi", Neutral::Off),
    ("attention_chunk_size", Neutral::Off),
    ("attention_multiplier", Neutral::Off),
    ("attn_output_gate", Neutral::Off),
    ("attn_scale", Neutral::One),
    ("bias", Neutral::Off),
    ("clip_qkv", Neutral::Off),
    ("compression_config", Neutral::Off),
    ("dim_model_base", Neutral::One),
    ("embedding_multiplier", Neutral::One),
    ("first_k_dense_replace", Neutral::Off),
    ("full_attn_mod", Neutral::One),
    ("interleaved_rope", Neutral::Off),
    ("interpolate_factor", Neutral::One),
    ("is_causal", Neutral::On),
    ("is_encoder_decoder", Neutral::Off),
    ("kv_lora_rank", Neutral::Off),
    ("lm_head_bias", Neutral::Off),
    ("logit_scale", Neutral::One),
    ("logits_scaling", Neutral::One),
    ("moe_layer_freq", Neutral::One),
    ("n_group", Neutral::AtMostOne),
    ("n_routed_experts", Neutral::Off),
    ("n_shared_experts", Neutral::Off),
    ("no_rope_layer_interval", Neutral::Off),
    ("no_rope_layers", Neutral::Off),
    ("norm_type", Neutral::Named(&["rms_norm", "rmsnorm", "rms"])),
    ("num_kv_shared_layers", Neutral::Off),
    ("num_shared_experts", Neutral::Off),
    ("parallel_attn", Neutral::Off),
    ("parallel_residual", Neutral::Off),
    ("position_embedding_type", Neutral::Named(&["rope", "rotary"])),
    ("pruned_heads", Neutral::Off),
    ("q_lora_rank", Neutral::Off),
    ("qk_layernorm", Neutral::Off),
    ("quantization", Neutral::Off),
    ("residual_multiplier", Neutral::One),
    ("rope_interleaved", Neutral::Off),
    ("rope_ratio", Neutral::One),
    ("rotary_pct", Neutral::One),
    ("routed_scaling_factor", Neutral::One),
    ("scale_depth", Neutral::One),
    ("scale_emb", Neutral::One),
    ("scale_embeddings", Neutral::Off),
    ("scoring_func", Neutral::Named(&["softmax"])),
    ("shared_expert_intermediate_size", Neutral::Off),
    ("topk_group", Neutral::AtMostOne),
    ("topk_method", Neutral::Named(&["greedy"])),
    ("use_bias", Neutral::Off),
    ("use_bidirectional_attention", Neutral::Off),
    ("use_mrope", Neutral::Off),
    ("use_parallel_residual", Neutral::Off),
    ("use_qk_norm", Neutral::Off),
];

/// Keys that only some families understand; for the others they must be [`Neutral::Off`].
const ONLY_FOR: &[(&str, &[Family])] = &[
    ("attention_bias", &[Family::Llama, Family::Qwen3, Family::Qwen3Moe, Family::Gemma2, Family::Gemma3]),
    ("mlp_bias", &[Family::Llama]),
    ("qkv_bias", &[Family::Qwen2]),
    ("num_experts", &[Family::Qwen3Moe]),
    ("num_local_experts", &[Family::Qwen3Moe]),
    ("num_experts_per_tok", &[Family::Qwen3Moe]),
    ("query_pre_attn_scalar", &[Family::Gemma2, Family::Gemma3]),
    // Gemma3TextConfig has the key, but its attention does not use it.
    ("attn_logit_softcapping", &[Family::Gemma2]),
    ("final_logit_softcapping", &[Family::Gemma2, Family::Gemma3]),
    ("rope_local_base_freq", &[Family::Gemma3]),
    ("sliding_window_pattern", &[Family::Gemma3]),
];

/// Keys that sound as if they changed the answers of a text model and do not, and those that are read by other means or
/// under conditions only. Names without a mathematical word need an entry only to pass in silence.
const WITHOUT_EFFECT: &[&str] = &[
    "architectures",
    "attn_implementation",
    "attention_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "boi_token_index",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_sparse_step",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eoi_token_index",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "image_token_index",
    "is_decoder",
    "is_llama_config",
    "layer_norm_eps", // every family here has an rms_norm_eps of its own
    "layer_types",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "max_window_layers",
    "min_length",
    "mlp_only_layers",
    "mm_tokens_per_image",
    "model_type",
    "moe_intermediate_size",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "norm_topk_prob",
    "num_beam_groups",
    "num_beams",
    "num_key_value_heads",
    "num_logits_to_keep",
    "num_nextn_predict_layers", // further heads that predict further tokens
    "num_return_sequences",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sep_token_id",
    "sliding_window",
    "sliding_window_pattern",
    "sliding_window_size", // beside `sliding_window` in early Gemma 2 files
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_word_embeddings",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_memory_efficient_attention",
    "use_sliding_window",
    "vision_config",
];

impl Neutral {
    fn holds(&self, value: &Value) -> bool {
        match self {
            Self::Off => is_off(value),
            Self::On => value == &Value::Bool(true),
            Self::One => value.as_f64() == Some(1.0),
            Self::AtMostOne => is_off(value) || value.as_u64() == Some(1),
            Self::Named(names) => {
                value.as_str().is_some_and(|text| names.iter().any(|name| name.eq_ignore_ascii_case(text)))
            }
        }
    }

    fn want(&self) -> String {
        match self {
            Self::Off => "only absent, null, false or 0".into(),
            Self::On => "only absent, null or true".into(),
            Self::One => "only absent, null or 1".into(),
            Self::AtMostOne => "only absent, null, 0 or 1".into(),
            Self::Named(names) => format!("only absent, null or {}", names.join(", ")),
        }
    }
}

/// False, 0 or empty: what a key says that switches nothing on.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Refuses keys of other models that would change the answers.
pub(super) fn refuse(reader: &Reader<'_>) -> Result<()> {
    let foreign = ONLY_FOR.iter().filter(|(_, families)| !families.contains(&reader.family));
    let checks = NEUTRAL.iter().map(|(key, neutral)| (*key, neutral));
    for (key, neutral) in checks.chain(foreign.map(|(key, _)| (*key, &Neutral::Off))) {
        if let Some(v) = reader.get(key).filter(|v| !neutral.holds(v)) {
            return Err(reader.unsupported(key, v, &neutral.want()));
        }
    }
    Ok(())
}

/// The keys that were neither asked for nor are known to be without effect, in order; call it when everything is read.
///
/// One that is switched on and whose name speaks of the mathematics is refused, the others are for a warning.
pub(super) fn unread(reader: &Reader<'_>) -> Result<Vec<String>> {
    let asked = reader.asked.borrow();
    let is_known = |key: &str| asked.contains(key) || WITHOUT_EFFECT.contains(&key) || key.starts_with('_');
    let unknown = reader.map.iter().filter(|(key, value)| !value.is_null() && !is_known(key));
    match noted(unknown.map(|(key, value)| (key.as_str(), !is_off(value)))) {
        Ok(noted) => Ok(noted.into_iter().map(str::to_owned).collect()),
        Err(key) => Err(reader.unsupported(key, &reader.map[key], UNKNOWN_KEY_WANT)),
    }
}
