//! How many processes and threads.

use anyhow::{Result, bail};
use clap::Args;

/// Parallelism flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ParallelFlags {
    /// Tensor-parallel size: rank processes that share every layer.
    #[arg(long, visible_aliases = ["tp-size", "tensor-parallel-size"], default_value_t = 1, allow_negative_numbers = true)]
    pub tp: i64,

    /// Tokenizer processes; 0 means one worker that tokenizes and detokenizes.
    #[arg(long, default_value_t = 0)]
    pub num_tokenizer: usize,

    /// Threads of each rank [default: cores / tp, at least 1].
    #[arg(long)]
    pub threads: Option<usize>,

    /// Seconds a rank waits for another in a collective before the server stops.
    #[arg(long, default_value_t = 30.0)]
    pub collective_timeout: f64,
}

/// Most tokenizer processes.
const NUM_TOKENIZER_MAX: usize = 64;
/// Most threads of a rank.
const THREADS_MAX: usize = 512;

impl ParallelFlags {
    /// Threads of each of `tp` ranks on a machine with `cores`.
    pub fn threads(&self, cores: usize, tp: usize) -> Result<usize> {
        match self.threads {
            None => Ok((cores / tp).max(1)),
            Some(n) if (1..=THREADS_MAX).contains(&n) => Ok(n),
            Some(n) => bail!("--threads {n} is outside 1..={THREADS_MAX}"),
        }
    }

    /// Child processes of the server: ranks, tokenizers, the detokenizer. An illegal `--tp` counts as 1: it is
    /// refused where the sizes that the model takes are known.
    pub fn children(&self) -> usize {
        usize::try_from(self.tp).unwrap_or(1).max(1) + self.num_tokenizer + 1
    }

    /// Checks that need no model.
    pub fn check(&self) -> Result<()> {
        if self.num_tokenizer > NUM_TOKENIZER_MAX {
            bail!("--num-tokenizer {} is above {NUM_TOKENIZER_MAX}", self.num_tokenizer);
        }
        if !(1.0..=3600.0).contains(&self.collective_timeout) {
            bail!("--collective-timeout {} is outside 1..=3600 seconds", self.collective_timeout);
        }
        Ok(())
    }
}
