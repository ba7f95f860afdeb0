//! Sums and gathers over the ranks of a TP group by kernels of our own, for GPUs that write to each other's memory.
//!
//! The kernels (`kernels/peers.cu`, which states the protocol) sum small messages in fewer microseconds than NCCL, and
//! the sum at the end of a half layer in one kernel with the residual add and the norm. They spin until the
//! other ranks' data arrives, so:
//! * all blocks of a grid must find a place at once ([`switch::resident_blocks`]), and all ranks take the same grids;
//! * a wait has an end, after which the host names the missing rank ([`Report`]);
//! * where several ranks use one GPU (`--share-gpu`, a test mode), grids are small and no kernel starts before the one
//!   before it has ended; there is no library then, for NCCL refuses such ranks, and everything goes this way.
//!
//! **Invariant:** results are bit-equal on all ranks; sums are the tree of [`Collective`], formed in f32. Between one
//! shot, two shots and the library they differ by roundings to the activations' type.
//!
//! Reading order: `switch` (sizes), `connect` (how the memory is had), `report` (failures), this file; `simulation` tries
//! the protocol with random schedules.

pub(super) mod connect;
mod report;
#[cfg(test)]
mod simulation;
pub(super) mod switch;

pub(super) use connect::Card;
pub(super) use report::Report;
pub use switch::SUM_RANKS;
pub(super) use switch::Way;

use super::compile::Source;
use super::device::Device;
use super::driver::Address;
use super::launch::{Args, Grid, Kernel};
use super::memory::Buffer;
use crate::{BackendError, Result};
use lockstep_comm::collective::{Collective, StreamHandle};
use lockstep_comm::group::ProcessGroup;
use lockstep_core::DType;
use std::ffi::c_void;
use std::rc::Rc;
use std::time::Duration;

/// Lanes of an inbox, most blocks of a grid; as in `peers.cu`.
const LANES: usize = 256;
/// Bytes of a slot, most that a block moves in a turn.
const LANE_BYTES: usize = 16 << 10;
/// Phases of a lane.
const PHASES: usize = 2;
/// What an inbox is filled with: `EMPTY`, byte by byte.
const EMPTY_BYTE: u8 = 0xff;
/// Threads of a block of a gather, which moves a word with each.
const GATHER_THREADS: usize = 256;
/// How long a kernel waits for another rank where nobody said.
const PATIENCE: Duration = Duration::from_secs(30);

/// How the ranks of a TP group move tensors between their GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerMode {
    /// Small messages by kernels of ours where the GPUs reach each other's memory, the rest by NCCL.
    Automatic,
    /// NCCL alone (`--disable-custom-all-reduce`).
    Library,
    /// NCCL alone: the ranks are not all on one host.
    Hosts,
    /// Kernels of ours alone: several ranks use one GPU (`--share-gpu`).
    SharedGpu,
}

/// The ranks' memory as this rank's GPU sees it, and the kernels that use it.
pub(super) struct Peers {
    sum: [Kernel; 2],
    sum_norm: [Kernel; 2],
    gather: Kernel,
    /// Type that the sums are of.
    dtype: DType,
    ranks: usize,
    rank: usize,
    /// Fewest multiprocessors of a rank's GPU.
    sms: usize,
    /// Most ranks on one GPU.
    sharing: usize,
    has_library: bool,
    /// `struct Peers` of the kernels.
    words: [u32; 24],
    _inbox: Buffer,
    _state: Buffer,
}

/// The end of a half layer, with addresses; as [`crate::ReduceAddNorm`].
pub(super) struct SumNorm {
    pub partial: Address,
    pub residual: Address,
    pub out: Address,
    pub bias: Option<Address>,
    pub post_norm: Option<Address>,
    pub norm_weight: Address,
    pub norm_eps: f32,
    pub cols: usize,
    pub rows: usize,
}

/// What came of [`Peers::connect`].
pub(super) enum Connected {
    /// The ranks reach each other.
    Yes(Box<Peers>),
    /// They do not, or shall not; says why.
    No(String),
}

