//! Products with floats.

use super::kernels::{Block, F32, Levels, NextTiles, STRETCH, Stream, Weight, Widen};
use super::{Blocks, Cut, Matmul, PANEL_LEN, Part, SHAPE_ROWS_MAX, group_tiles, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::RowsIn;
use std::marker::PhantomData;
use std::ops::Range;

/// Blocks from which widening weights once for all of them pays.
const WIDEN_BLOCKS_MIN: usize = 5;

/// Rows of floats and a matrix of floats of type `W`.
pub(super) struct FloatBlocks<'a, W> {
    isa: Isa,
    weights: &'a PackedLinear,
    x: RowsIn<'a>,
    x_rows: Option<&'a [u32]>,
    weight: PhantomData<W>,
}

impl<'a, W: Weight> FloatBlocks<'a, W> {
    pub(super) fn new(op: &Matmul<'a>) -> Self {
        Self { isa: op.isa, weights: op.weights, x: op.x, x_rows: op.x_rows, weight: PhantomData }
    }

    /// Whether blocks read a panel, not the weights as they lie.
    fn widens(cut: Cut) -> bool {
        cut.blocks >= WIDEN_BLOCKS_MIN && W::ROW_BYTES != F32::ROW_BYTES
    }

    /// Where input `from` of tile `tile` is.
    fn stream(&self, tile: usize, from: usize) -> Stream {
        let weights = self.weights;
        Stream { start: weights.tile(tile, from), step: W::ROW_BYTES, tile_stride: weights.tile_bytes() }
    }

    /// What a block of a group of `tiles` tiles asks for: its part of the same inputs of the next group, if any.
    fn next_group(&self, part: &Part<'_>, tiles: usize) -> NextTiles {
        let next = part.tile + tiles;
        if next + tiles > self.weights.tiles() {
            return NextTiles::NONE;
        }
        let bytes = (STRETCH * W::ROW_BYTES, self.weights.tile_bytes());
        NextTiles::new(self.weights.tile(next, part.inputs.start), (part.block, part.cut.blocks), bytes)
    }
}

impl<W: Weight> Blocks for FloatBlocks<'_, W> {
    fn shape(&self, rows: usize) -> (usize, usize) {
        let rows = rows.min(rows_max(self.isa));
        (rows, group_tiles(self.isa, rows))
    }

    fn inputs_at_once(&self, tiles: usize, cut: Cut) -> usize {
        if cut.blocks == 1 { usize::MAX } else { PANEL_LEN / (tiles * LANES) }
    }

    fn prepare<const T: usize>(&self, tile: usize, inputs: &Range<usize>, cut: Cut, panel: &mut [f32]) {
        if !Self::widens(cut) {
            return;
        }
        let panel = &mut panel[..inputs.len() * T * LANES];
        let widen = Widen::<W, T> {
            w: self.stream(tile, inputs.start),
            inputs: inputs.len(),
            panel: panel.as_mut_ptr(),
            weight: PhantomData,
        };
        // SAFETY: `T` tiles have these inputs, and the panel holds them.
        unsafe { self.isa.run(widen) };
    }

    fn add<const T: usize>(&self, part: &Part<'_>, levels: &mut [f32]) {
        let widened = Self::widens(part.cut);
        let w = match widened {
            true => Stream {
                start: part.panel[..part.inputs.len() * T * LANES].as_ptr().cast(),
                step: T * F32::ROW_BYTES,
                tile_stride: F32::ROW_BYTES,
            },
            false => self.stream(part.tile, part.inputs.start),
        };
        let mut x = [std::ptr::null(); SHAPE_ROWS_MAX];
        for (pointer, row) in x.iter_mut().zip(part.rows.clone()) {
            let row = self.x_rows.map_or(row, |rows| rows[row] as usize);
            *pointer = self.x.row(row)[part.inputs.clone()].as_ptr();
        }
        let block = Block {
            x: &x,
            rows: part.rows.len(),
            w,
            next: if widened { self.next_group(part, T) } else { NextTiles::NONE },
            runs: part.runs,
            levels: Levels::new(levels),
        };
        // SAFETY: the rows of `x` have the inputs, `w` is as many inputs of `T` tiles, in the matrix or in the panel; the
        // runs are of these inputs; each level holds a block of rows.
        unsafe {
            match (widened, part.block) {
                (true, _) => block.run::<F32, T, false>(self.isa),
                (false, 0) => block.run::<W, T, true>(self.isa),
                (false, _) => block.run::<W, T, false>(self.isa),
            }
        }
    }
}
