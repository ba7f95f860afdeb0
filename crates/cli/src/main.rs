//! The `lockstep` binary: every role of the server and every tool, in one file to copy.
//!
//! `lockstep serve` re-executes this binary once per child process; [`child`] is what those run.
//! Reading order: [`flags`], [`serve`], [`child`].

mod batch;
mod bench;
mod chat;
mod checkpoint;
mod child;
mod client;
mod device;
mod doctor;
mod error;
mod flags;
mod logging;
mod output;
mod plan;
mod pull;
mod selftest;
mod serve;
mod trace;
mod verify;

use clap::Parser;
use error::{CliError, Result};
use flags::{BenchCommand, Cli, Command};
use lockstep_core::ExitCode;
use output::{say_line, written};
use std::io::Write;

fn main() {
    if let Some(entry) = lockstep_launch::child::enter() {
        std::process::exit(child::run(entry));
    }
    lockstep_launch::init::end_on_signals();
    let code = match parse().and_then(run) {
        Ok(()) => ExitCode::Drained,
        Err(CliError { code, message }) => {
            if !message.is_empty() {
                // Not eprintln!, which panics when nobody reads stderr.
                let _ = writeln!(std::io::stderr(), "lockstep: {message}");
            }
            code
        }
    };
    std::process::exit(code.code());
}

/// The command line, or one sentence about what is wrong with it. Help and version end here.
fn parse() -> Result<Cli> {
    Cli::try_parse().map_err(|error| {
        let help = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
        if !error.use_stderr() || error.kind() == help {
            // Help was asked for, or nothing was: it is the answer.
            if let Err(failed) = written(error.print().and_then(|()| std::io::stdout().flush())) {
                return failed;
            }
            let code = if error.use_stderr() { ExitCode::Flags } else { ExitCode::Drained };
            return CliError::new(code, "");
        }
        let text = error.to_string();
        let mut parts = text.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
        let sentence = parts.next().unwrap_or_default();
        let tips: Vec<String> = parts.filter(|part| part.starts_with("tip:")).collect();
        let words: Vec<&str> = std::iter::once(sentence.trim_start_matches("error: "))
            .chain(tips.iter().map(String::as_str))
            .collect();
        CliError::new(ExitCode::Flags, format!("{}; see `lockstep --help`", words.join("; ")))
    })
}

fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Serve(flags) => serve::run(&flags),
        Command::Chat(flags) => chat::run(&flags),
        Command::Batch(flags) => batch::run(&flags),
        Command::Plan(flags) => plan::run(&flags),
        Command::Verify(flags) => verify::run(&flags),
        Command::Pull(flags) => pull::run(&flags),
        Command::Replay(flags) => {
            let report =
                lockstep_engine::flight::replay(&flags.file).map_err(CliError::with(ExitCode::Internal))?;
            say_line(&report)?;
            match report.difference {
                None => Ok(()),
                Some(_) => Err(CliError::new(
                    ExitCode::Internal,
                    "the recording and this version decide differently",
                )),
            }
        }
        Command::Trace(flags) => trace::run(&flags),
        Command::Selftest(flags) => selftest::run(&flags),
        Command::Doctor(flags) => doctor::run(&flags),
        Command::Bench(flags) => match flags.what {
            BenchCommand::Hw(flags) => bench::hardware(&flags),
            BenchCommand::Cpu(flags) => bench::cpu(&flags),
            BenchCommand::Decode(flags) => bench::decode(&flags),
            BenchCommand::Comm(flags) => bench::comm(&flags),
            BenchCommand::Serve(flags) => bench::serve(&flags),
            BenchCommand::Offline(flags) => bench::offline(&flags),
            BenchCommand::Latency(flags) => bench::latency(&flags),
        },
    }
}
