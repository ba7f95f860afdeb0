//! A mixture of experts, before any device packs it.

use crate::Backend;
use lockstep_core::config::Activation;

/// The weights of one expert on this rank.
pub struct ExpertWeights<B: Backend + ?Sized> {
    /// gate and up fused, `[2 * local_inner, hidden]`, one leaf.
    pub gate_up: B::Linear,
    /// `[hidden, local_inner]`, with the leaves of a row-parallel matrix.
    pub down: B::Linear,
}

/// Sizes of the workspace of a mixture, see [`Backend::moe_workspace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeShape {
    /// Largest number of rows of a step.
    pub rows_max: usize,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts that a token takes, at least 1.
    pub experts_per_token: usize,
    /// Width of an expert's inner activation on this rank.
    pub local_inner: usize,
    /// Width of its input and output.
    pub hidden: usize,
}

/// Arguments of [`Backend::moe`].
pub struct MoeArgs<'a, B: Backend + ?Sized> {
    /// Router logits `[rows, num_experts]`, the same on all ranks.
    pub router_logits: &'a B::Tensor,
    /// Experts that a token takes; what the workspace was made for.
    pub experts_per_token: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Activation of the gate.
    pub activation: Activation,
}
