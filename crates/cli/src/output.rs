//! What commands print: to a reader who may leave, on a disk that may be full.
//!
//! **Invariant:** a command whose answer was not written does not end well. Only a reader who has heard enough (a closed
//! pipe) is no error: `lockstep plan ... | head -1` ends as it would have.

use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Prints a part of the answer, which is then on its way to whoever reads.
pub fn say(text: impl Display) -> Result<()> {
    // In one piece: two writers of one terminal do not mix.
    let text = text.to_string();
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// The same, and a line's end.
pub fn say_line(text: impl Display) -> Result<()> {
    say(format_args!("{text}\n"))
}

/// What became of writing an answer to standard output.
pub fn written(result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CliError::new(
            ExitCode::Internal,
            format!(
                "the answer cannot be written to standard output: {error}; free some space, or write it elsewhere"
            ),
        )),
        _ => Ok(()),
    }
}
