//! From a rank's configuration to the backend of its device.

use lockstep_backend::Backend;
use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_comm::gloo::{GlooCollective, GlooGroup, Mesh, MeshPlace};
use lockstep_comm::shm::{AbortHandle, SharedRegion, ShmCollective, ShmGroup, ShmOptions};
use lockstep_comm::watch::Mark;
use lockstep_comm::{Collective, Patience, meeting};
use lockstep_core::{DType, WeightMode};
use lockstep_engine::config::RankHosts;
use lockstep_engine::gpu::{self, JoinSpec, Joined};
use lockstep_engine::start::Groups;
use lockstep_engine::{DeviceConfig, EngineError, RankConfig};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// What a rank does on its device, whichever that is.
pub trait RankTask {
    /// What comes of it.
    type Output;
    /// Does it. **Collective: all ranks of the replica.**
    fn run<B: Backend>(
        self,
        config: &RankConfig,
        backend: B,
        groups: Groups,
    ) -> Result<Self::Output, EngineError>;
}

/// Opens the device of a rank, joins its groups in the shared memory `region` and runs `task`; `mark` shows what
/// the rank does in them.
/// **Collective: all ranks of the replica.**
pub fn on_device<T: RankTask>(
    config: &RankConfig,
    region: &OwnedFd,
    mark: Option<Mark>,
    task: T,
) -> Result<T::Output, EngineError> {
    let groups = join_groups(config, region, mark)?;
    match &config.device {
        DeviceConfig::Cpu => {
            let placement = config.placement.clone();
            let options = CpuOptions { threads: config.threads, placement, ..CpuOptions::default() };
            task.run(config, CpuBackend::new(options)?, groups)
        }
        DeviceConfig::Cuda { memory_ratio, gpus } => {
            let dtype = config.weights.cast().unwrap_or(DType::Bf16);
            let abort = AbortHandle::new(region).map_err(EngineError::from)?;
            let hosts = config.host_map();
            let join = JoinSpec {
                dtype,
                patience: config.patience(),
                hosts,
                address: config.hosts.as_ref().map(|hosts| hosts.address),
                abort: Some(abort),
            };
            let Joined { backend, mut groups } = gpu::join(gpus, &join, groups)?;
            let free = backend.free_bytes()?;
            // Nobody takes memory before all who share a GPU have asked how much is free.
            groups.replica.barrier(Patience::Idle)?;
            let rank = hosts.local_rank(config.parallel.replica_rank());
            let sharing = gpus.sharing(rank, hosts.ranks_per_host());
            let shared_by = if sharing > 1 { format!(", shared by {sharing} ranks") } else { String::new() };
            let config = RankConfig {
                // Kernels compute in one type, so weights are loaded in it.
                weights: WeightMode::Cast(dtype),
                memory_budget_bytes: (free as f64 * memory_ratio / sharing as f64) as usize,
                memory_budget_origin: format!(
                    "--memory-ratio {memory_ratio} of {} MiB free on the GPU{shared_by}",
                    free >> 20
                ),
                ..config.clone()
            };
            task.run(&config, backend, groups)
        }
    }
}

/// The replica's process group, the TP group's collective and the pipeline's, side by side in one region.
fn join_groups(config: &RankConfig, region: &OwnedFd, mark: Option<Mark>) -> Result<Groups, EngineError> {
    let p = config.parallel;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = ShmOptions {
        deadline: config.patience(),
        ranks_share_cores: p.world_size() * config.threads > cores,
    };
    let region = SharedRegion::map(region)
        .map_err(|e| EngineError::Internal(format!("cannot map the rank group's shared memory: {e}")))?;
    let region = Arc::new(region);
    if let Some(hosts) = &config.hosts {
        return join_hosts(config, hosts, (region, options), mark);
    }
    let join = |e: lockstep_comm::collective::CollectiveError| EngineError::from(e);
    let mut replica = ShmGroup::new(Arc::clone(&region), p.replica_rank(), options).map_err(join)?;
    let mut tensors = ShmCollective::of_stage(Arc::clone(&region), p, options).map_err(join)?;
    let patient = ShmOptions { deadline: config.stage_patience(p.pp_rank), ..options };
    let pipeline = (p.pp_size > 1).then(|| ShmCollective::of_pipeline(region, p, patient));
    let mut pipeline = pipeline.transpose().map_err(join)?;
    if let Some(mark) = mark {
        replica = replica.watched(mark.clone());
        tensors = tensors.watched(mark.clone());
        pipeline = pipeline.map(|pipeline| pipeline.watched(mark));
    }
    let pipeline = pipeline.map(|pipeline| Box::new(pipeline) as Box<dyn Collective>);
    Ok(Groups { replica: Box::new(replica), tensors: Box::new(tensors), pipeline })
}

