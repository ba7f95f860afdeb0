//! Stages and slots of one lane: what the process group and the collective have in common.
//!
//! Flag line of a rank: stage (u32), sleepers (u32), two signatures (u64, by parity of the stage),
//! claimed (u32). Only its rank writes stage, signatures and claimed.
//!
//! **A rank is at most one stage ahead.** To publish stage `s+1` it must have left stage `s`, hence
//! have seen `s` of every rank. Consequences:
//! - two signatures are enough: the one for `s+2` is written after everybody published `s+1`, that
//!   is, after everybody has read the one for `s`;
//! - two slots are enough, see [`Channel::next_piece`];
//! - 32 bits are enough: stages are compared by wrapping distance, which is -1, 0 or 1.

use super::abort::AbortHandle;
use super::layout::Lane;
use super::members::Members;
use super::operation::Operation;
use super::region::SharedRegion;
use super::wait::{Ended, Manners, ShmOptions, publish, wait_until};
use crate::collective::{CollectiveError, Result};
use crate::group::Patience;
use crate::watch::{Mark, Track};
use lockstep_core::DType;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Offsets inside a flag line.
const SLEEPERS: usize = 4;
const SIGNATURES: usize = 8;
const CLAIMED: usize = 24;

/// What every rank must agree on: operation, detail (dtype, root, or the direction of a pair) and
/// count, in one word. Compared, never used as a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature(pub(crate) u64);

impl Signature {
    const COUNT_BITS: u32 = 48;

    pub(crate) fn new(operation: Operation, detail: u8, count: usize) -> Self {
        let count = count as u64 & ((1 << Self::COUNT_BITS) - 1);
        Self((u64::from(operation as u8) << 56) | (u64::from(detail) << Self::COUNT_BITS) | count)
    }

    pub(crate) fn tensor(operation: Operation, dtype: DType, count: usize) -> Self {
        Self::new(operation, dtype_code(dtype), count)
    }

    pub(crate) fn operation(self) -> Operation {
        Operation::from_code((self.0 >> 56) as u8)
    }

    /// For error messages.
    pub(crate) fn describe(self) -> String {
        let count = self.0 & ((1 << Self::COUNT_BITS) - 1);
        let detail = (self.0 >> Self::COUNT_BITS) as u8;
        let name = self.operation().name();
        match (self.operation(), detail) {
            (Operation::None | Operation::Barrier, _) => name.to_owned(),
            (Operation::Broadcast, root) => format!("{name} of {count} bytes from rank {root}"),
            (_, 1) => format!("{name} of {count} f32"),
            (_, 2) => format!("{name} of {count} f16"),
            (_, 3) => format!("{name} of {count} bf16"),
            (_, _) => format!("{name} of {count} bytes"),
        }
    }
}

fn dtype_code(dtype: DType) -> u8 {
    match dtype {
        DType::F32 => 1,
        DType::F16 => 2,
        DType::Bf16 => 3,
    }
}

/// One rank's view of one lane. Used by one thread at a time (`Send`, not `Sync`).
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) region: Arc<SharedRegion>,
    lane: Lane,
    members: Members,
    /// Place of this rank among the members.
    pub(super) rank: usize,
    /// Members.
    pub(super) size: usize,
    stage: Cell<u32>,
    piece: Cell<usize>,
    sequence: Cell<u64>,
    manners: Manners,
    mark: Option<Mark>,
}

impl Drop for Channel {
    fn drop(&mut self) {
        // A rank thread that unwinds leaves the others waiting; tell them now.
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.member(self.rank)));
        }
    }
}

impl Channel {
    /// Takes the place `rank` among the `members` in `lane`; each rank's place in a lane can be taken once in the life of
    /// the region.
    pub(super) fn claim(
        region: Arc<SharedRegion>,
        (lane, members): (Lane, Members),
        rank: usize,
        options: ShmOptions,
    ) -> Result<Self> {
        let (size, ranks) = (members.size(), region.layout().size());
        if rank >= size || members.rank(size - 1) >= ranks {
            return Err(CollectiveError::Region {
                problem: format!("rank {rank} of {size} members of a group of {ranks} ranks"),
            });
        }
        let claimed = region.word(region.layout().flag(lane, members.rank(rank)) + CLAIMED);
        if claimed.swap(1, Ordering::AcqRel) != 0 {
            return Err(CollectiveError::Region {
                problem: format!(
                    "rank {} has already joined; a rank joins once and does not come back",
                    members.rank(rank)
                ),
            });
        }
        Ok(Self {
            region,
            lane,
            members,
            rank,
            size,
            stage: Cell::new(0),
            piece: Cell::new(0),
            sequence: Cell::new(0),
            manners: Manners::new(options),
            mark: None,
        })
    }

    /// The number in the rank group, which messages and the memory's layout use, of the member at `place`.
    pub(super) fn member(&self, place: usize) -> usize {
        self.members.rank(place)
    }

