//! Presents quantised checkpoints as ordinary matrices: finds the scales, zeros and group lists that
//! belong to each, checks their shapes and types against each other, and puts one
//! `<module>.weight` of shape `[out, in]` in their place.
//!
//! Follows the checkpoints themselves: FP8 (`weight` with `weight_scale_inv` per tile, or
//! `weight_scale` per tensor or row; both multiply), GPTQ and AWQ (`qweight`, `qzeros`, `scales`,
//! `g_idx`). Modules that the checkpoint left in plain floats stay as they are. Scales of
//! activations and of the KV cache are dropped: neither is quantised here.

use super::Weights;
use crate::error::{Fault, WeightsError};
use crate::grouped::{FIRST_FORMAT, Grouped, Membership, PER_WORD, Packing};
use crate::mapped::MappedFile;
use crate::scaled::Scales;
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::{Form, Tensor};
use lockstep_core::QuantizationConfig;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Ends of the names of scales that have no use where activations and the KV cache stay floats.
const IGNORED: [&str; 6] =
    [".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale"];

/// What a `config.json` says about quantisation.
pub(super) struct Quantisation(pub QuantizationConfig);

impl Quantisation {
    /// Joins what belongs together. Also gives the number of scales that were dropped.
    pub fn join(&self, (files, tensors): Weights) -> Result<(Weights, usize), WeightsError> {
        let mut joiner = Joiner { files: &files, tensors };
        let ignored = joiner.drop_ignored();
        match &self.0 {
            QuantizationConfig::Fp8 { block_size, .. } => joiner.float8(*block_size)?,
            QuantizationConfig::Gptq { group_size, activation_order, second_format, .. } => {
                let zeros_offset = if *second_format { 0 } else { FIRST_FORMAT };
                joiner.grouped(Packing::Gptq { zeros_offset }, *group_size, *activation_order)?;
            }
            QuantizationConfig::Awq { group_size, .. } => {
                joiner.grouped(Packing::Awq, *group_size, false)?;
            }
        }
        let tensors = joiner.tensors;
        Ok(((files, tensors), ignored))
    }
}

/// A checkpoint whose tensors are being joined.
struct Joiner<'a> {
    files: &'a [Arc<MappedFile>],
    tensors: BTreeMap<String, Tensor>,
}