impl Peers {
    /// Lends the other ranks memory and borrows theirs; `first` is the replica's number of the group's first rank. Errors
    /// when the ranks cannot work together at all.
    /// **Collective: all ranks of the TP group, each with its device's context current.**
    pub fn connect(
        device: &Rc<Device>,
        dtype: DType,
        (group, first): (&mut dyn ProcessGroup, usize),
        mode: PeerMode,
    ) -> Result<Connected> {
        let (rank, ranks) = (group.rank(), group.size());
        let refusal = match mode {
            PeerMode::Library => Some("--disable-custom-all-reduce".to_owned()),
            PeerMode::Hosts => Some("its ranks are on several hosts".to_owned()),
            _ if !switch::has_kernels(ranks) => {
                Some(format!("there are kernels for 2, 4 and 8 ranks, not for {ranks}"))
            }
            _ => None,
        };
        let own = match refusal {
            None => Own::new(device, dtype, (rank, ranks, first)).map_err(|e| e.to_string()),
            Some(reason) => Err(reason),
        };
        let card = Card::of(device, own.as_ref().ok().map(|own| own.inbox.address()))?;
        let cards = connect::exchange(group, &card)?;
        connect::check_one_rank_a_gpu(&cards, mode == PeerMode::SharedGpu)?;
        if connect::share_a_context(&cards) {
            device.share_context();
        }
        let opened = own.and_then(|own| {
            let inboxes = connect::open_inboxes(device, rank, &cards)?;
            own.into_peers(&inboxes, &cards, mode).map_err(|e| e.to_string())
        });
        let problem = connect::agree(group, opened.as_ref().err().map(String::as_str))?;
        match (problem, opened) {
            (None, Ok(peers)) => Ok(Connected::Yes(Box::new(peers))),
            (Some(reason), _) | (None, Err(reason)) if mode == PeerMode::SharedGpu => {
                Err(BackendError::Unsupported(format!("--share-gpu cannot be used here: {reason}")))
            }
            (Some(reason), _) | (None, Err(reason)) => Ok(Connected::No(reason)),
        }
    }

    /// Bytes of device memory that every rank lends.
    pub fn inbox_bytes(ranks: usize) -> usize {
        LANES * PHASES * ranks * LANE_BYTES
    }

    /// The way of a sum of `bytes` bytes.
    pub fn way(&self, bytes: usize) -> Way {
        switch::way(self.ranks, bytes, self.has_library)
    }

    /// Whether sums of rows so long can end in a norm in one kernel.
    pub fn takes_rows(&self, cols: usize) -> bool {
        switch::row_threads(cols * self.dtype.size_bytes()).is_some()
    }

    /// Whether NCCL is there for what these kernels leave.
    pub fn has_library(&self) -> bool {
        self.has_library
    }

    fn args(&self) -> Args {
        Args::default().words(&self.words)
    }

