//! Process group and collectives over one piece of shared memory, for ranks of one host.
//!
//! The launcher makes one memfd per rank group ([`SharedRegion::create`]) and hands it to the ranks
//! as an inherited descriptor; each rank maps it ([`SharedRegion::map`]) and builds a [`ShmGroup`]
//! and a [`ShmCollective`] on it, which may be used side by side from two threads. The launcher
//! keeps an [`AbortHandle`]. The memory has no name, so nothing is left behind when the last process
//! ends, however it ends. Where each rank stands is on the watch page, if it has one ([`crate::watch`]).
//!
//! **Protocol.** Every rank has a *stage* counter in its own cache line. An operation is one or two
//! stages: write to the own slot, publish the stage, wait until the others have published it, read
//! their slots. Slots are double-buffered, and every stage waits for *every* rank, so a rank can
//! be at most one stage ahead of the slowest: when it writes a buffer again, two pieces later, all
//! ranks have published a stage of the piece between, hence finished reading (`channel`).
//!
//! **Memory ordering.** The stage is published with SeqCst and awaited with Acquire: whatever a rank
//! wrote to its slot before publishing is visible to whoever saw the stage. SeqCst instead of
//! Release is for the sleeper count, see `wait`.
//!
//! **Determinism.** A sum is the binary tree `((r0+r1)+(r2+r3))+...` over ranks whatever the size of
//! the payload, so results are bit-equal on all ranks and do not depend on which algorithm ran
//! (`sum`).
//!
//! **Waiting.** A few microseconds of polling, then yielding, then a futex; no core burns while a
//! rank is idle or ranks outnumber cores. Every wait looks at the abort word.
//!
//! **Failure.** A rank that gives up (deadline, disagreement) aborts the whole group with its error
//! as the cause, so that every rank ends with the first cause and not with its own time-out.
//! Counts and dtypes are published next to the stage and compared; they are never used as lengths.
//!
//! **Members.** One region is the memory of a replica, with one abort word: its process group has all ranks, a TP group
//! those of a stage, a pipeline one of each stage. Each is a lane of its own, in which a rank is a member of one group.
//!
//! Reading order: `layout`, `members`, `region`, `wait`, `channel`, `sum`, `group`, `collective`, `pair`,
//! `abort`, `threads`. The idea of one- and two-shot all-reduce over peer memory is from
//! TensorRT-LLM's and vLLM's custom all-reduce; theirs sums in rank order, ours in tree order.

mod abort;
mod channel;
mod collective;
mod group;
mod layout;
mod members;
mod operation;
mod pair;
mod region;
mod sum;
mod threads;
mod wait;

pub(crate) use channel::Signature;
pub(crate) use collective::shard;
pub(crate) use sum::{Element, tree_sum};

pub use abort::{ABORT_CAUSE_BYTES_MAX, AbortHandle};
pub use collective::{ONE_SHOT_BYTES_MAX, ShmCollective};
pub use group::{GROUP_PAYLOAD_BYTES_MAX, ShmGroup};
pub use layout::ShmLayout;
pub use members::Members;
pub use operation::Operation;
pub use region::SharedRegion;
pub use threads::{AbortOnPanic, as_threads};
pub use wait::ShmOptions;

#[cfg(test)]
mod tests;
