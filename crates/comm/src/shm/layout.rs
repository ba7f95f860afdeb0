//! Where everything lies in the shared memory of a rank group.
//!
//! ```text
//! header   4 KiB   magic, version, size, slot_bytes, pair_chunks; at 128 the abort word and its cause
//! flags            one line per lane and rank
//! pairs            two lines per ordered pair of ranks: chunks written, chunks read
//! group slots      per rank 2 x 64 KiB
//! pipeline slots   per rank 2 x 64 KiB
//! tensor slots     per rank 2 x slot_bytes
//! pair slots       per ordered pair pair_chunks x 16 KiB
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
/// Bytes of one chunk of a point-to-point transfer, its signature included.
pub(super) const PAIR_CHUNK_BYTES: usize = 16 << 10;
/// Where a chunk's data begins, behind its signature: a cache line, so that data is aligned as in a slot.
pub(super) const PAIR_DATA: usize = 64;
/// Chunks that may be on their way from one rank to another, unless [`ShmLayout::with_transfers`] says more.
const PAIR_CHUNKS_MIN: usize = 4;
/// The most that it can say: 64 MiB. A larger transfer waits for its receiver to begin.
const PAIR_CHUNKS_MAX: usize = 4096;
/// Smallest tensor slot: a one-shot payload fits.
const SLOT_BYTES_MIN: usize = 16 << 10;
const SLOT_BYTES_MAX: usize = 64 << 20;

/// Offsets of the abort area inside the header page.
pub(super) const ABORT_STATE: usize = LINE;
pub(super) const ABORT_LEN: usize = LINE + 4;
pub(super) const ABORT_CAUSE: usize = LINE + 8;

/// The independent sets of flags and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// The CPU process group.
    Group,
    /// Tensors of a TP group.
    Tensor,
    /// Tensors that stages pass on.
    Pipeline,
}

impl Lane {
    pub(super) const ALL: [Lane; 3] = [Lane::Group, Lane::Tensor, Lane::Pipeline];
}

/// Shape of the shared memory of one rank group; equal on every rank and in the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmLayout {
    size: usize,
    slot_bytes: usize,
    pair_chunks: usize,
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
            return Ok(Self { size, slot_bytes, pair_chunks: PAIR_CHUNKS_MIN });
        };
        Err(CollectiveError::Region { problem })
    }

    /// The same, with room for `bytes` on their way from any rank to any other, 64 MiB at most: as long as no more are,
    /// a sender does not wait for its receiver.
    pub fn with_transfers(self, bytes: usize) -> Self {
        let chunks = bytes.div_ceil(PAIR_CHUNK_BYTES - PAIR_DATA).clamp(PAIR_CHUNKS_MIN, PAIR_CHUNKS_MAX);
        // A divisor of 2^32, so that positions in the ring survive the wrap of the counts.
        Self { pair_chunks: chunks.next_power_of_two(), ..self }
    }

    /// The same, with a number of chunks that some header names.
    pub(super) fn with_pair_chunks(self, pair_chunks: usize) -> Result<Self> {
        let is_legal = (PAIR_CHUNKS_MIN..=PAIR_CHUNKS_MAX).contains(&pair_chunks);
        if !is_legal || !pair_chunks.is_power_of_two() {
            let problem = format!(
                "{pair_chunks} chunks for each pair of ranks, possible are powers of 2 from {PAIR_CHUNKS_MIN} to \
                 {PAIR_CHUNKS_MAX}"
            );
            return Err(CollectiveError::Region { problem });
        }
        Ok(Self { pair_chunks, ..self })
    }

    /// Bytes of address space for `size` ranks and slots of `slot_bytes`; used pages cost memory.
    pub const fn bytes(size: usize, slot_bytes: usize) -> usize {
        Self { size, slot_bytes, pair_chunks: PAIR_CHUNKS_MIN }.total_bytes()
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
        self.pair_slots() + self.size * self.size * self.pair_chunks * PAIR_CHUNK_BYTES
    }

    /// Chunks that may be on their way from one rank to another: a power of 2.
    pub(super) const fn pair_chunks(&self) -> usize {
        self.pair_chunks
    }

    /// Flag line of `rank`.
    pub(super) const fn flag(&self, lane: Lane, rank: usize) -> usize {
        let lane = match lane {
            Lane::Group => 0,
            Lane::Tensor => 1,
            Lane::Pipeline => 2,
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
            Lane::Pipeline => self.pipeline_slots() + index * GROUP_SLOT_BYTES,
        }
    }

    /// Bytes of one slot of `lane`.
    pub(super) const fn lane_slot_bytes(&self, lane: Lane) -> usize {
        match lane {
            Lane::Group | Lane::Pipeline => GROUP_SLOT_BYTES,
            Lane::Tensor => self.slot_bytes,
        }
    }

    /// Chunk number `chunk` of the ring of a pair: its signature, and its data from [`PAIR_DATA`] on.
    pub(super) const fn pair_slot(&self, from: usize, to: usize, chunk: usize) -> usize {
        self.pair_slots() + ((from * self.size + to) * self.pair_chunks + chunk) * PAIR_CHUNK_BYTES
    }

    const fn pairs(&self) -> usize {
        FLAGS + page_up(Lane::ALL.len() * self.size * LINE)
    }

    const fn group_slots(&self) -> usize {
        self.pairs() + page_up(2 * self.size * self.size * LINE)
    }

    const fn pipeline_slots(&self) -> usize {
        self.group_slots() + 2 * self.size * GROUP_SLOT_BYTES
    }

    const fn tensor_slots(&self) -> usize {
        self.pipeline_slots() + 2 * self.size * GROUP_SLOT_BYTES
    }

    const fn pair_slots(&self) -> usize {
        self.tensor_slots() + 2 * self.size * self.slot_bytes
    }
}

const fn page_up(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}
