//! The residual stream from one pipeline stage to the next, between ranks with the same place in their stages.
//!
//! Where GPUs write to each other's memory (several ranks on one GPU included), a kernel of the sending stage writes into
//! memory that the receiving one lends and raises a flag there; a kernel of the receiving stage waits for the flag
//! (`kernels/stages.cu`). Both are queued like everything else, so neither host waits. From one host to another NCCL sends
//! and receives, queued as well. Elsewhere (no peer access, CUDA IPC refused, ranks that are threads of one context, stages
//! on several hosts that may share a GPU, which NCCL refuses) the stream goes through the host's memory and the pipeline's
//! [`Collective`], and the sending host waits for its device. Which way a hop takes is known from the ranks' places and
//! whether kernels work on every host ([`Hop::of`]).
//!
//! **Invariants:** transfers of a pair of stages are numbered, and the one with number n uses slot n modulo the number of
//! stages. A slot is free when it is used again, for a rank starts a step only when the step so many steps before has ended
//! on the devices of all ranks: as many steps as stages are in flight, and a step ends with [`Backend::end_step`] of every
//! stage. A kernel waits with an end, after which the host names the missing rank.
//!
//! [`Backend::end_step`]: crate::Backend::end_step

use super::compile::Source;
use super::device::Device;
use super::driver::Address;
use super::launch::{Args, Grid, Kernel};
use super::memory::{Buffer, Staging};
use super::peers::{Card, Report, connect};
use crate::{BackendError, PipelinePlace, Result};
use lockstep_comm::collective::{Collective, StreamHandle};
use lockstep_comm::group::ProcessGroup;
use lockstep_core::DType;
use std::ffi::c_void;
use std::rc::Rc;
use std::time::Duration;

/// Bytes before the slots of an inbox, one flag of four bytes for each.
const FLAG_BYTES: usize = 4096;
/// Most stages of a pipeline.
const STAGES_MAX: usize = FLAG_BYTES / size_of::<u32>();
/// Threads of a block.
const THREADS: usize = 512;

/// How the stream comes and goes.
pub(super) struct Stages {
    device: Rc<Device>,
    /// From the stage before.
    before: Hop,
    /// To the next stage.
    next: Hop,
    /// Where kernels work.
    ring: Option<Ring>,
    /// Where a stream arrives that comes through the host's memory.
    arrived: Vec<u8>,
}

/// One way from stage to stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hop {
    /// By kernels, through memory that the GPUs share.
    Kernels,
    /// By NCCL, from host to host.
    Library,
    /// Through the hosts' memory.
    Host,
}

impl Hop {
    /// The way between the rank at `place` and `neighbour`, if it has one there; both come to the same.
    /// `kernels_work` is agreed by all ranks. `engine::gpu` makes NCCL ready by the same rule.
    fn of(place: &PipelinePlace, neighbour: Option<usize>, kernels_work: bool) -> Self {
        match neighbour {
            Some(other) if !place.shares_host_with(other) && !place.shares_gpus => Self::Library,
            Some(other) if !place.shares_host_with(other) => Self::Host,
            _ if kernels_work => Self::Kernels,
            _ => Self::Host,
        }
    }
}

/// The memory between this rank and its neighbours, and the kernels that use it.
pub(super) struct Ring {
    send: Kernel,
    recv: Kernel,
    /// What the stage before writes to; None on the first.
    inbox: Option<Buffer>,
    /// The next stage's.
    next: Option<Address>,
    state: Buffer,
    report: Address,
    limit: Duration,
    /// The stage before, as the report's words name ranks.
    source: u32,
    slots: usize,
    slot_bytes: usize,
    sms: usize,
    /// Transfers so far.
    sent: usize,
    received: usize,
}

impl Stages {
    /// Bytes that the stages after the first lend for streams of `rows` rows of `cols` elements.
    pub fn inbox_bytes(place_count: usize, rows: usize, cols: usize, dtype: DType) -> usize {
        FLAG_BYTES + place_count * slot_bytes(rows, cols, dtype)
    }

