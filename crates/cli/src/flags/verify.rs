//! Flags of `lockstep verify`.

use super::gpus::GpuFlags;
use super::model::WeightFlags;
use clap::Args;
use std::path::PathBuf;

/// Which model, and how thoroughly.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct VerifyFlags {
    /// Catalogue name, folder or GGUF file.
    #[arg(long, visible_aliases = ["model-path"])]
    pub model: String,

    /// Tp sizes; the first is the reference [default: on CPUs those of 1, 2, 4 that the model can be cut into, with a
    /// GPU 1].
    #[arg(long, visible_aliases = ["tp-size"], value_delimiter = ',')]
    pub tp: Vec<i64>,

    /// Numbers of pipeline stages at each tp size; the first is the reference.
    #[arg(long, visible_aliases = ["pp-size"], value_delimiter = ',', default_value = "1")]
    pub pp: Vec<i64>,

    /// Devices, cpu and cuda; the first is the reference. `cpu,cuda` holds GPUs against exact f32 on CPUs; auto is
    /// cpu.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub device: Vec<String>,

    /// Which GPUs.
    #[command(flatten)]
    pub gpus: GpuFlags,

    /// A file with one prompt a line [default: a few built-in ones].
    #[arg(long)]
    pub prompts: Option<PathBuf>,

    /// Greedy tokens after each prompt.
    #[arg(long, default_value_t = 24)]
    pub tokens: usize,

    /// Threads of each rank [default: cores / largest number of ranks].
    #[arg(long)]
    pub threads: Option<usize>,

    /// Form of weights; with cuda, --dtype is what GPUs compute in.
    #[command(flatten)]
    pub weights: WeightFlags,

    /// Where a promise is broken, look for the first layer whose activations differ.
    #[arg(long)]
    pub bisect: bool,

    /// Made-up weights of this seed; a folder with a config.json is enough.
    #[arg(long, value_name = "SEED", num_args = 0..=1, default_missing_value = "0")]
    pub dummy_weights: Option<u64>,

    /// Where fetched models are kept [default: $LOCKSTEP_CACHE, else the user's cache directory].
    #[arg(long)]
    pub cache_dir: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
