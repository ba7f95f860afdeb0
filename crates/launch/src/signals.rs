//! SIGINT, SIGTERM and SIGHUP as bytes in a pipe, for the supervisor's poll.
//!
//! **Invariant:** handlers only write one byte; no signal that arrives after [`Signals::start`] is
//! lost (bytes are counted, not coalesced), and none is handled on another thread.

use crate::LaunchError;
use crate::init::{disposition, hand_over};
use rustix::io::Errno;
use signal_hook::SigId;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The signals that end the server, in the order they are reported.
pub(crate) const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The receiving ends of the signal pipes.
pub(crate) struct Signals {
    pipes: Vec<(i32, UnixStream, SigId)>,
}

impl Signals {
    /// Takes over the three signals. SIGHUP stays ignored when it was at start (`nohup`).
    pub(crate) fn start() -> Result<Self, LaunchError> {
        // An inherited "ignore" would make the kernel reap children itself and lose their status.
        // SAFETY: SIG_DFL is a valid disposition, and no code of this process handles SIGCHLD.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        let mut pipes = Vec::new();
        for signal in SIGNALS {
            if signal == libc::SIGHUP && disposition(signal) == libc::SIG_IGN {
                continue;
            }
            hand_over(signal);
            let (read, write) = UnixStream::pair().map_err(LaunchError::system("socketpair"))?;
            read.set_nonblocking(true).map_err(LaunchError::system("fcntl(O_NONBLOCK)"))?;
            let id = signal_hook::low_level::pipe::register(signal, write)
                .map_err(LaunchError::system("sigaction"))?;
            pipes.push((signal, read, id));
        }
        Ok(Self { pipes })
    }

    /// Descriptors to poll for reading.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.pipes.iter().map(|(_, pipe, _)| pipe.as_fd())
    }

    /// The next signal that arrived, if any.
    pub(crate) fn next(&mut self) -> Option<i32> {
        self.pipes.iter_mut().find_map(|(signal, pipe, _)| {
            let mut byte = [0];
            matches!(pipe.read(&mut byte), Ok(1)).then_some(*signal)
        })
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (_, _, id) in &self.pipes {
            signal_hook::low_level::unregister(*id);
        }
    }
}

/// Makes this process deaf to `signal`.
pub(crate) fn ignore(signal: i32) -> Result<(), Errno> {
    // SAFETY: SIG_IGN is a valid disposition for the signals this crate ignores.
    let previous = unsafe { libc::signal(signal, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(Errno::INVAL) } else { Ok(()) }
}
