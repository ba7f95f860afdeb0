//! [`ProcessGroup`] over shared memory.

use super::channel::{Channel, Signature};
use super::layout::{GROUP_SLOT_BYTES, Lane};
use super::members::Members;
use super::operation::Operation;
use super::region::SharedRegion;
use super::wait::ShmOptions;
use crate::collective::Result;
use crate::group::{Patience, ProcessGroup};
use crate::watch::Mark;
use std::sync::Arc;

/// Largest contribution of one rank to [`ProcessGroup::all_gather`].
pub const GROUP_PAYLOAD_BYTES_MAX: usize = GROUP_SLOT_BYTES;

/// The CPU process group of the ranks of one host. All ranks of the region use it together.
#[derive(Debug)]
pub struct ShmGroup {
    channel: Channel,
}

impl ShmGroup {
    /// Joins as `rank`; once per rank and region. Does not wait for the others.
    pub fn new(region: Arc<SharedRegion>, rank: usize, options: ShmOptions) -> Result<Self> {
        let all = Members::all(region.layout().size());
        Ok(Self { channel: Channel::claim(region, (Lane::Group, all), rank, options)? })
    }

    /// Shows on the watch page what this rank does in the group.
    pub fn watched(mut self, mark: Mark) -> Self {
        self.channel.watch(mark);
        self
    }

    /// See [`Channel::start_at`].
    #[cfg(test)]
    pub(super) fn start_at(&self, stage: u32) {
        self.channel.start_at(stage);
    }

    fn run(&self, operation: Operation, body: impl FnOnce(&Channel) -> Result<()>) -> Result<()> {
        self.channel.begin(operation)?;
        body(&self.channel)?;
        self.channel.end(operation);
        Ok(())
    }
}

impl ProcessGroup for ShmGroup {
    fn rank(&self) -> usize {
        self.channel.rank
    }

    fn size(&self) -> usize {
        self.channel.size
    }

    fn barrier(&mut self, patience: Patience) -> Result<()> {
        self.run(Operation::Barrier, |channel| {
            let signature = Signature::new(Operation::Barrier, 0, 0);
            // A stage without data is still a piece: slots alternate by piece, and the argument for
            // reusing them counts pieces.
            channel.next_piece();
            channel.arrive(signature);
            channel.wait_all(signature, patience)
        })
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> Result<()> {
        self.run(Operation::AllGather, |channel| {
            if send.len() > GROUP_PAYLOAD_BYTES_MAX || recv.len() != send.len() * channel.size {
                let problem = format!(
                    "{} bytes into a buffer of {}; at most {GROUP_PAYLOAD_BYTES_MAX} bytes a rank, and the buffer \
                     holds those of all {} ranks",
                    send.len(),
                    recv.len(),
                    channel.size
                );
                return Err(channel.invalid(Operation::AllGather, problem));
            }
            let signature = Signature::new(Operation::AllGather, 0, send.len());
            let parity = channel.next_piece();
            // SAFETY: `send` fits the slot (checked); the own slot may be written before `arrive`.
            unsafe {
                std::ptr::copy_nonoverlapping(send.as_ptr(), channel.slot(channel.rank, parity), send.len());
            }
            channel.arrive(signature);
            channel.wait_all(signature, patience)?;
            for rank in 0..channel.size {
                let part = &mut recv[rank * send.len()..(rank + 1) * send.len()];
                // SAFETY: the slot holds at least `send.len()` bytes, readable after `wait_all`.
                unsafe {
                    std::ptr::copy_nonoverlapping(channel.slot(rank, parity), part.as_mut_ptr(), part.len());
                }
            }
            Ok(())
        })
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> Result<()> {
        self.run(Operation::Broadcast, |channel| {
            if root >= channel.size {
                let problem = format!("there is no rank {root} in a group of {}", channel.size);
                return Err(channel.invalid(Operation::Broadcast, problem));
            }
            let signature = Signature::new(Operation::Broadcast, root as u8, data.len());
            // An empty broadcast is still one stage, so that sizes that differ are noticed.
            let pieces = data.len().div_ceil(GROUP_SLOT_BYTES).max(1);
            for index in 0..pieces {
                let start = index * GROUP_SLOT_BYTES;
                let end = data.len().min(start + GROUP_SLOT_BYTES);
                let piece = &mut data[start..end];
                let parity = channel.next_piece();
                let slot = channel.slot(root, parity);
                if channel.rank == root {
                    // SAFETY: a piece fits the slot; the own slot may be written before `arrive`.
                    unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), slot, piece.len()) };
                }
                channel.arrive(signature);
                // Also the root waits for all: otherwise it could run two pieces ahead and overwrite.
                channel.wait_all(signature, patience)?;
                if channel.rank != root {
                    // SAFETY: a piece fits the slot, which is readable after `wait_all`.
                    unsafe { std::ptr::copy_nonoverlapping(slot, piece.as_mut_ptr(), piece.len()) };
                }
            }
            Ok(())
        })
    }
}
