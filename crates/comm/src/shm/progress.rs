//! Where each rank stands, readable by a watchdog without disturbing anybody.
//!
//! One 64-bit word per rank and kind of operation: count of operations (47 bits), operation (8),
//! inside or not (1). A single word cannot be read torn.

use super::layout::Lane;
use super::region::SharedRegion;
use crate::collective::Result;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a rank does in its process group or collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// No operation yet.
    None = 0,
    /// [`crate::ProcessGroup::barrier`].
    Barrier = 1,
    /// [`crate::ProcessGroup::broadcast`].
    Broadcast = 2,
    /// `all_gather` of either trait.
    AllGather = 3,
    /// [`crate::Collective::all_reduce`].
    AllReduce = 4,
    /// [`crate::Collective::send`].
    Send = 5,
    /// [`crate::Collective::recv`].
    Recv = 6,
}

impl Operation {
    /// The method's name.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::None => "no operation",
            Operation::Barrier => "barrier",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::AllReduce => "all_reduce",
            Operation::Send => "send",
            Operation::Recv => "recv",
        }
    }

    /// The operation with number `code`; unknown numbers (a damaged region) read as none.
    pub(super) const fn from_code(code: u8) -> Self {
        match code {
            1 => Operation::Barrier,
            2 => Operation::Broadcast,
            3 => Operation::AllGather,
            4 => Operation::AllReduce,
            5 => Operation::Send,
            6 => Operation::Recv,
            _ => Operation::None,
        }
    }
}

/// One rank's place in its sequence of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Operations begun since start.
    pub sequence: u64,
    /// The last one begun.
    pub operation: Operation,
    /// It has not ended yet (or ended with an error).
    pub inside: bool,
}

impl Progress {
    pub(super) fn pack(self) -> u64 {
        (self.sequence << 9) | (u64::from(self.operation as u8) << 1) | u64::from(self.inside)
    }

    fn unpack(word: u64) -> Self {
        Self {
            sequence: word >> 9,
            operation: Operation::from_code((word >> 1) as u8),
            inside: word & 1 == 1,
        }
    }
}

/// Both sequences of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankProgress {
    /// Its process group.
    pub group: Progress,
    /// Its tensor collectives.
    pub collective: Progress,
}

/// Reads the progress of every rank; for a process that is not a rank.
#[derive(Clone, Debug)]
pub struct ProgressReader {
    region: Arc<SharedRegion>,
}

impl ProgressReader {
    /// Maps the rank group's memory.
    pub fn new(fd: impl AsFd) -> Result<Self> {
        Ok(Self { region: Arc::new(SharedRegion::map(fd)?) })
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.region.layout().size()
    }

    /// Where `rank` stands now; the two sequences are read one after the other. Panics when there is
    /// no such rank.
    pub fn read(&self, rank: usize) -> RankProgress {
        assert!(rank < self.size(), "rank {rank} of a group of {}", self.size());
        let read = |lane| {
            Progress::unpack(
                self.region.long(progress_offset(&self.region, lane, rank)).load(Ordering::Relaxed),
            )
        };
        RankProgress { group: read(Lane::Group), collective: read(Lane::Tensor) }
    }
}

/// Offset of the progress word of `rank`; written by that rank only.
pub(super) fn progress_offset(region: &SharedRegion, lane: Lane, rank: usize) -> usize {
    region.layout().progress(rank)
        + match lane {
            Lane::Group => 0,
            Lane::Tensor => 8,
        }
}
