//! Flags of `lockstep plan`.

use super::model::WeightFlags;
use anyhow::{Result, bail};
use clap::Args;
use lockstep_api::engine::router::REPLICAS_MAX;
use lockstep_core::hosts::NNODES_MAX;
use lockstep_core::limits::PAGE_SIZE_MAX;
use lockstep_planner::{Link, Workload};
use std::path::PathBuf;

/// Fastest link that is believed, in Gbit/s.
const LINK_GBIT_S_MAX: f64 = 1e6;
/// Slowest, in microseconds.
const LINK_US_MAX: f64 = 1e7;

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

    /// Hosts that the ranks of a replica are spread over, as `serve --nnodes` does; the device is then one of each.
    #[arg(long, value_name = "HOSTS", default_value_t = 1)]
    pub nnodes: usize,

    /// Rate of the links between hosts in Gbit/s, each way.
    #[arg(long, value_name = "GBIT_S", default_value_t = Link::default().gbit_s)]
    pub link_gbit: f64,

    /// What a small message takes from one host to another, in microseconds.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = Link::default().latency_us)]
    pub link_us: f64,

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
        if !(1..=NNODES_MAX).contains(&load.hosts) {
            bail!("--nnodes {} is outside 1..={NNODES_MAX}", load.hosts);
        }
        if !(load.link.gbit_s > 0.0 && load.link.gbit_s <= LINK_GBIT_S_MAX) {
            bail!("--link-gbit {:?} is not above 0 and at most {LINK_GBIT_S_MAX}", load.link.gbit_s);
        }
        if !(0.0..=LINK_US_MAX).contains(&load.link.latency_us) {
            bail!("--link-us {:?} is outside 0 to {LINK_US_MAX}", load.link.latency_us);
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
