//! `--restart on-failure`: another set of children in place of one that failed.
//!
//! The listener, the api and the watch page stay; shared memory, links and processes are new, so nothing of the
//! failed engine can reach the next. All ranks restart together: what a rank holds is worth nothing without the
//! others. (With several replicas the failure of one concerns that one only, see [`revival`](super::revival).)
//! Meanwhile requests are answered 503 `engine_restarting` with `Retry-After`.

use super::abroad;
use super::plan::ServePlan;
use super::ready;
use super::serving::{self, Service};
use super::spawn::Server;
use crate::error::{CliError, Result};
use crate::flags::server::{Restart, ServerFlags};
use lockstep_core::ExitCode;
use lockstep_launch::Event;
use std::time::{Duration, Instant};

/// Pause before the first restart; doubled for every further failure in a row, up to the maximum.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Service of this length ends a row of failures.
const STEADY: Duration = Duration::from_secs(300);
/// How long the rest of a failed engine may take to end: its grace and the kernel's last word.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(10);

/// When to restart and when to give up; pure, time is an argument.
#[derive(Clone, Debug)]
pub struct Policy {
    restart: Restart,
    limit: u32,
    in_a_row: u32,
    ready_at: Instant,
}

impl Policy {
    /// As the flags say; the engine is ready now.
    pub fn new(flags: &ServerFlags, now: Instant) -> Self {
        Self { restart: flags.restart, limit: flags.restart_limit, in_a_row: 0, ready_at: now }
    }

    /// One that was ready at `now`.
    #[cfg(test)]
    pub(super) fn for_test(restart: Restart, limit: u32, now: Instant) -> Self {
        Self { restart, limit, in_a_row: 0, ready_at: now }
    }

    /// Whether a failure with `code` may be followed by a restart at all. A cause that the user has to change (flags,
    /// files, memory) is no reason to try again.
    pub fn restarts(&self, code: ExitCode) -> bool {
        self.restart == Restart::OnFailure && code == ExitCode::ChildDied
    }

    /// The engine is ready again.
    pub(super) fn ready(&mut self, now: Instant) {
        self.ready_at = now;
    }

    /// The engine has failed with `code`: how long to wait before it is started again, or `None` to end.
    pub(super) fn after_failure(&mut self, code: ExitCode, now: Instant) -> Option<Duration> {
        if !self.restarts(code) {
            return None;
        }
        if now.saturating_duration_since(self.ready_at) >= STEADY {
            self.in_a_row = 0;
        }
        self.in_a_row += 1;
        (self.in_a_row <= self.limit).then(|| {
            let doublings = (self.in_a_row - 1).min(16);
            PAUSE.saturating_mul(1 << doublings).min(PAUSE_MAX)
        })
    }
}

impl Service {
    /// Ends what is left of the failed engine and starts another, as often as the policy allows. Errors with the
    /// launcher's last word: the failure that was one too many, or a signal.
    pub(super) async fn restart(
        &mut self,
        plan: &ServePlan,
        server: &mut Server,
        for_clients: String,
        mut failure: CliError,
    ) -> Result<()> {
        self.leave_engine(&for_clients).await;
        loop {
            let Some(pause) = self.policy.after_failure(failure.code, Instant::now()) else {
                return Err(failure);
            };
            tracing::error!("{}; all processes are started again in {} s", failure.message, pause.as_secs());
            server.begin_end("the engine is restarted")?;
            all_ended(server).await?;
            serving::on_hosts(server, |room| {
                room.wait_ended(END_PATIENCE);
            })
            .await;
            quiet(server, pause).await?;
            self.gather_hosts(plan, server).await?;
            server.start_again(plan)?;
            match ready::wait(plan, server).await {
                Ok(_) => {
                    self.join_engine(plan, server)?;
                    self.policy.ready(Instant::now());
                    tracing::info!("the engine was restarted and answers");
                    return Ok(());
                }
                Err(error) => failure = error,
            }
        }
    }
}

impl Service {
    /// Waits until hosts that were lost have joined again. Errors when they do not in time, and on a signal.
    async fn gather_hosts(&self, plan: &ServePlan, server: &mut Server) -> Result<()> {
        let (Some(hosts), Some(room)) = (&plan.hosts, server.hosts.clone()) else { return Ok(()) };
        for host in room.missing() {
            tracing::warn!("host {host} has to join again before the engine is started");
        }
        abroad::wait_for_all(&room, hosts, &mut server.events).await
    }
}

/// Waits until no child is left. Errors on a signal.
async fn all_ended(server: &mut Server) -> Result<()> {
    let ended = async {
        while let Some(event) = server.events.recv().await {
            match event {
                Event::AllExited => return Ok(()),
                Event::Signal(signal) => return Err(ready::by_signal(signal)),
                _ => {}
            }
        }
        Err(CliError::new(ExitCode::Internal, "the supervising thread is gone"))
    };
    let late = || CliError::new(ExitCode::ChildDied, "the failed engine's processes do not end");
    tokio::time::timeout(END_PATIENCE, ended).await.unwrap_or_else(|_| Err(late()))
}

/// Waits for `pause`. Errors on a signal.
async fn quiet(server: &mut Server, pause: Duration) -> Result<()> {
    let signalled = async {
        loop {
            match server.events.recv().await {
                Some(Event::Signal(signal)) => return ready::by_signal(signal),
                Some(_) => {}
                None => return CliError::new(ExitCode::Internal, "the supervising thread is gone"),
            }
        }
    };
    match tokio::time::timeout(pause, signalled).await {
        Ok(error) => Err(error),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_a_row_of_failures_ends() {
        let start = Instant::now();
        let mut policy = Policy { restart: Restart::OnFailure, limit: 7, in_a_row: 0, ready_at: start };
        let mut fail = |seconds| {
            let now = start + Duration::from_secs(seconds);
            policy.after_failure(ExitCode::ChildDied, now).map(|pause| pause.as_secs())
        };
        let pauses: Vec<_> = (0..8).map(&mut fail).collect();
        let want = [1, 2, 4, 8, 16, 30, 30].map(Some);
        assert_eq!((&pauses[..7], pauses[7]), (&want[..], None));
        assert_eq!(fail(300), Some(1), "steady service since the last start");
    }

    #[test]
    fn what_the_user_must_change_is_not_tried_again() {
        let now = Instant::now();
        let policy = |restart| Policy { restart, limit: 5, in_a_row: 0, ready_at: now };
        for code in [ExitCode::Flags, ExitCode::ModelFiles, ExitCode::Memory, ExitCode::Terminated] {
            assert_eq!(policy(Restart::OnFailure).after_failure(code, now), None);
        }
        assert_eq!(policy(Restart::Never).after_failure(ExitCode::ChildDied, now), None);
    }
}
