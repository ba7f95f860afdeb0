//! The data plane: sums and gathers of tensors over a group of ranks.
//!
//! Takes raw pointers plus a stream handle, so that this crate needs no backend; `HostCollective`
//! style helpers for slices sit on top. Implementations: one rank (identity), shared memory
//! (CPU of one host), Gloo (CPUs of several), NCCL (GPUs). Models never ask how many ranks there are.

/// Why a collective failed. Every variant ends the rank group.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// The abort word was set: another rank died or the server is stopping.
    #[error("rank {rank} left {operation} because the rank group was aborted: {cause}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// What it was doing.
        operation: &'static str,
        /// First cause, as far as known.
        cause: String,
    },
    /// A rank did not arrive in time.
    #[error(
        "rank {rank} waited {waited_ms} ms in {operation} (operation {sequence}) for rank {missing}; that rank is stopped, dead or in another operation"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The rank that is missing.
        missing: usize,
        /// What it was doing.
        operation: &'static str,
        /// Count of operations since start.
        sequence: u64,
        /// How long.
        waited_ms: u64,
    },
    /// A kernel gave up waiting for another rank's data.
    #[error(
        "rank {rank} waited {waited_ms} ms in {operation} of {bytes} bytes (operation {sequence} on the GPU) for rank {missing}; that rank is stopped, dead or in another operation"
    )]
    DeviceTimeout {
        /// This rank.
        rank: usize,
        /// The rank that is missing.
        missing: usize,
        /// What it was doing.
        operation: &'static str,
        /// Count of such operations since start.
        sequence: u64,
        /// Bytes of one rank's part.
        bytes: usize,
        /// How long.
        waited_ms: u64,
    },
    /// Two ranks are in different operations, or in the same one with different sizes.
    #[error(
        "rank {rank} is in {mine} (operation {sequence}) but rank {peer} is in {theirs}; the ranks no longer agree on the step"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The rank that disagrees.
        peer: usize,
        /// Count of operations since start.
        sequence: u64,
        /// What this rank does.
        mine: String,
        /// What the other rank does.
        theirs: String,
    },
    /// Arguments that no rank may pass.
    #[error("rank {rank} cannot {operation}: {problem}")]
    Invalid {
        /// This rank.
        rank: usize,
        /// What was asked.
        operation: &'static str,
        /// What is wrong, and the limit.
        problem: String,
    },
    /// The connection with a rank of another host has ended, so that rank has, or its host.
    #[error("rank {rank} lost rank {missing} in {operation} (operation {sequence}): {problem}")]
    Lost {
        /// This rank.
        rank: usize,
        /// The rank at the other end.
        missing: usize,
        /// What it was doing.
        operation: &'static str,
        /// Count of operations since start.
        sequence: u64,
        /// The transport's words.
        problem: String,
    },
    /// NCCL has lost some other rank; it does not say which.
    #[error("rank {rank} lost another rank in {operation}: {problem}")]
    LostAny {
        /// This rank.
        rank: usize,
        /// What it was doing.
        operation: &'static str,
        /// The library's words.
        problem: String,
    },
    /// Ranks on several hosts cannot be connected.
    #[error("rank {rank} cannot join the ranks of other hosts: {problem}")]
    Mesh {
        /// This rank.
        rank: usize,
        /// What is wrong.
        problem: String,
    },
    /// The shared memory cannot be made or is not what was expected.
    #[error("shared memory of the rank group: {problem}")]
    Region {
        /// What is wrong.
        problem: String,
    },
}

use lockstep_core::DType;
use std::ffi::c_void;

impl CollectiveError {
    /// Whether somebody else's end is behind it, which is named where that is seen.
    pub fn is_consequence(&self) -> bool {
        matches!(self, Self::Aborted { .. } | Self::Lost { .. } | Self::LostAny { .. })
    }

    /// The rank that did not come, where one is known.
    pub fn missing(&self) -> Option<usize> {
        match self {
            Self::Timeout { missing, .. }
            | Self::DeviceTimeout { missing, .. }
            | Self::Lost { missing, .. } => Some(*missing),
            _ => None,
        }
    }
}

/// Result of this module.
pub type Result<T> = std::result::Result<T, CollectiveError>;

/// The queue an operation is ordered on: null on CPU, a CUDA stream later.
#[derive(Clone, Copy, Debug)]
pub struct StreamHandle(pub *mut c_void);

impl StreamHandle {
    /// The CPU: operations run before the call returns.
    pub const HOST: Self = Self(std::ptr::null_mut());
}

