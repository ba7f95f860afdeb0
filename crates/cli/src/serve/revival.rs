//! A replica that fails is started again while the others serve (`--dp`, `--restart on-failure`).
//!
//! Nothing here waits: the service's loop goes on with the others, and each step of a revival follows an event.
//!
//! ```text
//! serving ─failed→ ending ─all its processes gone→ pausing ─time→ loading ─its primary is ready→ serving
//!                    ↑______________________failed again_____________|
//! ```
//! When it fails: its requests move or end ([`EngineClient::lose_replica`](lockstep_api::EngineClient::lose_replica)),
//! its ranks are aborted and ended, nobody watches its loops. When it is ready: the api and the tokenizers turn to its
//! new primary, then it gets requests. **Invariant:** a replica has no living process of an earlier set when the next
//! is started. Pauses and the number of failures in a row are those of [`Policy`], for each replica on its own; one
//! failure too many ends the server, as it does with one replica.

use super::plan::ServePlan;
use super::restart::{END_PATIENCE, Policy};
use super::serving::{Service, connect_scheduler, for_clients, last_word};
use super::spawn::Server;
use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use lockstep_launch::{Failure, Phase};
use lockstep_wire::{Ready, Role};
use std::time::{Duration, Instant};

/// Where a replica stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Serving,
    /// Its processes are being ended, by `late_at`.
    Ending {
        pause: Duration,
        late_at: Instant,
    },
    /// It is started again at that time.
    Pausing(Instant),
    Loading,
}

/// All replicas; pure, time is an argument.
#[derive(Debug)]
pub(super) struct Revivals {
    replicas: Vec<(Policy, Stage)>,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Start(usize),
    /// Its processes do not end.
    Late(usize),
}

impl Revivals {
    /// `replicas` replicas that serve, each with this policy.
    pub(super) fn new(replicas: usize, policy: &Policy) -> Self {
        Self { replicas: vec![(policy.clone(), Stage::Serving); replicas] }
    }

    /// Whether a replica serves.
    pub(super) fn is_serving(&self, replica: usize) -> bool {
        self.replicas[replica].1 == Stage::Serving
    }

    /// All are new and serve.
    pub(super) fn forget(&mut self) {
        self.replicas.iter_mut().for_each(|(_, stage)| *stage = Stage::Serving);
    }

    /// When [`Self::take_due`] will have something.
    pub(super) fn due(&self) -> Option<Instant> {
        let times = self.replicas.iter().filter_map(|(_, stage)| match stage {
            Stage::Ending { late_at, .. } => Some(*late_at),
            Stage::Pausing(until) => Some(*until),
            Stage::Serving | Stage::Loading => None,
        });
        times.min()
    }

    fn take_due(&mut self, now: Instant) -> Option<Due> {
        self.replicas.iter_mut().enumerate().find_map(|(replica, (_, stage))| match *stage {
            Stage::Ending { late_at, .. } if late_at <= now => Some(Due::Late(replica)),
            Stage::Pausing(until) if until <= now => {
                *stage = Stage::Loading;
                Some(Due::Start(replica))
            }
            _ => None,
        })
    }

    /// A replica has failed with `code`: how long it will pause, or `None` when that was once too often.
    fn failed(&mut self, replica: usize, code: ExitCode, now: Instant) -> Option<Duration> {
        let (policy, stage) = &mut self.replicas[replica];
        let pause = policy.after_failure(code, now)?;
        *stage = Stage::Ending { pause, late_at: now + END_PATIENCE };
        Some(pause)
    }

    fn ended(&mut self, replica: usize, now: Instant) {
        let stage = &mut self.replicas[replica].1;
        if let Stage::Ending { pause, .. } = *stage {
            *stage = Stage::Pausing(now + pause);
        }
    }

    /// Whether that is what was waited for.
    fn ready(&mut self, replica: usize, now: Instant) -> bool {
        let (policy, stage) = &mut self.replicas[replica];
        let waited_for = *stage == Stage::Loading;
        if waited_for {
            policy.ready(now);
            *stage = Stage::Serving;
        }
        waited_for
    }
}

impl Service {
    /// Whether a failure is that of one replica which may be started again.
    pub(super) fn loses_one(&self, failure: &Failure) -> bool {
        failure.replica.is_some() && self.policy.restarts(failure.exit_code)
    }

