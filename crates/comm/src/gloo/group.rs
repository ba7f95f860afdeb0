//! [`ProcessGroup`] over a mesh.

use super::lane::Lane;
use super::mesh::Mesh;
use crate::collective::Result;
use crate::group::{Patience, ProcessGroup};
use crate::shm::{GROUP_PAYLOAD_BYTES_MAX, Operation, Signature};
use crate::watch::{Mark, Track};
use std::sync::Arc;

/// The CPU process group of ranks on several hosts.
#[derive(Debug)]
pub struct GlooGroup {
    lane: Lane,
}

impl GlooGroup {
    /// Joins the group of the ranks `members` of `mesh` in lane `number`, which nothing else of the mesh may have.
    /// Does not wait for the others.
    pub fn new(mesh: Arc<Mesh>, members: Vec<usize>, number: u64) -> Result<Self> {
        let lane = Lane::new(mesh, members, (number, GROUP_PAYLOAD_BYTES_MAX), Track::Group)?;
        Ok(Self { lane })
    }

    /// Shows on the watch page what this rank does in the group.
    pub fn watched(mut self, mark: Mark) -> Self {
        self.lane.watch(mark);
        self
    }
}

impl ProcessGroup for GlooGroup {
    fn rank(&self) -> usize {
        self.lane.rank
    }

    fn size(&self) -> usize {
        self.lane.size()
    }

    fn barrier(&mut self, patience: Patience) -> Result<()> {
        let signature = Signature::new(Operation::Barrier, 0, 0);
        self.lane.run(Operation::Barrier, || self.lane.round((signature, patience), |_, _| 0, |_| 0, |_| ()))
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> Result<()> {
        let (lane, len) = (&self.lane, send.len());
        lane.run(Operation::AllGather, || {
            if len > GROUP_PAYLOAD_BYTES_MAX || recv.len() != len * lane.size() {
                let problem = format!(
                    "{len} bytes into a buffer of {}; at most {GROUP_PAYLOAD_BYTES_MAX} bytes a rank, and the \
                     buffer holds those of all {} ranks",
                    recv.len(),
                    lane.size()
                );
                return Err(lane.invalid(Operation::AllGather, problem));
            }
            let fill = |_, to: *mut u8| {
                // SAFETY: `send` fits a message (checked).
                unsafe { std::ptr::copy_nonoverlapping(send.as_ptr(), to, len) };
                len
            };
            let signature = Signature::new(Operation::AllGather, 0, len);
            lane.round((signature, patience), fill, |_| len, |payload| {
                for position in 0..lane.size() {
                    let part = &mut recv[position * len..(position + 1) * len];
                    if position == lane.rank {
                        part.copy_from_slice(send);
                    } else {
                        // SAFETY: `len` bytes were received from that member.
                        unsafe { std::ptr::copy_nonoverlapping(payload(position), part.as_mut_ptr(), len) };
                    }
                }
            })
        })
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> Result<()> {
        let lane = &self.lane;
        lane.run(Operation::Broadcast, || {
            if root >= lane.size() {
                let problem = format!("there is no rank {root} in a group of {}", lane.size());
                return Err(lane.invalid(Operation::Broadcast, problem));
            }
            let signature = Signature::new(Operation::Broadcast, root as u8, data.len());
            let pieces = data.len().div_ceil(GROUP_PAYLOAD_BYTES_MAX).max(1);
            for index in 0..pieces {
                let start = index * GROUP_PAYLOAD_BYTES_MAX;
                let end = data.len().min(start + GROUP_PAYLOAD_BYTES_MAX);
                let piece = &mut data[start..end];
                let (from, len) = (piece.as_mut_ptr(), piece.len());
                // Also those who have nothing to tell send a header: the root must not run ahead, and ranks that do
                // something else are noticed.
                let fill = |_, to: *mut u8| {
                    if lane.rank != root {
                        return 0;
                    }
                    // SAFETY: a piece fits a message.
                    unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), to, len) };
                    len
                };
                let expected = |position| if position == root { len } else { 0 };
                lane.round((signature, patience), fill, expected, |payload| {
                    if lane.rank != root {
                        // SAFETY: `len` bytes were received from the root; `from` is this rank's own piece.
                        unsafe { std::ptr::copy_nonoverlapping(payload(root), from, len) };
                    }
                })?;
            }
            Ok(())
        })
    }
}
