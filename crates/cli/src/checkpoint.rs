//! A model's files as every command opens them: headers held against the model before anything is loaded, or the
//! description alone, which is enough for `plan` and for made-up weights.

use crate::error::{CliError, Result};
use crate::flags::model::DtypeFlag;
use lockstep_core::config::hf;
use lockstep_core::{DType, ExitCode, ModelConfig};
use lockstep_engine::{DummySpec, EngineError};
use lockstep_model::{ModelRules, WeightSource};
use lockstep_weights::{
    ConfigFile, ModelFiles, WeightsError, holds_weights, read_config, unread_keys_report,
};
use std::path::Path;

/// Opens a checkpoint that has every tensor the model needs, in the shapes and in types that are loaded. Reads headers
/// only; exit code 3.
pub fn open(path: &Path) -> Result<ModelFiles> {
    let files = ModelFiles::open(path).map_err(CliError::with(ExitCode::ModelFiles))?;
    ModelRules::new(files.config()).check(&files).map_err(|error| {
        let error = EngineError::from(error);
        CliError::new(error.exit_code(), error)
    })?;
    Ok(files)
}

/// What a checkpoint holds that is not read, a sentence each: tensors, and keys of its description.
pub fn notes(files: &ModelFiles) -> Vec<String> {
    let unused = ModelRules::new(files.config()).unused_report(files);
    files.unread_keys_report().into_iter().chain(unused).collect()
}

/// A model without its weights.
pub struct ConfigOnly {
    /// Its description.
    pub config: ModelConfig,
    /// The element type to give to weights.
    pub dtype: DType,
    /// What was not understood of it.
    pub notes: Vec<String>,
}

/// Whether there is a description and nothing else: no weights in any form, and no list of them.
pub fn is_config_only(path: &Path) -> Result<bool> {
    let has_config = path.join("config.json").symlink_metadata().is_ok();
    Ok(has_config && !holds_weights(path).map_err(CliError::with(ExitCode::ModelFiles))?)
}

/// The description of a model whose weights, if there are any, are not looked at: a folder's config.json, else the
/// metadata of a GGUF file. Weights are `wanted`, or else what the description names.
pub fn config_only(path: &Path, wanted: Option<DType>) -> Result<ConfigOnly> {
    let model_files = CliError::with::<WeightsError>(ExitCode::ModelFiles);
    if path.join("config.json").symlink_metadata().is_err() {
        let files = ModelFiles::open(path).map_err(model_files)?;
        // Blocks are unpacked to bf16.
        let own = || WeightSource::dtype_of(&files, "model.embed_tokens.weight").unwrap_or(DType::Bf16);
        let dtype = wanted.unwrap_or_else(own);
        let notes = files.unread_keys_report().into_iter().collect();
        return Ok(ConfigOnly { config: files.config().clone(), dtype, notes });
    }
    let ConfigFile { config, unread_keys, json } = read_config(path).map_err(model_files)?;
    let sentence =
        |what: String| CliError::new(ExitCode::ModelFiles, format!("{}/config.json{what}", path.display()));
    let own = || hf::dtype(&json).map_err(|error| sentence(format!(": {error}")));
    match wanted.map_or_else(own, |dtype| Ok(Some(dtype)))? {
        Some(dtype) => {
            Ok(ConfigOnly { config, dtype, notes: unread_keys_report(&unread_keys).into_iter().collect() })
        }
        None => Err(sentence(
            " names no dtype and there are no weights that would show it; give --dtype f32, f16 or bf16"
                .into(),
        )),
    }
}

/// Weights to make up from `seed` for a folder without any, in the type that `--dtype` or else the config names.
pub fn dummy_spec(path: &Path, dtype: &DtypeFlag, seed: u64) -> Result<DummySpec> {
    let wanted = dtype.convert().map_err(CliError::with(ExitCode::Flags))?;
    let ConfigOnly { config, dtype, .. } = config_only(path, wanted)?;
    Ok(DummySpec { config, dtype, seed })
}
