//! [`Collective`] over a mesh, for ranks that compute on the CPU.

use super::lane::{HEADER_BYTES, Lane};
use super::mesh::Mesh;
use super::transport::Buffer;
use super::transport_types::Pair;
use crate::collective::{Collective, Result, StreamHandle, peer_problem};
use crate::group::Patience;
use crate::shm::{Element, ONE_SHOT_BYTES_MAX, Operation, Signature, shard, tree_sum};
use crate::watch::{Mark, Track};
use lockstep_core::DType;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one message; larger tensors go in pieces.
const PIECE_BYTES: usize = 256 << 10;
/// How long what is on its way may take to leave when this rank ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// Messages to one rank that may be on their way before a transfer waits: 16 MiB, about what a pipeline stage sends
/// in one step of 512 tokens of 8,192 floats.
const TRANSFERS_MAX: usize = 64;

/// The tensor collectives of ranks on several hosts.
///
/// Streams are ignored: an operation is complete when the call returns, except that what was sent to another rank may
/// still be on its way, as it may be with shared memory.
#[derive(Debug)]
pub struct GlooCollective {
    lane: Lane,
    patience: Patience,
    /// This rank's own part of a sum, while the sum takes its place.
    scratch: Arc<Buffer>,
    /// Messages on their way to each other member, oldest first.
    transfers: RefCell<Vec<VecDeque<Arc<Buffer>>>>,
}

impl Drop for GlooCollective {
    fn drop(&mut self) {
        // What was sent arrives, as it would from shared memory. A failure is the receiver's to tell.
        let waiting = self.transfers.get_mut().drain(..).flatten();
        waiting.for_each(|buffer| drop(self.lane.mesh.wait(&buffer, true, FAREWELL)));
    }
}

impl GlooCollective {
    /// Joins the group of the ranks `members` of `mesh` in lane `number`, which nothing else of the mesh may have.
    /// A rank is waited for at most `deadline`. Does not wait for the others.
    pub fn new(mesh: Arc<Mesh>, members: Vec<usize>, number: u64, deadline: Duration) -> Result<Self> {
        let scratch = mesh.buffer(PIECE_BYTES)?;
        let transfers = RefCell::new(vec![VecDeque::new(); members.len()]);
        let lane = Lane::new(mesh, members, (number, PIECE_BYTES), Track::Tensors)?;
        Ok(Self { lane, patience: Patience::Deadline(deadline), scratch, transfers })
    }

    /// Shows on the watch page what this rank does in the collective.
    pub fn watched(mut self, mark: Mark) -> Self {
        self.lane.watch(mark);
        self
    }

    /// # Safety
    /// As [`Collective::all_reduce`].
    unsafe fn reduce<T: Element>(&self, data: *mut T, count: usize, dtype: DType) -> Result<()> {
        let signature = Signature::tensor(Operation::AllReduce, dtype, count);
        // Two ranks send each other as much either way, and half as often if they send everything at once.
        let at_once = self.lane.size() == 2 || count * size_of::<T>() <= ONE_SHOT_BYTES_MAX;
        let piece_len = self.lane.piece_bytes() / size_of::<T>();
        // Nothing is still one round, so that counts that differ are noticed.
        for index in 0..count.div_ceil(piece_len).max(1) {
            let start = index * piece_len;
            let len = piece_len.min(count - start);
            // SAFETY: `start + len <= count`, the caller's promise; a piece fits a message.
            unsafe {
                match at_once {
                    true => self.one_shot(data.add(start), len, signature)?,
                    false => self.two_shot(data.add(start), len, signature)?,
                }
            }
        }
        Ok(())
    }

