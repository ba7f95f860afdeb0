//! What is verified. Users verify a checkpoint; tests verify one that lies to some ranks.

use lockstep_core::ParallelInfo;
use lockstep_model::WeightSource;

/// Where each rank's weights come from.
pub trait Subject: Sync {
    /// What the rank at `p` loads.
    fn source(&self, p: ParallelInfo) -> &dyn WeightSource;
}

/// The same source for every rank.
pub struct WholeSource<'a>(pub &'a dyn WeightSource);

impl Subject for WholeSource<'_> {
    fn source(&self, _p: ParallelInfo) -> &dyn WeightSource {
        self.0
    }
}
