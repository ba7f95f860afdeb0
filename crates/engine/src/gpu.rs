//! From a rank's place in its replica to a backend on its GPU and the data plane of its TP group.

use crate::Result;
use crate::start::Groups;
use lockstep_backend::cuda::{CudaBackend, CudaOptions, PeerMode};
use lockstep_comm::NcclCollective;
use lockstep_comm::group::PartOf;
use lockstep_core::{DType, Topology};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Which GPUs the ranks of a replica use, and how tensors move between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPlan {
    /// `--gpu-ids`: the GPU of each rank; empty for those of the ranks' numbers, or the first where ranks share.
    pub ids: Vec<usize>,
    /// `--share-gpu`: several ranks may use one GPU.
    pub share_gpu: bool,
    /// `--disable-custom-all-reduce`: NCCL moves everything.
    pub nccl_only: bool,
}

impl GpuPlan {
    /// Index of the GPU of a rank.
    pub fn gpu_of(&self, rank: usize) -> usize {
        let default = if self.share_gpu { 0 } else { rank };
        self.ids.get(rank).copied().unwrap_or(default)
    }

    /// How many of `ranks` ranks use the GPU of rank `rank`.
    pub fn sharing(&self, rank: usize, ranks: usize) -> usize {
        (0..ranks).filter(|other| self.gpu_of(*other) == self.gpu_of(rank)).count()
    }

    /// The GPUs of one replica's ranks, where this plan is for the ranks of all.
    pub fn of_replica(&self, topology: &Topology, dp_rank: usize) -> Self {
        let ids = if topology.dp_size == 1 || (self.ids.is_empty() && self.share_gpu) {
            self.ids.clone()
        } else {
            topology.ranks_of(dp_rank).map(|rank| self.gpu_of(rank)).collect()
        };
        Self { ids, ..self.clone() }
    }

    /// How tensors move.
    pub fn mode(&self) -> PeerMode {
        match (self.share_gpu, self.nccl_only) {
            (true, _) => PeerMode::SharedGpu,
            (false, true) => PeerMode::Library,
            (false, false) => PeerMode::Automatic,
        }
    }
}

/// A backend, and the groups with a data plane that moves tensors between GPUs.
pub struct Joined {
    /// On the rank's GPU.
    pub backend: CudaBackend,
    /// Where ranks share a GPU, `tensors` moves host memory only: the backend does the rest.
    pub groups: Groups,
}

/// Opens the GPU of a rank and joins the other ranks of its TP group. One line of each stage's first rank says how tensors
/// move. A rank waits `patience` for those of the first stage, and once more for each stage after it.
/// **Collective: all ranks of the replica.**
///
/// Errors in one sentence when there is no such GPU, or when two ranks would be on one that may not share it.
pub fn join(plan: &GpuPlan, dtype: DType, patience: Duration, mut groups: Groups) -> Result<Joined> {
    let (rank, ranks) = (groups.tensors.rank(), groups.tensors.size());
    let (place, others) = (groups.replica.rank(), groups.replica.size() > 1);
    let patience = patience * (1 + place / ranks) as u32;
    let options = CudaOptions { gpu: plan.gpu_of(place), dtype, patience: others.then_some(patience) };
    let mut backend = CudaBackend::new(options)?;
    if ranks == 1 {
        return Ok(Joined { backend, groups });
    }
    let mode = plan.mode();
    let mut stage = PartOf::of(&mut *groups.replica, ranks);
    let first = stage.first();
    let refusal = backend.connect((&mut stage, first), mode)?;
    if mode != PeerMode::SharedGpu {
        groups.tensors = Box::new(NcclCollective::new(groups.tensors, &mut stage)?);
    }
    if rank == 0 {
        match (refusal, mode) {
            (Some(reason), _) => tracing::info!("all-reduce: NCCL alone ({reason})"),
            (None, PeerMode::SharedGpu) => tracing::warn!(
                "all-reduce: own kernels alone, for ranks that share a GPU; this is a test mode and slow"
            ),
            (None, _) => {
                tracing::info!("all-reduce: own kernels between the GPUs' memories, NCCL for large messages")
            }
        }
    }
    Ok(Joined { backend, groups })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceConfig;

    #[test]
    fn ranks_take_the_listed_gpus_and_count_who_shares() {
        let plain = GpuPlan::default();
        assert_eq!((plain.gpu_of(0), plain.gpu_of(3), plain.sharing(3, 4)), (0, 3, 1));
        let listed = GpuPlan { ids: vec![3, 0], ..plain.clone() };
        assert_eq!((listed.gpu_of(0), listed.gpu_of(1), listed.mode()), (3, 0, PeerMode::Automatic));
        let shared = GpuPlan { share_gpu: true, ..plain.clone() };
        assert_eq!((shared.gpu_of(1), shared.sharing(1, 2), shared.mode()), (0, 2, PeerMode::SharedGpu));
        let pairs = GpuPlan { ids: vec![0, 0, 1, 1], share_gpu: true, nccl_only: false };
        assert_eq!((pairs.gpu_of(2), pairs.sharing(2, 4)), (1, 2));
        assert_eq!(GpuPlan { nccl_only: true, ..plain.clone() }.mode(), PeerMode::Library);
        let topology = Topology { dp_size: 2, ..Topology::tensor_parallel(2) };
        assert_eq!(plain.of_replica(&topology, 1).ids, [2, 3]);
        assert_eq!(pairs.of_replica(&topology, 1).ids, [1, 1]);
        assert_eq!(shared.of_replica(&topology, 1), shared);
        let device = |gpus: &GpuPlan| DeviceConfig::Cuda { memory_ratio: 0.8, gpus: gpus.clone() };
        let DeviceConfig::Cuda { memory_ratio, gpus } = device(&shared).of_rank(&topology, 3) else {
            panic!("a GPU")
        };
        assert_eq!((memory_ratio, gpus), (0.4, shared.clone()), "two replicas share it");
        assert_eq!(device(&pairs).of_rank(&topology, 1), device(&pairs.of_replica(&topology, 0)));
    }
}