    /// Joins the neighbours of the rank at `place`; gives why the stream goes through a host's memory, where it does.
    /// Errors when two ranks are on one GPU and may not be.
    /// **Collective: all ranks of the replica, each with its device's context current.**
    pub fn connect(
        device: &Rc<Device>,
        dtype: DType,
        group: &mut dyn ProcessGroup,
        place: &PipelinePlace,
    ) -> Result<(Self, Option<String>)> {
        let own = Own::new(device, dtype, place).map_err(|error| error.to_string());
        let inbox = own.as_ref().ok().and_then(|own| own.inbox.as_ref()).map(Buffer::address);
        let cards = connect::exchange(group, &Card::of(device, inbox)?)?;
        connect::check_one_rank_a_gpu(&cards, place.shares_gpus)?;
        if connect::share_a_context(&cards) {
            device.share_context();
        }
        let opened = own.and_then(|own| {
            if device.shares_context() {
                return Err("ranks are threads of one process on one GPU".into());
            }
            let here = place.next().filter(|next| place.shares_host_with(*next));
            let next = here.map(|next| connect::open_inbox(device, (place.rank, next), &cards));
            own.into_ring(device, place, next.transpose()?).map_err(|error| error.to_string())
        });
        let problem = connect::agree(group, opened.as_ref().err().map(String::as_str))?;
        let ring = opened.ok().filter(|_| problem.is_none());
        let hop = |neighbour| Hop::of(place, neighbour, ring.is_some());
        let (before, next) = (hop(place.previous()), hop(place.next()));
        let by_hosts = (place.hosts.nnodes() > 1 && place.shares_gpus)
            .then(|| "--share-gpu on several hosts, where NCCL refuses ranks on one GPU".to_owned());
        let stages = Self { device: Rc::clone(device), before, next, ring, arrived: Vec::new() };
        Ok((stages, problem.or(by_hosts)))
    }

    /// Queues the transfer of `bytes` bytes at `from` to stage `to`. Panics unless `bytes` is a multiple of 16.
    ///
    /// # Safety
    /// `from` is valid for `bytes` bytes of device memory until the transfer has run.
    pub unsafe fn send(
        &mut self,
        staging: &mut Staging,
        pipeline: &dyn Collective,
        (from, bytes): (Address, usize),
        to: usize,
    ) -> Result<()> {
        let count = bytes / size_of::<f32>();
        match self.next {
            Hop::Kernels => {
                let ring = self.ring.as_mut().ok_or_else(|| no_neighbour("after"))?;
                // SAFETY: the caller's promise.
                unsafe { ring.queue_send(from, bytes) }
            }
            Hop::Library => {
                let (data, stream) = (from as *const c_void, StreamHandle(self.device.stream));
                // SAFETY: the caller's promise; what was queued on the stream comes before.
                let queued = unsafe { pipeline.send(data, count, DType::F32, to, stream) };
                self.device.with_others(queued)
            }
            Hop::Host => {
                // SAFETY: the caller's promise.
                let copied = unsafe { staging.copy_out(from, bytes)? };
                let data = copied.as_ptr().cast();
                // SAFETY: `copied` holds that many bytes; the host's memory is sent before this returns.
                unsafe { pipeline.send(data, count, DType::F32, to, StreamHandle::HOST)? };
                Ok(())
            }
        }
    }

    /// Queues the transfer of what stage `from` sends to `to`.
    ///
    /// # Safety
    /// `to` is valid for `bytes` bytes of device memory until the transfer has run.
    pub unsafe fn recv(
        &mut self,
        staging: &mut Staging,
        pipeline: &dyn Collective,
        (to, bytes): (Address, usize),
        from: usize,
    ) -> Result<()> {
        let count = bytes / size_of::<f32>();
        match self.before {
            Hop::Kernels => {
                let ring = self.ring.as_mut().ok_or_else(|| no_neighbour("before"))?;
                // SAFETY: the caller's promise.
                unsafe { ring.queue_recv(to, bytes) }
            }
            Hop::Library => {
                let (data, stream) = (to as *mut c_void, StreamHandle(self.device.stream));
                // SAFETY: the caller's promise; what is queued on the stream comes after.
                let queued = unsafe { pipeline.recv(data, count, DType::F32, from, stream) };
                self.device.with_others(queued)
            }
            Hop::Host => {
                self.arrived.resize(self.arrived.len().max(bytes), 0);
                let data = self.arrived.as_mut_ptr().cast();
                // SAFETY: the buffer holds that many bytes; they are there when this returns.
                unsafe { pipeline.recv(data, count, DType::F32, from, StreamHandle::HOST)? };
                // SAFETY: the caller's promise.
                unsafe { staging.copy_in(to, &self.arrived[..bytes]) }
            }
        }
    }
}

