//! How processes end, and what the launcher makes of it.

use lockstep_core::ExitCode;
use lockstep_wire::Role;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Exit code of a process that stops only because its rank group was aborted, that is, because
/// another process died or left a collective. Such an exit is never the first cause.
pub const GROUP_ABORTED_EXIT: i32 = 71;

/// Exit code of a child whose launcher is gone; nobody reads it but a tracer.
pub const ORPHANED_EXIT: i32 = 72;

/// Exit code of a Rust process whose main thread panicked.
const PANIC_EXIT: i32 = 101;

/// What the server is doing, as far as deaths of children are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Until everyone has acknowledged. Exit codes 2, 3 and 5 of a child become the launcher's.
    Loading,
    /// Requests are answered.
    Serving,
    /// Children were asked to end: exit code 0 is expected.
    Draining,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Loading => "loading",
            Phase::Serving => "serving",
            Phase::Draining => "draining",
        })
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChildStatus {
    /// It exited with this code.
    Exit(i32),
    /// A signal killed it.
    Signal(i32),
    /// Someone else took its status (a `wait` for any child elsewhere in this process).
    Unknown,
    /// It is a whole host, which does not answer any more.
    Lost,
}

impl fmt::Display for ChildStatus {
    /// The middle of a sentence: `was killed by signal 9 (SIGKILL)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ChildStatus::Signal(n) => match signal_name(n) {
                Some(name) => write!(f, "was killed by signal {n} ({name})"),
                None => write!(f, "was killed by signal {n}"),
            },
            ChildStatus::Exit(code) => match exit_meaning(code) {
                Some(meaning) => write!(f, "exited with code {code} ({meaning})"),
                None => write!(f, "exited with code {code}"),
            },
            ChildStatus::Unknown => f.write_str("ended, and its status was lost"),
            ChildStatus::Lost => f.write_str("was lost"),
        }
    }
}

/// What the supervisor reports. One event per child and signal at most, so the unbounded channel
/// holds a handful.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A child ended although nobody asked it to. Sent at once: abort the rank group now, so that
    /// its other members stop waiting; the verdict follows as [`Event::Failed`].
    ChildDied {
        /// Its name.
        name: String,
        /// Its part.
        role: Role,
        /// How it ended.
        status: ChildStatus,
    },
    /// The first cause, once it is known: within 0.1 s of the first death that explains itself,
    /// within 2 s when every process so far only says that its group was aborted. Sent once for each
    /// replica, and for what belongs to none, until that has ended.
    Failed(Failure),
    /// No child of this replica is left, after [`Supervisor::end_replica`](crate::Supervisor::end_replica).
    ReplicaEnded(usize),
    /// A child ended with exit code 0 while draining.
    ChildExited {
        /// Its name.
        name: String,
        /// Its part.
        role: Role,
    },
    /// No child is left, for whatever reason (or a shutdown gave up one that SIGKILL cannot end).
    AllExited,
    /// SIGINT, SIGTERM or SIGHUP: stop admission and drain. A second SIGINT or SIGTERM never
    /// arrives here: it ends the launcher and all children at once.
    Signal(i32),
}

/// Why the server, or a replica of it, cannot go on: the first cause among all deaths. Displays as one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the process.
    pub process: String,
    /// Its part.
    pub role: Role,
    /// The replica that cannot go on; `None`: the whole server.
    pub replica: Option<usize>,
    /// How it ended.
    pub status: ChildStatus,
    /// Why the launcher has killed it, if it did, or has given up its host.
    pub reason: Option<String>,
    /// When.
    pub phase: Phase,
    /// The end of its stderr and stdout, oldest first, at most [`crate::lines::TAIL_LINES_MAX`].
    pub last_lines: Vec<String>,
    /// What the launcher should exit with.
    pub exit_code: ExitCode,
}

