//! Where one rank process stands in the tp × pp × dp layout.

use serde::{Deserialize, Serialize};

/// Position of one rank. Ranks are numbered tp fastest, then pp, then dp; a TP group is the ranks
/// that share `pp_rank` and `dp_rank`. Nothing may assume `world_size == tp_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelInfo {
    /// Position in the tensor-parallel group, `0..tp_size`.
    pub tp_rank: usize,
    /// Ranks that share one layer's weights.
    pub tp_size: usize,
    /// Pipeline stage, `0..pp_size`.
    pub pp_rank: usize,
    /// Pipeline stages.
    pub pp_size: usize,
    /// Replica, `0..dp_size`.
    pub dp_rank: usize,
    /// Replicas.
    pub dp_size: usize,
    /// Position among the ranks of this host (chooses the device).
    pub local_rank: usize,
}

impl ParallelInfo {
    /// The layout of one rank that holds everything.
    pub const SINGLE: Self =
        Self { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1, dp_rank: 0, dp_size: 1, local_rank: 0 };

    /// Rank `tp_rank` of a purely tensor-parallel group on one host.
    pub const fn tensor_parallel(tp_rank: usize, tp_size: usize) -> Self {
        Self { tp_rank, tp_size, local_rank: tp_rank, ..Self::SINGLE }
    }

    /// All ranks of all replicas.
    pub const fn world_size(&self) -> usize {
        self.tp_size * self.pp_size * self.dp_size
    }

    /// Global rank: tp fastest, then pp, then dp.
    pub const fn rank(&self) -> usize {
        self.tp_rank + self.tp_size * (self.pp_rank + self.pp_size * self.dp_rank)
    }

    /// Ranks of one replica, the group that steps together.
    pub const fn replica_size(&self) -> usize {
        self.tp_size * self.pp_size
    }

    /// Rank inside the replica.
    pub const fn replica_rank(&self) -> usize {
        self.tp_rank + self.tp_size * self.pp_rank
    }

    /// Whether this rank speaks for its replica (the only one with sockets to the outside).
    pub const fn is_primary(&self) -> bool {
        self.replica_rank() == 0
    }

    /// Name shown by `ps` and in every log line, e.g. `TP0` or, with more axes, `DP1-PP0-TP1`.
    pub fn label(&self) -> String {
        let mut label = String::new();
        if self.dp_size > 1 {
            label += &format!("DP{}-", self.dp_rank);
        }
        if self.pp_size > 1 {
            label += &format!("PP{}-", self.pp_rank);
        }
        label + &format!("TP{}", self.tp_rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_run_tp_fastest_then_pp_then_dp() {
        let mut seen = Vec::new();
        for dp_rank in 0..2 {
            for pp_rank in 0..3 {
                for tp_rank in 0..2 {
                    let p = ParallelInfo {
                        tp_rank,
                        tp_size: 2,
                        pp_rank,
                        pp_size: 3,
                        dp_rank,
                        dp_size: 2,
                        local_rank: 0,
                    };
                    seen.push(p.rank());
                    assert_eq!(p.is_primary(), tp_rank == 0 && pp_rank == 0);
                }
            }
        }
        assert_eq!(seen, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn labels_name_only_the_axes_in_use() {
        assert_eq!(ParallelInfo::tensor_parallel(1, 2).label(), "TP1");
        let p = ParallelInfo { pp_size: 2, pp_rank: 1, dp_size: 2, ..ParallelInfo::SINGLE };
        assert_eq!(p.label(), "DP0-PP1-TP0");
    }
}
