//! What is logged.

use crate::logging::LogSettings;
use clap::{Args, ValueEnum};
use lockstep_api::OtlpEndpoint;
use serde::{Deserialize, Serialize};
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

    /// `text` for people, or `json`: one object a line with time, level, target, process, role, rank, message and
    /// fields such as the request.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,

    /// Collector that is told of every request as an OpenTelemetry trace: OTLP as JSON over HTTP, e.g.
    /// http://127.0.0.1:4318.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<OtlpEndpoint>,

    /// Folder to which a rank that fails (or every rank on `POST /debug/flight`) writes what its scheduler was told
    /// and decided lately, prompts included, for `lockstep replay`.
    #[arg(long)]
    pub flight_dir: Option<PathBuf>,
}

impl ServeLoggingFlags {
    /// For every process of the server.
    pub fn settings(&self) -> LogSettings {
        LogSettings { level: self.log_level, format: self.log_format }
    }
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum LogFormat {
    /// Lines to read.
    Text,
    /// One JSON object a line.
    Json,
}

/// Levels, most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
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
    /// The word that `tracing` knows it by.
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
