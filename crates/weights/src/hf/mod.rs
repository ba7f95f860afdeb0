//! A model folder in Hugging Face layout: config.json, generation_config.json and safetensors.
//!
//! `model.safetensors.index.json`, where there is one, decides which files and which of their
//! tensors belong to the model, so that leftovers of another download never mix in (vLLM filters
//! by it too; engines that load every *.safetensors overwrite good tensors). Weight files are
//! read by [`safetensors`], the tensors of quantised checkpoints joined by [`quantised`].

mod quantised;
mod safetensors;

use crate::error::{Fault, WeightsError};
use crate::files::Opened;
use crate::generation::GenerationDefaults;
use crate::locate::refuse_stand_in;
use crate::mapped::MappedFile;
use crate::tensor::{Form, Piece, Tensor};
use lockstep_core::config::hf as config_json;
use lockstep_core::limits::MODEL_JSON_BYTES_MAX;
use lockstep_core::{ModelConfig, TokenId, files};
use quantised::Quantisation;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The weight file of a model that has one.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The list of tensors of a model that has several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// Whether the folder says which safetensors files make the model. Dangling links count, so that
/// opening them reports the link.
pub(crate) fn has_weights(folder: &Path) -> bool {
    [INDEX, SINGLE].iter().any(|name| folder.join(name).symlink_metadata().is_ok())
}

/// Opens a folder for which [`has_weights`] holds.
pub(crate) fn open(folder: &Path) -> Result<Opened, WeightsError> {
    let path = folder.join(CONFIG);
    let ConfigFile { config, unread_keys, json } = read_config(folder)?;
    let quantisation = config_json::quantization(&json).map_err(|e| WeightsError::config(&path, e))?;
    let quantisation = quantisation.map(Quantisation);
    let (defaults, more_eos_tokens) = read_generation_config(folder)?;
    let mut eos_tokens = config.eos_tokens.clone();
    eos_tokens.extend(more_eos_tokens);
    let weights = if folder.join(INDEX).symlink_metadata().is_ok() {
        open_indexed(folder)?
    } else {
        let (file, tensors) = open_weights(&folder.join(SINGLE), 0)?;
        (vec![file], tensors)
    };
    let ((files, tensors), ignored_scales) = match quantisation {
        Some(quantisation) => quantisation.join(weights)?,
        None => (weights, 0),
    };
    Ok(Opened {
        config,
        eos_tokens,
        defaults,
        label: label(&tensors, files.len()),
        files,
        tensors,
        ignored_scales,
        unread_keys,
        folder: Some(folder.to_owned()),
        metadata: None,
    })
}

/// A config.json, read.
#[derive(Debug)]
pub struct ConfigFile {
    /// The description.
    pub config: ModelConfig,
    /// Keys that are neither read nor known to be without effect.
    pub unread_keys: Vec<String>,
    /// The text, known to be a JSON object.
    pub json: Vec<u8>,
}

/// The description of the model in `folder`; its weights are not looked at.
pub fn read_config(folder: &Path) -> Result<ConfigFile, WeightsError> {
    let path = folder.join(CONFIG);
    let (json, _) = read_object(&path)?;
    let (config, unread_keys) =
        config_json::parse_noting(&json).map_err(|source| WeightsError::config(&path, source))?;
    Ok(ConfigFile { config, unread_keys, json })
}

/// Sampling defaults and end tokens; a folder without the file has none.
fn read_generation_config(folder: &Path) -> Result<(GenerationDefaults, Vec<TokenId>), WeightsError> {
    let path = folder.join(GENERATION_CONFIG);
    if path.symlink_metadata().is_err() {
        return Ok(Default::default());
    }
    let (_, map) = read_object(&path)?;
    let parse = || Ok((GenerationDefaults::from_json(&map)?, config_json::eos_tokens(&map)?));
    parse().map_err(|source| WeightsError::config(&path, source))
}

type Weights = (Vec<Arc<MappedFile>>, BTreeMap<String, Tensor>);

/// Opens the files that the index names and keeps the tensors that it assigns to each.
fn open_indexed(folder: &Path) -> Result<Weights, WeightsError> {
    let index_path = folder.join(INDEX);
    let mut files = Vec::new();
    let mut tensors = BTreeMap::new();
    for (file_name, names) in read_index(&index_path)? {
        let path = folder.join(&file_name);
        if path.metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            return Err(WeightsError::MissingFile { path, named_by: INDEX.into() });
        }
        let (file, mut found) = open_weights(&path, files.len())?;
        let held = found.len();
        for name in names {
            let Some(tensor) = found.remove(&name) else {
                let expected = format!("tensor {name} (named by {INDEX})");
                return Err(Fault::new("tensors", expected, format!("{held} tensors without it")).at(&path));
            };
            tensors.insert(name, tensor);
        }
        files.push(file);
    }
    Ok((files, tensors))
}

/// The index turned around: file name to the tensors in it.
fn read_index(path: &Path) -> Result<BTreeMap<PathBuf, Vec<String>>, WeightsError> {
    let damaged = |expected: &str, found: String| Fault::new("weight_map", expected, found).at(path);
    let (_, index) = read_object(path)?;
    let Some(Value::Object(map)) = index.get("weight_map") else {
        return Err(damaged("an object from tensor names to file names", "none".into()));
    };
    if map.is_empty() {
        return Err(damaged("at least one tensor", "none".into()));
    }
    let mut files: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let plain = |f: &&Path| {
            f.components().count() > 0 && f.components().all(|c| matches!(c, Component::Normal(_)))
        };
        let Some(file) = file.as_str().map(Path::new).filter(plain) else {
            return Err(damaged("file names inside the folder", file.to_string()));
        };
        files.entry(file.to_owned()).or_default().push(tensor.clone());
    }
    Ok(files)
}

/// Maps one weight file and checks its header; `index` is its position among the model's files.
fn open_weights(
    path: &Path,
    index: usize,
) -> Result<(Arc<MappedFile>, BTreeMap<String, Tensor>), WeightsError> {
    let file = MappedFile::open(path)?;
    let described = safetensors::parse(file.bytes()).map_err(|fault| fault.at(path))?;
    let tensor =
        |(name, info, bytes)| (name, Tensor { info, data: Piece { file: index, bytes }, form: Form::PLAIN });
    let tensors = described.into_iter().map(tensor).collect();
    file.release_all();
    Ok((Arc::new(file), tensors))
}

/// Reads a JSON file of bounded size: its text, and the object in it.
fn read_object(path: &Path) -> Result<(Vec<u8>, Map<String, Value>), WeightsError> {
    let text = files::read(path, MODEL_JSON_BYTES_MAX)?;
    refuse_stand_in(&text).map_err(|fault| fault.at(path))?;
    let object = serde_json::from_slice(&text).map_err(|e| {
        Fault::new("content", "a JSON object", format!("{} bytes ({e})", text.len())).at(path)
    })?;
    Ok((text, object))
}

/// `safetensors bf16, 3 files`; several types are joined by `+`, the largest first.
fn label(tensors: &BTreeMap<String, Tensor>, files: usize) -> String {
    let mut bytes_by_kind = BTreeMap::new();
    for tensor in tensors.values() {
        *bytes_by_kind.entry(tensor.info.stored).or_insert(0) += tensor.data.bytes.len();
    }
    let mut kinds: Vec<_> = bytes_by_kind.into_iter().collect();
    kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let kinds: Vec<String> = kinds.iter().map(|(kind, _)| kind.name().to_lowercase()).collect();
    format!("safetensors {}, {files} file{}", kinds.join("+"), if files == 1 { "" } else { "s" })
}
