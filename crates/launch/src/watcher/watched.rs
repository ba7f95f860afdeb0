//! One living child: its pipes, and how it ended.

use crate::lines::{LineSplitter, Tail};
use crate::spawn::Started;
use crate::{ChildSpec, ChildStatus, StderrSink};
use lockstep_wire::Role;
use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use std::os::fd::{AsFd, OwnedFd};

/// One living child.
pub(super) struct Watched {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) replica: Option<usize>,
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    /// Open for the child's whole life: its end tells the child that the launcher is gone.
    pub(super) stdin: OwnedFd,
    pub(super) unsent: Vec<u8>,
    pub(super) sent: usize,
    pub(super) outputs: [Output; 2],
    pub(super) tail: Tail,
    /// Why the launcher itself has killed it.
    pub(super) given_up: Option<String>,
}

/// stdout or stderr of a child.
pub(super) struct Output {
    pub(super) pipe: Option<OwnedFd>,
    pub(super) lines: LineSplitter,
}

/// A child that has ended meanwhile answers ESRCH, which is what was wanted.
pub(super) fn send_all<'a>(children: impl IntoIterator<Item = &'a Watched>, signal: Signal) {
    for child in children {
        let _ = pidfd_send_signal(&child.pidfd, signal);
    }
}

impl Watched {
    /// A child that has just been started from `spec`.
    pub(super) fn new(spec: &ChildSpec, started: Started) -> Self {
        let output = |pipe| Output { pipe: Some(pipe), lines: LineSplitter::default() };
        Self {
            name: spec.name.clone(),
            role: spec.role,
            replica: spec.replica,
            pid: started.pid,
            pidfd: started.pidfd,
            stdin: started.stdin,
            unsent: started.first_bytes,
            sent: 0,
            outputs: started.outputs.map(output),
            tail: Tail::default(),
            given_up: None,
        }
    }

    /// Writes more of the configuration.
    pub(super) fn feed(&mut self) {
        match rustix::io::write(&self.stdin, &self.unsent[self.sent..]) {
            Ok(n) => self.sent += n,
            Err(Errno::INTR | Errno::AGAIN) => {}
            // The child is gone; its descriptor reports that.
            Err(_) => self.sent = self.unsent.len(),
        }
    }

    /// Reaps; `None` when it has not ended after all.
    pub(super) fn status(&self) -> Option<ChildStatus> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => ChildStatus::Exit(code),
                (None, Some(signal)) => ChildStatus::Signal(signal),
                (None, None) => ChildStatus::Unknown,
            }),
            Err(_) => Some(ChildStatus::Unknown),
        }
    }

    /// Passes on what the child wrote to one of its outputs, at most about `limit` bytes.
    pub(super) fn forward(&mut self, which: usize, limit: usize, stderr: &StderrSink) {
        let Self { outputs, tail, .. } = self;
        let Output { pipe, lines } = &mut outputs[which];
        let mut emit = |line: &[u8]| {
            stderr.write_line(line);
            tail.push(line);
        };
        let mut buffer = [0; 16 << 10];
        let mut taken = 0;
        while let Some(fd) = &*pipe
            && taken < limit
        {
            match rustix::io::read(fd, &mut buffer) {
                Ok(0) => {
                    lines.finish(&mut emit);
                    *pipe = None;
                }
                Ok(n) => {
                    taken += n;
                    lines.push(&buffer[..n], &mut emit);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => *pipe = None,
            }
        }
    }
}
