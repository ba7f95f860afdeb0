//! What ends a command: one sentence and an exit code.

use lockstep_core::ExitCode;

/// The end of a command that did not succeed.
#[derive(Debug)]
pub struct CliError {
    /// What the process exits with.
    pub code: ExitCode,
    /// One sentence for people; empty when it has been said already.
    pub message: String,
}

/// Result of a command.
pub type Result<T> = std::result::Result<T, CliError>;

impl CliError {
    /// An error with the given code.
    pub fn new(code: ExitCode, message: impl std::fmt::Display) -> Self {
        Self { code, message: message.to_string() }
    }

    /// For `map_err`: any error becomes one with `code`.
    pub fn with<E: std::fmt::Display>(code: ExitCode) -> impl Fn(E) -> Self {
        move |error| Self::new(code, format!("{error:#}"))
    }
}

/// How a launcher exits that `signal` ended before its drain was complete.
pub fn code_of_signal(signal: i32) -> ExitCode {
    const SIGINT: i32 = 2;
    if signal == SIGINT { ExitCode::Interrupted } else { ExitCode::Terminated }
}
