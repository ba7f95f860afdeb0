//! [`Collective`] over shared memory, for ranks that compute on the CPU.

use super::channel::{Channel, Signature};
use super::layout::Lane;
use super::members::Members;
use super::operation::Operation;
use super::pair::Pairs;
use super::region::SharedRegion;
use super::sum::{Element, tree_sum};
use super::wait::ShmOptions;
use crate::collective::{Collective, Result, StreamHandle, peer_problem};
use crate::group::Patience;
use crate::watch::Mark;
use lockstep_core::{DType, ParallelInfo};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// Largest payload of which every rank reads everything. Above it each rank sums one part and all
/// gather the sums: one more wait, but `size` times less to read.
pub const ONE_SHOT_BYTES_MAX: usize = 16 << 10;

/// Shards of a two-shot sum start on multiples of this many elements, so that two ranks never write
/// into one cache line.
const SHARD_ALIGN: usize = 64;

/// The tensor collectives of the ranks of one host.
///
/// Streams are ignored: an operation is complete when the call returns.
#[derive(Debug)]
pub struct ShmCollective {
    channel: Channel,
    pairs: Pairs,
    patience: Patience,
}

impl ShmCollective {
    /// Joins as `rank` of all; once per rank and region. Does not wait for the others.
    pub fn new(region: Arc<SharedRegion>, rank: usize, options: ShmOptions) -> Result<Self> {
        let all = Members::all(region.layout().size());
        Self::join((region, Lane::Tensor), all, rank, options)
    }

    /// Joins the TP group of the rank at `p`, in the region of its replica; like [`new`](Self::new) for a replica of one
    /// stage.
    pub fn of_stage(region: Arc<SharedRegion>, p: ParallelInfo, options: ShmOptions) -> Result<Self> {
        Self::join((region, Lane::Tensor), Members::of_stage(p), p.tp_rank, options)
    }

    /// Joins the ranks to which the one at `p` passes activations and from which it gets them: their places are their
    /// stages. Beside the TP group's, once per rank and region.
    pub fn of_pipeline(region: Arc<SharedRegion>, p: ParallelInfo, options: ShmOptions) -> Result<Self> {
        Self::join((region, Lane::Pipeline), Members::of_pipeline(p), p.pp_rank, options)
    }

    fn join(
        (region, lane): (Arc<SharedRegion>, Lane),
        members: Members,
        rank: usize,
        options: ShmOptions,
    ) -> Result<Self> {
        let channel = Channel::claim(region, (lane, members), rank, options)?;
        Ok(Self { pairs: Pairs::new(channel.size), channel, patience: Patience::Deadline(options.deadline) })
    }

    /// Shows on the watch page what this rank does in the collective.
    pub fn watched(mut self, mark: Mark) -> Self {
        self.channel.watch(mark);
        self
    }

    fn run(&self, operation: Operation, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.channel.begin(operation)?;
        body()?;
        self.channel.end(operation);
        Ok(())
    }

    /// # Safety
    /// As [`Collective::all_reduce`].
    unsafe fn reduce<T: Element>(&self, data: *mut T, count: usize, dtype: DType) -> Result<()> {
        let signature = Signature::tensor(Operation::AllReduce, dtype, count);
        if count * size_of::<T>() <= ONE_SHOT_BYTES_MAX {
            // SAFETY: the caller's promise; the payload fits a slot (`layout`: at least 16 KiB).
            return unsafe { self.one_shot(data, count, signature) };
        }
        let piece_len = self.channel.slot_bytes() / size_of::<T>();
        for start in (0..count).step_by(piece_len) {
            let len = piece_len.min(count - start);
            // SAFETY: `start + len <= count`, the caller's promise; a piece fits a slot.
            unsafe { self.two_shot(data.add(start), len, signature)? };
        }
        Ok(())
    }

    /// Everybody reads everything.
    ///
    /// # Safety
    /// `data` is valid for `count` elements, which fit a slot.
    unsafe fn one_shot<T: Element>(&self, data: *mut T, count: usize, signature: Signature) -> Result<()> {
        let channel = &self.channel;
        let parity = channel.next_piece();
        let slot = |rank: usize| channel.slot(rank, parity).cast::<T>();
        if count > 0 {
            // SAFETY: `count` elements fit; the own slot may be written before `arrive`.
            unsafe { std::ptr::copy_nonoverlapping(data, slot(channel.rank), count) };
        }
        channel.arrive(signature);
        channel.wait_all(signature, self.patience)?;
        if count > 0 {
            // SAFETY: the caller's `count` elements, not touched by anybody else during the call.
            let out = unsafe { std::slice::from_raw_parts_mut(data, count) };
            // SAFETY: every slot is readable after `wait_all`, starts on a page, and is not `data`.
            unsafe { tree_sum(&|rank| slot(rank).cast_const(), channel.size, out) };
        }
        Ok(())
    }

