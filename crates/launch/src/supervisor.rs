//! The launcher's handle on its children.

use crate::watcher::{Command, Remote, Watcher};
use crate::{ChildSpec, Event, LaunchError, Phase, StderrSink};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Where events arrive: `recv().await` in async code, `blocking_recv()` elsewhere. `None` means that
/// the supervising thread is gone (a bug), which has taken all children with it.
pub type Events = UnboundedReceiver<Event>;

/// How long the supervising thread may take beyond the grace it was given (a process that even
/// SIGKILL cannot end, because it is inside the kernel).
pub(crate) const UNKILLABLE_AFTER: Duration = Duration::from_secs(5);

/// How long the last lines may take to reach a stuck terminal.
pub(crate) const LAST_LINES: Duration = Duration::from_millis(200);

/// What [`Supervisor::shutdown`] had to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Names of processes that did not end within the grace and were killed.
    pub killed: Vec<String>,
    /// Names of processes that SIGKILL did not end within 5 s (stuck inside the kernel). They end
    /// as soon as the kernel lets them.
    pub left: Vec<String>,
}

/// Owns all child processes of this server.
///
/// One thread does everything: it forks (so that the kernel's death signal is tied to a thread that
/// lives as long as any child), polls process descriptors, log pipes and signals, and forwards the
/// children's output line by line to the [`StderrSink`]. Dropping the supervisor kills and reaps
/// every child. Processes that are not our children (when the launcher is process 1 of a container,
/// orphans of others are given to it) are never waited for.
///
/// A second SIGINT or SIGTERM ends the launcher and all children at once with exit code 130 or 143,
/// on the supervising thread, so that it works while the rest of the launcher is stuck.
pub struct Supervisor {
    remote: Remote,
    stderr: StderrSink,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Supervisor {
    /// Takes over SIGINT, SIGTERM and SIGHUP and starts the supervising thread. One per process.
    pub fn start(stderr: StderrSink) -> Result<(Self, Events), LaunchError> {
        let (events_in, events) = unbounded_channel();
        let (watcher, remote) = Watcher::new(stderr.clone(), events_in)?;
        let thread = std::thread::Builder::new()
            .name("supervisor".into())
            .spawn(move || watcher.run())
            .map_err(LaunchError::system("starting the supervising thread"))?;
        Ok((Self { remote, stderr, thread: Some(thread) }, events))
    }

    /// Starts a child and returns its process id (for display only: never signal it by number).
    /// May be called from any thread; the child is watched before this returns.
    pub fn spawn(&self, spec: ChildSpec) -> Result<u32, LaunchError> {
        let (reply, answer) = sync_channel(1);
        self.remote.send(Command::Spawn(Box::new(spec), reply))?;
        answer.recv().map_err(|_| LaunchError::SupervisorGone)?
    }

    /// Ends a child that does not answer, at once, also one that is stopped. Its death is then told with `why`,
    /// which follows "because", and is the first cause among others. Nothing happens when it has gone already.
    pub fn give_up(&self, name: &str, why: String) -> Result<(), LaunchError> {
        self.remote.send(Command::GiveUp { name: name.into(), why })
    }

    /// What the server is doing from now on; see [`Phase`]. Starts as [`Phase::Loading`].
    pub fn set_phase(&self, phase: Phase) -> Result<(), LaunchError> {
        self.remote.send(Command::SetPhase(phase))
    }

    /// The same for one replica while others serve: it is started again, then it serves.
    pub fn set_replica_phase(&self, replica: usize, phase: Phase) -> Result<(), LaunchError> {
        self.remote.send(Command::SetReplicaPhase(replica, phase))
    }

    /// Ends the children of one replica without waiting: SIGTERM now, SIGKILL after `grace`.
    /// [`Event::ReplicaEnded`] follows; children of that replica can be started again afterwards.
    pub fn end_replica(&self, replica: usize, grace: Duration) -> Result<(), LaunchError> {
        self.remote.send(Command::EndReplica { replica, grace })
    }

    /// For what happens on other hosts; see [`Reporter`].
    pub fn reporter(&self) -> Reporter {
        Reporter(self.remote.clone())
    }

    /// Names and process ids of the children that live, in order of start.
    pub fn processes(&self) -> Result<Vec<(String, u32)>, LaunchError> {
        let (reply, answer) = sync_channel(1);
        self.remote.send(Command::List(reply))?;
        answer.recv().map_err(|_| LaunchError::SupervisorGone)
    }

    /// What to do just before a second signal ends the launcher, e.g. to remove the directory of
    /// its sockets. Runs on the supervising thread; must be quick. Later calls add to earlier ones.
    pub fn at_sudden_end(&self, cleanup: impl FnOnce() + Send + 'static) -> Result<(), LaunchError> {
        self.remote.send(Command::AtSuddenEnd(Box::new(cleanup)))
    }

    /// Ends all children without waiting: SIGTERM now, SIGKILL after `grace`. [`Event::AllExited`]
    /// follows. Deaths from here on are no failures.
    pub fn begin_shutdown(&self, grace: Duration) -> Result<(), LaunchError> {
        self.remote.send(Command::Shutdown { grace, done: None })
    }

    /// Ends all children and waits: SIGTERM now, SIGKILL after `grace`, each through its process
    /// descriptor, and every one is reaped. Blocks for `grace` plus 5 s at most. A verdict that was
    /// still open is sent as [`Event::Failed`] first. The children's last lines are on stderr when
    /// this returns (unless the terminal is stuck), so that what the launcher prints next comes
    /// after them. Children can be started again afterwards.
    pub fn shutdown(&self, grace: Duration) -> Result<ShutdownReport, LaunchError> {
        let (reply, answer) = sync_channel(1);
        self.remote.send(Command::Shutdown { grace, done: Some(reply) })?;
        match answer.recv_timeout(grace + UNKILLABLE_AFTER + Duration::from_secs(1)) {
            Ok(report) => {
                self.stderr.flush_within(LAST_LINES);
                Ok(report)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(LaunchError::SupervisorGone)
            }
        }
    }
}

/// Brings what happens on other hosts among the events of this one: a [`Event::Failed`] counts as one more death, of
/// which the first cause is told; others are passed on.
#[derive(Clone)]
pub struct Reporter(Remote);

#[cfg(test)]
impl Reporter {
    /// One that reports to the receiver.
    pub(crate) fn for_test() -> (Self, std::sync::mpsc::Receiver<Command>) {
        let (remote, sent) = Remote::for_test();
        (Self(remote), sent)
    }
}

impl Reporter {
    /// May be called from any thread. Nothing happens when the supervising thread is gone, which has its own report.
    pub fn report(&self, event: Event) {
        let _ = self.0.send(Command::Elsewhere(Box::new(event)));
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Already gone: then the death signal of that thread has ended the children.
        let _ = self.shutdown(Duration::ZERO);
        let _ = self.remote.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
