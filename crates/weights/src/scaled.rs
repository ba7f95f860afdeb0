//! Rows of eight-bit floats with scales in a tensor of their own (FP8 checkpoints).
//!
//! `weight = scale * value`, one scale for each tile of `tile_rows x tile_cols` elements: the whole
//! matrix, a row, or the 128x128 tiles of DeepSeek and Qwen3 checkpoints, whose last tiles may be
//! smaller. Follows the checkpoints' own description (`weight_block_size` of their config).

use crate::dequant::{self, float8};
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
    /// Appends columns `cols` of row `row` as bf16. `stored` and `scales` are the bytes of the matrix
    /// and of its scales.
    pub fn append_row(
        &self,
        info: &TensorInfo,
        (stored, scales): (&[u8], &[u8]),
        row: usize,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) {
        let first_scale = row / self.tile_rows * info.cols().div_ceil(self.tile_cols);
        let stored = &stored[row * info.row_bytes()..];
        let mut col = cols.start;
        while col < cols.end {
            let tile = col / self.tile_cols;
            let end = cols.end.min((tile + 1).saturating_mul(self.tile_cols));
            let scale = self.value(scales, first_scale + tile);
            float8::append_scaled(info.stored, &stored[col..end], scale, out);
            col = end;
        }
    }

    fn value(&self, scales: &[u8], index: usize) -> f32 {
        let size = self.kind.block_bytes();
        let mut value = [0.0];
        dequant::to_f32(self.kind, &scales[index * size..(index + 1) * size], &mut value);
        value[0]
    }
}
