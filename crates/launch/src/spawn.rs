//! fork and exec of one child.
//!
//! Runs on the supervising thread only: the kernel ties the death signal to the *thread* that
//! forked, and that thread lives until every child is reaped.

use crate::LaunchError;
use crate::child::{CHILD_FLAG, CONFIG_BYTES_MAX, Envelope};
use lockstep_wire::Role;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// A child to start.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    /// Its part.
    pub role: Role,
    /// `argv[0]` and the name in every message, e.g. `lockstep-TP0-scheduler`.
    pub name: String,
    /// The replica that fails with it, while others go on; `None`: the whole server does.
    pub replica: Option<usize>,
    /// Handed to the child unchanged.
    pub config_json: String,
    /// Descriptors the child gets, in this order, as [`crate::ChildEntry::inherited`]; shared,
    /// because several children map the same memory. It gets no others.
    pub inherited: Vec<Arc<OwnedFd>>,
}

/// The running program, opened once, so that replacing the file on disk (an update) cannot mix
/// versions among children.
pub(crate) struct Program {
    fd: OwnedFd,
}

impl Program {
    pub(crate) fn open() -> Result<Self, LaunchError> {
        rustix::fs::open("/proc/self/exe", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map(|fd| Self { fd })
            .map_err(|e| LaunchError::Program(e.into()))
    }
}

/// A child that was just started.
pub(crate) struct Started {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
    /// Non-blocking; still to be written: `first_bytes`.
    pub(crate) stdin: OwnedFd,
    pub(crate) first_bytes: Vec<u8>,
    /// stdout and stderr, non-blocking.
    pub(crate) outputs: [OwnedFd; 2],
}

/// Starts `spec`. Must run on the supervising thread.
pub(crate) fn start(program: &Program, spec: &ChildSpec) -> Result<Started, LaunchError> {
    let first_bytes = envelope_bytes(spec)?;
    if spec.name.contains('\0') {
        return Err(LaunchError::BadName { name: spec.name.clone() });
    }
    let kept: Vec<RawFd> = spec.inherited.iter().map(|fd| fd.as_raw_fd()).collect();
    let launcher = rustix::process::getpid();
    let mut command = Command::new(format!("/proc/self/fd/{}", program.fd.as_raw_fd()));
    command
        .arg0(&spec.name)
        .arg(CHILD_FLAG)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: `between_fork_and_exec` makes only system calls (async-signal-safe), allocates nothing
    // and takes no lock; `kept` was allocated before the fork and is only read.
    unsafe { command.pre_exec(move || between_fork_and_exec(launcher, &kept)) };
    let failed = |source| LaunchError::Spawn { name: spec.name.clone(), source };
    let mut child = command.spawn().map_err(failed)?;
    let pid = child.id();
    let taken = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(stdin), Some(stdout), Some(stderr)) = taken else {
        unreachable!("invariant: all three streams were asked for as pipes");
    };
    // The child cannot have been reaped by anyone yet, so the number is still its own.
    let raw = Pid::from_raw(pid as i32).expect("invariant: fork returns a positive id");
    let pidfd = match pidfd_open(raw, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(source) => {
            // Without a descriptor it cannot be supervised. It is unreaped, so this kill is exact.
            let _ = child.kill();
            let _ = child.wait();
            return Err(LaunchError::System { what: "pidfd_open", source: source.into() });
        }
    };
    let started =
        Started { pid, pidfd, stdin: stdin.into(), first_bytes, outputs: [stdout.into(), stderr.into()] };
    for fd in [&started.stdin, &started.outputs[0], &started.outputs[1]] {
        set_nonblocking(fd).map_err(LaunchError::system("fcntl(O_NONBLOCK)"))?;
    }
    Ok(started)
}

/// In the forked process, on its only thread.
fn between_fork_and_exec(launcher: Pid, kept: &[RawFd]) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The launcher may have died before the line above.
    if rustix::process::getppid() != Some(launcher) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // Nothing but what is given: descriptors opened by libraries without close-on-exec would keep
    // ports and files alive. Best effort: kernels before 5.11 do not know the flag.
    // SAFETY: changes flags of descriptors only; arguments are plain numbers.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    for fd in kept {
        // SAFETY: F_SETFD takes an integer; the descriptor is open, the launcher holds it.
        if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn envelope_bytes(spec: &ChildSpec) -> Result<Vec<u8>, LaunchError> {
    if spec.config_json.len() > CONFIG_BYTES_MAX {
        return Err(LaunchError::ConfigTooLarge {
            name: spec.name.clone(),
            got: spec.config_json.len(),
            limit: CONFIG_BYTES_MAX,
        });
    }
    let envelope = Envelope {
        name: spec.name.clone(),
        role: spec.role,
        launcher_pid: std::process::id(),
        inherited: spec.inherited.iter().map(|fd| fd.as_raw_fd()).collect(),
        config_json: spec.config_json.clone(),
    };
    let json = serde_json::to_vec(&envelope).expect("invariant: strings and numbers serialise");
    let length = u32::try_from(json.len()).expect("invariant: CONFIG_BYTES_MAX keeps it small");
    Ok([&length.to_le_bytes()[..], &json].concat())
}

fn set_nonblocking(fd: impl AsFd) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)
}