    /// A replica has failed: its requests move or end, what is left of it is ended.
    pub(super) fn on_replica_failure(&mut self, plan: &ServePlan, server: &Server, failure: &Failure) {
        let Some(replica) = failure.replica else { return };
        let (moved, ended) = self.client.lose_replica(replica, &for_clients(failure));
        let error = last_word(failure);
        let Some(pause) = self.revivals.failed(replica, error.code, Instant::now()) else {
            return self.fail(error);
        };
        tracing::error!(
            "{}; replica {replica} is started again in {} s; {moved} of its requests move to other replicas, {ended} end",
            error.message,
            pause.as_secs()
        );
        let done = server
            .begin_end_of(replica, "the replica is restarted")
            .and_then(|()| self.watch_loops(plan, server));
        if let Err(error) = done {
            self.fail(error);
        }
    }

    /// The last process of a replica has gone.
    pub(super) fn on_replica_ended(&mut self, replica: usize) {
        self.revivals.ended(replica, Instant::now());
    }

    /// Time has come for some replica.
    pub(super) fn on_due(&mut self, plan: &ServePlan, server: &mut Server) {
        while let Some(due) = self.revivals.take_due(Instant::now()) {
            let done = match due {
                Due::Late(replica) => {
                    let message = format!("the processes of replica {replica}, which failed, do not end");
                    Err(CliError::new(ExitCode::ChildDied, message))
                }
                // A server that is told to end starts nothing.
                Due::Start(_) if self.signal.is_some() => Ok(()),
                Due::Start(replica) => self.start_replica(plan, server, replica),
            };
            if let Err(error) = done {
                return self.fail(error);
            }
        }
    }

    fn start_replica(&self, plan: &ServePlan, server: &mut Server, replica: usize) -> Result<()> {
        let phase = server.supervisor.set_replica_phase(replica, Phase::Loading);
        phase.map_err(CliError::with(ExitCode::Internal))?;
        server.start_replica(plan, replica)?;
        self.show_processes(plan, server)
    }

    /// Some child says that it has loaded.
    pub(super) async fn on_ready(&mut self, plan: &ServePlan, server: &Server, ready: &Ready) {
        let Role::Scheduler(rank) = ready.role else { return };
        let replica = plan.layout.topology.replica_of(rank);
        if !self.revivals.ready(replica, Instant::now()) {
            return;
        }
        match self.rejoin(plan, server, replica).await {
            Ok(()) => tracing::info!("replica {replica} was restarted and answers"),
            Err(error) => self.fail(error),
        }
    }

    async fn rejoin(&mut self, plan: &ServePlan, server: &Server, replica: usize) -> Result<()> {
        let sender = connect_scheduler(server, replica).map_err(CliError::with(ExitCode::Internal))?;
        self.schedulers.replace(replica, sender);
        let phase = server.supervisor.set_replica_phase(replica, Phase::Serving);
        phase.map_err(CliError::with(ExitCode::Internal))?;
        self.watch_loops(plan, server)?;
        self.client.rejoin_replica(replica, &server.group.replicas[replica].inbox.0).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::server::Restart;

    #[test]
    fn a_replica_goes_through_its_stages_while_another_serves() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut revivals = Revivals::new(2, &Policy::for_test(Restart::OnFailure, 2, start));
        assert_eq!(revivals.due(), None);
        assert_eq!(revivals.failed(1, ExitCode::ChildDied, at(0)), Some(Duration::from_secs(1)));
        assert!(revivals.is_serving(0) && !revivals.is_serving(1));
        revivals.ended(1, at(1));
        assert_eq!((revivals.due(), revivals.take_due(at(1))), (Some(at(2)), None));
        assert_eq!(revivals.take_due(at(2)), Some(Due::Start(1)));
        assert_eq!(revivals.due(), None, "a load has no limit");
        // It fails while it loads: a longer pause, then ready; and ready once only.
        assert_eq!(revivals.failed(1, ExitCode::ChildDied, at(3)), Some(Duration::from_secs(2)));
        assert!(!revivals.ready(1, at(3)), "what was on its way from the one before");
        revivals.ended(1, at(3));
        assert_eq!(revivals.take_due(at(5)), Some(Due::Start(1)));
        assert!(revivals.ready(1, at(6)) && revivals.is_serving(1) && !revivals.ready(1, at(6)));
        assert_eq!(revivals.failed(1, ExitCode::ChildDied, at(7)), None, "the third in a row");
        // The other has a count of its own, and its end is waited for with patience.
        assert!(revivals.failed(0, ExitCode::ChildDied, at(8)).is_some());
        assert_eq!(revivals.take_due(at(8) + END_PATIENCE), Some(Due::Late(0)));
        revivals.forget();
        assert!(revivals.is_serving(0));
    }
}
