//! The broadcast of rank 0 to the other ranks of its replica.

use crate::to_scheduler::ToScheduler;
use serde::{Deserialize, Serialize};

/// One message for every scheduler of the replica, in the order rank 0 applies them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Broadcast {
    /// Counts broadcasts from 0; a gap is a fatal error that names both numbers.
    pub sequence: u64,
    /// Milliseconds since the group started, stamped by rank 0: the only clock schedulers see.
    pub stamp_ms: u64,
    /// What to apply.
    pub message: ToScheduler,
}
