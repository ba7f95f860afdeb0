//! GGUF tensor names as Hugging Face names.
//!
//! Follows llama.cpp `gguf-py/gguf/tensor_mapping.py`. The same GGUF name means different things in
//! different families: `ffn_norm` stands after attention in Llama and before the MLP in Gemma,
//! `ffn_up` holds gate and up in Phi-3.

use lockstep_core::Family;

/// Names outside the layers.
const GLOBAL: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names inside layer `i`: `blk.i.<left>` is `model.layers.i.<right>`.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];
/// Names of Gemma's layers that mean something else or exist only there.
const GEMMA_LAYER: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
const PHI3_LAYER: &[(&str, &str)] = &[("ffn_up", "mlp.gate_up_proj")];
/// Tensors with a leading dimension of experts.
const EXPERTS: &[(&str, &str)] =
    &[("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

/// The Hugging Face name of a GGUF tensor; unknown names stay as they are.
pub(crate) fn hugging_face(family: Family, name: &str) -> String {
    known(family, name).unwrap_or_else(|| name.to_owned())
}

fn known(family: Family, name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
    if let Some(hf) = find(GLOBAL, stem) {
        return Some(format!("{hf}.{suffix}"));
    }
    let (layer, part) = layer_and_part(stem)?;
    let own: &[_] = match family {
        Family::Gemma2 | Family::Gemma3 => GEMMA_LAYER,
        Family::Phi3 => PHI3_LAYER,
        _ => &[],
    };
    let hf = find(own, part).or_else(|| find(LAYER, part))?;
    Some(format!("model.layers.{layer}.{hf}.{suffix}"))
}

/// Layer and Hugging Face projection of a tensor that holds all experts of a layer.
pub(crate) fn experts(name: &str) -> Option<(usize, &'static str)> {
    let (layer, part) = layer_and_part(name.strip_suffix(".weight")?)?;
    Some((layer, find(EXPERTS, part)?))
}

/// The Hugging Face name of one expert's matrix.
pub(crate) fn expert(layer: usize, expert: usize, projection: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
}

fn layer_and_part(stem: &str) -> Option<(usize, &str)> {
    let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

fn find(names: &[(&str, &'static str)], wanted: &str) -> Option<&'static str> {
    names.iter().find(|(gguf, _)| *gguf == wanted).map(|(_, hf)| *hf)
}

/// Whether a tensor with this Hugging Face name is a query or key projection, whose rows llama.cpp
/// reorders for the `llama` architecture.
pub(crate) fn is_query_or_key(name: &str) -> bool {
    name.contains(".self_attn.q_proj.") || name.contains(".self_attn.k_proj.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_map_and_others_stay() {
        for (family, gguf, hf) in [
            (Family::Llama, "token_embd.weight", "model.embed_tokens.weight"),
            (Family::Llama, "output.weight", "lm_head.weight"),
            (Family::Llama, "output_norm.weight", "model.norm.weight"),
            (Family::Qwen2, "blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
            (Family::Qwen3, "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
            (Family::Llama, "blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            (Family::Gemma3, "blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
            (
                Family::Gemma2,
                "blk.3.post_attention_norm.weight",
                "model.layers.3.post_attention_layernorm.weight",
            ),
            (
                Family::Gemma3,
                "blk.3.post_ffw_norm.weight",
                "model.layers.3.post_feedforward_layernorm.weight",
            ),
            (Family::Llama, "blk.3.post_ffw_norm.weight", "blk.3.post_ffw_norm.weight"),
            (Family::Phi3, "blk.1.ffn_up.weight", "model.layers.1.mlp.gate_up_proj.weight"),
            (Family::Phi3, "blk.1.attn_qkv.weight", "model.layers.1.self_attn.qkv_proj.weight"),
            (Family::Qwen3Moe, "blk.3.ffn_gate_inp.weight", "model.layers.3.mlp.gate.weight"),
            (Family::Qwen3, "blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
            (Family::Llama, "blk.x.ffn_norm.weight", "blk.x.ffn_norm.weight"),
            (Family::Llama, "rope_freqs.weight", "rope_freqs.weight"),
        ] {
            assert_eq!(hugging_face(family, gguf), hf);
        }
    }

    #[test]
    fn tensors_of_experts_are_known() {
        assert_eq!(experts("blk.7.ffn_down_exps.weight"), Some((7, "down_proj")));
        assert_eq!(experts("blk.7.ffn_down.weight"), None);
        assert_eq!(expert(7, 3, "up_proj"), "model.layers.7.mlp.experts.3.up_proj.weight");
    }
}
