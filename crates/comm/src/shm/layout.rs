//! Where everything lies in the shared memory of a rank group.
//!
//! ```text
//! header   4 KiB   magic, version, size, slot_bytes, total; at 128 the abort word and its cause
//! flags            group: one line per rank; collective: one line per rank
//! pairs            two lines per ordered pair of ranks: chunks written, chunks read
//! group slots      per rank 2 x 64 KiB
//! tensor slots     per rank 2 x slot_bytes
//! pair slots       per ordered pair 4 x 16 KiB
//! ```
//! A *line* is 128 bytes: two cache lines, because x86 fetches them in pairs and aarch64 has some of
//! 128. Sections start on pages. The file is sparse: a page costs memory once it is used, so the
//! slots of pairs that never talk are free.

use crate::collective::{CollectiveError, Result};
use lockstep_core::limits::TP_SIZE_MAX;

/// Bytes that one writer has for itself.
pub(super) const LINE: usize = 128;
const PAGE: usize = 4096;
/// Behind the header.
const FLAGS: usize = PAGE;
/// Bytes of one of the two buffers per rank of the process group.
pub(super) const GROUP_SLOT_BYTES: usize = 64 << 10;
/// Bytes of one chunk of a point-to-point transfer.
pub(super) const PAIR_CHUNK_BYTES: usize = 16 << 10;
/// Chunks that may be on their way from one rank to another.
pub(super) const PAIR_CHUNKS: usize = 4;
/// Smallest tensor slot: a one-shot payload fits.
const SLOT_BYTES_MIN: usize = 16 << 10;
const SLOT_BYTES_MAX: usize = 64 << 20;

/// Offsets of the abort area inside the header page.
pub(super) const ABORT_STATE: usize = LINE;
pub(super) const ABORT_LEN: usize = LINE + 4;
pub(super) const ABORT_CAUSE: usize = LINE + 8;

/// The two independent sets of flags and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// The CPU process group.
    Group,
    /// Tensors.
    Tensor,
}

/// Shape of the shared memory of one rank group; equal on every rank and in the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmLayout {
    size: usize,
    slot_bytes: usize,
}

impl ShmLayout {
    /// A good `slot_bytes`: pieces of it stay in a core's second-level cache.
    pub const SLOT_BYTES_DEFAULT: usize = 256 << 10;

    /// Memory for `size` ranks (1..=64) with two tensor slots of `slot_bytes` each (a multiple of
    /// 4096, 16 KiB to 64 MiB).
    pub fn new(size: usize, slot_bytes: usize) -> Result<Self> {
        let problem = if !(1..=TP_SIZE_MAX).contains(&size) {
            format!("{size} ranks asked for, possible are 1..={TP_SIZE_MAX}")
        } else if !slot_bytes.is_multiple_of(PAGE) || !(SLOT_BYTES_MIN..=SLOT_BYTES_MAX).contains(&slot_bytes)
        {
            format!(
                "slots of {slot_bytes} bytes asked for, possible are multiples of {PAGE} from {SLOT_BYTES_MIN} to \
                 {SLOT_BYTES_MAX}"
            )
        } else {
            return Ok(Self { size, slot_bytes });
        };
        Err(CollectiveError::Region { problem })
    }

    /// Bytes of address space for `size` ranks and slots of `slot_bytes`; used pages cost memory.
    pub const fn bytes(size: usize, slot_bytes: usize) -> usize {
        Self { size, slot_bytes }.total_bytes()
    }

    /// Ranks of the group.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Bytes of one tensor slot.
    pub const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of address space.
    pub const fn total_bytes(&self) -> usize {
        self.pair_slots() + self.size * self.size * PAIR_CHUNKS * PAIR_CHUNK_BYTES
    }

    /// Flag line of `rank`.
    pub(super) const fn flag(&self, lane: Lane, rank: usize) -> usize {
        let lane = match lane {
            Lane::Group => 0,
            Lane::Tensor => 1,
        };
        FLAGS + (lane * self.size + rank) * LINE
    }

    /// Line that the sender of a pair writes; the receiver's follows.
    pub(super) const fn pair_line(&self, from: usize, to: usize) -> usize {
        self.pairs() + (from * self.size + to) * 2 * LINE
    }

    /// Buffer `parity` (0 or 1) of `rank`.
    pub(super) const fn slot(&self, lane: Lane, rank: usize, parity: usize) -> usize {
        let index = rank * 2 + parity;
        match lane {
            Lane::Group => self.group_slots() + index * GROUP_SLOT_BYTES,
            Lane::Tensor => self.tensor_slots() + index * self.slot_bytes,
        }
    }

    /// Bytes of one slot of `lane`.
    pub(super) const fn lane_slot_bytes(&self, lane: Lane) -> usize {
        match lane {
            Lane::Group => GROUP_SLOT_BYTES,
            Lane::Tensor => self.slot_bytes,
        }
    }

    /// Buffer of one chunk of a pair.
    pub(super) const fn pair_slot(&self, from: usize, to: usize, chunk: usize) -> usize {
        self.pair_slots() + ((from * self.size + to) * PAIR_CHUNKS + chunk) * PAIR_CHUNK_BYTES
    }

    const fn pairs(&self) -> usize {
        FLAGS + page_up(2 * self.size * LINE)
    }

    const fn group_slots(&self) -> usize {
        self.pairs() + page_up(2 * self.size * self.size * LINE)
    }

    const fn tensor_slots(&self) -> usize {
        self.group_slots() + 2 * self.size * GROUP_SLOT_BYTES
    }

    const fn pair_slots(&self) -> usize {
        self.tensor_slots() + 2 * self.size * self.slot_bytes
    }
}

const fn page_up(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}
