//! `lockstep trace`: records what every loop of a running server does, into a file for Perfetto.

use crate::client::{Client, runtime};
use crate::error::{CliError, Result};
use crate::flags::trace::TraceFlags;
use crate::output::say_line;
use lockstep_core::ExitCode;

/// What a trace says of pipeline stages, a line each.
fn stages(trace: &[u8]) -> Vec<String> {
    let trace: serde_json::Value = serde_json::from_slice(trace).unwrap_or_default();
    let stages = trace["otherData"]["stages"].as_array().cloned().unwrap_or_default();
    let line = |stage: &serde_json::Value| {
        let number = |field: &str| stage[field].as_f64().unwrap_or_default();
        format!(
            "{}: {} steps, computed {:.2} s of {:.2} s with a step on its way: bubble {:.0} %",
            stage["rank"].as_str().unwrap_or_default(),
            stage["steps"],
            number("computed_seconds"),
            number("work_seconds"),
            100.0 * number("bubble")
        )
    };
    stages.iter().map(line).collect()
}

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
    for line in stages(&answer.body) {
        say_line(line)?;
    }
    say_line(format_args!(
        "{}: open it in https://ui.perfetto.dev or chrome://tracing",
        flags.output.display()
    ))
}
