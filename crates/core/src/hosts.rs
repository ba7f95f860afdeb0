//! Which ranks are on which host.
//!
//! **Invariant:** hosts have equally many ranks, in rank order, so tp ranks are neighbours, then pp stages: a TP group
//! crosses hosts only when it does not fit one. Used by the launcher of every host and by every rank.

use crate::Topology;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Most hosts of one server.
pub const NNODES_MAX: usize = 64;

/// The ranks of a server, spread over its hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMap {
    nnodes: usize,
    ranks_per_host: usize,
}

impl HostMap {
    /// Everything on one host.
    pub const fn single(topology: &Topology) -> Self {
        Self { nnodes: 1, ranks_per_host: topology.world_size() }
    }

    /// `topology` on `nnodes` hosts. Errors with a sentence when that is not possible.
    pub fn new(topology: &Topology, nnodes: usize) -> Result<Self, String> {
        let world = topology.world_size();
        if nnodes == 1 {
            return Ok(Self::single(topology));
        }
        if nnodes == 0 || nnodes > NNODES_MAX {
            return Err(format!("--nnodes {nnodes} is outside 1..={NNODES_MAX}"));
        }
        if topology.dp_size > 1 {
            return Err(format!(
                "--dp {} with --nnodes {nnodes} is not possible: start each replica as a server of its own and put a \
                 router in front of them",
                topology.dp_size
            ));
        }
        if !world.is_multiple_of(nnodes) {
            let legal: Vec<_> =
                (1..=world).filter(|n| world.is_multiple_of(*n)).map(|n| n.to_string()).collect();
            return Err(format!(
                "--nnodes {nnodes} does not divide the {world} ranks of {topology}; use {}",
                legal.join(", ")
            ));
        }
        Ok(Self { nnodes, ranks_per_host: world / nnodes })
    }

    /// Hosts.
    pub const fn nnodes(&self) -> usize {
        self.nnodes
    }

    /// Ranks of each host.
    pub const fn ranks_per_host(&self) -> usize {
        self.ranks_per_host
    }

    /// The host (`--node-rank`) of global rank `rank`.
    pub const fn host_of(&self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    /// Global ranks on host `node_rank`.
    pub const fn ranks_of(&self, node_rank: usize) -> Range<usize> {
        node_rank * self.ranks_per_host..(node_rank + 1) * self.ranks_per_host
    }

    /// Position of global rank `rank` among those of its host.
    pub const fn local_rank(&self, rank: usize) -> usize {
        rank % self.ranks_per_host
    }

    /// Whether every `size` consecutive ranks, from the first on, are on one host: TP groups, say.
    pub const fn keeps_together(&self, size: usize) -> bool {
        self.nnodes == 1 || self.ranks_per_host.is_multiple_of(size)
    }

    /// Whether all of `ranks` are on one host.
    pub fn shares_host(&self, ranks: impl IntoIterator<Item = usize>) -> bool {
        let mut hosts = ranks.into_iter().map(|rank| self.host_of(rank));
        let first = hosts.next();
        hosts.all(|host| Some(host) == first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_equal_ranges_in_rank_order() {
        let topology = Topology { tp_size: 2, pp_size: 3, dp_size: 1 };
        let map = HostMap::new(&topology, 3).unwrap();
        assert_eq!((map.nnodes(), map.ranks_per_host(), map.ranks_of(1)), (3, 2, 2..4));
        assert_eq!((map.host_of(3), map.local_rank(3)), (1, 1));
        assert!(map.shares_host(2..4) && !map.shares_host([0, 2, 4]) && map.shares_host([]));
        assert_eq!(HostMap::new(&topology, 1).unwrap(), HostMap::single(&topology));
        assert!(map.keeps_together(2) && !map.keeps_together(4) && !map.keeps_together(3));
        let halves = HostMap::new(&topology, 2).unwrap();
        assert!(!halves.keeps_together(2), "the second of three pairs is on both hosts");
        assert!(HostMap::single(&topology).keeps_together(4));
    }

    #[test]
    fn what_is_not_possible_is_one_sentence_with_the_way_out() {
        let refusal = |tp_size, pp_size, dp_size, nnodes| {
            HostMap::new(&Topology { tp_size, pp_size, dp_size }, nnodes).unwrap_err()
        };
        let uneven = refusal(2, 2, 1, 3);
        assert!(uneven.contains("--nnodes 3") && uneven.contains("use 1, 2, 4"), "{uneven}");
        assert!(refusal(1, 1, 2, 2).contains("router"));
        assert!(refusal(2, 1, 1, 0).contains("1..=64") && refusal(2, 1, 1, 65).contains("1..=64"));
    }
}
