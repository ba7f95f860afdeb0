//! Which model, and how its weights are kept.

use crate::pull::cache_dir;
use anyhow::{Context, Result, bail};
use clap::Args;
use lockstep_core::{DType, QuantizeFormat, WeightMode};
use lockstep_engine::PackedCacheMode;
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

    /// Form of weights.
    #[command(flatten)]
    pub weights: WeightFlags,

    /// Keep weights on disk as they lie in memory, for later starts: auto (where that saves time), off, or a folder.
    #[arg(long, default_value = "auto", value_name = "auto|off|DIR")]
    pub packed_cache: String,

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

/// In which form weights are kept, the same wherever they are loaded or counted.
#[derive(Args, Debug)]
pub struct WeightFlags {
    /// Element type.
    #[command(flatten)]
    pub dtype: DtypeFlag,

    /// On CPUs: unpack a file's blocks to bf16 and compute in f32 instead of with 8-bit integers.
    #[arg(long)]
    pub cpu_exact: bool,

    /// On CPUs: turn float weights into q8_0, q4_0 or q4_k while loading.
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<String>,
}

impl WeightFlags {
    /// What is asked for, on this `--device`.
    pub fn mode(&self, device: &str) -> Result<WeightMode> {
        let asked = [
            ("--cpu-exact", self.cpu_exact),
            ("--quantize", self.quantize.is_some()),
            ("--dtype", self.dtype.convert()?.is_some()),
        ];
        let mut asked = asked.iter().filter(|(_, given)| *given).map(|(name, _)| *name);
        if let (Some(one), Some(other)) = (asked.next(), asked.next()) {
            bail!("{one} and {other} say different things about the form of weights; give one of them");
        }
        if device == "cuda" && (self.cpu_exact || self.quantize.is_some()) {
            bail!("--cpu-exact and --quantize are for CPUs; leave them out with --device cuda");
        }
        let format = |name: &str| {
            let known = QuantizeFormat::ALL.iter().find(|(known, _)| *known == name);
            known.map(|(_, format)| *format).with_context(|| {
                let names = QuantizeFormat::ALL.map(|(name, _)| name).join(", ");
                format!("--quantize {name} is not known; use one of {names}")
            })
        };
        Ok(match (&self.quantize, self.dtype.convert()?) {
            (Some(name), _) => WeightMode::Quantize(format(name)?),
            (None, Some(dtype)) => WeightMode::Cast(dtype),
            (None, None) if self.cpu_exact => WeightMode::Exact,
            (None, None) => WeightMode::AsStored,
        })
    }
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
    /// Whether packed weights are kept, and where.
    pub fn packed_cache(&self) -> Result<PackedCacheMode> {
        Ok(match self.packed_cache.as_str() {
            "auto" => PackedCacheMode::Auto(cache_dir(self.cache_dir.clone()).join("packed")),
            "off" => PackedCacheMode::Off,
            "" => bail!("--packed-cache is empty; give auto, off, or a folder"),
            _ if self.device == "cuda" => {
                bail!("--packed-cache with a folder is for CPUs; leave it out with --device cuda")
            }
            folder => PackedCacheMode::Always(folder.into()),
        })
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(dtype: &str, cpu_exact: bool, quantize: Option<&str>) -> WeightFlags {
        WeightFlags {
            dtype: DtypeFlag { dtype: dtype.into() },
            cpu_exact,
            quantize: quantize.map(str::to_owned),
        }
    }

    #[test]
    fn the_form_of_weights_is_said_once() {
        let mode = |dtype, exact, quantize| flags(dtype, exact, quantize).mode("cpu").unwrap();
        assert_eq!(mode("auto", false, None), WeightMode::AsStored);
        assert_eq!(mode("auto", true, None), WeightMode::Exact);
        assert_eq!(mode("half", false, None), WeightMode::Cast(DType::F16));
        for (name, format) in QuantizeFormat::ALL {
            assert_eq!(mode("auto", false, Some(name)), WeightMode::Quantize(format));
        }
        for (flags, device, words) in [
            (flags("auto", true, Some("q8_0")), "cpu", "--cpu-exact and --quantize"),
            (flags("f32", true, None), "cpu", "--cpu-exact and --dtype"),
            (flags("bf16", false, Some("q4_0")), "cpu", "--quantize and --dtype"),
            (flags("auto", true, None), "cuda", "--device cuda"),
            (flags("auto", false, Some("q4_0")), "cuda", "--device cuda"),
            (flags("auto", false, Some("q2_k")), "cpu", "q8_0, q4_0, q4_k"),
            (flags("int8", false, None), "cpu", "auto, f32, f16 or bf16"),
        ] {
            let error = flags.mode(device).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