    /// Reduce-scatter, then gather. Stage one: everybody's parts of the other ranks' shards are
    /// readable. Stage two: everybody's summed shard is.
    ///
    /// # Safety
    /// As [`ShmCollective::one_shot`], with `count > 0`.
    unsafe fn two_shot<T: Element>(&self, data: *mut T, count: usize, signature: Signature) -> Result<()> {
        let channel = &self.channel;
        let rank = channel.rank;
        let parity = channel.next_piece();
        let slot = |rank: usize| channel.slot(rank, parity).cast::<T>();
        let shard = |rank: usize| shard(rank, channel.size, count);
        let mine = shard(rank);
        for other in [0..mine.start, mine.end..count] {
            // SAFETY: in bounds of data and slot; the own slot may be written before `arrive`.
            unsafe {
                let (from, to) = (data.add(other.start), slot(rank).add(other.start));
                std::ptr::copy_nonoverlapping(from, to, other.len());
            }
        }
        channel.arrive(signature);
        channel.wait_all(signature, self.patience)?;
        // The own shard comes from `data`, the others' parts of it from their slots, and the sum goes
        // to the place of the own shard in the own slot, which nobody has read or written yet.
        let source = |from: usize| {
            let base = if from == rank { data.cast_const() } else { slot(from).cast_const() };
            base.wrapping_add(mine.start)
        };
        // SAFETY: `mine` is in bounds of the own slot; other ranks read it after stage two only.
        let sum = unsafe { std::slice::from_raw_parts_mut(slot(rank).add(mine.start), mine.len()) };
        // SAFETY: sources are readable after `wait_all`: other ranks write no part of this
        // piece but their own shard, which is not `mine`; `sum` is none of them.
        unsafe { tree_sum(&source, channel.size, sum) };
        channel.arrive(signature);
        // Own shard first: it is in this core's cache, and the others may still be summing.
        for from in std::iter::once(rank).chain((1..channel.size).map(|i| (rank + i) % channel.size)) {
            if from != rank {
                channel.wait_for(from, signature, self.patience)?;
            }
            let part = shard(from);
            // SAFETY: in bounds; `from` published its sum (or is this rank).
            unsafe {
                let (from, to) = (slot(from).add(part.start), data.add(part.start));
                std::ptr::copy_nonoverlapping(from, to, part.len());
            }
        }
        Ok(())
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
        let channel = &self.channel;
        let slot_bytes = channel.slot_bytes();
        for index in 0..bytes.div_ceil(slot_bytes).max(1) {
            let start = index * slot_bytes;
            let len = slot_bytes.min(bytes - start);
            let parity = channel.next_piece();
            if len > 0 {
                // SAFETY: in bounds of `send`; the own slot may be written before `arrive`.
                unsafe {
                    std::ptr::copy_nonoverlapping(send.add(start), channel.slot(channel.rank, parity), len)
                };
            }
            channel.arrive(signature);
            channel.wait_all(signature, self.patience)?;
            for rank in 0..channel.size {
                if len > 0 {
                    // SAFETY: rank's part of `recv`; slots are readable after `wait_all`.
                    unsafe {
                        let to = recv.add(rank * bytes + start);
                        std::ptr::copy_nonoverlapping(channel.slot(rank, parity), to, len);
                    }
                }
            }
        }
        Ok(())
    }

    /// Errors unless `peer` is another rank of the group.
    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        let problem = peer_problem(self.channel.rank, self.channel.size, peer);
        problem.map_or(Ok(()), |problem| Err(self.channel.invalid(operation, problem)))
    }
}

/// The elements of `0..count` that `rank` sums.
pub(crate) fn shard(rank: usize, size: usize, count: usize) -> Range<usize> {
    let len = count.div_ceil(size).next_multiple_of(SHARD_ALIGN);
    (rank * len).min(count)..((rank + 1) * len).min(count)
}

impl Collective for ShmCollective {
    fn rank(&self) -> usize {
        self.channel.rank
    }

    fn size(&self) -> usize {
        self.channel.size
    }

    unsafe fn all_reduce(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        _: StreamHandle,
    ) -> Result<()> {
        if self.channel.size == 1 {
            return Ok(());
        }
        // SAFETY: the caller's promise, for the element type that `dtype` names.
        self.run(Operation::AllReduce, || unsafe {
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
        self.run(Operation::AllGather, || unsafe { self.gather(send.cast(), recv.cast(), bytes, signature) })
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
        let bytes = count * dtype.size_bytes();
        self.run(Operation::Send, || {
            self.check_peer(Operation::Send, peer)?;
            // SAFETY: the caller's promise; `peer` is another rank.
            unsafe { self.pairs.send(&self.channel, peer, (data.cast(), bytes), signature, self.patience) }
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
        let bytes = count * dtype.size_bytes();
        self.run(Operation::Recv, || {
            self.check_peer(Operation::Recv, peer)?;
            // SAFETY: the caller's promise; `peer` is another rank.
            unsafe { self.pairs.recv(&self.channel, peer, (data.cast(), bytes), signature, self.patience) }
        })
    }
}
