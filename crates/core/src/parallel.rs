//! The tp × pp × dp layout of a server's ranks, and where one rank process stands in it.
//!
//! The one place that knows the order of ranks: tp fastest, then pp, then dp, so that a replica is a range of
//! global ranks. Used by the launcher, by every rank and by `plan`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// The sizes of the three axes, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Ranks that share one layer's weights.
    pub tp_size: usize,
    /// Pipeline stages of a replica.
    pub pp_size: usize,
    /// Replicas.
    pub dp_size: usize,
}

impl Topology {
    /// One purely tensor-parallel replica.
    pub const fn tensor_parallel(tp_size: usize) -> Self {
        Self { tp_size, pp_size: 1, dp_size: 1 }
    }

    /// All ranks of all replicas.
    pub const fn world_size(&self) -> usize {
        self.tp_size * self.pp_size * self.dp_size
    }

    /// Ranks of one replica, the group that steps together.
    pub const fn replica_size(&self) -> usize {
        self.tp_size * self.pp_size
    }

    /// Rank inside its replica of the rank that tells the others what was sampled: the first of the last stage.
    pub const fn sampler(&self) -> usize {
        self.tp_size * (self.pp_size - 1)
    }

    /// The replica that global rank `rank` belongs to.
    pub const fn replica_of(&self, rank: usize) -> usize {
        rank / self.replica_size()
    }

    /// Global ranks of replica `dp_rank`, its primary first.
    pub const fn ranks_of(&self, dp_rank: usize) -> Range<usize> {
        dp_rank * self.replica_size()..(dp_rank + 1) * self.replica_size()
    }

    /// Where global rank `rank` stands. On one host the local rank is the global one.
    pub const fn place(&self, rank: usize) -> ParallelInfo {
        let Self { tp_size, pp_size, dp_size } = *self;
        ParallelInfo {
            tp_rank: rank % tp_size,
            tp_size,
            pp_rank: rank / tp_size % pp_size,
            pp_size,
            dp_rank: self.replica_of(rank),
            dp_size,
            local_rank: rank,
        }
    }

    /// Places of all ranks, by ascending global rank.
    pub fn places(&self) -> impl Iterator<Item = ParallelInfo> + use<> {
        let topology = *self;
        (0..self.world_size()).map(move |rank| topology.place(rank))
    }
}

impl fmt::Display for Topology {
    /// The axes in use: `tp 2`, or `tp 2 x dp 2 (4 ranks)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {}", self.tp_size)?;
        for (axis, size) in [("pp", self.pp_size), ("dp", self.dp_size)] {
            if size > 1 {
                write!(f, " x {axis} {size}")?;
            }
        }
        match self.world_size() {
            world if world > self.tp_size => write!(f, " ({world} ranks)"),
            _ => Ok(()),
        }
    }
}

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

    /// The layout that it is a place of.
    pub const fn topology(&self) -> Topology {
        Topology { tp_size: self.tp_size, pp_size: self.pp_size, dp_size: self.dp_size }
    }

    /// Whether its tokens and log-probabilities are the ones that the other ranks of its replica are told.
    pub const fn is_sampler(&self) -> bool {
        self.replica_rank() == self.topology().sampler()
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
        let topology = Topology { tp_size: 2, pp_size: 3, dp_size: 2 };
        let mut rank = 0;
        for dp_rank in 0..2 {
            assert_eq!(topology.ranks_of(dp_rank), rank..rank + 6);
            for pp_rank in 0..3 {
                for tp_rank in 0..2 {
                    let place = topology.place(rank);
                    assert_eq!((place.dp_rank, place.pp_rank, place.tp_rank), (dp_rank, pp_rank, tp_rank));
                    assert_eq!((place.rank(), topology.replica_of(rank)), (rank, dp_rank));
                    assert_eq!((place.world_size(), place.replica_size()), (12, 6));
                    assert_eq!(
                        (place.topology(), place.is_sampler()),
                        (topology, pp_rank == 2 && tp_rank == 0)
                    );
                    assert_eq!(place.is_primary(), rank == topology.ranks_of(dp_rank).start);
                    rank += 1;
                }
            }
        }
        assert!(topology.places().map(|place| place.rank()).eq(0..12));
    }

    #[test]
    fn layouts_show_the_axes_in_use() {
        let shown = |tp_size, pp_size, dp_size| Topology { tp_size, pp_size, dp_size }.to_string();
        assert_eq!((shown(1, 1, 1), shown(2, 1, 1)), ("tp 1".into(), "tp 2".into()));
        assert_eq!(shown(1, 1, 2), "tp 1 x dp 2 (2 ranks)");
        assert_eq!(shown(2, 3, 2), "tp 2 x pp 3 x dp 2 (12 ranks)");
    }

    #[test]
    fn labels_name_only_the_axes_in_use() {
        assert_eq!(ParallelInfo::tensor_parallel(1, 2).label(), "TP1");
        let p = ParallelInfo { pp_size: 2, pp_rank: 1, dp_size: 2, ..ParallelInfo::SINGLE };
        assert_eq!(p.label(), "DP0-PP1-TP0");
    }
}
