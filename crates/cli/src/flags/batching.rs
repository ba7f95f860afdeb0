//! How requests share a step.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use lockstep_core::limits::PAGE_SIZE_MAX;

/// Batching flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct BatchingFlags {
    /// Tokens per KV page.
    #[arg(long, default_value_t = 16)]
    pub page_size: usize,

    /// Requests that run at once; others wait.
    #[arg(long, visible_aliases = ["max-running-requests", "max-running-req"], default_value_t = 64)]
    pub max_running: usize,

    /// Requests that may wait; more are answered 503.
    #[arg(long, default_value_t = 4096)]
    pub max_waiting: usize,

    /// Prefill tokens of one step; longer prompts are computed in chunks.
    #[arg(long, visible_aliases = ["chunked-prefill-size", "max-prefill-length"], default_value_t = 512)]
    pub chunk: usize,

    /// Longest prompt plus answer in tokens [default: the model's, or what the pool holds].
    #[arg(long, visible_aliases = ["context-length", "max-seq-len-override"])]
    pub max_context: Option<usize>,

    /// Prefix cache: radix keeps the KV of finished requests, none forgets it.
    #[arg(long, value_enum, default_value_t = Cache::Radix)]
    pub cache: Cache,

    /// Prefill and decode in one step; `--mixed false` alternates.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub mixed: bool,

    /// Read each step's tokens before the next step is planned.
    #[arg(long, visible_aliases = ["disable-overlap-schedule"])]
    pub no_overlap: bool,
}

/// Kinds of prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// Radix tree over pages.
    Radix,
    /// No reuse.
    None,
}

impl BatchingFlags {
    /// Every number is in its range.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("--page-size", self.page_size, PAGE_SIZE_MAX),
            ("--max-running", self.max_running, 4096),
            ("--max-waiting", self.max_waiting, 1 << 20),
            ("--chunk", self.chunk, 1 << 20),
        ];
        for (flag, value, max) in ranges {
            if value == 0 || value > max {
                bail!("{flag} {value} is outside 1..={max}");
            }
        }
        if self.max_context.is_some_and(|c| c < 2) {
            bail!("--max-context must be at least 2: one token of prompt and one of answer");
        }
        Ok(())
    }
}
