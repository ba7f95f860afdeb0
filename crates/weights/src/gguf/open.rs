//! Opens a GGUF file, or the parts of one, and presents it under Hugging Face names.

use super::config::{self, RopeTensors};
use super::header::RawTensor;
use super::{Metadata, names, split};
use crate::dequant;
use crate::error::{Fault, WeightsError};
use crate::files::Opened;
use crate::generation::GenerationDefaults;
use crate::mapped::MappedFile;
use crate::storage::TensorInfo;
use crate::tensor::{Form, Piece, RowOrder, Tensor};
use lockstep_core::{Family, ModelConfig};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Reads the header of `path`, whose magic was seen, and of the other parts.
pub(crate) fn open(path: &Path) -> Result<Opened, WeightsError> {
    let split::Parts { files, metadata, tensors: raw } = split::open(path)?;
    let rope = rope_tensors(&files, &raw)?;
    let (config, unread_keys) =
        config::read(&metadata, &raw, rope).map_err(|source| WeightsError::config(path, source))?;
    let tensors = tensors(raw, &config, &files)?;
    // The vocabulary was walked once; most ranks never look at it again.
    files.iter().for_each(|file| file.release_all());
    Ok(Opened {
        eos_tokens: config.eos_tokens.clone(),
        config,
        defaults: GenerationDefaults::from_gguf(&metadata),
        label: label(&metadata, &tensors, files.len()),
        files,
        tensors,
        ignored_scales: 0,
        unread_keys,
        folder: None,
        metadata: Some(metadata),
    })
}

/// Whether a tensor holds rope divisors, which are part of the config.
pub(crate) fn is_rope_tensor(name: &str) -> bool {
    RopeTensors::NAMES.contains(&name)
}

fn rope_tensors(files: &[Arc<MappedFile>], tensors: &[RawTensor]) -> Result<RopeTensors, WeightsError> {
    let [freqs, short, long] = RopeTensors::NAMES.map(|name| divisors(files, tensors, name));
    Ok(RopeTensors { freqs: freqs?, short: short?, long: long? })
}

fn divisors(
    files: &[Arc<MappedFile>],
    tensors: &[RawTensor],
    name: &str,
) -> Result<Option<Vec<f64>>, WeightsError> {
    let Some(tensor) = tensors.iter().find(|t| t.name == name) else { return Ok(None) };
    let (file, stored) = (&files[tensor.file], tensor.info.stored);
    if stored.dtype().is_none() {
        return Err(Fault::new(format!("type of {name}"), "F32", stored.to_string()).at(file.path()));
    }
    let mut values = vec![0.0; tensor.info.elements()];
    dequant::to_f32(stored, &file.bytes()[tensor.bytes.clone()], &mut values);
    Ok(Some(values.into_iter().map(f64::from).collect()))
}

/// Renames the tensors, cuts those of experts into one matrix for each, and notes which rows
/// llama.cpp reordered.
fn tensors(
    raw: Vec<RawTensor>,
    config: &ModelConfig,
    files: &[Arc<MappedFile>],
) -> Result<BTreeMap<String, Tensor>, WeightsError> {
    let mut tensors = BTreeMap::new();
    for raw in raw {
        let path = files[raw.file].path();
        for (name, tensor) in present(raw, config).map_err(|fault| fault.at(path))? {
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(Fault::new(format!("tensor {name}"), "one description", "two").at(path));
            }
        }
    }
    Ok(tensors)
}

/// What the model sees of one tensor of the file.
fn present(raw: RawTensor, config: &ModelConfig) -> Result<Vec<(String, Tensor)>, Fault> {
    if let (Some((layer, projection)), Some(moe)) = (names::experts(&raw.name), &config.moe) {
        let [experts, rows, cols] = raw.info.shape[..] else {
            let found = format!("{:?}", raw.info.shape);
            return Err(Fault::new(format!("shape of tensor {}", raw.name), "three dimensions", found));
        };
        if experts != moe.num_experts {
            let expected = format!("{} (expert_count)", moe.num_experts);
            return Err(Fault::new(format!("experts of tensor {}", raw.name), expected, experts.to_string()));
        }
        let bytes = |expert: usize| -> Range<usize> {
            let len = raw.bytes.len() / experts;
            raw.bytes.start + expert * len..raw.bytes.start + (expert + 1) * len
        };
        let matrix = |expert: usize| Tensor {
            info: TensorInfo { shape: vec![rows, cols], stored: raw.info.stored },
            data: Piece { file: raw.file, bytes: bytes(expert) },
            form: Form::PLAIN,
        };
        return Ok((0..experts).map(|e| (names::expert(layer, e, projection), matrix(e))).collect());
    }
    let name = names::hugging_face(config.family, &raw.name);
    let mut order = RowOrder::AsStored;
    // Only files of the `llama` architecture have q and k in pairs.
    if config.family == Family::Llama && names::is_query_or_key(&name) {
        let head_dim = config.head_dim;
        let rows = if raw.info.shape.len() == 1 { raw.info.cols() } else { raw.info.rows() };
        if !rows.is_multiple_of(head_dim) {
            let expected = format!("a multiple of the head size {head_dim}");
            return Err(Fault::new(format!("rows of tensor {}", raw.name), expected, rows.to_string()));
        }
        order = RowOrder::RopePairs { head_dim };
    }
    let data = Piece { file: raw.file, bytes: raw.bytes };
    Ok(vec![(name, Tensor { info: raw.info, data, form: Form::Rows(order) })])
}

/// `gguf Q4_K_M, 2 files`: the file's own name for its mixture of types, else the commonest type.
fn label(metadata: &Metadata, tensors: &BTreeMap<String, Tensor>, files: usize) -> String {
    let mixture = match metadata.integer("general.file_type") {
        Some(0) => "F32",
        Some(1) => "F16",
        Some(2) => "Q4_0",
        Some(3) => "Q4_1",
        Some(7) => "Q8_0",
        Some(8) => "Q5_0",
        Some(9) => "Q5_1",
        Some(10) => "Q2_K",
        Some(11) => "Q3_K_S",
        Some(12) => "Q3_K_M",
        Some(13) => "Q3_K_L",
        Some(14) => "Q4_K_S",
        Some(15) => "Q4_K_M",
        Some(16) => "Q5_K_S",
        Some(17) => "Q5_K_M",
        Some(18) => "Q6_K",
        Some(21) => "Q2_K_S",
        Some(25) => "IQ4_NL",
        Some(32) => "BF16",
        _ => {
            let mut bytes_by_kind = BTreeMap::new();
            for tensor in tensors.values() {
                *bytes_by_kind.entry(tensor.info.stored).or_insert(0) += tensor.data.bytes.len();
            }
            bytes_by_kind.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("empty", |(kind, _)| kind.name())
        }
    };
    match files {
        1 => format!("gguf {mixture}"),
        n => format!("gguf {mixture}, {n} files"),
    }
}
