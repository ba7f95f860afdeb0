//! What the launcher asks of the watching thread, and the way there.

use crate::{ChildSpec, Event, LaunchError, Phase, ShutdownReport};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};
use std::time::Duration;

/// What the launcher asks of the thread.
pub(crate) enum Command {
    Spawn(Box<ChildSpec>, SyncSender<Result<u32, LaunchError>>),
    SetPhase(Phase),
    SetReplicaPhase(usize, Phase),
    EndReplica {
        replica: usize,
        grace: Duration,
    },
    GiveUp {
        name: String,
        why: String,
    },
    List(SyncSender<Vec<(String, u32)>>),
    /// What another host says of its children, or of itself.
    Elsewhere(Box<Event>),
    AtSuddenEnd(Box<dyn FnOnce() + Send>),
    Shutdown {
        grace: Duration,
        done: Option<SyncSender<ShutdownReport>>,
    },
    Stop,
}

/// The sending end of the thread's commands.
#[derive(Clone)]
pub(crate) struct Remote {
    pub(super) commands: Sender<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

impl Remote {
    pub(crate) fn send(&self, command: Command) -> Result<(), LaunchError> {
        self.commands.send(command).map_err(|_| LaunchError::SupervisorGone)?;
        // A full counter (which takes 2^64 wakes) would mean that the thread is awake anyway.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        Ok(())
    }
}

#[cfg(test)]
impl Remote {
    /// One whose commands nobody carries out.
    pub(crate) fn for_test() -> (Self, std::sync::mpsc::Receiver<Command>) {
        use rustix::event::{EventfdFlags, eventfd};
        let (commands, sent) = std::sync::mpsc::channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        (Self { commands, wake: Arc::new(wake) }, sent)
    }
}
