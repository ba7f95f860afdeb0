//! `lockstep trace`: records what every loop of a running server does, into a file for Perfetto.

use crate::client::{Client, runtime};
use crate::error::{CliError, Result};
use crate::flags::trace::TraceFlags;
use crate::output::say_line;
use lockstep_core::ExitCode;

/// Asks the server for a trace and writes it.
pub fn run(flags: &TraceFlags) -> Result<()> {
    let client =
        Client::new(&flags.url, flags.api_key.as_deref(), 1).map_err(CliError::with(ExitCode::Flags))?;
    let path = format!("/debug/trace?seconds={}", flags.seconds);
    let answer = runtime()?.block_on(client.get(&path)).map_err(CliError::with(ExitCode::Internal))?;
    if !answer.is_success() {
        return Err(CliError::new(ExitCode::Internal, answer.refusal()));
    }
    let failed = |e| CliError::new(ExitCode::Flags, format!("cannot write {}: {e}", flags.output.display()));
    std::fs::write(&flags.output, &answer.body).map_err(failed)?;
    say_line(format_args!(
        "{}: open it in https://ui.perfetto.dev or chrome://tracing",
        flags.output.display()
    ))
}
