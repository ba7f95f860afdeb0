//! Phi-3, Phi-3.5 and Phi-4 (`modeling_phi3.py`): Llama whose files hold q|k|v and gate|up fused.
//!
//! A blind cut of the fused rows would give query rows to the KV heads, so each projection is
//! sliced before a rank joins its own parts.

use super::{LLAMA, Layout, Stored};

/// Llama with fused tensors.
pub const LAYOUT: Layout =
    Layout { qkv: Stored::Fused("qkv_proj"), gate_up: Stored::Fused("gate_up_proj"), ..LLAMA };