    fn kernel<'a>(&self, kernels: &'a [Kernel; 2], way: Way) -> &'a Kernel {
        match way {
            Way::OneShot => &kernels[0],
            Way::TwoShot => &kernels[1],
            Way::Library => unreachable!("the library's sums are not queued here"),
        }
    }

    /// Queues the sum of `bytes` bytes at `data` over all ranks, in place, by `way`. Panics unless `bytes` is a multiple
    /// of 16. **Collective: all ranks, in the same order with the same arguments.**
    ///
    /// # Safety
    /// `data` is valid for `bytes` bytes of elements of the kernels' type until the kernel has run.
    pub unsafe fn queue_sum(&self, way: Way, data: Address, bytes: usize) {
        assert!(bytes.is_multiple_of(16), "{bytes} bytes are summed in parts of 16");
        let vectors = bytes / 16;
        let threads = switch::sum_threads(vectors);
        let blocks = vectors.div_ceil(threads).min(self.blocks(threads));
        let args = self.args().address(data).int(vectors);
        // SAFETY: the caller's promise; inboxes and state are there as long as this value.
        unsafe { self.kernel(&self.sum, way).launch(Grid::rows(blocks, threads), args) };
    }

    /// Queues the sum of `sum.partial` over all ranks with what follows it, by `way`. Panics unless
    /// [`Self::takes_rows`]. **Collective: all ranks, in the same order with the same sizes.**
    ///
    /// # Safety
    /// The three tensors are valid for `rows` rows of `cols` elements of the kernels' type, and the vectors for `cols`
    /// of f32, until the kernel has run.
    pub unsafe fn queue_sum_norm(&self, way: Way, sum: &SumNorm) {
        let row_bytes = sum.cols * self.dtype.size_bytes();
        let threads = switch::row_threads(row_bytes).expect("invariant: the caller has asked takes_rows");
        let blocks = sum.rows.min(self.blocks(threads));
        let args = self.args().address(sum.partial).address(sum.residual).address(sum.out);
        let args = args.optional(sum.bias).optional(sum.post_norm).address(sum.norm_weight);
        let args = args.float(sum.norm_eps).int(sum.cols).int(sum.rows);
        // SAFETY: the caller's promise; inboxes and state are there as long as this value.
        unsafe { self.kernel(&self.sum_norm, way).launch(Grid::rows(blocks, threads), args) };
    }

    /// Queues the gather of every rank's `words` 32-bit words into `all`, by rank. A word of all ones arrives, on all
    /// ranks, as another NaN. **Collective: all ranks, in the same order with the same size.**
    ///
    /// # Safety
    /// `mine` is valid for `words` words and `all` for those of all ranks, apart from each other, until the kernel has
    /// run.
    pub unsafe fn queue_gather(&self, mine: Address, all: Address, words: usize) {
        let blocks = words.div_ceil(GATHER_THREADS).min(self.blocks(GATHER_THREADS));
        let args = self.args().address(mine).address(all).int(words);
        // SAFETY: the caller's promise; inboxes and state are there as long as this value.
        unsafe { self.gather.launch(Grid::rows(blocks, GATHER_THREADS), args) };
    }

    /// Queues every kernel for nothing, which waits for nobody: the first launch loads it.
    fn load_kernels(&self) {
        for sum in &self.sum {
            // SAFETY: of zero vectors none is read.
            unsafe { sum.launch(Grid::rows(1, 32), self.args().address(0).int(0)) };
        }
        for sum in &self.sum_norm {
            let args = (0..6).fold(self.args(), |args, _| args.address(0)).float(1.0).int(0).int(0);
            // SAFETY: of zero rows of zero columns none is read.
            unsafe { sum.launch(Grid::rows(1, 32), args) };
        }
        // SAFETY: of zero words none is read.
        unsafe { self.gather.launch(Grid::rows(1, 32), self.args().address(0).address(0).int(0)) };
    }

    /// Blocks of a grid, at most; the same on all ranks.
    fn blocks(&self, threads: usize) -> usize {
        switch::resident_blocks(self.sms, threads, self.sharing)
    }
}

/// What a rank makes before it knows of the others.
struct Own {
    device: Rc<Device>,
    dtype: DType,
    rank: usize,
    ranks: usize,
    inbox: Buffer,
    state: Buffer,
    report: Report,
}

impl Own {
    fn new(device: &Rc<Device>, dtype: DType, (rank, ranks, first): (usize, usize, usize)) -> Result<Self> {
        let own = Self {
            inbox: Buffer::filled(device, Peers::inbox_bytes(ranks), EMPTY_BYTE, "sums over ranks")?,
            state: Buffer::zeroed(device, (LANES + 64) * size_of::<u32>(), "sums over ranks")?,
            report: Report::new(device, first + rank, first)?,
            device: Rc::clone(device),
            dtype,
            rank,
            ranks,
        };
        // Nobody may write to the inbox before it is empty.
        device.wait()?;
        Ok(own)
    }

    fn into_peers(self, inboxes: &[Address], cards: &[Card], mode: PeerMode) -> Result<Peers> {
        let sharing = if mode == PeerMode::SharedGpu { connect::most_on_one_gpu(cards) } else { 1 };
        let overlaps = sharing == 1 && self.device.can_overlap_launches();
        let limit = self.device.patience().unwrap_or(PATIENCE);
        let longs = inboxes.iter().copied().chain(std::iter::repeat(0)).take(8);
        let longs = longs.chain([self.state.address(), self.report.address()]);
        let tail =
            [self.rank as u32, limit.as_millis().min(u128::from(u32::MAX)) as u32, u32::from(overlaps), 0];
        let words = longs.flat_map(|long| [long as u32, (long >> 32) as u32]).chain(tail);
        let mut list = [0; 24];
        list.iter_mut().zip(words).for_each(|(word, value)| *word = value);
        let module = Source::Peers(self.ranks).load(&self.device, self.dtype)?;
        let kernel = |name: &'static str| {
            let kernel = module.kernel(name, 0)?;
            Ok::<Kernel, BackendError>(if overlaps { kernel } else { kernel.without_overlap() })
        };
        let peers = Peers {
            sum: [kernel("reduce_one_shot")?, kernel("reduce_two_shot")?],
            sum_norm: [kernel("reduce_norm_one_shot")?, kernel("reduce_norm_two_shot")?],
            gather: kernel("gather")?,
            dtype: self.dtype,
            ranks: self.ranks,
            rank: self.rank,
            sms: cards.iter().map(|card| card.sm_count as usize).min().unwrap_or(1),
            sharing,
            has_library: mode == PeerMode::Automatic,
            words: list,
            _inbox: self.inbox,
            _state: self.state,
        };
        self.device.watch(self.report);
        peers.load_kernels();
        self.device.wait()?;
        Ok(peers)
    }
}

