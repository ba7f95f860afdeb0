//! A scheduler process: one rank of the model.

use crate::device::{RankTask, on_device};
use lockstep_backend::{Backend, cuda};
use lockstep_comm::link::{Context, Sender};
use lockstep_comm::shm::AbortHandle;
use lockstep_comm::watch::Mark;
use lockstep_core::ExitCode;
use lockstep_engine::start::{self, Groups};
use lockstep_engine::{DeviceConfig, EngineError, RankConfig};
use lockstep_launch::GROUP_ABORTED_EXIT;
use lockstep_model::Progress;
use lockstep_wire::ToApi;
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Progress messages to the api: at most one in this time.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs one rank to its end; returns its exit code. `region` is the group's shared memory.
pub fn run(config: &RankConfig, region: Option<OwnedFd>, mark: Mark) -> i32 {
    let Some(region) = region else {
        tracing::error!("the launcher gave no shared memory; this is a bug in lockstep");
        return ExitCode::Internal.code();
    };
    let code = run_to_code(config, &region, mark);
    if code != ExitCode::Drained.code() && config.device != DeviceConfig::Cpu {
        cuda::exit_process(code);
    }
    code
}

fn run_to_code(config: &RankConfig, region: &OwnedFd, mark: Mark) -> i32 {
    match run_rank(config, region, mark) {
        Ok(()) => ExitCode::Drained.code(),
        Err(error) if error.is_consequence() => {
            tracing::warn!("{}", config.explain(&error));
            GROUP_ABORTED_EXIT
        }
        Err(error) => {
            let words = config.explain(&error);
            tracing::error!("{words}");
            // The other ranks must not wait for this one; the launcher will name it.
            if let Ok(abort) = AbortHandle::new(region) {
                abort.abort(&format!("{}: {words}", config.parallel.label()));
            }
            error.exit_code().code()
        }
    }
}

fn run_rank(config: &RankConfig, region: &OwnedFd, mark: Mark) -> Result<(), EngineError> {
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
    on_device(config, region, Some(mark.clone()), Serving { progress: &progress, mark })
}

/// Serves requests until told to stop.
struct Serving<'a> {
    progress: Progress<'a>,
    mark: Mark,
}

impl RankTask for Serving<'_> {
    type Output = ();

    fn run<B: Backend>(self, config: &RankConfig, backend: B, groups: Groups) -> Result<(), EngineError> {
        start::run(config, backend, groups, self.progress, Some(self.mark))
    }
}
