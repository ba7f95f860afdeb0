//! Sums over the ranks, and the ends of half layers: by our own kernels or the library, in one kernel or two.

use super::launch::{Args, Grid};
use super::norm_threads;
use super::peers::{Connected, DataPlane, PeerMode, Peers, SumNorm, Way};
use super::{CudaBackend, CudaTensor};
use crate::{ReduceAddNorm, Result};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::ProcessGroup;

impl CudaBackend {
    /// Joins the other ranks' GPUs, so that they write to each other's memory. Gives why they do not where NCCL has
    /// to do everything; `first` is the replica's number of the group's first rank. Errors where the ranks cannot work together at all.
    /// **Collective: all ranks of the TP group, after they have made their backends and before anything else.**
    pub fn connect(
        &mut self,
        (group, first): (&mut dyn ProcessGroup, usize),
        mode: PeerMode,
    ) -> Result<Option<String>> {
        match Peers::connect(&self.device, self.dtype, (group, first), mode)? {
            Connected::Yes(peers) => {
                self.peers = Some(peers);
                Ok(None)
            }
            Connected::No(reason) => Ok(Some(reason)),
        }
    }

    /// Sums `x[..rows]` over all ranks, in place.
    pub(super) fn reduce(&self, collective: &dyn Collective, x: &CudaTensor, rows: usize) -> Result<()> {
        self.device.report()?;
        let count = x.bytes(rows) / x.dtype.size_bytes();
        let plane = DataPlane { peers: self.peers.as_deref(), collective, device: &self.device };
        // SAFETY: the tensor holds `count` elements.
        unsafe { plane.all_reduce(x.buffer.address(), count, x.dtype) }
    }

    /// [`crate::Backend::reduce_add_norm`] of the tensors (partial, residual, out).
    pub(super) fn end_half_layer(
        &self,
        collective: &dyn Collective,
        args: &ReduceAddNorm<'_, Self>,
        tensors: (&CudaTensor, &CudaTensor, &CudaTensor),
        rows: usize,
    ) -> Result<()> {
        let sum = self.sum_norm(args, tensors, rows);
        if let Some(peers) = self.peers.as_deref().filter(|_| collective.size() > 1 && rows > 0) {
            let way = peers.way(rows * sum.cols * self.dtype.size_bytes());
            if way != Way::Library && peers.takes_rows(sum.cols) {
                DataPlane { peers: Some(peers), collective, device: &self.device }.meet()?;
                // SAFETY: `sum_norm` has checked tensors and vectors.
                unsafe { peers.queue_sum_norm(way, &sum) };
                return self.device.report();
            }
        }
        self.reduce(collective, tensors.0, rows)?;
        self.add_norm(&sum);
        self.device.report()
    }

    /// Addresses of a half layer's end. Panics when tensors and vectors are of different sizes.
    pub(super) fn sum_norm(
        &self,
        args: &ReduceAddNorm<'_, Self>,
        (partial, residual, out): (&CudaTensor, &CudaTensor, &CudaTensor),
        rows: usize,
    ) -> SumNorm {
        let cols = partial.cols;
        let [partial, residual, out] =
            [partial, residual, out].map(|tensor| tensor.rows(rows, cols, self.dtype));
        SumNorm {
            partial,
            residual,
            out,
            bias: args.bias.map(|v| v.exact(cols)),
            post_norm: args.post_norm.map(|v| v.exact(cols)),
            norm_weight: args.norm_weight.exact(cols),
            norm_eps: args.norm_eps,
            cols,
            rows,
        }
    }

    /// What follows the sum, as a kernel of its own.
    pub(super) fn add_norm(&self, sum: &SumNorm) {
        let list = Args::default().address(sum.partial).address(sum.residual).address(sum.out);
        let list = list.optional(sum.bias).optional(sum.post_norm).address(sum.norm_weight);
        let list = list.float(sum.norm_eps).int(sum.cols);
        // SAFETY: the three tensors and the vectors have `cols` columns, and `rows` rows are there, as `sum_norm` checks.
        unsafe { self.kernels.add_norm.launch(Grid::rows(sum.rows, norm_threads(sum.cols)), list) };
    }
}
