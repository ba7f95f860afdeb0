//! What a weight matrix is, before any device packs it.

use lockstep_core::WeightType;

/// The local part `[out_features, in_features]` of a weight matrix, and how its sum is ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Output rows on this rank (fused parts concatenated).
    pub out_features: usize,
    /// Inputs on this rank.
    pub in_features: usize,
    /// Form of the elements; the same at every tp size. Leaves of codes are whole groups.
    pub weight_type: WeightType,
    /// Boundaries of the leaves of the input sum, `n + 1` ascending values from 0 to
    /// `in_features` with `n` a power of two (`lockstep_core::shard::leaf_bounds`). Each leaf is
    /// summed in ascending order by fused multiply-add from 0, leaves are added as a binary tree.
    /// A column-parallel matrix has one leaf.
    pub leaves: Vec<usize>,
}

impl LinearSpec {
    /// A matrix whose whole input is one leaf (column- and vocab-parallel).
    pub fn single_leaf(out_features: usize, in_features: usize, weight_type: impl Into<WeightType>) -> Self {
        Self { out_features, in_features, weight_type: weight_type.into(), leaves: vec![0, in_features] }
    }
}
