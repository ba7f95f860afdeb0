//! Where a rank stands in a pipeline, as its device needs to know.

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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_have_the_same_place_in_their_stages() {
        let place = |rank| PipelinePlace {
            rank,
            stage_size: 2,
            stages: 3,
            rows_max: 1,
            cols: 64,
            patience: Duration::from_secs(1),
            shares_gpus: false,
        };
        let next = [0, 1, 2, 3, 4, 5].map(|rank| place(rank).next());
        assert_eq!(next, [Some(2), Some(3), Some(4), Some(5), None, None]);
        assert_eq!((place(3).stage(), place(3).first_of_stage()), (1, 2));
    }
}
