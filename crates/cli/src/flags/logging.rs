//! What is logged.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Logging flags of the other commands.
#[derive(Args, Debug)]
pub struct LoggingFlags {
    /// Least important messages to show.
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
}

/// Logging flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ServeLoggingFlags {
    /// Least important messages to show.
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,

    /// Folder to which a rank that fails (or every rank on `POST /debug/flight`) writes what its scheduler was told
    /// and decided lately, prompts included, for `lockstep replay`.
    #[arg(long)]
    pub flight_dir: Option<PathBuf>,
}

/// Levels, most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Only what ends the server.
    Error,
    /// What a user should look at.
    Warn,
    /// Start, end and shape of the service.
    Info,
    /// One line per request.
    Debug,
    /// One line per step and message.
    Trace,
}

impl LogLevel {
    /// The word that child processes are given.
    pub const fn name(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}
