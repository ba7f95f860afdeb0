//! Which ranks of a rank group take part in one collective.

use lockstep_core::ParallelInfo;

/// The ranks `first`, `first + stride`, ... of a rank group, by their number in it. A collective's own ranks are their
/// places in this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    first: usize,
    stride: usize,
    size: usize,
}

impl Members {
    /// All of a group of `size` ranks.
    pub const fn all(size: usize) -> Self {
        Self { first: 0, stride: 1, size }
    }

    /// The TP group of the rank at `p`, in the group of its replica.
    pub const fn of_stage(p: ParallelInfo) -> Self {
        Self { first: p.pp_rank * p.tp_size, stride: 1, size: p.tp_size }
    }

    /// The ranks, one a stage, to which the rank at `p` passes activations and from which it gets them.
    pub const fn of_pipeline(p: ParallelInfo) -> Self {
        Self { first: p.tp_rank, stride: p.tp_size, size: p.pp_size }
    }

    /// How many they are.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The number in the rank group of the member at `place`.
    pub const fn rank(&self, place: usize) -> usize {
        self.first + place * self.stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::Topology;

    #[test]
    fn every_rank_is_in_one_stage_and_in_one_pipeline() {
        let topology = Topology { tp_size: 2, pp_size: 3, dp_size: 2 };
        for place in topology.places() {
            let (stage, pipeline) = (Members::of_stage(place), Members::of_pipeline(place));
            assert_eq!((stage.size(), pipeline.size()), (2, 3));
            assert_eq!(stage.rank(place.tp_rank), place.replica_rank());
            assert_eq!(pipeline.rank(place.pp_rank), place.replica_rank());
        }
        assert_eq!(Members::all(4).rank(3), 3);
    }
}
