//! How a tensor lies in its file: shape and element or block type.

use lockstep_core::DType;
use std::fmt;

/// Type of a stored tensor. Kernels that compute on quantised blocks match on this enum.
///
/// Block layouts are ggml's (`ggml-common.h`): a row is a sequence of blocks, each of
/// [`block_len`](Self::block_len) elements in [`block_bytes`](Self::block_bytes) bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StorageKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 elements of 4 bits, with scale and minimum in f16.
    Q4_1,
    /// 32 elements of 5 bits around 16, with a scale in f16.
    Q5_0,
    /// 32 signed bytes with a scale in f16.
    Q8_0,
    /// 256 elements of 4 bits in 8 groups with 6-bit scales and minima.
    Q4K,
    /// 256 elements of 6 bits in 16 groups with 8-bit scales.
    Q6K,
    /// Known to the format, but not readable here; the file's name for it.
    Unsupported(&'static str),
}

impl StorageKind {
    /// Every readable kind.
    pub const SUPPORTED: [Self; 8] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q4_1, Self::Q5_0, Self::Q8_0, Self::Q4K, Self::Q6K];

    /// Elements that share one block; 1 for plain floats.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
            Self::F32 | Self::F16 | Self::Bf16 | Self::Unsupported(_) => 1,
        }
    }

    /// Bytes of one block; 0 when the kind cannot be read.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
            Self::Unsupported(_) => 0,
        }
    }

    /// Element type that reading gives: plain floats as stored, blocks as bf16; `None` when the
    /// kind cannot be read.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 | Self::Q4K | Self::Q6K => Some(DType::Bf16),
            Self::Unsupported(_) => None,
        }
    }

    /// Whether elements are packed in blocks that reading unpacks.
    pub const fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// The format's own spelling, e.g. `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
            Self::Unsupported(name) => name,
        }
    }

    /// The readable kinds, comma-separated, for messages.
    pub(crate) fn supported_names() -> String {
        Self::SUPPORTED.map(Self::name).join(", ")
    }
}

impl fmt::Display for StorageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Shape and type of one tensor in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// `[n]` or `[rows, cols]` (possibly more leading dimensions), in Hugging Face order: the last
    /// dimension is contiguous. The product is known not to overflow.
    pub shape: Vec<usize>,
    /// How the elements are stored.
    pub stored: StorageKind,
}

impl TensorInfo {
    /// Elements of the whole tensor.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of the contiguous dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows when all leading dimensions are flattened; 1 for a vector or scalar.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes in the file; 0 for a kind that cannot be read.
    pub fn stored_bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// Bytes that reading the whole tensor gives; `None` for a kind that cannot be read.
    pub fn read_bytes(&self) -> Option<usize> {
        self.stored.dtype().map(|dtype| self.elements() * dtype.size_bytes())
    }

    /// Bytes of one stored row; rows start on block boundaries.
    pub(crate) fn row_bytes(&self) -> usize {
        self.cols() / self.stored.block_len() * self.stored.block_bytes()
    }
}
