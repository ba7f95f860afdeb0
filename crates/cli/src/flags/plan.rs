//! Flags of `lockstep plan`.

use super::model::WeightFlags;
use anyhow::{Result, bail};
use clap::Args;
use lockstep_api::engine::router::REPLICAS_MAX;
use lockstep_core::limits::PAGE_SIZE_MAX;
use lockstep_planner::Workload;
use std::path::PathBuf;

/// Which model, where, for which load.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct PlanFlags {
    /// Catalogue name, folder (a config.json is enough) or GGUF file.
    #[arg(long, visible_aliases = ["model-path"])]
    pub model: String,

    /// h200, h100-80g, b200, a100-80g, a100-40g, l40s, rtx4090, cpu, cpu:24g (any memory in GiB), or detect: this
    /// machine.
    #[arg(long, default_value = "detect")]
    pub device: String,

    /// A device table of your own, in the form of devices.json.
    #[arg(long)]
    pub devices: Option<PathBuf>,

    /// Tokens of prompt plus answer of each request [default: the model's, at most 8192].
    #[arg(long)]
    pub context: Option<usize>,

    /// Requests at once [default: 32, CPU 8].
    #[arg(long)]
    pub concurrency: Option<usize>,

    /// Replicas that share the requests, each with ranks of its own; they share a CPU's memory and cores.
    #[arg(long, visible_aliases = ["dp-size", "data-parallel-size"], default_value_t = 1)]
    pub dp: usize,

    /// Pipeline stages of each replica, with layers balanced as `serve` does.
    #[arg(long, visible_aliases = ["pp-size", "pipeline-parallel-size"], default_value_t = 1)]
    pub pp: usize,

    /// Prefill tokens of a step [default: 8192, CPU 512].
    #[arg(long)]
    pub chunk: Option<usize>,

    /// Tokens in a page.
    #[arg(long, default_value_t = 16)]
    pub page_size: usize,

    /// Share of the device's memory that ranks may use [default: 0.9, CPU 0.5].
    #[arg(long)]
    pub memory_ratio: Option<f64>,

    /// Form of weights.
    #[command(flatten)]
    pub weights: WeightFlags,

    /// Where fetched models are kept [default: $LOCKSTEP_CACHE, else the user's cache directory].
    #[arg(long)]
    pub cache_dir: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl PlanFlags {
    /// The numbers that will be used are in their ranges.
    pub fn check(&self, load: &Workload) -> Result<()> {
        for (flag, value) in
            [("--context", load.context), ("--concurrency", load.concurrency), ("--chunk", load.chunk)]
        {
            if !(1..=1 << 24).contains(&value) {
                bail!("{flag} {value} is outside 1 to {}", 1 << 24);
            }
        }
        if !(1..=REPLICAS_MAX).contains(&load.replicas) {
            bail!("--dp {} is outside 1..={REPLICAS_MAX} replicas", load.replicas);
        }
        if !(1..=PAGE_SIZE_MAX).contains(&load.page_size) {
            bail!("--page-size {} is outside 1 to {PAGE_SIZE_MAX}", load.page_size);
        }
        if !(load.memory_ratio > 0.0 && load.memory_ratio <= 1.0) {
            bail!("--memory-ratio {:?} is outside (0, 1]", load.memory_ratio);
        }
        Ok(())
    }
}