    /// Everybody gets everything.
    ///
    /// # Safety
    /// `data` is valid for `count` elements, which fit a piece.
    unsafe fn one_shot<T: Element>(&self, data: *mut T, count: usize, signature: Signature) -> Result<()> {
        let (lane, bytes) = (&self.lane, count * size_of::<T>());
        let own: *mut T = self.scratch.data().cast();
        // SAFETY: a piece fits the scratch buffer, of which nobody else knows.
        unsafe { std::ptr::copy_nonoverlapping(data, own, count) };
        let fill = |_, to: *mut u8| {
            // SAFETY: a piece fits a message.
            unsafe { std::ptr::copy_nonoverlapping(own.cast::<u8>().cast_const(), to, bytes) };
            bytes
        };
        lane.round(
            (signature, self.patience),
            fill,
            |_| bytes,
            |payload| {
                let source = |from: usize| {
                    if from == lane.rank { own.cast_const() } else { payload(from).cast::<T>() }
                };
                // SAFETY: the caller's `count` elements; sources are as long, aligned, and none of them.
                unsafe { tree_sum(&source, lane.size(), std::slice::from_raw_parts_mut(data, count)) };
            },
        )
    }

    /// Each member sums one shard of everybody's, then all get the sums.
    ///
    /// # Safety
    /// As [`GlooCollective::one_shot`].
    unsafe fn two_shot<T: Element>(&self, data: *mut T, count: usize, signature: Signature) -> Result<()> {
        let lane = &self.lane;
        let size_bytes = size_of::<T>();
        let shard = |position: usize| shard(position, lane.size(), count);
        let mine = shard(lane.rank);
        let own: *mut T = self.scratch.data().cast();
        let fill = |position: usize, to: *mut u8| {
            let part = shard(position);
            // SAFETY: in bounds of `data`; a part of a piece fits a message.
            unsafe {
                std::ptr::copy_nonoverlapping(data.add(part.start).cast_const(), to.cast::<T>(), part.len())
            };
            part.len() * size_bytes
        };
        lane.round(
            (signature, self.patience),
            fill,
            |_| mine.len() * size_bytes,
            |payload| {
                let source = |from: usize| {
                    if from == lane.rank {
                        data.wrapping_add(mine.start).cast_const()
                    } else {
                        payload(from).cast::<T>()
                    }
                };
                // SAFETY: the scratch buffer has room for a piece and is none of the sources, which are as long as it.
                unsafe { tree_sum(&source, lane.size(), std::slice::from_raw_parts_mut(own, mine.len())) };
            },
        )?;
        let fill = |_, to: *mut u8| {
            // SAFETY: the sum is in bounds of the scratch buffer and fits a message.
            unsafe { std::ptr::copy_nonoverlapping(own.cast_const(), to.cast::<T>(), mine.len()) };
            mine.len() * size_bytes
        };
        let expected = |position| shard(position).len() * size_bytes;
        lane.round((signature, self.patience), fill, expected, |payload| {
            for position in 0..lane.size() {
                let part = shard(position);
                let from =
                    if position == lane.rank { own.cast_const() } else { payload(position).cast::<T>() };
                // SAFETY: in bounds of `data`; as many elements were received, or are in the scratch buffer.
                unsafe { std::ptr::copy_nonoverlapping(from, data.add(part.start), part.len()) };
            }
        })
    }

    /// # Safety
    /// As [`Collective::all_gather`], in bytes.
    unsafe fn gather(
        &self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
        signature: Signature,
    ) -> Result<()> {
        let lane = &self.lane;
        for (start, len) in pieces(bytes) {
            // SAFETY: `start + len <= bytes`.
            let own = unsafe { send.add(start) };
            let fill = |_, to: *mut u8| {
                // SAFETY: a piece of the caller's bytes fits a message.
                unsafe { std::ptr::copy_nonoverlapping(own, to, len) };
                len
            };
            lane.round(
                (signature, self.patience),
                fill,
                |_| len,
                |payload| {
                    for position in 0..lane.size() {
                        let from = if position == lane.rank { own } else { payload(position) };
                        // SAFETY: that rank's part of `recv`; `len` bytes were received from it.
                        unsafe {
                            std::ptr::copy_nonoverlapping(from, recv.add(position * bytes + start), len)
                        };
                    }
                },
            )?;
        }
        Ok(())
    }