/// Passes a few bytes from stage to stage by NCCL. Connections are made at the first transfer, which would wait on the host,
/// without a limit, for a rank that has stopped; so that is here.
/// **Collective: all ranks of the pipeline, each with its device's context current.**
pub(super) fn open_transfers(device: &Rc<Device>, pipeline: &dyn Collective) -> Result<()> {
    let buffer = Buffer::zeroed(device, 16, "a first transfer between stages")?;
    let (data, stream) = (buffer.address() as *mut c_void, StreamHandle(device.stream));
    let rank = pipeline.rank();
    if rank > 0 {
        // SAFETY: the buffer holds four elements until the wait below is over; if there is none it is never given back.
        device.with_others(unsafe { pipeline.recv(data, 4, DType::F32, rank - 1, stream) })?;
    }
    if rank + 1 < pipeline.size() {
        // SAFETY: as above.
        device.with_others(unsafe { pipeline.send(data, 4, DType::F32, rank + 1, stream) })?;
    }
    device.wait()
}

impl Ring {
    unsafe fn queue_send(&mut self, from: Address, bytes: usize) -> Result<()> {
        let next = self.next.ok_or_else(|| no_neighbour("after"))?;
        let (slot, flag) = self.place(next, self.sent, bytes)?;
        self.sent += 1;
        let args = Args::default().address(from).address(slot).address(flag).address(self.state.address());
        let args = args.int(number(self.sent)).int(bytes / 16);
        // SAFETY: the caller's promise; the next stage's inbox has a slot of `slot_bytes` there for as long as it runs.
        unsafe { self.send.launch(self.grid(bytes), args) };
        Ok(())
    }

    unsafe fn queue_recv(&mut self, to: Address, bytes: usize) -> Result<()> {
        let inbox = self.inbox.as_ref().ok_or_else(|| no_neighbour("before"))?.address();
        let (slot, flag) = self.place(inbox, self.received, bytes)?;
        self.received += 1;
        let limit_ms = u32::try_from(self.limit.as_millis()).unwrap_or(u32::MAX) as usize;
        let args = Args::default().address(slot).address(flag).address(to).address(self.state.address());
        let args = args.address(self.report).int(limit_ms).int(self.source as usize);
        let args = args.int(number(self.received)).int(bytes / 16);
        // SAFETY: the caller's promise; the inbox is there as long as this value.
        unsafe { self.recv.launch(self.grid(bytes), args) };
        Ok(())
    }

    /// Slot and flag, in the inbox at `inbox`, of the transfer after `before` others. Errors when it is too large.
    fn place(&self, inbox: Address, before: usize, bytes: usize) -> Result<(Address, Address)> {
        assert!(bytes.is_multiple_of(16), "{bytes} bytes of the residual stream move in parts of 16");
        if bytes > self.slot_bytes {
            return Err(BackendError::Unsupported(format!(
                "a step passes {bytes} bytes on to the next stage, at most {} were planned",
                self.slot_bytes
            )));
        }
        let slot = before % self.slots;
        let data = inbox + (FLAG_BYTES + slot * self.slot_bytes) as u64;
        Ok((data, inbox + (slot * size_of::<u32>()) as u64))
    }

    fn grid(&self, bytes: usize) -> Grid {
        Grid::rows((bytes / 16).div_ceil(THREADS).clamp(1, 2 * self.sms), THREADS)
    }
}

/// The flag of transfer `count`, counted from 1; another than that of the one before in the same slot.
fn number(count: usize) -> usize {
    count & u32::MAX as usize
}

fn slot_bytes(rows: usize, cols: usize, dtype: DType) -> usize {
    (rows * cols * dtype.size_bytes()).next_multiple_of(256)
}

fn no_neighbour(which: &str) -> BackendError {
    BackendError::Unsupported(format!("there is no pipeline stage {which} this one"))
}

