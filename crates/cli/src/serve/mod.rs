//! `lockstep serve`: from flags to a running server and back.
//!
//! 1. [`plan`]: everything that can be refused is refused before a process is started.
//! 2. [`spawn`]: one child per rank, tokenizers, detokenizer; shared memory; link names.
//! 3. [`ready`]: wait for acknowledgements while watching every child.
//! 4. [`serving`]: listen, answer, watch; drain, fail or [`restart`], or start one replica again ([`revival`]).
//!
//! On several hosts this is host 0, which waits for the others first ([`abroad`]); they run [`follower`].
//!
//! The launcher's exit code and last line are decided here and nowhere else.

mod abroad;
mod facts;
mod follower;
pub mod memory;
mod plan;
mod port;
mod ready;
mod restart;
mod revival;
mod serving;
mod spawn;

use crate::error::{CliError, Result};
use crate::flags::ServeFlags;
use crate::logging::{self, Speaker};
use lockstep_core::ExitCode;
use lockstep_launch::StderrSink;
use plan::ServePlan;
pub(crate) use plan::{CPU_MEMORY_RATIO, budget};
use std::time::Duration;

/// How long the last lines may take to be written before the launcher ends without them.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Runs a server until it is told to stop or cannot go on. Says the last word itself, through the
/// same queue as every log line, so that it comes last and an unread stderr cannot hold it up.
pub fn run(flags: &ServeFlags) -> Result<()> {
    let settings = flags.logging.settings();
    let stderr = StderrSink::start(settings.raw_lines()).map_err(CliError::with(ExitCode::Internal))?;
    let log = stderr.clone();
    logging::init(Speaker::named("api"), settings, move || log.clone());
    let ended = serve(flags, &stderr).map_err(|error| {
        stderr.write_line(format!("lockstep: {}", error.message).as_bytes());
        CliError::new(error.code, "")
    });
    stderr.flush_within(LAST_WORDS);
    ended
}

fn serve(flags: &ServeFlags, stderr: &StderrSink) -> Result<()> {
    let limit = lockstep_launch::raise_fd_limit().map_err(CliError::with(ExitCode::Internal))?;
    tracing::debug!("file descriptor limit {limit:?}");
    let plan = ServePlan::new(flags, limit.now)?;
    tracing::info!("{}", plan.summary());
    if let Some(words) = plan.placements_in_words() {
        tracing::info!("{words}");
    }
    if let Some(order) = plan.rank_order() {
        tracing::info!("{order}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::with(ExitCode::Internal))?;
    if let Some(hosts) = plan.hosts.as_ref().filter(|hosts| !hosts.is_head()) {
        return runtime.block_on(follower::run(&plan, hosts, stderr));
    }
    runtime.block_on(async {
        let mut server = spawn::start(&plan, stderr).await?;
        let facts = match ready::wait(&plan, &mut server).await {
            Ok(facts) => facts,
            Err(error) => return Err(server.end(error)),
        };
        serving::run(plan, server, facts, &flags.server).await
    })
}
