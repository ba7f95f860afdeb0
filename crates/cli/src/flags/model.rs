//! Which model, and how its weights are kept.

use anyhow::{Result, bail};
use clap::Args;
use lockstep_core::DType;
use std::path::PathBuf;

/// Model flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ModelFlags {
    /// Catalogue name (see `lockstep pull`), folder in Hugging Face layout, GGUF file, or org/name of the hub.
    #[arg(long, visible_aliases = ["model-path"])]
    pub model: String,

    /// Name that clients use [default: folder, file or catalogue name].
    #[arg(long)]
    pub served_model_name: Option<String>,

    /// Element type of weights.
    #[command(flatten)]
    pub dtype: DtypeFlag,

    /// Device: auto (cpu), cpu, or cuda.
    #[arg(long, default_value = "auto")]
    pub device: String,

    /// Made-up weights of this seed instead of the model's; config and tokenizer files are enough.
    #[arg(long, value_name = "SEED", num_args = 0..=1, default_missing_value = "0")]
    pub dummy_weights: Option<u64>,

    /// Sampling defaults: auto takes those of the model's generation_config.json, none leaves OpenAI's.
    #[arg(long, default_value = "auto")]
    pub generation_config: String,

    /// Chat template file that replaces the model's own.
    #[arg(long)]
    pub chat_template: Option<PathBuf>,

    /// Where fetched models are kept [default: $LOCKSTEP_CACHE, else the user's cache directory].
    #[arg(long)]
    pub cache_dir: Option<PathBuf>,
}

/// `--dtype`, the same wherever weights are loaded or counted.
#[derive(Args, Debug)]
pub struct DtypeFlag {
    /// Element type of weights: auto (the file's own), f32, f16 or bf16.
    #[arg(long, default_value = "auto")]
    pub dtype: String,
}

impl DtypeFlag {
    /// The conversion; `None` keeps the file's types.
    pub fn convert(&self) -> Result<Option<DType>> {
        Ok(match self.dtype.as_str() {
            "auto" => None,
            "f32" | "float32" | "float" => Some(DType::F32),
            "f16" | "float16" | "half" => Some(DType::F16),
            "bf16" | "bfloat16" => Some(DType::Bf16),
            other => bail!("--dtype {other} is not known; use auto, f32, f16 or bf16"),
        })
    }
}

impl ModelFlags {
    /// Whether the model's own sampling defaults count.
    pub fn uses_generation_config(&self) -> Result<bool> {
        match self.generation_config.as_str() {
            "auto" => Ok(true),
            "none" => Ok(false),
            other => bail!("--generation-config {other} is not known; use auto or none"),
        }
    }

    /// Clients need a name to use.
    pub fn check_served_name(&self) -> Result<()> {
        match self.served_model_name.as_deref().map(str::trim) {
            Some("") => bail!("--served-model-name is empty; give a name that clients can send"),
            _ => Ok(()),
        }
    }

    /// The chat template file exists.
    pub fn check_chat_template(&self) -> Result<()> {
        match &self.chat_template {
            Some(path) if !path.is_file() => {
                bail!("--chat-template {} is not a file; give the path of a Jinja template", path.display())
            }
            _ => Ok(()),
        }
    }
}
