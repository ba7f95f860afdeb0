//! How much memory the ranks may use.

use anyhow::{Result, bail};
use clap::Args;

/// Memory flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct MemoryFlags {
    /// Share of the available memory for weights, activations and KV of all ranks together; on GPUs, of the free
    /// memory of each [default: 0.5, GPU 0.9].
    #[arg(long, visible_aliases = ["mem-fraction-static", "gpu-memory-utilization"])]
    pub memory_ratio: Option<f64>,

    /// Pages of the KV pool [default: what --memory-ratio leaves].
    #[arg(long)]
    pub num_pages: Option<usize>,

    /// Serve although ranks can hold very different numbers of pages; all use the smallest.
    #[arg(long)]
    pub allow_imbalance: bool,

    /// Test aid: a page count for each rank in turn, to see that all use the smallest.
    #[arg(long, hide = true, value_delimiter = ',')]
    pub debug_num_pages: Vec<usize>,
}

/// Most tokens of a pool: slots are numbered in 32 bits.
const POOL_TOKENS_MAX: usize = u32::MAX as usize / 2;

impl MemoryFlags {
    /// Numbers are in their ranges, and so is the pool they make.
    pub fn check(&self, page_size: usize) -> Result<()> {
        if let Some(ratio) = self.memory_ratio.filter(|ratio| !(*ratio > 0.0 && *ratio <= 1.0)) {
            bail!("--memory-ratio {ratio:?} is outside (0, 1]");
        }
        for pages in self.num_pages.iter().chain(&self.debug_num_pages) {
            let tokens = pages.saturating_mul(page_size);
            if !(2..=POOL_TOKENS_MAX).contains(&tokens) {
                bail!(
                    "--num-pages {pages} of {page_size} tokens each make a pool of {tokens}; it must hold 2 to {POOL_TOKENS_MAX}"
                );
            }
        }
        Ok(())
    }

    /// `--num-pages` of one rank.
    pub fn pages_of(&self, rank: usize) -> Option<usize> {
        self.debug_num_pages.get(rank).copied().or(self.num_pages)
    }
}
