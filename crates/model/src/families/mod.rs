//! How each family's files name and join their tensors; everything else that sets a family apart is
//! a fact of [`ModelConfig`].
//!
//! Llama, Mistral, Qwen2 and Qwen3 are [`LLAMA`] with [`PRE_NORMS`]; a family with a file here says
//! only how it differs. To add one see `docs/adding-a-model.md`.

pub mod gemma;
pub mod phi3;
pub mod qwen3_moe;

use lockstep_core::shard::{Piece, RowCut};
use lockstep_core::{Family, ModelConfig};

/// Names inside one decoder layer, without its prefix.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The query, key and value projections, under `self_attn.`.
    pub qkv: Stored,
    /// The gate and up projections of a dense MLP, under `mlp.`.
    pub gate_up: Stored,
    /// The experts, where the family has any, under `mlp.`.
    pub experts: Option<ExpertNames>,
}

/// Projections that are joined by rows on a rank, as the files hold them.
#[derive(Clone, Copy, Debug)]
pub enum Stored {
    /// One tensor each, in row order.
    Apart(&'static [&'static str]),
    /// One tensor with all of them, one below the other.
    Fused(&'static str),
}

/// Names of a layer's norms.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorms {
    /// Before attention.
    pub input: &'static str,
    /// On the attention output, before it joins the residual stream.
    pub attention_output: Option<&'static str>,
    /// Before the MLP.
    pub mlp_input: &'static str,
    /// On the MLP output, before it joins the residual stream.
    pub mlp_output: Option<&'static str>,
}

/// Names of a mixture of experts; expert `e` lies under `{experts}.{e}` with Llama's names.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNames {
    /// The matrix that chooses experts.
    pub router: &'static str,
    /// The list of experts.
    pub experts: &'static str,
}

/// The layout of Llama, Mistral, Qwen2 and Qwen3.
pub const LLAMA: Layout = Layout {
    qkv: Stored::Apart(&["q_proj", "k_proj", "v_proj"]),
    gate_up: Stored::Apart(&["gate_proj", "up_proj"]),
    experts: None,
};

/// The norms of every family without sandwich norms.
pub const PRE_NORMS: LayerNorms = LayerNorms {
    input: "input_layernorm",
    attention_output: None,
    mlp_input: "post_attention_layernorm",
    mlp_output: None,
};

/// The layout of the model's family.
pub fn layout(config: &ModelConfig) -> &'static Layout {
    match config.family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => &LLAMA,
        Family::Gemma2 | Family::Gemma3 => &LLAMA,
        Family::Qwen3Moe => &qwen3_moe::LAYOUT,
        Family::Phi3 => &phi3::LAYOUT,
    }
}

/// The norms of the model's layers.
pub fn norms(config: &ModelConfig) -> &'static LayerNorms {
    if config.sandwich_norms { &gemma::SANDWICH_NORMS } else { &PRE_NORMS }
}

impl Stored {
    /// The pieces `{prefix}.{name}.{suffix}` of projections given as (rows, cut), in row order.
    pub fn pieces(self, prefix: &str, suffix: &str, projections: &[(usize, RowCut)]) -> Vec<Piece> {
        match self {
            Stored::Apart(names) => {
                assert_eq!(names.len(), projections.len(), "invariant: a layout names every projection");
                let piece = |(name, (rows, cut)): (&&str, &(usize, RowCut))| {
                    Piece::whole(format!("{prefix}.{name}.{suffix}"), *rows, *cut)
                };
                names.iter().zip(projections).map(piece).collect()
            }
            Stored::Fused(name) => {
                let tensor_rows = projections.iter().map(|(rows, _)| rows).sum();
                let mut start = 0;
                let piece = |(rows, cut): &(usize, RowCut)| {
                    let first = start;
                    start += rows;
                    let tensor = format!("{prefix}.{name}.{suffix}");
                    Piece { tensor, tensor_rows, rows: first..start, cut: *cut }
                };
                projections.iter().map(piece).collect()
            }
        }
    }
}
