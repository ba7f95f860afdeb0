//! GGUF tensor names as Hugging Face names.
//!
//! Follows llama.cpp `gguf-py/gguf/tensor_mapping.py` for the dense llama-like families.

/// Names outside the layers.
const GLOBAL: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names inside layer `i`: `blk.i.<left>` is `model.layers.i.<right>`.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The Hugging Face name of a GGUF tensor; unknown names stay as they are.
pub(crate) fn hugging_face(name: &str) -> String {
    known(name).unwrap_or_else(|| name.to_owned())
}

fn known(name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
    if let Some((_, hf)) = GLOBAL.iter().find(|(gguf, _)| *gguf == stem) {
        return Some(format!("{hf}.{suffix}"));
    }
    let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
    let index: usize = layer.parse().ok()?;
    let (_, hf) = LAYER.iter().find(|(gguf, _)| *gguf == part)?;
    Some(format!("model.layers.{index}.{hf}.{suffix}"))
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
        for (gguf, hf) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
            ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
            ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
            ("blk.x.ffn_norm.weight", "blk.x.ffn_norm.weight"),
            ("blk.3.ffn_gate_inp.weight", "blk.3.ffn_gate_inp.weight"),
            ("rope_freqs.weight", "rope_freqs.weight"),
        ] {
            assert_eq!(hugging_face(gguf), hf);
        }
    }
}