/// What a rank makes before it knows of the others.
struct Own {
    inbox: Option<Buffer>,
    state: Buffer,
    report: Address,
    send: Kernel,
    recv: Kernel,
    slot_bytes: usize,
}

impl Own {
    fn new(device: &Rc<Device>, dtype: DType, place: &PipelinePlace) -> Result<Self> {
        if place.stages > STAGES_MAX {
            let problem = format!("{} pipeline stages on GPUs, at most {STAGES_MAX}", place.stages);
            return Err(BackendError::Unsupported(problem));
        }
        let what = "what the stage before passes on";
        let bytes = Stages::inbox_bytes(place.stages, place.rows_max, place.cols, dtype);
        let is_here = place.previous().is_some_and(|before| place.shares_host_with(before));
        let inbox = is_here.then(|| Buffer::zeroed(device, bytes, what)).transpose()?;
        if !device.is_watched() {
            device.watch(Report::new(device, place.rank, place.first_of_stage())?);
        }
        let module = Source::Stages.load(device, DType::F32)?;
        let own = Self {
            inbox,
            state: Buffer::zeroed(device, 256, what)?,
            report: device.report_address().expect("invariant: it is watched"),
            send: module.kernel("stage_send", 0)?.without_overlap(),
            recv: module.kernel("stage_recv", 0)?.without_overlap(),
            slot_bytes: slot_bytes(place.rows_max, place.cols, dtype),
        };
        // Nobody may write to the inbox before it is empty.
        device.wait()?;
        Ok(own)
    }

    fn into_ring(self, device: &Device, place: &PipelinePlace, next: Option<Address>) -> Result<Ring> {
        let before = place.rank.wrapping_sub(place.stage_size).wrapping_sub(place.first_of_stage());
        Ok(Ring {
            send: self.send,
            recv: self.recv,
            inbox: self.inbox,
            next,
            state: self.state,
            report: self.report,
            limit: place.patience,
            source: before as u32,
            slots: place.stages,
            slot_bytes: self.slot_bytes,
            sms: device.sm_count,
            sent: 0,
            received: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ways from the stage before and to the next, of each rank of tp 2 x pp 3.
    fn hops(nnodes: usize, shares_gpus: bool, kernels_work: bool) -> Vec<[Hop; 2]> {
        let place = |rank| PipelinePlace { shares_gpus, ..PipelinePlace::of_six(rank, nnodes) };
        let of = |place: PipelinePlace| {
            [place.previous(), place.next()].map(|neighbour| Hop::of(&place, neighbour, kernels_work))
        };
        (0..6).map(|rank| of(place(rank))).collect()
    }

    #[test]
    fn a_hop_between_hosts_is_nccls_and_one_on_a_host_never_is() {
        use Hop::{Host, Kernels, Library};
        assert!(hops(1, false, true).iter().flatten().all(|hop| *hop == Kernels));
        assert!(hops(1, true, false).iter().flatten().all(|hop| *hop == Host));
        let a_stage_each = hops(3, false, true);
        assert_eq!(a_stage_each[0], [Kernels, Library], "nothing comes to the first");
        assert_eq!([a_stage_each[2], a_stage_each[5]], [[Library, Library], [Library, Kernels]]);
        // Three ranks a host: 0 to 2 and 3 to 5 stay, 1 to 3 and 2 to 4 leave.
        let next: Vec<Hop> = hops(2, false, true).iter().map(|[_, next]| *next).collect();
        assert_eq!(next[..4], [Kernels, Library, Library, Kernels]);
        let without: Vec<Hop> = hops(2, false, false).iter().map(|[_, next]| *next).collect();
        assert_eq!(without[..4], [Host, Library, Library, Host]);
        let shared: Vec<Hop> = hops(2, true, true).iter().map(|[_, next]| *next).collect();
        assert_eq!(shared[..4], [Kernels, Host, Host, Kernels]);
        // Both ends of a hop come to the same.
        for (nnodes, shares_gpus, kernels_work) in
            [(2, false, true), (2, true, false), (3, true, true), (6, false, true)]
        {
            let hops = hops(nnodes, shares_gpus, kernels_work);
            assert!((0..4).all(|rank| hops[rank][1] == hops[rank + 2][0]), "{hops:?}");
        }
    }
}
