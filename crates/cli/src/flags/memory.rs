//! How much memory the ranks may use.

use anyhow::{Result, bail};
use clap::Args;

/// Memory flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct MemoryFlags {
    /// Share of the available memory for weights, activations and KV of all ranks together.
    #[arg(long, visible_aliases = ["mem-fraction-static", "gpu-memory-utilization"], default_value_t = 0.5)]
    pub memory_ratio: f64,

    /// Pages of the KV pool [default: what --memory-ratio leaves].
    #[arg(long)]
    pub num_pages: Option<usize>,

    /// Test aid: a page count for each rank in turn, to see that all use the smallest.
    #[arg(long, hide = true, value_delimiter = ',')]
    pub debug_num_pages: Vec<usize>,
}

/// Most pages of a pool.
const NUM_PAGES_MAX: usize = 1 << 28;

impl MemoryFlags {
    /// Numbers are in their ranges.
    pub fn check(&self) -> Result<()> {
        if !(self.memory_ratio > 0.0 && self.memory_ratio <= 1.0) {
            bail!("--memory-ratio {} is outside (0, 1]", self.memory_ratio);
        }
        if self.num_pages.is_some_and(|n| n == 0 || n > NUM_PAGES_MAX) {
            bail!("--num-pages {} is outside 1..={NUM_PAGES_MAX}", self.num_pages.unwrap_or(0));
        }
        Ok(())
    }

    /// `--num-pages` of one rank.
    pub fn pages_of(&self, rank: usize) -> Option<usize> {
        self.debug_num_pages.get(rank).copied().or(self.num_pages)
    }
}