impl Joiner<'_> {
    fn drop_ignored(&mut self) -> usize {
        let before = self.tensors.len();
        self.tensors.retain(|name, _| !IGNORED.iter().any(|end| name.ends_with(end)));
        before - self.tensors.len()
    }

    fn float8(&mut self, tile: Option<(usize, usize)>) -> Result<(), WeightsError> {
        let float8 = |tensor: &Tensor| match tensor.info.stored {
            StorageKind::Unsupported("F8_E4M3") if tensor.info.shape.len() == 2 => Some(StorageKind::Fp8E4m3),
            StorageKind::Unsupported("F8_E5M2") if tensor.info.shape.len() == 2 => Some(StorageKind::Fp8E5m2),
            _ => None,
        };
        let found: Vec<(String, StorageKind)> = self
            .tensors
            .iter()
            .filter(|(name, _)| name.ends_with(".weight"))
            .filter_map(|(name, tensor)| Some((name.clone(), float8(tensor)?)))
            .collect();
        for (name, kind) in found {
            let inverse = format!("{name}_scale_inv");
            let plain = format!("{name}_scale");
            let scale_name =
                if tile.is_some() || self.tensors.contains_key(&inverse) { inverse } else { plain };
            let scale = self.take(&scale_name)?;
            self.expect_float(&scale_name, &scale)?;
            let tensor = self.tensors.get_mut(&name).expect("invariant: listed above");
            let (tile_rows, tile_cols) = tile_of(tile, &tensor.info, &scale.info)
                .map_err(|expected| self.wrong_shape(&scale_name, &scale, expected))?;
            let tensor = self.tensors.get_mut(&name).expect("invariant: listed above");
            tensor.info.stored = kind;
            tensor.form =
                Form::Scaled(Scales { data: scale.data, kind: scale.info.stored, tile_rows, tile_cols });
        }
        Ok(())
    }

    /// GPTQ and AWQ.
    fn grouped(
        &mut self,
        packing: Packing,
        group_size: Option<usize>,
        listed: bool,
    ) -> Result<(), WeightsError> {
        let modules: Vec<String> =
            self.tensors.keys().filter_map(|name| name.strip_suffix(".qweight")).map(str::to_owned).collect();
        for module in modules {
            let tensor = self.grouped_matrix(&module, packing, group_size, listed)?;
            let path = self.path(&tensor).to_owned();
            let name = format!("{module}.weight");
            if self.tensors.insert(name.clone(), tensor).is_some() {
                let expected = format!("{module}.qweight alone");
                return Err(Fault::new(format!("tensor {name}"), expected, "both").at(&path));
            }
        }
        Ok(())
    }

    fn grouped_matrix(
        &mut self,
        module: &str,
        packing: Packing,
        group_size: Option<usize>,
        listed: bool,
    ) -> Result<Tensor, WeightsError> {
        let name = |part: &str| format!("{module}.{part}");
        let words = self.take_words(&name("qweight"), None)?;
        let [outer, inner] = words.info.shape[..] else { unreachable!("take_words checks the dimensions") };
        let (in_features, out_features, stored) = match packing {
            Packing::Gptq { .. } => (PER_WORD * outer, inner, StorageKind::Gptq4),
            Packing::Awq => (outer, PER_WORD * inner, StorageKind::Awq4),
        };
        if in_features == 0 || out_features == 0 || !(in_features | out_features).is_multiple_of(PER_WORD) {
            let fault = Fault::new(
                format!("shape of tensor {}", name("qweight")),
                format!("input and output features that are multiples of {PER_WORD}"),
                format!("{in_features} and {out_features}"),
            );
            return Err(fault.at(self.path(&words)));
        }
        let scales = self.take(&name("scales"))?;
        self.expect_float(&name("scales"), &scales)?;
        let group_size = group_size.unwrap_or(in_features);
        let groups = in_features.div_ceil(group_size);
        if scales.info.shape != [groups, out_features] {
            return Err(self.wrong_shape(&name("scales"), &scales, vec![groups, out_features]));
        }
        let zeros = self.take_words(&name("qzeros"), Some(vec![groups, out_features / PER_WORD]))?;
        let list = self.tensors.remove(&name("g_idx")).filter(|list| list.info.elements() > 0);
        let membership = match list {
            Some(list) if list.info.shape != [in_features] => {
                return Err(self.wrong_shape(&name("g_idx"), &list, vec![in_features]));
            }
            Some(list) => {
                self.expect_words(&name("g_idx"), &list)?;
                // Some quantisers leave a list of zeros where they kept the order.
                let bytes = &self.files[list.data.file].bytes()[list.data.bytes.clone()];
                if bytes.iter().all(|byte| *byte == 0) {
                    Membership::Even(group_size)
                } else {
                    Membership::Listed(list.data)
                }
            }
            None if listed => return Err(self.missing(&name("g_idx"))),
            None => Membership::Even(group_size),
        };
        let form = Form::Grouped(Grouped {
            packing,
            zeros: zeros.data,
            scales: scales.data,
            scales_kind: scales.info.stored,
            groups,
            membership,
        });
        let info = TensorInfo { shape: vec![out_features, in_features], stored };
        Ok(Tensor { info, data: words.data, form })
    }

    fn take(&mut self, name: &str) -> Result<Tensor, WeightsError> {
        self.tensors.remove(name).ok_or_else(|| self.missing(name))
    }

    /// A matrix of 32-bit words, of this shape if one is given.
    fn take_words(&mut self, name: &str, shape: Option<Vec<usize>>) -> Result<Tensor, WeightsError> {
        let tensor = self.take(name)?;
        self.expect_words(name, &tensor)?;
        match shape {
            Some(shape) if tensor.info.shape != shape => Err(self.wrong_shape(name, &tensor, shape)),
            None if tensor.info.shape.len() != 2 => {
                let found = format!("{:?}", tensor.info.shape);
                let fault = Fault::new(format!("shape of tensor {name}"), "two dimensions", found);
                Err(fault.at(self.path(&tensor)))
            }
            _ => Ok(tensor),
        }
    }

    fn expect_words(&self, name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
        match tensor.info.stored {
            StorageKind::Unsupported("I32" | "U32") => Ok(()),
            other => {
                let fault = Fault::new(format!("type of tensor {name}"), "I32", other.to_string());
                Err(fault.at(self.path(tensor)))
            }
        }
    }

    fn expect_float(&self, name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
        match tensor.info.stored {
            StorageKind::F32 | StorageKind::F16 | StorageKind::Bf16 => Ok(()),
            other => {
                let fault =
                    Fault::new(format!("type of tensor {name}"), "F32, F16 or BF16", other.to_string());
                Err(fault.at(self.path(tensor)))
            }
        }
    }

    fn path(&self, tensor: &Tensor) -> &Path {
        self.files[tensor.data.file].path()
    }

    fn missing(&self, name: &str) -> WeightsError {
        let searched = self.files.first().map(|file| file.path().display().to_string()).unwrap_or_default();
        let searched = match self.files.len() {
            0 | 1 => searched,
            n => format!("{searched} and {} more files", n - 1),
        };
        WeightsError::MissingTensor { name: name.into(), searched }
    }

    fn wrong_shape(&self, name: &str, tensor: &Tensor, expected: Vec<usize>) -> WeightsError {
        WeightsError::WrongShape {
            name: name.into(),
            path: self.path(tensor).to_owned(),
            expected,
            found: tensor.info.shape.clone(),
        }
    }
}

/// Rows and columns that share a scale, from the config's tile and the shape of the scales; the
/// error is the shape that was expected.
fn tile_of(
    tile: Option<(usize, usize)>,
    matrix: &TensorInfo,
    scales: &TensorInfo,
) -> Result<(usize, usize), Vec<usize>> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    match tile {
        Some((tile_rows, tile_cols)) => {
            let expected = vec![rows.div_ceil(tile_rows), cols.div_ceil(tile_cols)];
            if scales.shape == expected { Ok((tile_rows, tile_cols)) } else { Err(expected) }
        }
        None if scales.elements() == 1 => Ok((rows.max(1), cols.max(1))),
        None if scales.shape == [rows] || scales.shape == [rows, 1] => Ok((1, cols.max(1))),
        None => Err(vec![1]),
    }
}
