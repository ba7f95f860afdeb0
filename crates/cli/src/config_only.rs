//! A model folder with nothing but a `config.json`: enough for `plan` and for made-up weights.

use crate::error::{CliError, Result};
use crate::flags::model::DtypeFlag;
use lockstep_core::config::hf;
use lockstep_core::{DType, ExitCode, ModelConfig};
use lockstep_engine::DummySpec;
use std::path::Path;

/// Description of a folder without weights and the element type to give them: `wanted`, or else what the config names.
pub fn config_only(folder: &Path, wanted: Option<DType>) -> Result<(ModelConfig, DType)> {
    let path = folder.join("config.json");
    let model_files = CliError::with::<anyhow::Error>(ExitCode::ModelFiles);
    let text = std::fs::read(&path).map_err(|e| {
        model_files(anyhow::anyhow!("{}: {e}; give a folder with a config.json", path.display()))
    })?;
    let bad_config = |e| model_files(anyhow::anyhow!("{}: {e}", path.display()));
    let config = hf::parse(&text).map_err(bad_config)?;
    let own = || hf::dtype(&text).map_err(bad_config);
    match wanted.map_or_else(own, |dtype| Ok(Some(dtype)))? {
        Some(dtype) => Ok((config, dtype)),
        None => Err(model_files(anyhow::anyhow!(
            "{} names no dtype and there are no weights that would show it; give --dtype f32, f16 or bf16",
            path.display()
        ))),
    }
}

/// Weights to make up from `seed` for a folder without any, in the type that `--dtype` or else the config names.
pub fn dummy_spec(folder: &Path, dtype: &DtypeFlag, seed: u64) -> Result<DummySpec> {
    let wanted = dtype.convert().map_err(CliError::with(ExitCode::Flags))?;
    let (config, dtype) = config_only(folder, wanted)?;
    Ok(DummySpec { config, dtype, seed })
}
