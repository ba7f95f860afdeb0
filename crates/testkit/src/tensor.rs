//! Tensors of the tiny models and the float types a file can store them in.
//!
//! **Invariant:** a tensor's values are exactly representable in the file's float type (they are
//! rounded when made), so that reference and engine start from the same numbers.

use std::collections::BTreeMap;

/// A row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Lengths, outermost first.
    pub shape: Vec<usize>,
    /// Elements, `shape.iter().product()` of them.
    pub data: Vec<f32>,
}

impl Tensor {
    /// A tensor of `shape` with one value everywhere.
    pub fn filled(shape: &[usize], value: f32) -> Self {
        Self { shape: shape.to_vec(), data: vec![value; shape.iter().product()] }
    }

    /// A tensor whose elements come from `next`, in order.
    pub fn from_fn(shape: &[usize], mut next: impl FnMut() -> f32) -> Self {
        let len = shape.iter().product();
        Self { shape: shape.to_vec(), data: (0..len).map(|_| next()).collect() }
    }

    /// Row `i` of a matrix `[rows, cols]`.
    pub fn row(&self, i: usize) -> &[f32] {
        let cols = self.shape[1];
        &self.data[i * cols..(i + 1) * cols]
    }
}

/// Named tensors; sorted, so that files are the same on every run.
pub type Weights = BTreeMap<String, Tensor>;

/// Float type of a checkpoint file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileDType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl FileDType {
    /// The nearest (ties to even) value that this type can hold.
    pub fn round(self, value: f32) -> f32 {
        match self {
            FileDType::F32 => value,
            FileDType::F16 => half::f16::from_f32(value).to_f32(),
            FileDType::Bf16 => half::bf16::from_f32(value).to_f32(),
        }
    }

    /// Little-endian bytes of `values`.
    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            FileDType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            FileDType::F16 => values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
            FileDType::Bf16 => values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        }
    }

    /// The name in a safetensors header.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            FileDType::F32 => "F32",
            FileDType::F16 => "F16",
            FileDType::Bf16 => "BF16",
        }
    }

    /// The name in a `config.json`.
    pub const fn torch_name(self) -> &'static str {
        match self {
            FileDType::F32 => "float32",
            FileDType::F16 => "float16",
            FileDType::Bf16 => "bfloat16",
        }
    }
}
