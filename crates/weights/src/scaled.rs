//! Rows of eight-bit floats with scales in a tensor of their own (FP8 checkpoints).
//!
//! `weight = scale * value`, one scale for each tile of `tile_rows x tile_cols` elements: the whole
//! matrix, a row, or the 128x128 tiles of DeepSeek and Qwen3 checkpoints, whose last tiles may be
//! smaller. Follows the checkpoints' own description (`weight_block_size` of their config).

use crate::dequant::{self, Vectorised, float8, vectorise};
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::Piece;
use std::ops::Range;

/// The scales of one matrix.
#[derive(Debug)]
pub(crate) struct Scales {
    pub data: Piece,
    /// A plain float type.
    pub kind: StorageKind,
    /// Rows that share a scale; at least 1.
    pub tile_rows: usize,
    /// Columns that share a scale; at least 1.
    pub tile_cols: usize,
}

impl Scales {
    /// Appends rows `rows` x columns `cols` as bf16. `stored` and `scales` are the bytes of the matrix
    /// and of its scales.
    pub fn append(
        &self,
        info: &TensorInfo,
        (stored, scales): (&[u8], &[u8]),
        (rows, cols): (Range<usize>, Range<usize>),
        out: &mut Vec<u8>,
    ) {
        vectorise(Append { layout: self, info, stored, scales, rows, cols, out });
    }
}

/// [`Scales::append`] as one vectorised loop.
struct Append<'a> {
    layout: &'a Scales,
    info: &'a TensorInfo,
    stored: &'a [u8],
    scales: &'a [u8],
    rows: Range<usize>,
    cols: Range<usize>,
    out: &'a mut Vec<u8>,
}

impl Vectorised for Append<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { layout, info, stored, scales, rows, cols, out } = self;
        for row in rows {
            let first_scale = row / layout.tile_rows * info.cols().div_ceil(layout.tile_cols);
            let stored = &stored[row * info.row_bytes()..];
            let mut col = cols.start;
            while col < cols.end {
                let tile = col / layout.tile_cols;
                let end = cols.end.min((tile + 1).saturating_mul(layout.tile_cols));
                let scale = dequant::plain(layout.kind, scales, first_scale + tile);
                float8::append_scaled(info.stored, &stored[col..end], scale, out);
                col = end;
            }
        }
    }
}