    /// Shows what this rank does here on the watch page.
    pub(super) fn watch(&mut self, mark: Mark) {
        self.mark = Some(mark);
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> usize {
        self.region.layout().lane_slot_bytes(self.lane)
    }

    /// Notes the start of an operation. Errors when the group is already aborted.
    pub(super) fn begin(&self, operation: Operation) -> Result<()> {
        self.sequence.set(self.sequence.get() + 1);
        self.note(operation, true);
        if self.region.is_aborted() { Err(self.aborted(operation)) } else { Ok(()) }
    }

    /// Notes the end of an operation that succeeded.
    pub(super) fn end(&self, operation: Operation) {
        self.note(operation, false);
    }

    /// Moves to the next piece and returns its parity, for [`Channel::slot`].
    ///
    /// The buffer it names was last used two pieces ago. This rank has left the piece between,
    /// whose first stage every rank published only after leaving the piece before it: nobody reads
    /// the buffer any more. (A piece has one stage or two; the argument needs the first only.)
    pub(super) fn next_piece(&self) -> usize {
        self.piece.set(self.piece.get() ^ 1);
        self.piece.get()
    }

    /// Buffer `parity` of `rank`: `slot_bytes` bytes. This rank's own may be written between
    /// [`Channel::next_piece`] and [`Channel::arrive`]; another's read between
    /// [`Channel::wait_for`] and the next [`Channel::arrive`].
    pub(super) fn slot(&self, rank: usize, parity: usize) -> *mut u8 {
        let at = self.region.layout().slot(self.lane, self.member(rank), parity);
        self.region.bytes(at, self.slot_bytes())
    }

    /// Publishes the next stage: everything written to the own slot becomes visible to whoever
    /// waits for it.
    pub(super) fn arrive(&self, signature: Signature) {
        let stage = self.stage.get().wrapping_add(1);
        self.stage.set(stage);
        // Ordered before the stage by the store below, which is at least a Release.
        self.signature_word(self.rank, stage).store(signature.0, Ordering::Relaxed);
        let (word, sleepers) = self.flag(self.rank);
        publish(word, sleepers, stage);
    }

    /// Waits until every other rank has published the current stage, starting with the next rank so
    /// that not everybody polls the same line.
    pub(super) fn wait_all(&self, signature: Signature, patience: Patience) -> Result<()> {
        (1..self.size).try_for_each(|i| self.wait_for((self.rank + i) % self.size, signature, patience))
    }

    /// Waits until `peer` has published the current stage, and checks that it is in the same
    /// operation. What `peer` wrote to its slot is visible afterwards.
    pub(super) fn wait_for(&self, peer: usize, signature: Signature, patience: Patience) -> Result<()> {
        let stage = self.stage.get();
        let arrived = |seen: u32| seen.wrapping_sub(stage) as i32 >= 0;
        self.wait(self.flag(peer), arrived, peer, signature.operation(), patience)?;
        // Visible since the Acquire of the stage.
        let theirs = Signature(self.signature_word(peer, stage).load(Ordering::Relaxed));
        self.check_signature(peer, signature, theirs)
    }

    /// Waits for a (futex word, sleepers) pair that `peer` writes. Giving up aborts the group.
    pub(super) fn wait(
        &self,
        place: (&AtomicU32, &AtomicU32),
        arrived: impl Fn(u32) -> bool,
        peer: usize,
        operation: Operation,
        patience: Patience,
    ) -> Result<()> {
        let alive = || {
            if let Some(mark) = &self.mark {
                mark.beat();
            }
        };
        match wait_until(&self.region, place, arrived, self.manners, patience, alive) {
            Ok(()) => Ok(()),
            Err(Ended::Aborted) => Err(self.aborted(operation)),
            Err(Ended::Expired { waited_ms }) => Err(self.give_up(CollectiveError::Timeout {
                rank: self.member(self.rank),
                missing: self.member(peer),
                operation: operation.name(),
                sequence: self.sequence.get(),
                waited_ms,
            })),
        }
    }

    /// Errors, and aborts the group, unless `peer` does what this rank does.
    pub(super) fn check_signature(&self, peer: usize, mine: Signature, theirs: Signature) -> Result<()> {
        if mine == theirs {
            return Ok(());
        }
        Err(self.give_up(CollectiveError::Mismatch {
            rank: self.member(self.rank),
            peer: self.member(peer),
            sequence: self.sequence.get(),
            mine: mine.describe(),
            theirs: theirs.describe(),
        }))
    }

    /// The error for arguments no rank may pass; aborts the group, since the others will wait.
    pub(super) fn invalid(&self, operation: Operation, problem: String) -> CollectiveError {
        let rank = self.member(self.rank);
        self.give_up(CollectiveError::Invalid { rank, operation: operation.name(), problem })
    }

    fn give_up(&self, error: CollectiveError) -> CollectiveError {
        self.abort(&error.to_string());
        error
    }

    fn abort(&self, cause: &str) {
        AbortHandle::of(self.region.clone()).abort(cause);
    }

    fn aborted(&self, operation: Operation) -> CollectiveError {
        let cause = AbortHandle::of(self.region.clone()).cause();
        CollectiveError::Aborted {
            rank: self.member(self.rank),
            operation: operation.name(),
            cause: cause.unwrap_or_else(|| "unknown".into()),
        }
    }

    /// Pretends that `stage` stages have passed; called on every rank before its first operation.
    #[cfg(test)]
    pub(super) fn start_at(&self, stage: u32) {
        self.stage.set(stage);
        self.flag(self.rank).0.store(stage, Ordering::SeqCst);
    }

    fn note(&self, operation: Operation, inside: bool) {
        let Some(mark) = &self.mark else { return };
        let track = match self.lane {
            Lane::Group => Track::Group,
            Lane::Tensor => Track::Tensors,
            // It has no track: its numbers are not those of the rank's other operations on tensors.
            Lane::Pipeline => return mark.beat(),
        };
        mark.note(track, self.sequence.get(), operation as u8, inside);
    }

    fn flag(&self, rank: usize) -> (&AtomicU32, &AtomicU32) {
        let line = self.region.layout().flag(self.lane, self.member(rank));
        (self.region.word(line), self.region.word(line + SLEEPERS))
    }

    fn signature_word(&self, rank: usize, stage: u32) -> &std::sync::atomic::AtomicU64 {
        let line = self.region.layout().flag(self.lane, self.member(rank));
        self.region.long(line + SIGNATURES + 8 * (stage & 1) as usize)
    }
}
