//! The CPU process group: agreement between the ranks of a replica about small things.

use crate::collective::CollectiveError;
use std::time::Duration;

/// Result of this module.
pub type Result<T> = std::result::Result<T, CollectiveError>;

/// How long a rank may wait for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A peer that does not arrive in time is an error.
    Deadline(Duration),
    /// Idle: the others may legitimately be waiting for work. Only an abort ends the wait.
    Idle,
}

/// **Collective:** all ranks of the group call every method in the same order with equal sizes.
pub trait ProcessGroup: Send {
    /// This rank.
    fn rank(&self) -> usize;
    /// Ranks of the group.
    fn size(&self) -> usize;
    /// Returns when every rank has called it.
    fn barrier(&mut self, patience: Patience) -> Result<()>;
    /// Every rank's `send` (equal lengths, at most 64 KiB) in rank order into `recv`
    /// (`send.len() * size()` bytes).
    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> Result<()>;
    /// Copies rank `root`'s `data` to every rank.
    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> Result<()>;
}