/// What is wrong with `peer` as the other end of a transfer of rank `rank` of `size`, if anything is.
pub(crate) fn peer_problem(rank: usize, size: usize, peer: usize) -> Option<String> {
    let is_another = peer < size && peer != rank;
    (!is_another).then(|| format!("the peer is rank {peer}, it must be another of the {size} ranks"))
}

/// Sums and gathers over one group of ranks (a TP group, or a pipeline pair for send/recv).
///
/// **Collective:** every method must be called by all ranks of the group, in the same order, with
/// the same counts. Results are bit-equal on all ranks; a sum is the binary tree
/// `((r0+r1)+(r2+r3))+...` over ranks, so that it continues the K-leaf tree of a row-parallel
/// linear (`lockstep_core::shard::leaf_bounds`).
pub trait Collective: Send {
    /// This rank's position in the group.
    fn rank(&self) -> usize;
    /// Ranks of the group.
    fn size(&self) -> usize;

    /// Sums `count` elements over all ranks, in place.
    ///
    /// # Safety
    /// `data` is valid for reads and writes of `count` elements of `dtype` on the stream's device
    /// until the operation has run there.
    unsafe fn all_reduce(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Concatenates every rank's `count` elements in rank order into `recv`.
    ///
    /// # Safety
    /// `send` is valid for reads of `count` and `recv` for writes of `count * size()` elements of
    /// `dtype`, without overlap, until the operation has run.
    unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DType,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Sends `count` elements to rank `peer`, which must call [`Collective::recv`].
    ///
    /// # Safety
    /// `data` is valid for reads of `count` elements of `dtype` until the operation has run.
    unsafe fn send(
        &self,
        data: *const c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Receives `count` elements from rank `peer`.
    ///
    /// # Safety
    /// `data` is valid for writes of `count` elements of `dtype` until the operation has run.
    unsafe fn recv(
        &self,
        data: *mut c_void,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamHandle,
    ) -> Result<()>;
}

/// The same operations on host slices of f32.
impl dyn Collective + '_ {
    /// Sums `x` over all ranks in place. **Collective.**
    pub fn all_reduce_f32(&self, x: &mut [f32]) -> Result<()> {
        // SAFETY: the slice is valid for its length, and host operations finish before returning.
        unsafe { self.all_reduce(x.as_mut_ptr().cast(), x.len(), DType::F32, StreamHandle::HOST) }
    }

    /// Sends `x` to rank `peer`, which must call `recv_f32` with as many.
    pub fn send_f32(&self, x: &[f32], peer: usize) -> Result<()> {
        // SAFETY: the slice is valid for its length, and host operations finish before returning.
        unsafe { self.send(x.as_ptr().cast(), x.len(), DType::F32, peer, StreamHandle::HOST) }
    }

    /// Receives what rank `peer` sends into `x`, all of it.
    pub fn recv_f32(&self, x: &mut [f32], peer: usize) -> Result<()> {
        // SAFETY: the slice is valid for its length, and host operations finish before returning.
        unsafe { self.recv(x.as_mut_ptr().cast(), x.len(), DType::F32, peer, StreamHandle::HOST) }
    }

    /// Concatenates every rank's `send` into `recv` (`send.len() * size()` long). **Collective.**
    pub fn all_gather_f32(&self, send: &[f32], recv: &mut [f32]) -> Result<()> {
        assert_eq!(recv.len(), send.len() * self.size(), "receive buffer holds every rank's part");
        // SAFETY: lengths are checked above, the borrows cannot overlap, and host operations
        // finish before returning.
        unsafe {
            self.all_gather(
                send.as_ptr().cast(),
                recv.as_mut_ptr().cast(),
                send.len(),
                DType::F32,
                StreamHandle::HOST,
            )
        }
    }
}

/// The group of one rank: every operation is the identity.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneRank;

impl Collective for OneRank {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    unsafe fn all_reduce(&self, _: *mut c_void, _: usize, _: DType, _: StreamHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: DType,
        _: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller promises both ranges valid and disjoint.
        unsafe {
            std::ptr::copy_nonoverlapping(send.cast::<u8>(), recv.cast::<u8>(), count * dtype.size_bytes())
        };
        Ok(())
    }

    unsafe fn send(&self, _: *const c_void, _: usize, _: DType, peer: usize, _: StreamHandle) -> Result<()> {
        unreachable!("one rank has no peer {peer}")
    }

    unsafe fn recv(&self, _: *mut c_void, _: usize, _: DType, peer: usize, _: StreamHandle) -> Result<()> {
        unreachable!("one rank has no peer {peer}")
    }
}
