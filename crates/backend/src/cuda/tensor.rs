//! What a model keeps on the device: activations, vectors, weight matrices, rope tables.

use super::device::Device;
use super::driver::Address;
use super::memory::{Buffer, Staging};
use crate::{BackendError, LinearSpec, Result};
use half::{bf16, f16};
use lockstep_core::config::RopeFrequencies;
use lockstep_core::{DType, WeightType};
use std::rc::Rc;

/// Kernels read this many elements at a time; inner dimensions are multiples of it.
pub(super) const VECTOR: usize = 8;

/// Activations `[rows_max, cols]`, row-major, of the backend's type or f32.
pub struct CudaTensor {
    pub(super) buffer: Buffer,
    pub(super) rows_max: usize,
    pub(super) cols: usize,
    pub(super) dtype: DType,
}

impl CudaTensor {
    pub(super) fn new(device: &Rc<Device>, rows_max: usize, cols: usize, dtype: DType) -> Result<Self> {
        let buffer = Buffer::zeroed(device, rows_max * cols * dtype.size_bytes(), "activations")?;
        Ok(Self { buffer, rows_max, cols, dtype })
    }

    /// Where the first of `rows` rows of `cols` columns starts. Panics when the tensor is another one.
    pub(super) fn rows(&self, rows: usize, cols: usize, dtype: DType) -> Address {
        assert!(rows <= self.rows_max, "{rows} rows of a tensor of {}", self.rows_max);
        assert_eq!((self.cols, self.dtype), (cols, dtype), "columns and type of a tensor");
        self.buffer.address()
    }

    /// Bytes of the first `rows` rows.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        assert!(rows <= self.rows_max, "{rows} rows of a tensor of {}", self.rows_max);
        rows * self.cols * self.dtype.size_bytes()
    }
}

/// A replicated vector: f32 for norms, the backend's type for biases of matrix products.
pub struct CudaVector {
    pub(super) exact: Buffer,
    pub(super) rounded: Buffer,
    pub(super) len: usize,
}

impl CudaVector {
    pub(super) fn new(
        device: &Rc<Device>,
        staging: &mut Staging,
        values: &[f32],
        dtype: DType,
    ) -> Result<Self> {
        let exact = Buffer::zeroed(device, size_of_val(values), "norms and biases")?;
        let narrow = narrowed(values, dtype);
        let rounded = Buffer::zeroed(device, narrow.len(), "norms and biases")?;
        // SAFETY: the buffers hold as many bytes as are copied.
        unsafe {
            staging.copy_in(exact.address(), bytemuck::cast_slice(values))?;
            staging.copy_in(rounded.address(), &narrow)?;
        }
        Ok(Self { exact, rounded, len: values.len() })
    }

    /// The f32 values. Panics unless there are `len`.
    pub(super) fn exact(&self, len: usize) -> Address {
        assert_eq!(self.len, len, "length of a vector");
        self.exact.address()
    }
}

/// A weight matrix `[out_features, in_features]`, row-major.
pub struct CudaLinear {
    pub(super) buffer: Buffer,
    pub(super) spec: LinearSpec,
}

impl CudaLinear {
    /// One for each of `specs`; those of one shape lie one after another. Errors when a shape or type is none that the
    /// kernels take.
    pub(super) fn all(device: &Rc<Device>, specs: &[LinearSpec], dtype: DType) -> Result<Vec<Self>> {
        // Of each shape, the parts of its memory that no matrix has yet.
        let mut shapes: Vec<(&LinearSpec, std::vec::IntoIter<Buffer>)> = Vec::new();
        let mut linear = |spec| {
            let index = match shapes.iter().position(|(of, _)| *of == spec) {
                Some(index) => index,
                None => {
                    Self::check(spec, dtype)?;
                    let bytes = spec.out_features * spec.in_features * dtype.size_bytes();
                    let count = specs.iter().filter(|other| *other == spec).count();
                    shapes.push((spec, Buffer::parts(device, bytes, count, "weights")?.into_iter()));
                    shapes.len() - 1
                }
            };
            let buffer = shapes[index].1.next().expect("invariant: a part for each matrix of a shape");
            Ok(Self { buffer, spec: spec.clone() })
        };
        specs.iter().map(&mut linear).collect()
    }

    fn check(spec: &LinearSpec, dtype: DType) -> Result<()> {
        if spec.weight_type != WeightType::Float(dtype) {
            return Err(BackendError::Unsupported(format!(
                "a matrix of {} for kernels of {}; load weights as {}",
                spec.weight_type.words(),
                dtype.name(),
                dtype.name()
            )));
        }
        if !spec.in_features.is_multiple_of(VECTOR) {
            return Err(BackendError::Unsupported(format!(
                "a matrix with {} inputs on this rank, which the CUDA kernels do not take (multiples of {VECTOR}); use \
                 another --tp or --device cpu",
                spec.in_features
            )));
        }
        Ok(())
    }

    /// Copies whole rows. Panics when they do not fit.
    pub(super) fn pack(&mut self, staging: &mut Staging, first_row: usize, data: &[u8]) -> Result<()> {
        let row_bytes = self.spec.weight_type.packed_bytes(self.spec.in_features);
        let start = first_row * row_bytes;
        assert!(start + data.len() <= self.buffer.bytes(), "the band lies inside the matrix");
        // SAFETY: inside the buffer by the assertion.
        unsafe { staging.copy_in(self.buffer.address() + start as u64, data) }
    }
}

/// `[position][cos half | sin half]`, f32.
pub struct CudaRopeTable {
    pub(super) buffer: Buffer,
    pub(super) half: usize,
    pub(super) positions: usize,
}

impl CudaRopeTable {
    pub(super) fn new(
        device: &Rc<Device>,
        staging: &mut Staging,
        frequencies: &RopeFrequencies,
        positions: usize,
    ) -> Result<Self> {
        let half = frequencies.inverse.len();
        let buffer = Buffer::zeroed(device, positions * 2 * half * size_of::<f32>(), "the rope table")?;
        let mut row = vec![0f32; 2 * half];
        for position in 0..positions {
            for (i, inverse) in frequencies.inverse.iter().enumerate() {
                let angle = position as f64 * inverse;
                row[i] = (angle.cos() * frequencies.attention_factor) as f32;
                row[half + i] = (angle.sin() * frequencies.attention_factor) as f32;
            }
            let bytes: &[u8] = bytemuck::cast_slice(&row);
            // SAFETY: row `position` lies inside the table.
            unsafe { staging.copy_in(buffer.address() + (position * bytes.len()) as u64, bytes)? };
        }
        Ok(Self { buffer, half, positions })
    }
}

/// `values` as elements of `dtype`, nearest even.
pub(super) fn narrowed(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => bytemuck::cast_slice(values).to_vec(),
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
    }
}

/// Elements of `dtype` as f32.
pub(super) fn widened(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        DType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
    }
}
