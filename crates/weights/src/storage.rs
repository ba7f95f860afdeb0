//! How a tensor lies in its file: shape and element or block type.

use lockstep_core::{CodeLayout, DType};
use std::fmt;

/// Type of a stored tensor. Kernels that compute on quantised blocks match on this enum.
///
/// Block layouts are ggml's (`ggml-common.h`): a row is a sequence of blocks, each of
/// [`block_len`](Self::block_len) elements in [`block_bytes`](Self::block_bytes) bytes. The kinds of
/// quantised Hugging Face checkpoints keep their scales in tensors of their own, which are not
/// counted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StorageKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 elements of 4 bits around 8, with a scale in f16.
    Q4_0,
    /// 32 elements of 4 bits, with scale and minimum in f16.
    Q4_1,
    /// 32 elements of 5 bits around 16, with a scale in f16.
    Q5_0,
    /// 32 elements of 5 bits, with scale and minimum in f16.
    Q5_1,
    /// 32 signed bytes with a scale in f16.
    Q8_0,
    /// 32 elements of 4 bits that choose one of 16 uneven levels, with a scale in f16.
    Iq4Nl,
    /// 256 elements of 2 bits in 16 groups with 4-bit scales and minima.
    Q2K,
    /// 256 elements of 3 bits around 4 in 16 groups with 6-bit scales.
    Q3K,
    /// 256 elements of 4 bits in 8 groups with 6-bit scales and minima.
    Q4K,
    /// 256 elements of 5 bits in 8 groups with 6-bit scales and minima.
    Q5K,
    /// 256 elements of 6 bits in 16 groups with 8-bit scales.
    Q6K,
    /// Eight-bit floats E4M3 with scales per tensor, row or tile.
    Fp8E4m3,
    /// Eight-bit floats E5M2 with scales per tensor, row or tile.
    Fp8E5m2,
    /// GPTQ: 4-bit elements, eight input features of one output feature in a word.
    Gptq4,
    /// AWQ: 4-bit elements, eight output features of one input feature in a word.
    Awq4,
    /// Known to the format, but not readable here; the file's name for it.
    Unsupported(&'static str),
}

impl StorageKind {
    /// Every readable kind.
    pub const SUPPORTED: [Self; 18] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Iq4Nl,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Fp8E4m3,
        Self::Fp8E5m2,
        Self::Gptq4,
        Self::Awq4,
    ];

    /// Elements and bytes of one block, and the name.
    const fn layout(self) -> (usize, usize, &'static str) {
        match self {
            Self::F32 => (1, 4, "F32"),
            Self::F16 => (1, 2, "F16"),
            Self::Bf16 => (1, 2, "BF16"),
            Self::Q4_0 => (32, 18, "Q4_0"),
            Self::Q4_1 => (32, 20, "Q4_1"),
            Self::Q5_0 => (32, 22, "Q5_0"),
            Self::Q5_1 => (32, 24, "Q5_1"),
            Self::Q8_0 => (32, 34, "Q8_0"),
            Self::Iq4Nl => (32, 18, "IQ4_NL"),
            Self::Q2K => (256, 84, "Q2_K"),
            Self::Q3K => (256, 110, "Q3_K"),
            Self::Q4K => (256, 144, "Q4_K"),
            Self::Q5K => (256, 176, "Q5_K"),
            Self::Q6K => (256, 210, "Q6_K"),
            Self::Fp8E4m3 => (1, 1, "F8_E4M3"),
            Self::Fp8E5m2 => (1, 1, "F8_E5M2"),
            Self::Gptq4 => (8, 4, "GPTQ 4-bit"),
            Self::Awq4 => (8, 4, "AWQ 4-bit"),
            Self::Unsupported(name) => (1, 0, name),
        }
    }

    /// Elements that share one block; 1 for floats.
    pub const fn block_len(self) -> usize {
        self.layout().0
    }

    /// Bytes of one block; 0 when the kind cannot be read.
    pub const fn block_bytes(self) -> usize {
        self.layout().1
    }

    /// The format's own spelling, e.g. `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.layout().2
    }

    /// Element type that reading gives: plain floats as stored, everything quantised as bf16; `None`
    /// when the kind cannot be read.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Unsupported(_) => None,
            _ => Some(DType::Bf16),
        }
    }

    /// How [`ModelFiles::read_codes`](crate::ModelFiles::read_codes) gives the elements: unchanged, but that the scales of
    /// 256-element blocks, products of an f16 and a small integer, are rounded to f16. `None` for floats and for
    /// formats with scales in other tensors.
    pub const fn code_layout(self) -> Option<CodeLayout> {
        Some(match self {
            Self::Q4_0 => CodeLayout::new(-8, 7, false, false),
            Self::Q5_0 => CodeLayout::new(-16, 15, false, false),
            Self::Q8_0 | Self::Iq4Nl => CodeLayout::new(-128, 127, false, false),
            Self::Q4_1 | Self::Q4K => CodeLayout::new(0, 15, true, false),
            Self::Q5_1 | Self::Q5K => CodeLayout::new(0, 31, true, false),
            Self::Q2K => CodeLayout::new(0, 3, true, true),
            Self::Q3K => CodeLayout::new(-4, 3, false, true),
            Self::Q6K => CodeLayout::new(-32, 31, false, true),
            _ => return None,
        })
    }

    /// Whether reading unpacks the elements.
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::Unsupported(_))
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

    /// Bytes in the file, without scales in other tensors; 0 for a kind that cannot be read.
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
