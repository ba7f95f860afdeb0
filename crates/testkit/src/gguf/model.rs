//! A tiny model as a GGUF file, the way llama.cpp's converters write one.
//!
//! Written from the conventions of those converters, family by family, so that the engine's reader
//! has something independent to agree with: q and k rows of Llama in pairs, 1 added to Gemma's
//! norms, experts of a layer in one tensor, rope divisors as tensors. All tensors are f32.

use super::{GgmlType, GgufWriter};
use crate::spec::{ModelSpec, RMS_NORM_EPS, RopeSpec, SpecFamily};
use crate::tensor::{Tensor, Weights};
use std::f64::consts::PI;

/// Pieces of Hugging Face names and what stands for them, longest first.
const NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    ("input_layernorm.", "attn_norm."),
    ("pre_feedforward_layernorm.", "ffn_norm."),
    ("post_feedforward_layernorm.", "post_ffw_norm."),
    ("self_attn.q_norm.", "attn_q_norm."),
    ("self_attn.k_norm.", "attn_k_norm."),
    ("self_attn.q_proj.", "attn_q."),
    ("self_attn.k_proj.", "attn_k."),
    ("self_attn.v_proj.", "attn_v."),
    ("self_attn.qkv_proj.", "attn_qkv."),
    ("self_attn.o_proj.", "attn_output."),
    ("mlp.gate_up_proj.", "ffn_up."),
    ("mlp.gate_proj.", "ffn_gate."),
    ("mlp.up_proj.", "ffn_up."),
    ("mlp.down_proj.", "ffn_down."),
    ("mlp.gate.", "ffn_gate_inp."),
];

/// The file of a model without its tokenizer.
///
/// Panics for a rope or window that the format cannot express for the family: a window of Mistral,
/// Qwen2 or Qwen3, and dynamic rope.
pub fn from_spec(spec: &ModelSpec, weights: &Weights) -> GgufWriter {
    let mut file = GgufWriter::new();
    write_keys(spec, &mut file);
    write_rope(spec, &mut file);
    for (name, tensor) in weights.iter().filter(|(name, _)| !name.contains(".experts.")) {
        let stored = stored(spec, name, tensor);
        file.tensor(&gguf_name(spec, name), GgmlType::F32, &tensor.shape, bytes(&stored));
    }
    for layer in 0..spec.layers {
        let Some(experts) = spec.experts_of(layer) else { continue };
        for part in ["gate", "up", "down"] {
            let matrix =
                |e: usize| &weights[&format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight")];
            let shape = [&[experts.count], matrix(0).shape.as_slice()].concat();
            let data: Vec<u8> = (0..experts.count).flat_map(|e| bytes(&matrix(e).data)).collect();
            file.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), GgmlType::F32, &shape, data);
        }
    }
    file
}

/// The value of `general.architecture`.
fn architecture(spec: &ModelSpec) -> &'static str {
    match spec.family {
        SpecFamily::Llama | SpecFamily::Mistral => "llama",
        SpecFamily::Qwen2 => "qwen2",
        SpecFamily::Qwen3 => "qwen3",
        SpecFamily::Qwen3Moe => "qwen3moe",
        SpecFamily::Phi3 => "phi3",
        SpecFamily::Gemma2 => "gemma2",
        SpecFamily::Gemma3 => "gemma3",
    }
}

fn write_keys(spec: &ModelSpec, file: &mut GgufWriter) {
    let arch = architecture(spec);
    let windowed = matches!(spec.family, SpecFamily::Phi3 | SpecFamily::Gemma2 | SpecFamily::Gemma3);
    assert!(windowed || spec.window.is_none(), "{arch} files have no window");
    file.meta("general.architecture", arch);
    for (key, value) in [
        ("block_count", spec.layers),
        ("context_length", spec.max_position),
        ("embedding_length", spec.hidden),
        ("feed_forward_length", spec.intermediate),
        ("attention.head_count", spec.heads),
        ("attention.head_count_kv", spec.kv_heads),
        ("attention.key_length", spec.head_dim),
        ("attention.value_length", spec.head_dim),
        ("rope.dimension_count", spec.rotary_dim()),
        ("vocab_size", spec.vocab),
    ] {
        file.meta(&format!("{arch}.{key}"), value as u32);
    }
    file.meta(&format!("{arch}.attention.layer_norm_rms_epsilon"), RMS_NORM_EPS as f32);
    if windowed {
        file.meta(&format!("{arch}.attention.sliding_window"), spec.window.unwrap_or(0) as u32);
    }
    if spec.family == SpecFamily::Gemma3 {
        file.meta(&format!("{arch}.attention.sliding_window_pattern"), spec.window_start as u32);
        file.meta(&format!("{arch}.rope.freq_base_swa"), spec.local_theta as f32);
    }
    if spec.is_gemma() {
        file.meta(&format!("{arch}.attention.scale"), spec.query_scalar.powf(-0.5) as f32);
    }
    for (key, cap) in
        [("attn_logit_softcapping", spec.score_cap), ("final_logit_softcapping", spec.logit_cap)]
    {
        if let Some(cap) = cap {
            file.meta(&format!("{arch}.{key}"), cap as f32);
        }
    }
    if let Some(experts) = spec.experts {
        file.meta(&format!("{arch}.expert_count"), experts.count as u32);
        file.meta(&format!("{arch}.expert_used_count"), experts.per_token as u32);
        file.meta(&format!("{arch}.expert_feed_forward_length"), experts.inner as u32);
        file.meta(&format!("{arch}.expert_weights_norm"), experts.normalised);
    }
    file.meta("tokenizer.ggml.bos_token_id", 256_u32).meta("tokenizer.ggml.eos_token_id", 257_u32);
}