/// The data plane of one step: our kernels where they are there and faster, else the collective.
pub(super) struct DataPlane<'a> {
    /// Our kernels, if the ranks reach each other.
    pub peers: Option<&'a Peers>,
    /// The library, or the group of one rank.
    pub collective: &'a dyn Collective,
    /// Where everything is queued.
    pub device: &'a Device,
}

impl DataPlane<'_> {
    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.collective.size()
    }

    /// Sums `count` elements at `data` over all ranks, in place. **Collective: all ranks of the TP group.**
    ///
    /// # Safety
    /// `data` is valid for `count` elements of `dtype` of device memory until the operation has run.
    pub unsafe fn all_reduce(&self, data: Address, count: usize, dtype: DType) -> Result<()> {
        let bytes = count * dtype.size_bytes();
        if self.ranks() == 1 || count == 0 {
            return Ok(());
        }
        if let Some(peers) = self.peers
            && dtype == peers.dtype
            && bytes.is_multiple_of(16)
            && peers.way(bytes) != Way::Library
        {
            self.meet()?;
            // SAFETY: the caller's promise.
            unsafe { peers.queue_sum(peers.way(bytes), data, bytes) };
            return self.device.report();
        }
        self.check_library("all-reduce", bytes)?;
        let stream = StreamHandle(self.device.stream);
        // SAFETY: the caller's promise; what was queued on the stream comes before.
        let queued = unsafe { self.collective.all_reduce(data as *mut c_void, count, dtype, stream) };
        self.device.with_others(queued)
    }

    /// Gathers every rank's `words` 32-bit words at `mine` into `all`, by rank. **Collective: all ranks of the TP group.**
    ///
    /// # Safety
    /// `mine` is valid for `words` words and `all` for those of all ranks, apart from each other, until the operation
    /// has run.
    pub unsafe fn all_gather(&self, mine: Address, all: Address, words: usize) -> Result<()> {
        let bytes = words * size_of::<u32>();
        if let Some(peers) = self.peers
            && (bytes <= switch::GATHER_MAX || !peers.has_library)
        {
            self.meet()?;
            // SAFETY: the caller's promise.
            unsafe { peers.queue_gather(mine, all, words) };
            return self.device.report();
        }
        let stream = StreamHandle(self.device.stream);
        let (mine, all) = (mine as *const c_void, all as *mut c_void);
        // SAFETY: the caller's promise.
        let queued = unsafe { self.collective.all_gather(mine, all, words, DType::F32, stream) };
        self.device.with_others(queued)
    }

    /// Waits, on the host, until all ranks are here, where they are threads that share a context: loading a kernel or
    /// taking memory may wait for everything that runs there, so nobody may still have to when one begins to spin.
    pub fn meet(&self) -> Result<()> {
        match self.device.shares_context() {
            true => Ok(self.collective.all_reduce_f32(&mut [0.0])?),
            false => Ok(()),
        }
    }

    /// Errors where ranks share a GPU: the collective would take the address for the host's.
    fn check_library(&self, operation: &str, bytes: usize) -> Result<()> {
        match self.peers {
            Some(peers) if !peers.has_library => Err(BackendError::Unsupported(format!(
                "rank {}: --share-gpu has no {operation} of {bytes} bytes in this type",
                peers.rank
            ))),
            _ => Ok(()),
        }
    }
}