    /// A buffer for a message to `peer`: a new one, or the oldest once its message has left.
    fn transfer_buffer(&self, peer: usize) -> Result<Arc<Buffer>> {
        let oldest = {
            let mut transfers = self.transfers.borrow_mut();
            if transfers[peer].len() < TRANSFERS_MAX { None } else { transfers[peer].pop_front() }
        };
        let Some(oldest) = oldest else { return self.lane.mesh.buffer(HEADER_BYTES + PIECE_BYTES) };
        self.lane.complete(&oldest, (peer, true), Operation::Send, self.patience)?;
        Ok(oldest)
    }

    /// Errors unless `peer` is another rank of the group.
    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        let problem = peer_problem(self.lane.rank, self.lane.size(), peer);
        problem.map_or(Ok(()), |problem| Err(self.lane.invalid(operation, problem)))
    }
}

/// (start, length) of each piece of `bytes`; one empty piece for none.
fn pieces(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes.div_ceil(PIECE_BYTES).max(1)).map(move |index| {
        let start = index * PIECE_BYTES;
        (start, PIECE_BYTES.min(bytes - start))
    })
}

impl Collective for GlooCollective {
    fn rank(&self) -> usize {
        self.lane.rank
    }

    fn size(&self) -> usize {
        self.lane.size()
    }

    unsafe fn all_reduce(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        _: StreamHandle,
    ) -> Result<()> {
        if self.lane.size() == 1 {
            return Ok(());
        }
        // SAFETY: the caller's promise, for the element type that `dtype` names.
        self.lane.run(Operation::AllReduce, || unsafe {
            match dtype {
                DType::F32 => self.reduce::<f32>(data.cast(), count, dtype),
                DType::F16 => self.reduce::<half::f16>(data.cast(), count, dtype),
                DType::Bf16 => self.reduce::<half::bf16>(data.cast(), count, dtype),
            }
        })
    }

    unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DType,
        _: StreamHandle,
    ) -> Result<()> {
        let signature = Signature::tensor(Operation::AllGather, dtype, count);
        let bytes = count * dtype.size_bytes();
        // SAFETY: the caller's promise.
        self.lane
            .run(Operation::AllGather, || unsafe { self.gather(send.cast(), recv.cast(), bytes, signature) })
    }

    unsafe fn send(
        &self,
        data: *const c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        _: StreamHandle,
    ) -> Result<()> {
        // Both ends name the transfer "send", so that their signatures agree.
        let signature = Signature::tensor(Operation::Send, dtype, count);
        self.lane.run(Operation::Send, || {
            self.check_peer(Operation::Send, peer)?;
            for (start, len) in pieces(count * dtype.size_bytes()) {
                let buffer = self.transfer_buffer(peer)?;
                // SAFETY: a piece of the caller's bytes fits a message; nothing is pending on the buffer.
                unsafe {
                    let to = buffer.data().add(HEADER_BYTES);
                    std::ptr::copy_nonoverlapping(data.cast::<u8>().add(start), to, len);
                }
                self.lane.send(&buffer, peer, self.lane.transfer_slot(), (signature, len))?;
                self.transfers.borrow_mut()[peer].push_back(buffer);
            }
            Ok(())
        })
    }

    unsafe fn recv(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        _: StreamHandle,
    ) -> Result<()> {
        let signature = Signature::tensor(Operation::Send, dtype, count);
        self.lane.run(Operation::Recv, || {
            self.check_peer(Operation::Recv, peer)?;
            let buffer = self.lane.mesh.buffer(HEADER_BYTES + PIECE_BYTES)?;
            for (start, len) in pieces(count * dtype.size_bytes()) {
                let pair = Pair::Recv(self.lane.member(peer), self.lane.transfer_slot());
                let posted = buffer.start(pair, HEADER_BYTES + PIECE_BYTES);
                posted.map_err(|words| self.lane.lost(Operation::Recv, peer, words))?;
                self.lane.complete(&buffer, (peer, false), Operation::Recv, self.patience)?;
                self.lane.check(&buffer, peer, (signature, len))?;
                // SAFETY: a piece of the caller's bytes; as many were received.
                unsafe {
                    let from = buffer.data().add(HEADER_BYTES).cast_const();
                    std::ptr::copy_nonoverlapping(from, data.cast::<u8>().add(start), len);
                }
            }
            Ok(())
        })
    }
}
