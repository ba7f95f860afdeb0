//! `lockstep bench serve`: HTTP load against any server that speaks OpenAI's API, and what came of it.
//!
//! Everything that costs time is done before the first request is sent (prompts, bodies, arrivals) or after the
//! last is answered (percentiles), so that the client does little more than read sockets meanwhile; what it
//! does cost is measured and shown.
//!
//! Figures, in milliseconds: TTFT from sending a request to its first text; ITL between two pieces of text of an
//! answer; E2E from sending to the last piece or the reason of the end; TPOT from the first text to that end,
//! divided by the tokens behind the first. Percentiles interpolate linearly, as numpy's do.
//!
//! Reading order: [`random`](super::random), [`prompts`], [`trace`], [`workload`], [`load`], [`report`].

mod load;
mod prompts;
mod report;
mod trace;
mod workload;

use crate::client::{Target, runtime};
use crate::error::{CliError, Result};
use crate::flags::bench_serve::BenchServeFlags;
use crate::output::say;
use lockstep_core::ExitCode;
use report::Report;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;
use workload::Workload;

/// Unused connections that are kept.
const CONNECTIONS_MAX: usize = 4096;

/// Loads the server, prints the figures, and writes them if asked to. Errors when no request succeeded.
pub fn serve(flags: &BenchServeFlags) -> Result<()> {
    let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
    let internal = CliError::with::<anyhow::Error>(ExitCode::Internal);
    flags.check().map_err(&flag_error)?;
    let lines = flags.trace.as_deref().map(trace::read).transpose().map_err(&flag_error)?;
    lockstep_launch::raise_fd_limit().map_err(CliError::with(ExitCode::Internal))?;
    let runtime = runtime()?;
    let target = Target::open(&flags.target, &runtime, CONNECTIONS_MAX)?;
    let form = runtime.block_on(prompts::Form::probe(flags, &target)).map_err(&internal)?;
    let workload = Workload::new(flags, lines, form, &target.model).map_err(&flag_error)?;
    let cpu_before = cpu_time();
    let loaded = runtime.block_on(load::drive(&target.client, flags.endpoint.path(), &workload));
    let cpu = cpu_time().saturating_sub(cpu_before);
    let (server, model) = (target.client.base(), target.model.clone());
    target.close();
    let report = Report::new(flags, (server, model), &workload, &loaded.map_err(&internal)?, cpu);
    say(&report)?;
    if let Some(path) = &flags.json {
        let text = serde_json::to_string_pretty(&report).map_err(CliError::with(ExitCode::Internal))?;
        std::fs::write(path, text + "\n")
            .map_err(|e| CliError::new(ExitCode::Internal, format!("--json {}: {e}", path.display())))?;
    }
    report.verdict()
}

/// CPU time of this process, all threads.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
