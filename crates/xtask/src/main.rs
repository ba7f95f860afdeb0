//! Developer commands: `cargo xtask COMMAND` (an alias in `.cargo/config.toml`).

mod sim;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(about = "Developer commands")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the simulator over many seeds (docs/simulation.md).
    Sim(sim::SimArguments),
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Sim(arguments) => sim::run(&arguments),
    }
}
