//! Flags of `lockstep batch`.

use super::client::TargetFlags;
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;

/// Most requests in flight.
const CONCURRENCY_MAX: usize = 4096;
/// Most seconds that `--timeout` may give, a week.
const TIMEOUT_MAX: f64 = 7.0 * 86400.0;

/// What to ask, of whom, and how eagerly.
#[derive(Args, Debug)]
pub struct BatchFlags {
    /// The server and its model. A --model that is given answers every line, whatever the line names.
    #[command(flatten)]
    pub target: TargetFlags,

    /// Requests in OpenAI's batch format, one JSON object a line: custom_id, method, url, body.
    #[arg(long, short, value_name = "FILE")]
    pub input: PathBuf,

    /// Where answers go, one JSON object a line. If it exists, the lines it answers are not asked again.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,

    /// Requests in flight at once.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub concurrency: usize,

    /// How often a request is repeated that met a busy server (429, 502, 503, 504) or a broken connection.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub retries: u32,

    /// Seconds that one answer may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600.0)]
    pub timeout: f64,

    /// Pass over lines that cannot be sent instead of refusing the file.
    #[arg(long)]
    pub skip_bad_lines: bool,

    /// Ask again for lines that the output answers with an error.
    #[arg(long)]
    pub retry_failed: bool,
}

impl BatchFlags {
    /// Numbers are in their ranges.
    pub fn check(&self) -> Result<()> {
        if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            bail!("--concurrency {} is outside 1..={CONCURRENCY_MAX}", self.concurrency);
        }
        if !(0.001..=TIMEOUT_MAX).contains(&self.timeout) {
            bail!("--timeout {} is outside 0.001..={TIMEOUT_MAX} seconds", self.timeout);
        }
        if self.input == self.output {
            bail!("--output is --input; answers need a file of their own");
        }
        Ok(())
    }
}
