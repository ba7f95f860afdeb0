//! The memory of a rank group: made, mapped and checked.

use super::layout::{ABORT_STATE, LINE, Lane, ShmLayout};
use crate::collective::{CollectiveError, Result};
use crate::mapping::{Failed, Mapping};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// "LOCKSTEP" in ASCII.
const MAGIC: u64 = u64::from_be_bytes(*b"LOCKSTEP");
/// Raised whenever the layout or the protocol changes.
const VERSION: u32 = 3;

const HEADER_SIZE: usize = 12;
const HEADER_SLOT_BYTES: usize = 16;
const HEADER_PAIR_CHUNKS: usize = 24;

/// The shared memory of one rank group, mapped into this process.
#[derive(Debug)]
pub struct SharedRegion {
    memory: Mapping,
    layout: ShmLayout,
}

impl SharedRegion {
    /// Makes zeroed memory without a name, sealed against shrinking, with a header that describes
    /// it. **Called once per rank group, by the launcher.**
    ///
    /// The descriptor is close-on-exec; whoever starts the ranks passes it on deliberately.
    pub fn create(layout: ShmLayout) -> Result<OwnedFd> {
        let fd = Mapping::create(c"lockstep-rank-group", layout.total_bytes()).map_err(region_error)?;
        let region = Self::map_as(&fd, layout)?;
        region.word(HEADER_SIZE).store(layout.size() as u32, Ordering::Relaxed);
        region.long(HEADER_SLOT_BYTES).store(layout.slot_bytes() as u64, Ordering::Relaxed);
        region.word(HEADER_PAIR_CHUNKS).store(layout.pair_chunks() as u32, Ordering::Relaxed);
        region.memory.publish_header(MAGIC, VERSION);
        Ok(fd)
    }

    /// Maps memory made by [`SharedRegion::create`]; the header and the file's size are checked.
    /// The descriptor may be closed afterwards.
    pub fn map(fd: impl AsFd) -> Result<Self> {
        let fd = fd.as_fd();
        // The smallest legal layout: enough to read the header from.
        let smallest = ShmLayout::new(1, 16 << 10)?;
        let file_bytes = Mapping::file_bytes(fd).map_err(region_error)?;
        if file_bytes < smallest.total_bytes() {
            return Err(CollectiveError::Region {
                problem: format!(
                    "the descriptor has {file_bytes} bytes, at least {} are needed",
                    smallest.total_bytes()
                ),
            });
        }
        let header = Self::map_as(fd, smallest)?;
        header.memory.check_header(MAGIC, VERSION).map_err(|found| CollectiveError::Region {
            problem: format!("the descriptor is not a rank group of this binary ({found})"),
        })?;
        let size = header.word(HEADER_SIZE).load(Ordering::Relaxed) as usize;
        let slot_bytes = header.long(HEADER_SLOT_BYTES).load(Ordering::Relaxed);
        let pair_chunks = header.word(HEADER_PAIR_CHUNKS).load(Ordering::Relaxed) as usize;
        let layout = ShmLayout::new(size, usize::try_from(slot_bytes).unwrap_or(usize::MAX))?;
        let layout = layout.with_pair_chunks(pair_chunks)?;
        if file_bytes != layout.total_bytes() {
            return Err(CollectiveError::Region {
                problem: format!(
                    "{size} ranks with slots of {slot_bytes} bytes need {} bytes, the descriptor has {file_bytes}",
                    layout.total_bytes()
                ),
            });
        }
        Self::map_as(fd, layout)
    }

    /// The shape of this memory.
    pub fn layout(&self) -> ShmLayout {
        self.layout
    }

    /// Whether somebody has begun to abort the group. One relaxed load of a line that is never
    /// written in normal service, so every waiting loop can afford it.
    pub(super) fn is_aborted(&self) -> bool {
        self.word(ABORT_STATE).load(Ordering::Relaxed) != 0
    }

    /// The 32-bit number at `offset`.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        self.memory.word(offset)
    }

    /// The 64-bit number at `offset`.
    pub(super) fn long(&self, offset: usize) -> &AtomicU64 {
        self.memory.long(offset)
    }

    /// Address of `len` bytes at `offset`, for a slot. Who may touch them when is the protocol's
    /// business.
    pub(super) fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        self.memory.bytes(offset, len)
    }

    /// Every (futex word, sleeper count) in the region.
    pub(super) fn waiting_places(&self) -> impl Iterator<Item = (&AtomicU32, &AtomicU32)> {
        let (layout, size) = (self.layout, self.layout.size());
        let flags = (0..size).flat_map(move |rank| Lane::ALL.map(|lane| layout.flag(lane, rank)));
        let pairs = (0..size * size).flat_map(move |pair| {
            let line = layout.pair_line(pair / size, pair % size);
            [line, line + LINE]
        });
        flags.chain(pairs).map(|line| (self.word(line), self.word(line + 4)))
    }

    fn map_as(fd: impl AsFd, layout: ShmLayout) -> Result<Self> {
        let memory = Mapping::map(fd, layout.total_bytes()).map_err(region_error)?;
        Ok(Self { memory, layout })
    }
}

fn region_error((what, error): Failed) -> CollectiveError {
    CollectiveError::Region { problem: format!("{what}: {error}") }
}
