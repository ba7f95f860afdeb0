//! Qwen3-MoE (`modeling_qwen3_moe.py`): Qwen3 whose sparse layers have a router, called `gate`, and
//! a list of experts in place of the MLP.

use super::{ExpertNames, LLAMA, Layout};

/// Llama with experts.
pub const LAYOUT: Layout =
    Layout { experts: Some(ExpertNames { router: "gate", experts: "experts" }), ..LLAMA };
