//! A scheduler process: one rank of the model.

use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_backend::cuda::{self, CudaBackend, CudaOptions};
use lockstep_comm::NcclCollective;
use lockstep_comm::link::{Context, Sender};
use lockstep_comm::shm::{AbortHandle, SharedRegion, ShmCollective, ShmGroup, ShmOptions};
use lockstep_core::{DType, ExitCode};
use lockstep_engine::start::{self, Groups};
use lockstep_engine::{DeviceConfig, EngineError, RankConfig};
use lockstep_launch::GROUP_ABORTED_EXIT;
use lockstep_wire::ToApi;
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Progress messages to the api: at most one in this time.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs one rank to its end; returns its exit code. `inherited` holds the group's shared memory.
pub fn run(config: &RankConfig, inherited: Vec<OwnedFd>) -> i32 {
    let Some(region) = inherited.into_iter().next() else {
        tracing::error!("the launcher gave no shared memory; this is a bug in lockstep");
        return ExitCode::Internal.code();
    };
    let code = run_to_code(config, &region);
    if code != ExitCode::Drained.code() && config.device != DeviceConfig::Cpu {
        cuda::exit_process(code);
    }
    code
}

fn run_to_code(config: &RankConfig, region: &OwnedFd) -> i32 {
    match run_rank(config, region) {
        Ok(()) => ExitCode::Drained.code(),
        Err(error) if error.is_consequence() => {
            tracing::warn!("{error}");
            GROUP_ABORTED_EXIT
        }
        Err(error) => {
            tracing::error!("{error}");
            // The other ranks must not wait for this one; the launcher will name it.
            if let Ok(abort) = AbortHandle::new(region) {
                abort.abort(&format!("{}: {error}", config.parallel.label()));
            }
            error.exit_code().code()
        }
    }
}

fn run_rank(config: &RankConfig, region: &OwnedFd) -> Result<(), EngineError> {
    let mut groups = join_groups(config, region)?;
    let context = Context::new();
    let api: Sender<ToApi> = Sender::connect(&context, &config.links.api, 64)
        .map_err(|e| EngineError::Internal(format!("cannot reach the api: {e}")))?;
    let rank = config.parallel.rank();
    let last = Cell::new(None::<Instant>);
    let progress = |done: usize, total: usize| {
        let due = done == total || last.get().is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL);
        if due {
            last.set(Some(Instant::now()));
            // Progress is decoration: when the api is busy it is left out.
            let _ = api.try_send(&ToApi::Loading { rank, done, total });
        }
    };
    match config.device {
        DeviceConfig::Cpu => {
            let options = CpuOptions { threads: config.threads, ..CpuOptions::default() };
            start::run(config, CpuBackend::new(options)?, groups, &progress)
        }
        DeviceConfig::Cuda { memory_ratio } => {
            let dtype = config.dtype.unwrap_or(DType::Bf16);
            let patience = Duration::from_millis(config.collective_timeout_ms);
            let options = CudaOptions {
                gpu: config.parallel.tp_rank,
                dtype,
                patience: (config.parallel.tp_size > 1).then_some(patience),
            };
            let backend = CudaBackend::new(options)?;
            if config.parallel.tp_size > 1 {
                groups.tensors = Box::new(NcclCollective::new(groups.tensors, &mut *groups.replica)?);
            }
            let free = backend.free_bytes()?;
            let config = RankConfig {
                // Kernels compute in one type, so weights are loaded in it.
                dtype: Some(dtype),
                memory_budget_bytes: (free as f64 * memory_ratio) as usize,
                memory_budget_origin: format!(
                    "--memory-ratio {memory_ratio} of {} MiB free on the GPU",
                    free >> 20
                ),
                ..config.clone()
            };
            start::run(&config, backend, groups, &progress)
        }
    }
}

/// The replica's process group and the TP group's collective, side by side in one region.
fn join_groups(config: &RankConfig, region: &OwnedFd) -> Result<Groups, EngineError> {
    let p = config.parallel;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = ShmOptions {
        deadline: Duration::from_millis(config.collective_timeout_ms),
        ranks_share_cores: p.world_size() * config.threads > cores,
    };
    let region = SharedRegion::map(region)
        .map_err(|e| EngineError::Internal(format!("cannot map the rank group's shared memory: {e}")))?;
    let region = Arc::new(region);
    let join = |e: lockstep_comm::collective::CollectiveError| EngineError::from(e);
    let replica = ShmGroup::new(Arc::clone(&region), p.replica_rank(), options).map_err(join)?;
    let tensors = ShmCollective::new(region, p.tp_rank, options).map_err(join)?;
    Ok(Groups { replica: Box::new(replica), tensors: Box::new(tensors) })
}
