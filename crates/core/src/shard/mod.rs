//! Who holds what: the arithmetic of cutting tensors over a TP group, and [`rule`], in whose terms
//! each layer states how its weights are cut.
//!
//! Every rule of `docs/sharding.md` is one function here; layers, loader, planner and memory
//! accounting all call it. Follows Megatron-LM (Shoeybi et al. 2019, §3) for column and row
//! parallelism and SGLang for KV-head replication.

pub mod rule;

pub use rule::{Columns, Group, LocalMatrix, Piece, RowCut, WeightRule};

use crate::config::{ConfigError, ModelConfig};
use crate::limits::{K_LEAVES, TP_SIZE_MAX};
use std::ops::Range;

/// The attention heads of one rank; all ranges are global head indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadShard {
    /// Query heads of this rank.
    pub query_heads: Range<usize>,
    /// KV heads of this rank; a head held by several ranks appears on each.
    pub kv_heads: Range<usize>,
    /// How many ranks hold each KV head (1 when split).
    pub kv_replicas: usize,
}

impl HeadShard {
    /// The heads of `tp_rank`. Panics when the layout is illegal; see [`check_tp_size`].
    pub fn new(num_heads: usize, num_kv_heads: usize, tp_rank: usize, tp_size: usize) -> Self {
        assert!(tp_rank < tp_size && num_heads.is_multiple_of(tp_size), "checked by check_tp_size");
        let local = num_heads / tp_size;
        Self {
            query_heads: tp_rank * local..(tp_rank + 1) * local,
            kv_heads: Self::kv_heads(num_kv_heads, tp_rank, tp_size),
            kv_replicas: (tp_size / num_kv_heads).max(1),
        }
    }

    /// The KV heads of `tp_rank`: split, or one of them replicated. Panics when the layout is illegal.
    pub fn kv_heads(num_kv_heads: usize, tp_rank: usize, tp_size: usize) -> Range<usize> {
        if num_kv_heads.is_multiple_of(tp_size) {
            return even(num_kv_heads, tp_rank, tp_size);
        }
        assert!(tp_size.is_multiple_of(num_kv_heads), "checked by check_tp_size");
        let head = tp_rank * num_kv_heads / tp_size;
        head..head + 1
    }

    /// Query heads that share one KV head on this rank (grouped-query attention).
    pub fn group_size(&self) -> usize {
        self.query_heads.len() / self.kv_heads.len()
    }
}

/// The vocabulary rows of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabShard {
    /// Global rows `[start, end)` of the padded vocabulary; `len()` is equal on all ranks.
    pub padded: Range<usize>,
    /// The part of `padded` that exists in the model; possibly empty on the last ranks.
    pub real: Range<usize>,
}

impl VocabShard {
    /// Rows of `tp_rank` when the vocabulary is padded up to a multiple of `tp_size`.
    pub fn new(vocab_size: usize, tp_rank: usize, tp_size: usize) -> Self {
        let local = vocab_size.div_ceil(tp_size);
        let padded = tp_rank * local..(tp_rank + 1) * local;
        let real = padded.start.min(vocab_size)..padded.end.min(vocab_size);
        Self { padded, real }
    }
}

/// `0..len` cut into `tp_size` equal parts. Panics unless `tp_size` divides `len`.
pub fn even(len: usize, tp_rank: usize, tp_size: usize) -> Range<usize> {
    assert!(len.is_multiple_of(tp_size), "checked by check_tp_size");
    let local = len / tp_size;
    tp_rank * local..(tp_rank + 1) * local
}

/// Boundaries of this rank's leaves of a row-parallel sum, relative to its own first input.
///
/// The whole input of `k` elements has [`K_LEAVES`] leaves, leaf `b` starting at `b*k/8` rounded
/// down to `block`. A rank owns a subtree, so for tp sizes 1, 2, 4 and 8 the sum
/// `((l0+l1)+(l2+l3))+((l4+l5)+(l6+l7))` is the same sequence of roundings at every size. For other
/// tp sizes a rank has a single leaf.
///
/// Returns `n + 1` ascending boundaries for `n` leaves (`n` a power of two), the last equal to
/// the rank's local input length.
pub fn leaf_bounds(k: usize, block: usize, tp_rank: usize, tp_size: usize) -> Vec<usize> {
    if !K_LEAVES.is_multiple_of(tp_size) {
        return vec![0, even(k, tp_rank, tp_size).len()];
    }
    let start = |leaf: usize| if leaf == K_LEAVES { k } else { leaf * k / K_LEAVES / block * block };
    let local = K_LEAVES / tp_size;
    let first = start(tp_rank * local);
    (0..=local).map(|i| start(tp_rank * local + i) - first).collect()
}

