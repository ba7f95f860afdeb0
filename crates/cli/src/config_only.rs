//! A model folder with nothing but a `config.json`: enough for `plan` and for made-up weights.

use crate::error::{CliError, Result};
use crate::flags::model::DtypeFlag;
use lockstep_core::config::hf;
use lockstep_core::{DType, ExitCode, ModelConfig};
use lockstep_engine::DummySpec;
use std::path::Path;

/// Description and own element type of a folder without weights.
pub fn config_only(folder: &Path) -> Result<(ModelConfig, DType)> {
    let path = folder.join("config.json");
    let model_files = CliError::with::<anyhow::Error>(ExitCode::ModelFiles);
    let text = std::fs::read(&path).map_err(|e| {
        model_files(anyhow::anyhow!("{}: {e}; give a folder with a config.json", path.display()))
    })?;
    let config = hf::parse(&text).map_err(CliError::with(ExitCode::ModelFiles))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(CliError::with(ExitCode::ModelFiles))?;
    let inner = json.get("text_config").unwrap_or(&json);
    let named = ["dtype", "torch_dtype"].iter().find_map(|key| inner.get(key).or(json.get(key))?.as_str());
    let dtype = match named {
        Some("float32") => DType::F32,
        Some("float16") => DType::F16,
        // What checkpoints are made in when they do not say.
        Some("bfloat16") | None => DType::Bf16,
        Some(other) => {
            return Err(model_files(anyhow::anyhow!(
                "{}: dtype {other} is not known; give --dtype f32, f16 or bf16",
                path.display()
            )));
        }
    };
    Ok((config, dtype))
}

/// Weights to make up from `seed` for a folder without any, in the type that `--dtype` or else the config names.
pub fn dummy_spec(folder: &Path, dtype: &DtypeFlag, seed: u64) -> Result<DummySpec> {
    let (config, own) = config_only(folder)?;
    let dtype = dtype.convert().map_err(CliError::with(ExitCode::Flags))?.unwrap_or(own);
    Ok(DummySpec { config, dtype, seed })
}
