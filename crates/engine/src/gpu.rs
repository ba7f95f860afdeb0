//! From a rank's place in its replica to a backend on its GPU and the data plane of its TP group.

use crate::start::Groups;
use crate::{EngineError, Result};
use lockstep_backend::BackendError;
use lockstep_backend::cuda::{CudaBackend, CudaOptions, OtherRanks, PeerMode};
use lockstep_comm::group::{PartOf, ProcessGroup};
use lockstep_comm::{AbortHandle, Collective, NcclCollective, OneRank};
use lockstep_core::{DType, HostMap, Topology};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::Duration;

/// Which GPUs the ranks of a replica use, and how tensors move between them. Ranks are counted on their host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPlan {
    /// `--gpu-ids`: the GPU of each rank of this host; empty for those of the ranks' numbers, or the first where ranks share.
    pub ids: Vec<usize>,
    /// `--share-gpu`: several ranks may use one GPU.
    pub share_gpu: bool,
    /// `--disable-custom-all-reduce`: NCCL moves everything.
    pub nccl_only: bool,
}

impl GpuPlan {
    /// Index of the GPU of a rank, by its number among those of its host.
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

    /// How tensors move in a TP group, which is on one host or not.
    pub fn mode(&self, is_on_one_host: bool) -> PeerMode {
        match (self.share_gpu, self.nccl_only) {
            _ if !is_on_one_host => PeerMode::Hosts,
            (true, _) => PeerMode::SharedGpu,
            (false, true) => PeerMode::Library,
            (false, false) => PeerMode::Automatic,
        }
    }

    /// Whether ranks on different hosts pass activations on by NCCL, which refuses two ranks on one GPU; else the hosts'
    /// process group does.
    pub fn has_library(&self) -> bool {
        !self.share_gpu
    }
}

/// How a rank comes to its GPU and to the other ranks.
#[derive(Clone, Debug)]
pub struct JoinSpec {
    /// Type of weights and activations.
    pub dtype: DType,
    /// How long it waits for a rank of the first stage, and once more for each stage after it.
    pub patience: Duration,
    /// Which of the replica's ranks are on which host.
    pub hosts: HostMap,
    /// The address of this rank's host, where there are several.
    pub address: Option<IpAddr>,
    /// Ends its waits when the ranks of its host are told to end.
    pub abort: Option<AbortHandle>,
}

/// Who is missing is not known to a rank whose sums are NCCL's, but to the launchers, at the same time. So it waits as much
/// longer for them to tell.
const LAUNCHERS_FIRST: Duration = Duration::from_secs(3);

/// A backend, and the groups with a data plane that moves tensors between GPUs.
pub struct Joined {
    /// On the rank's GPU.
    pub backend: CudaBackend,
    /// Where ranks share a GPU, `tensors` moves host memory only: the backend does the rest.
    pub groups: Groups,
}

/// Opens the GPU of a rank and joins the other ranks of its TP group, and those of its pipeline on other hosts. One line of
/// each stage's first rank says how tensors move. **Collective: all ranks of the replica.**
///
/// Errors in one sentence when there is no such GPU, or when two ranks would be on one that may not share it.
pub fn join(plan: &GpuPlan, spec: &JoinSpec, mut groups: Groups) -> Result<Joined> {
    let (ranks, size) = (groups.tensors.size(), groups.replica.size());
    let place = groups.replica.rank();
    let map = spec.hosts;
    let first = place / ranks * ranks;
    let mode = plan.mode(map.shares_host(first..first + ranks));
    let mut patience = spec.patience * (1 + place / ranks) as u32;
    if map.nnodes() > 1 || mode == PeerMode::Library {
        patience += LAUNCHERS_FIRST;
    }
    let others = OtherRanks { patience, rank: place, host: map.host_of(place), abort: spec.abort.clone() };
    let gpu = plan.gpu_of(map.local_rank(place));
    let options = CudaOptions { gpu, dtype: spec.dtype };
    // Before the GPU's driver has threads of its own.
    if let Some(address) = spec.address.filter(|_| plan.has_library()) {
        // SAFETY: a rank on several hosts is a process; this is its main thread at its start, and of its other threads (of
        // the process group and the control plane) none reads or writes the environment.
        let told = unsafe { NcclCollective::use_interface_of(address) };
        let told = told.map_err(|why| EngineError::Backend(BackendError::Unsupported(why)))?;
        tracing::info!("NCCL meets the ranks of other hosts with {told}");
    }
    let mut backend = CudaBackend::among((size > 1).then_some(others), options)?;
    if ranks > 1 {
        join_stage(mode, &mut backend, &mut groups, ranks)?;
    }
    if map.nnodes() > 1 && plan.has_library() {
        join_stages_of_hosts(&backend, &mut groups, ranks)?;
    }
    Ok(Joined { backend, groups })
}

/// Joins the TP group, of `ranks` ranks.
fn join_stage(mode: PeerMode, backend: &mut CudaBackend, groups: &mut Groups, ranks: usize) -> Result<()> {
    let mut stage = PartOf::of(&mut *groups.replica, ranks);
    let first = stage.first();
    let refusal = backend.connect((&mut stage, first), mode)?;
    let is_first = stage.rank() == 0;
    if mode != PeerMode::SharedGpu {
        groups.tensors = joined_nccl(&mut groups.tensors, &mut stage)?;
    }
    if is_first {
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
    Ok(())
}

/// Joins the ranks with the same place in the other stages, if there are any.
fn join_stages_of_hosts(backend: &CudaBackend, groups: &mut Groups, ranks: usize) -> Result<()> {
    let Some(pipeline) = &mut groups.pipeline else { return Ok(()) };
    let is_first = groups.replica.rank() == 0;
    let mut across = PartOf::across(&mut *groups.replica, ranks);
    *pipeline = joined_nccl(pipeline, &mut across)?;
    backend.open_transfers(&**pipeline)?;
    if is_first {
        tracing::info!("activations: NCCL from host to host");
    }
    Ok(())
}

/// `host` with NCCL for what is on GPUs. **Collective: all ranks of `group`, which are those of `host`.**
fn joined_nccl(host: &mut Box<dyn Collective>, group: &mut dyn ProcessGroup) -> Result<Box<dyn Collective>> {
    // What is here meanwhile is asked for nothing.
    let host = std::mem::replace(host, Box::new(OneRank));
    Ok(Box::new(NcclCollective::new(host, group)?))
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
        assert_eq!((listed.gpu_of(0), listed.gpu_of(1), listed.mode(true)), (3, 0, PeerMode::Automatic));
        let shared = GpuPlan { share_gpu: true, ..plain.clone() };
        assert_eq!((shared.gpu_of(1), shared.sharing(1, 2), shared.mode(true)), (0, 2, PeerMode::SharedGpu));
        let pairs = GpuPlan { ids: vec![0, 0, 1, 1], share_gpu: true, nccl_only: false };
        assert_eq!((pairs.gpu_of(2), pairs.sharing(2, 4)), (1, 2));
        assert_eq!(GpuPlan { nccl_only: true, ..plain.clone() }.mode(true), PeerMode::Library);
        for plan in [&plain, &shared, &GpuPlan { nccl_only: true, ..plain.clone() }] {
            assert_eq!(plan.mode(false), PeerMode::Hosts, "kernels of ours are for one host");
        }
        assert!(plain.has_library() && !shared.has_library());
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
