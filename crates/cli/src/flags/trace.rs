//! What `lockstep trace` records.

use clap::Args;
use std::path::PathBuf;

/// Flags of `lockstep trace`.
#[derive(Args, Debug)]
pub struct TraceFlags {
    /// Address of the running server.
    #[arg(long, default_value = "http://127.0.0.1:1919")]
    pub url: String,

    /// Key to send to it.
    #[arg(long, value_name = "KEY", env = "LOCKSTEP_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,

    /// How long to record, up to 60.
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,

    /// The file to write.
    #[arg(long, short, default_value = "lockstep-trace.json")]
    pub output: PathBuf,
}
