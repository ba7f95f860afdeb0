//! Rounded rows times a few tiles of a coded matrix, leaf by leaf.

use super::inputs::{BLOCK_ROWS, CodedRows};
use super::kernels::CodeShape;
use crate::cpu::matmul::{LeafSums, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use lockstep_core::{CODE_GROUP, CodeLayout};
use std::ops::Range;

/// Rows from which a kernel takes two tiles instead of four.
const TWO_TILES_ROWS: usize = 3;

/// Some rows of rounded activations and the matrix they meet.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct CodeSums<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    pub layout: CodeLayout,
    pub x: CodedRows<'a>,
    /// The first row and how many.
    pub first: usize,
    pub rows: usize,
}

impl CodeSums<'_> {
    /// Whether there are registers for several tiles or a whole block of rows.
    fn is_wide(&self) -> bool {
        rows_max(self.isa) >= BLOCK_ROWS
    }
}

impl LeafSums for CodeSums<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn tiles_at_once(&self, left: usize) -> usize {
        let most = match self.rows {
            _ if !self.is_wide() => 1,
            TWO_TILES_ROWS.. => 2,
            _ => 4,
        };
        match left.min(most) {
            4.. => 4,
            2 | 3 => 2,
            _ => 1,
        }
    }

    fn add<const T: usize>(&self, tile: usize, inputs: Range<usize>, acc: &mut [f32], _: &mut [f32]) {
        if const { T == 3 } {
            unreachable!("tiles_at_once says 1, 2 or 4");
        }
        let groups = inputs.start / CODE_GROUP..inputs.end / CODE_GROUP;
        if groups.is_empty() {
            return acc.fill(0.0);
        }
        assert!(self.first.is_multiple_of(BLOCK_ROWS), "kernels take rows of one block");
        let most = match (self.is_wide(), T) {
            (true, 4) => 2,
            (true, _) => 8,
            (false, _) => 4,
        };
        let mut done = 0;
        while done < self.rows {
            let rows = CodeShape::rows_at_once(self.rows - done, most);
            let shape = CodeShape {
                x: self.x.at(self.first + done, groups.start),
                rows,
                w: self.weights.tile(tile, inputs.start),
                tile_stride: self.weights.tile_bytes(),
                layout: self.layout,
                groups: groups.len(),
                sums: acc[done * T * LANES..][..rows * T * LANES].as_mut_ptr(),
            };
            // SAFETY: these rows and groups of `x` and tiles of the matrix exist; `acc` has the rows. A call starts at
            // a multiple of the rows it takes, so it stays in a block.
            unsafe { shape.run::<T>(self.isa) };
            done += rows;
        }
    }
}
