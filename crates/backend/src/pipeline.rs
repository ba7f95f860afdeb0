//! Where a rank stands in a pipeline, as its device needs to know.

use lockstep_core::HostMap;
use std::time::Duration;

/// A rank's place among the stages of its replica, and what passes through.
#[derive(Clone, Copy, Debug)]
pub struct PipelinePlace {
    /// Number in the replica: stage after stage, `stage_size` in each.
    pub rank: usize,
    /// Ranks of a stage.
    pub stage_size: usize,
    /// Stages.
    pub stages: usize,
    /// Rows of the largest step.
    pub rows_max: usize,
    /// Elements of a row, the hidden size.
    pub cols: usize,
    /// How long to wait for the stage before.
    pub patience: Duration,
    /// Several ranks may use one device.
    pub shares_gpus: bool,
    /// Which of the replica's ranks are on which host.
    pub hosts: HostMap,
}

impl PipelinePlace {
    /// Which stage it is in.
    pub fn stage(&self) -> usize {
        self.rank / self.stage_size
    }

    /// The first rank of its stage.
    pub fn first_of_stage(&self) -> usize {
        self.stage() * self.stage_size
    }

    /// The rank that it passes activations on to, if its stage is not the last.
    pub fn next(&self) -> Option<usize> {
        (self.stage() + 1 < self.stages).then_some(self.rank + self.stage_size)
    }

    /// The rank that passes activations on to it, if its stage is not the first.
    pub fn previous(&self) -> Option<usize> {
        self.rank.checked_sub(self.stage_size)
    }

    /// Whether the rank `other` is on this one's host.
    pub fn shares_host_with(&self, other: usize) -> bool {
        self.hosts.shares_host([self.rank, other])
    }

    /// Rank `rank` of tp 2 x pp 3 on so many hosts.
    #[cfg(test)]
    pub(crate) fn of_six(rank: usize, nnodes: usize) -> Self {
        let topology = lockstep_core::Topology { tp_size: 2, pp_size: 3, dp_size: 1 };
        Self {
            rank,
            stage_size: topology.tp_size,
            stages: topology.pp_size,
            rows_max: 1,
            cols: 64,
            patience: Duration::from_secs(1),
            shares_gpus: false,
            hosts: HostMap::new(&topology, nnodes).expect("a number of hosts that divides six"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_have_the_same_place_in_their_stages() {
        let place = |rank| PipelinePlace::of_six(rank, 2);
        let next = [0, 1, 2, 3, 4, 5].map(|rank| place(rank).next());
        assert_eq!(next, [Some(2), Some(3), Some(4), Some(5), None, None]);
        let previous = [0, 1, 2, 3, 4, 5].map(|rank| place(rank).previous());
        assert_eq!(previous, [None, None, Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!((place(3).stage(), place(3).first_of_stage()), (1, 2));
        // Three ranks a host.
        let stays = |rank: usize| place(rank).next().map(|next| place(rank).shares_host_with(next));
        assert_eq!([0, 1, 2, 3, 4].map(stays), [Some(true), Some(false), Some(false), Some(true), None]);
    }
}