/// Whether `tp_size` (as a user typed it) can cut this model; the error names what does not divide
/// and what would work.
pub fn check_tp_size(config: &ModelConfig, tp_size: i64) -> Result<(), ConfigError> {
    let Some(reason) = why_illegal(config, usize::try_from(tp_size).unwrap_or(0)) else { return Ok(()) };
    let legal: Vec<String> =
        (1..=TP_SIZE_MAX).filter(|&t| why_illegal(config, t).is_none()).map(|t| t.to_string()).collect();
    Err(ConfigError::IllegalTpSize { tp_size, reason, legal: legal.join(", ") })
}

/// The tp sizes of this model that owe each other equal bits: those among 1, 2, 4 and 8 that can cut it.
pub fn exact_tp_sizes(config: &ModelConfig) -> Vec<usize> {
    let sizes = (0..=K_LEAVES.ilog2()).map(|level| 1 << level);
    sizes.filter(|&size| why_illegal(config, size).is_none()).collect()
}

/// The first rule that `tp_size` breaks, in words.
fn why_illegal(config: &ModelConfig, tp_size: usize) -> Option<String> {
    let (heads, kv) = (config.num_heads, config.num_kv_heads);
    if tp_size == 0 || tp_size > TP_SIZE_MAX {
        return Some(format!("is outside 1..={TP_SIZE_MAX}"));
    }
    if !heads.is_multiple_of(tp_size) {
        return Some(format!("does not divide the model's {heads} query heads ({kv} KV heads)"));
    }
    if !kv.is_multiple_of(tp_size) && !tp_size.is_multiple_of(kv) {
        return Some(format!(
            "neither divides the model's {kv} KV heads nor is a multiple of them ({heads} query heads)"
        ));
    }
    let dense = (0..config.num_layers).any(|layer| config.moe_of(layer).is_none());
    if dense && !config.intermediate_size.is_multiple_of(tp_size) {
        return Some(format!("does not divide the model's intermediate_size {}", config.intermediate_size));
    }
    let expert_width = config.moe.as_ref().map(|moe| moe.expert_intermediate_size);
    let uneven = expert_width.filter(|width| !width.is_multiple_of(tp_size));
    uneven.map(|width| format!("does not divide the inner width {width} of the model's experts"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_heads_split_or_replicate() {
        let h = HeadShard::new(8, 2, 3, 4);
        assert_eq!((h.query_heads, h.kv_heads, h.kv_replicas), (6..8, 1..2, 2));
        let h = HeadShard::new(8, 2, 1, 4);
        assert_eq!((h.query_heads.clone(), h.kv_heads.clone(), h.group_size()), (2..4, 0..1, 2));
        let h = HeadShard::new(40, 8, 1, 2);
        assert_eq!((h.query_heads, h.kv_heads, h.kv_replicas), (20..40, 4..8, 1));
    }

    #[test]
    fn vocabulary_is_padded_and_the_last_rank_may_hold_less() {
        let v = VocabShard::new(321, 1, 2);
        assert_eq!((v.padded, v.real), (161..322, 161..321));
        let v = VocabShard::new(5, 7, 8);
        assert_eq!((v.padded, v.real), (7..8, 5..5));
    }

    #[test]
    fn leaves_of_all_ranks_join_to_the_leaves_of_one() {
        for (k, block) in [(96, 1), (100, 1), (4864, 32), (4864, 256), (896, 32), (8, 1), (24, 1)] {
            let whole = leaf_bounds(k, block, 0, 1);
            assert_eq!(whole.len(), K_LEAVES + 1);
            for tp in [2, 4, 8] {
                if k % tp != 0 || (k / tp) % block != 0 {
                    continue;
                }
                let mut joined = vec![0];
                for rank in 0..tp {
                    let base = *joined.last().unwrap();
                    assert_eq!(base, even(k, rank, tp).start);
                    joined.extend(leaf_bounds(k, block, rank, tp)[1..].iter().map(|b| base + b));
                }
                assert_eq!(joined, whole, "k {k} block {block} tp {tp}");
            }
        }
        assert_eq!(leaf_bounds(96, 1, 2, 3), vec![0, 32]);
    }
}
