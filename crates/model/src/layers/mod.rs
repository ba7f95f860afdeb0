//! Layers, each with its shard rule beside it (as nano-vllm `layers/linear.py` does).
//!
//! | layer | rule |
//! |---|---|
//! | [`linear::ColumnParallel`] | rows (outputs) cut; biases cut alike; no communication |
//! | [`linear::RowParallel`] | columns (inputs) cut; partial sums reduced, bias added once after |
//! | [`vocab::VocabParallel`] | vocabulary rows cut, padded; embedding reduced, logits gathered |
//! | [`attention::Attention`] | query heads cut, KV heads cut or replicated |
//! | [`mlp::GatedMlp`] | gate and up column-parallel, down row-parallel |
//! | norms | replicated |

pub mod attention;
pub mod linear;
pub mod mlp;
pub mod vocab;
