//! Gemma 2 and 3 text (`modeling_gemma2.py`, `modeling_gemma3.py`): norms on both sides of attention
//! and MLP. `post_attention_layernorm` is therefore not what it is in Llama.

use super::LayerNorms;

/// The norms of a layer.
pub const SANDWICH_NORMS: LayerNorms = LayerNorms {
    input: "input_layernorm",
    attention_output: Some("post_attention_layernorm"),
    mlp_input: "pre_feedforward_layernorm",
    mlp_output: Some("post_feedforward_layernorm"),
};