fn write_rope(spec: &ModelSpec, file: &mut GgufWriter) {
    let arch = architecture(spec);
    let key = |name: &str| format!("{arch}.rope.{name}");
    file.meta(&key("freq_base"), spec.rope_theta as f32);
    let divisors =
        |values: &[f64]| values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect::<Vec<u8>>();
    match spec.rope {
        RopeSpec::Default => {}
        RopeSpec::Dynamic(_) => panic!("GGUF has no dynamic rope"),
        RopeSpec::Linear(factor) => {
            file.meta(&key("scaling.type"), "linear").meta(&key("scaling.factor"), factor as f32);
        }
        RopeSpec::Yarn(factor, original, attention_factor) => {
            file.meta(&key("scaling.type"), "yarn").meta(&key("scaling.factor"), factor as f32);
            file.meta(&key("scaling.original_context_length"), original as u32);
            // The reader multiplies YaRN's own factor in.
            if let Some(wanted) = attention_factor {
                let own = 0.1 * factor.ln() + 1.0;
                file.meta(&key("scaling.attn_factor"), (wanted / own) as f32);
            }
        }
        RopeSpec::Llama3(factor, low, high, original) => {
            let values = llama3_divisors(spec, factor, (low, high, original as f64));
            file.tensor("rope_freqs.weight", GgmlType::F32, &[values.len()], divisors(&values));
        }
        RopeSpec::LongRope(short, long, original) => {
            let scale = spec.max_position as f64 / original as f64;
            let attention = (1.0 + scale.ln() / (original as f64).ln()).sqrt();
            file.meta(&key("scaling.original_context_length"), original as u32);
            file.meta(&key("scaling.attn_factor"), attention as f32);
            file.tensor("rope_factors_short.weight", GgmlType::F32, &[short.len()], divisors(short));
            file.tensor("rope_factors_long.weight", GgmlType::F32, &[long.len()], divisors(long));
        }
    }
}

/// By what Llama 3.1's bands divide each frequency; `bands` is (low, high, original context).
fn llama3_divisors(spec: &ModelSpec, factor: f64, (low, high, original): (f64, f64, f64)) -> Vec<f64> {
    (0..spec.head_dim / 2)
        .map(|i| {
            let wavelength = 2.0 * PI * spec.rope_theta.powf(2.0 * i as f64 / spec.head_dim as f64);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        })
        .collect()
}

fn gguf_name(spec: &ModelSpec, name: &str) -> String {
    // The norm after attention is Llama's second and Gemma's third.
    let second = if spec.is_gemma() { "post_attention_norm." } else { "ffn_norm." };
    let name = name.replace("post_attention_layernorm.", second);
    NAMES.iter().fold(name, |name, (hugging_face, gguf)| name.replace(hugging_face, gguf))
}

/// The elements as the converter changes them.
fn stored(spec: &ModelSpec, name: &str, tensor: &Tensor) -> Vec<f32> {
    let is_norm = name.ends_with("norm.weight");
    if spec.is_gemma() && is_norm {
        return tensor.data.iter().map(|v| v + 1.0).collect();
    }
    let in_pairs = [".q_proj.", ".k_proj."].iter().any(|part| name.contains(part));
    if architecture(spec) != "llama" || !in_pairs {
        return tensor.data.clone();
    }
    let row_len = tensor.data.len() / tensor.shape[0];
    let half = spec.head_dim / 2;
    let mut stored = Vec::new();
    for head in tensor.data.chunks(spec.head_dim * row_len) {
        for pair in 0..half {
            for row in [pair, pair + half] {
                stored.extend(&head[row * row_len..(row + 1) * row_len]);
            }
        }
    }
    stored
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_rows_come_in_pairs_and_gemma_norms_larger_by_one() {
        let spec = ModelSpec { head_dim: 4, ..ModelSpec::default() };
        let rows = Tensor { shape: vec![8], data: (0..8).map(|i| i as f32).collect() };
        let name = "model.layers.0.self_attn.q_proj.bias";
        assert_eq!(stored(&spec, name, &rows), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        let gemma = ModelSpec { family: SpecFamily::Gemma3, ..spec };
        assert_eq!(stored(&gemma, name, &rows), rows.data);
        assert_eq!(stored(&gemma, "model.norm.weight", &rows)[7], 8.0);
        assert_eq!(
            gguf_name(&gemma, "model.layers.3.post_attention_layernorm.weight"),
            "blk.3.post_attention_norm.weight"
        );
    }
}
