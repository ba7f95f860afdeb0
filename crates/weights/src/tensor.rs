//! Where one tensor of the model lies and how its elements are made from the stored bytes.

use crate::grouped::Grouped;
use crate::scaled::Scales;
use crate::storage::TensorInfo;
use std::ops::Range;

/// One tensor under its Hugging Face name.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// Shape and stored type, as the model sees them.
    pub info: TensorInfo,
    /// The elements, without scales.
    pub data: Piece,
    pub form: Form,
}

/// Bytes of one of the model's files; checked to lie inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index among the model's files.
    pub file: usize,
    pub bytes: Range<usize>,
}

/// How rows are made from the stored bytes.
#[derive(Debug)]
pub(crate) enum Form {
    /// Rows of plain floats or blocks, one after another.
    Rows(RowOrder),
    /// Rows of eight-bit floats whose scales are a tensor of their own.
    Scaled(Scales),
    /// 4-bit numbers, input features outside, with scales and zeros per group of input features.
    Grouped(Grouped),
}

impl Form {
    /// What every format but the quantised Hugging Face ones has.
    pub const PLAIN: Self = Self::Rows(RowOrder::AsStored);
}

/// How the rows of a tensor are ordered in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As Hugging Face has them.
    AsStored,
    /// Per head, rows `i` and `i + head_dim/2` stand side by side: llama.cpp's `permute` for
    /// interleaved rope. The number of rows is a multiple of `head_dim`.
    RopePairs {
        /// Rows per head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Row in the file of Hugging Face row `row`.
    pub fn stored_row(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::RopePairs { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (i % half) + i / half
            }
        }
    }
}
