//! Exit codes of the `lockstep` binary; documented in `docs/operations.md`.

use serde::{Deserialize, Serialize};

/// Why the process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum ExitCode {
    /// Ended after a drain, or the command succeeded.
    Drained = 0,
    /// A bug or an unexpected failure of the system.
    Internal = 1,
    /// Bad flags or an illegal parallel layout.
    Flags = 2,
    /// The model cannot be found, read or understood.
    ModelFiles = 3,
    /// A child process ended although nobody asked it to.
    ChildDied = 4,
    /// Not enough memory for the weights or one page.
    Memory = 5,
    /// Ended by SIGINT before the drain was complete.
    Interrupted = 130,
    /// Ended by SIGTERM before the drain was complete.
    Terminated = 143,
}

impl ExitCode {
    /// The code for `std::process::exit`.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The meaning of a child's exit code, if it is one of ours.
    pub const fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::Drained,
            1 => Self::Internal,
            2 => Self::Flags,
            3 => Self::ModelFiles,
            4 => Self::ChildDied,
            5 => Self::Memory,
            130 => Self::Interrupted,
            143 => Self::Terminated,
            _ => return None,
        })
    }
}