impl Failure {
    /// `status` decides the launcher's exit code: 2, 3 and 5 are passed on while loading, because
    /// they tell the user what to change; anything else is "a child died".
    pub(crate) fn new(
        process: String,
        role: Role,
        status: ChildStatus,
        phase: Phase,
        last_lines: Vec<String>,
    ) -> Self {
        let exit_code = match (phase, status) {
            (Phase::Loading, ChildStatus::Exit(code)) => match ExitCode::from_code(code) {
                Some(known @ (ExitCode::Flags | ExitCode::ModelFiles | ExitCode::Memory)) => known,
                _ => ExitCode::ChildDied,
            },
            _ => ExitCode::ChildDied,
        };
        Self { process, role, replica: None, status, reason: None, phase, last_lines, exit_code }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(reason), ChildStatus::Lost) = (&self.reason, self.status) {
            return write!(f, "lockstep: {} was lost while {}: {reason}", self.process, self.phase);
        }
        if let Some(reason) = &self.reason {
            return write!(f, "lockstep: {} was ended while {} because {reason}", self.process, self.phase);
        }
        write!(f, "lockstep: {} {} while {}", self.process, self.status, self.phase)?;
        match crate::lines::telling_line(&self.last_lines, self.status) {
            Some(line) => write!(f, "; {line}"),
            None => f.write_str("; it logged nothing"),
        }
    }
}

fn exit_meaning(code: i32) -> Option<&'static str> {
    Some(match code {
        GROUP_ABORTED_EXIT => "its rank group was aborted",
        ORPHANED_EXIT => "its launcher was gone",
        PANIC_EXIT => "panic",
        _ => match ExitCode::from_code(code)? {
            ExitCode::Drained => "success",
            ExitCode::Internal => "internal error",
            ExitCode::Flags => "flags or illegal layout",
            ExitCode::ModelFiles => "model files",
            ExitCode::ChildDied => "a child died",
            ExitCode::Memory => "not enough memory",
            ExitCode::Interrupted => "interrupted",
            ExitCode::Terminated => "terminated",
        },
    })
}

/// Names of the signals that a process can die of, from `signal(7)`.
fn signal_name(number: i32) -> Option<&'static str> {
    Some(match number {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(status: ChildStatus, phase: Phase, lines: &[&str]) -> Failure {
        let lines = lines.iter().map(|l| (*l).to_owned()).collect();
        Failure::new("lockstep-TP1-scheduler".into(), Role::Scheduler(1), status, phase, lines)
    }

    #[test]
    fn one_line_with_name_cause_phase_and_last_words() {
        let f = failure(ChildStatus::Signal(9), Phase::Serving, &["loaded", "step 12"]);
        assert_eq!(
            f.to_string(),
            "lockstep: lockstep-TP1-scheduler was killed by signal 9 (SIGKILL) while serving; \
             last log line: step 12"
        );
        let f = Failure { reason: Some("it was silent".into()), ..f };
        let want = "lockstep: lockstep-TP1-scheduler was ended while serving because it was silent";
        assert_eq!(f.to_string(), want);
        let f = failure(ChildStatus::Exit(3), Phase::Loading, &["x ERROR TP1 a.safetensors: short", "bye"]);
        assert_eq!(
            f.to_string(),
            "lockstep: lockstep-TP1-scheduler exited with code 3 (model files) while loading; \
             last error: x ERROR TP1 a.safetensors: short"
        );
        let f = failure(ChildStatus::Exit(99), Phase::Draining, &[]);
        assert_eq!(
            f.to_string(),
            "lockstep: lockstep-TP1-scheduler exited with code 99 while draining; it logged nothing"
        );
    }

    #[test]
    fn only_what_the_user_can_change_is_passed_on_and_only_while_loading() {
        for (status, phase, want) in [
            (ChildStatus::Exit(2), Phase::Loading, ExitCode::Flags),
            (ChildStatus::Exit(3), Phase::Loading, ExitCode::ModelFiles),
            (ChildStatus::Exit(5), Phase::Loading, ExitCode::Memory),
            (ChildStatus::Exit(3), Phase::Serving, ExitCode::ChildDied),
            (ChildStatus::Exit(5), Phase::Draining, ExitCode::ChildDied),
            (ChildStatus::Exit(0), Phase::Loading, ExitCode::ChildDied),
            (ChildStatus::Exit(1), Phase::Loading, ExitCode::ChildDied),
            (ChildStatus::Exit(130), Phase::Loading, ExitCode::ChildDied),
            (ChildStatus::Signal(3), Phase::Loading, ExitCode::ChildDied),
            (ChildStatus::Unknown, Phase::Loading, ExitCode::ChildDied),
        ] {
            assert_eq!(failure(status, phase, &[]).exit_code, want, "{status:?} {phase}");
        }
    }
}
