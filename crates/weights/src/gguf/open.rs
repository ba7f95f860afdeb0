//! Opens a GGUF file and presents it under Hugging Face names.

use super::{Metadata, config, header, names};
use crate::dequant;
use crate::error::{Fault, WeightsError};
use crate::files::{Opened, RowOrder, Tensor};
use crate::generation::GenerationDefaults;
use crate::mapped::MappedFile;
use lockstep_core::Family;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Tensor that turns into [`lockstep_core::RopeScaling::Divisors`].
pub(crate) const ROPE_FREQS: &str = "rope_freqs.weight";

/// Reads the header of `path`, whose magic was seen.
pub(crate) fn open(path: &Path) -> Result<Opened, WeightsError> {
    let file = Arc::new(MappedFile::open(path)?);
    let header = header::parse(file.bytes()).map_err(|fault| fault.at(path))?;
    let metadata = Metadata::new(Arc::clone(&file), header.entries);
    if let Some(parts) = metadata.integer("split.count").filter(|n| *n > 1) {
        return Err(WeightsError::NotAModel {
            path: path.to_owned(),
            reason: format!(
                "is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge` first"
            ),
        });
    }
    let divisors = rope_divisors(&file, &header.tensors).map_err(|fault| fault.at(path))?;
    let config = config::read(&metadata, &header.tensors, divisors)
        .map_err(|source| WeightsError::config(path, source))?;
    let reordered = (config.family == Family::Llama).then_some(config.head_dim);
    let tensors = tensors(header.tensors, reordered).map_err(|fault| fault.at(path))?;
    // The vocabulary was walked once; most ranks never look at it again.
    file.release_all();
    Ok(Opened {
        eos_tokens: config.eos_tokens.clone(),
        config,
        defaults: GenerationDefaults::from_gguf(&metadata),
        label: label(&metadata, &tensors),
        files: vec![file],
        tensors,
        folder: None,
        metadata: Some(metadata),
    })
}

fn rope_divisors(file: &MappedFile, tensors: &[header::RawTensor]) -> Result<config::RopeDivisors, Fault> {
    let Some(tensor) = tensors.iter().find(|t| t.name == ROPE_FREQS) else { return Ok(None) };
    if tensor.info.stored.dtype().is_none() {
        return Err(Fault::new(format!("type of {ROPE_FREQS}"), "F32", tensor.info.stored.to_string()));
    }
    let mut values = vec![0.0; tensor.info.elements()];
    dequant::to_f32(tensor.info.stored, &file.bytes()[tensor.bytes.clone()], &mut values);
    Ok(Some(values.into_iter().map(f64::from).collect()))
}

/// Renames the tensors and notes which rows llama.cpp reordered: those of q and k in files of the
/// `llama` architecture, `reordered` being the head size.
fn tensors(raw: Vec<header::RawTensor>, reordered: Option<usize>) -> Result<BTreeMap<String, Tensor>, Fault> {
    let mut tensors = BTreeMap::new();
    for header::RawTensor { name: gguf_name, info, bytes } in raw {
        let name = names::hugging_face(&gguf_name);
        let mut order = RowOrder::AsStored;
        if let Some(head_dim) = reordered.filter(|_| names::is_query_or_key(&name)) {
            let rows = if info.shape.len() == 1 { info.cols() } else { info.rows() };
            if !rows.is_multiple_of(head_dim) {
                let expected = format!("a multiple of the head size {head_dim}");
                return Err(Fault::new(format!("rows of tensor {gguf_name}"), expected, rows.to_string()));
            }
            order = RowOrder::RopePairs { head_dim };
        }
        if tensors.insert(name.clone(), Tensor { info, file: 0, bytes, order }).is_some() {
            return Err(Fault::new(format!("tensor {name}"), "one description", "two"));
        }
    }
    Ok(tensors)
}

/// `gguf Q4_K_M`: the file's own name for its mixture of types, else the commonest type.
fn label(metadata: &Metadata, tensors: &BTreeMap<String, Tensor>) -> String {
    let mixture = match metadata.integer("general.file_type") {
        Some(0) => "F32",
        Some(1) => "F16",
        Some(3) => "Q4_1",
        Some(7) => "Q8_0",
        Some(8) => "Q5_0",
        Some(14) => "Q4_K_S",
        Some(15) => "Q4_K_M",
        Some(18) => "Q6_K",
        Some(32) => "BF16",
        _ => {
            let mut bytes_by_kind = BTreeMap::new();
            for tensor in tensors.values() {
                *bytes_by_kind.entry(tensor.info.stored).or_insert(0) += tensor.bytes.len();
            }
            bytes_by_kind.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("empty", |(kind, _)| kind.name())
        }
    };
    format!("gguf {mixture}")
}
