//! Layers. Each states the rules of its weights (`rule`, `*Rules`) beside the code that loads and
//! runs them, as nano-vllm `layers/linear.py` does.
//!
//! | layer | rule |
//! |---|---|
//! | [`linear::ColumnParallel`] | rows (outputs) cut; biases cut alike; no communication |
//! | [`linear::RowParallel`] | columns (inputs) cut; partial sums reduced, bias added once after |
//! | [`vocab::VocabParallel`] | vocabulary rows cut, padded; embedding reduced, logits gathered |
//! | [`attention::Attention`] | query heads cut, KV heads cut or replicated |
//! | [`feed_forward::FeedForward`] | gate and up column-parallel, down row-parallel, in the MLP and in each expert; router replicated |
//! | [`norm::Norm`] | replicated |

pub mod attention;
pub mod feed_forward;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod residual;
pub mod vocab;
