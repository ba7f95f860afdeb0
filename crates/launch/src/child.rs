//! The child's side: from `main` to a configured process that cannot outlive its launcher.
//!
//! **Invariant:** after [`enter`] returned `Some`, the process ends when the launcher does, whatever
//! its threads are doing: the kernel sends SIGKILL when the supervising thread dies, and a thread of
//! our own sees the end of the launcher's pipe (also when a debugger or a user change disarmed the
//! death signal).

use crate::LaunchError;
use crate::signals;
use crate::status::ORPHANED_EXIT;
use lockstep_core::ExitCode;
use lockstep_wire::Role;
use rustix::fs::FileType;
use rustix::io::{Errno, FdFlags};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// `argv[1]` of every child.
pub const CHILD_FLAG: &str = "--lockstep-child";
/// Largest configuration in bytes.
pub const CONFIG_BYTES_MAX: usize = 16 << 20;
/// Longest thread name that Linux keeps.
const COMM_BYTES_MAX: usize = 15;

/// What the launcher sends through a child's stdin: 4 bytes little-endian length, then this as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) launcher_pid: u32,
    pub(crate) inherited: Vec<RawFd>,
    pub(crate) config_json: String,
}

/// What a child knows when it starts.
#[derive(Debug)]
pub struct ChildEntry {
    /// Its name in messages; also `argv[0]`.
    pub name: String,
    /// Its part.
    pub role: Role,
    /// The text given to [`crate::ChildSpec::config_json`].
    pub config_json: String,
    /// The descriptors of [`crate::ChildSpec::inherited`], in the same order, closed on exec again.
    pub inherited: Vec<OwnedFd>,
}

/// Call first thing in `main`, before any thread exists. `None`: this process is not a child.
///
/// In a child it reads the configuration, arms both death watches, makes the process ignore SIGINT
/// and SIGHUP (the launcher decides when to end; SIGTERM keeps its default) and sets its short name.
/// Its process group is its own already, so Ctrl-C in a terminal reaches the launcher only.
///
/// Ends the process, with a line on stderr, when it was started by hand or its launcher is gone.
pub fn enter() -> Option<ChildEntry> {
    if std::env::args_os().nth(1).is_none_or(|flag| flag != CHILD_FLAG) {
        return None;
    }
    match enter_child() {
        Ok(entry) => Some(entry),
        Err(error) => {
            eprintln!("lockstep: {error}");
            std::process::exit(ExitCode::Flags.code())
        }
    }
}

fn enter_child() -> Result<ChildEntry, LaunchError> {
    let stat = rustix::fs::fstat(io::stdin()).map_err(LaunchError::system("fstat(stdin)"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo {
        return Err(LaunchError::BadEntry(format!(
            "{CHILD_FLAG} is for processes that lockstep starts itself; use `lockstep serve`"
        )));
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(LaunchError::system("prctl(PR_SET_PDEATHSIG)"))?;
    for signal in [libc::SIGINT, libc::SIGHUP] {
        signals::ignore(signal).map_err(LaunchError::system("signal(SIG_IGN)"))?;
    }
    let envelope = read_envelope()?;
    // The death signal is not sent for a parent that was gone before it was armed.
    if std::os::unix::process::parent_id() != envelope.launcher_pid {
        exit_at_once(ORPHANED_EXIT);
    }
    watch_launcher()?;
    set_short_name(&envelope.name)?;
    let inherited = envelope.inherited.into_iter().map(adopt).collect::<Result<_, _>>()?;
    Ok(ChildEntry { name: envelope.name, role: envelope.role, config_json: envelope.config_json, inherited })
}

fn read_envelope() -> Result<Envelope, LaunchError> {
    let mut length = [0; 4];
    read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    // The envelope adds a few hundred bytes and JSON escapes at most double the configuration.
    if length > 2 * CONFIG_BYTES_MAX + 4096 {
        return Err(LaunchError::BadEntry(format!(
            "the launcher announces a configuration of {length} bytes"
        )));
    }
    let mut bytes = vec![0; length];
    read_exact(&mut bytes)?;
    serde_json::from_slice(&bytes)
        .map_err(|e| LaunchError::BadEntry(format!("the launcher's configuration cannot be read: {e}")))
}

/// Fills `bytes` from stdin, unbuffered: what follows belongs to the watching thread.
fn read_exact(mut bytes: &mut [u8]) -> Result<(), LaunchError> {
    while !bytes.is_empty() {
        match rustix::io::read(io::stdin(), &mut *bytes) {
            Ok(0) => exit_at_once(ORPHANED_EXIT),
            Ok(n) => bytes = &mut bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => {
                return Err(LaunchError::System { what: "reading the configuration", source: e.into() });
            }
        }
    }
    Ok(())
}

/// Starts the thread that ends this process when the launcher's end of the pipe closes.
fn watch_launcher() -> Result<(), LaunchError> {
    let watch = || {
        let mut byte = [0; 64];
        loop {
            match rustix::io::read(io::stdin(), &mut byte) {
                Ok(0) => exit_at_once(ORPHANED_EXIT),
                Ok(_) | Err(Errno::INTR) => {}
                // Nothing but a closed descriptor 0 can cause this: the watch would be blind.
                Err(_) => exit_at_once(ORPHANED_EXIT),
            }
        }
    };
    std::thread::Builder::new()
        .name("launcher-watch".into())
        .stack_size(64 << 10)
        .spawn(watch)
        .map(drop)
        .map_err(LaunchError::system("starting the watching thread"))
}

/// Ends the process without destructors or exit handlers, which could wait for a stuck thread.
pub(crate) fn exit_at_once(code: i32) -> ! {
    // SAFETY: `_exit` may be called at any time from any thread and does not return.
    unsafe { libc::_exit(code) }
}

/// Sets what `ps -o comm` and `top` show, which the kernel cuts to 15 bytes.
fn set_short_name(name: &str) -> Result<(), LaunchError> {
    let short: String = name.chars().filter(char::is_ascii).take(COMM_BYTES_MAX).collect();
    let short = CString::new(short).map_err(|_| LaunchError::BadName { name: name.into() })?;
    rustix::thread::set_name(&short).map_err(LaunchError::system("prctl(PR_SET_NAME)"))
}

/// Takes ownership of a descriptor the launcher left open for this process.
fn adopt(fd: RawFd) -> Result<OwnedFd, LaunchError> {
    if fd <= libc::STDERR_FILENO {
        return Err(LaunchError::BadEntry(format!("the launcher hands over descriptor {fd}")));
    }
    // SAFETY: the launcher cleared close-on-exec on exactly these numbers for this process, `enter`
    // runs before anything else could open or own a descriptor, and each number is adopted once.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&owned, FdFlags::CLOEXEC).map_err(|e| {
        LaunchError::BadEntry(format!(
            "descriptor {fd} from the launcher is not open: {}",
            io::Error::from(e)
        ))
    })?;
    Ok(owned)
}