/// How long ranks of other hosts may take to be there; their launchers have been told at the same time.
const MEETING_PATIENCE: Duration = Duration::from_secs(60);
/// Lanes of the mesh.
const REPLICA_LANE: u64 = 0;
const TENSOR_LANE: u64 = 1;
const PIPELINE_LANE: u64 = 2;

/// The same where ranks of the replica are on several hosts: the process group over the mesh of all of them, and there,
/// too, a TP group or pipeline that is not this host's alone. `region` has this host's ranks in their places.
fn join_hosts(
    config: &RankConfig,
    hosts: &RankHosts,
    (region, options): (Arc<SharedRegion>, ShmOptions),
    mark: Option<Mark>,
) -> Result<Groups, EngineError> {
    let p = config.parallel;
    let (rank, size) = (p.replica_rank(), p.replica_size());
    let abort = AbortHandle::of(Arc::clone(&region));
    let place = MeshPlace { rank, size, address: hosts.address };
    let patience = options.deadline.max(MEETING_PATIENCE);
    let mesh = Mesh::join(place, &hosts.invitation.key, (abort.clone(), options.deadline), |message| {
        meeting::meet(&hosts.invitation, (rank, size), message, (&abort, patience))
    })?;
    tracing::info!("connected with the ranks of {} hosts from {}", hosts.map.nnodes(), hosts.address);
    let mut replica = GlooGroup::new(Arc::clone(&mesh), (0..size).collect(), REPLICA_LANE)?;
    if let Some(mark) = &mark {
        replica = replica.watched(mark.clone());
    }
    let first_of_replica = p.rank() - rank;
    let is_here = |members: &[usize]| hosts.map.shares_host(members.iter().map(|m| first_of_replica + m));
    let stage: Vec<usize> = (0..p.tp_size).map(|tp_rank| rank - p.tp_rank + tp_rank).collect();
    let tensors: Box<dyn Collective> = if is_here(&stage) {
        let tensors = ShmCollective::of_stage(Arc::clone(&region), p, options)?;
        Box::new(watched(tensors, ShmCollective::watched, &mark))
    } else {
        let tensors = GlooCollective::new(Arc::clone(&mesh), stage, TENSOR_LANE, options.deadline)?;
        Box::new(watched(tensors, GlooCollective::watched, &mark))
    };
    let stages: Vec<usize> = (0..p.pp_size).map(|pp_rank| p.tp_rank + p.tp_size * pp_rank).collect();
    let patient = ShmOptions { deadline: config.stage_patience(p.pp_rank), ..options };
    let pipeline: Option<Box<dyn Collective>> = match p.pp_size {
        1 => None,
        _ if is_here(&stages) => {
            let pipeline = ShmCollective::of_pipeline(region, p, patient)?;
            Some(Box::new(watched(pipeline, ShmCollective::watched, &mark)))
        }
        _ => {
            // Not on a track of its own, as in shared memory; the mesh beats while it waits.
            Some(Box::new(GlooCollective::new(mesh, stages, PIPELINE_LANE, patient.deadline)?))
        }
    };
    Ok(Groups { replica: Box::new(replica), tensors, pipeline })
}

/// `member`, shown on the watch page if there is a place on it.
fn watched<T>(member: T, watch: impl FnOnce(T, Mark) -> T, mark: &Option<Mark>) -> T {
    match mark {
        Some(mark) => watch(member, mark.clone()),
        None => member,
    }
}
