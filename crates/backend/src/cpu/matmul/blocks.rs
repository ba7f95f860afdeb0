//! Products with floats.

use super::hints::{NextTiles, STRETCH};
use super::kernels::{Block, F32, Levels, Stream, Weight, pays_to_widen, widen};
use super::{Blocks, Cut, Matmul, Part, SHAPE_ROWS_MAX, group_tiles, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::RowsIn;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements of a panel of floats: 36 KiB stay in a first-level cache while rows pass by. From the second level kernels were 9 % slower.
const FLOAT_PANEL_LEN: usize = 9 << 10;
const _: () = assert!(FLOAT_PANEL_LEN <= super::PANEL_LEN, "there is memory for it");

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
}

impl<W: Weight> Blocks for FloatBlocks<'_, W> {
    fn shape(&self, rows: usize) -> (usize, usize) {
        let rows = rows.min(rows_max(self.isa));
        (rows, group_tiles(self.isa, rows))
    }

    fn inputs_at_once(&self, tiles: usize, cut: Cut) -> usize {
        if cut.blocks == 1 { usize::MAX } else { FLOAT_PANEL_LEN / (tiles * LANES) }
    }

    fn prepare<const T: usize>(&self, tile: usize, inputs: &Range<usize>, cut: Cut, panel: &mut [f32]) {
        if pays_to_widen::<W>(cut.blocks) {
            let w = Stream::of::<W>(self.weights, tile, inputs.start);
            // SAFETY: `T` tiles have these inputs.
            unsafe { widen::<W, T>(self.isa, w, inputs.len(), panel) };
        }
    }

    fn add<const T: usize>(&self, part: &Part<'_>, levels: &mut [f32]) {
        let widened = pays_to_widen::<W>(part.cut.blocks);
        let (w, next) = match widened {
            true => (
                Stream::panel::<T>(&part.panel[..part.inputs.len() * T * LANES]),
                part.next_group(self.weights, T, STRETCH * W::ROW_BYTES),
            ),
            false => (Stream::of::<W>(self.weights, part.tile, part.inputs.start), NextTiles::NONE),
        };
        let mut x = [std::ptr::null(); SHAPE_ROWS_MAX];
        match self.x_rows {
            Some(rows) => {
                for (pointer, &row) in x.iter_mut().zip(&rows[part.rows.clone()]) {
                    *pointer = self.x.row(row as usize)[part.inputs.clone()].as_ptr();
                }
            }
            None => {
                let rows = &self.x.data[part.rows.start * self.x.cols..part.rows.end * self.x.cols];
                let first = rows[part.inputs.clone()].as_ptr();
                for (row, pointer) in x.iter_mut().enumerate().take(part.rows.len()) {
                    *pointer = first.wrapping_add(row * self.x.cols);
                }
            }
        }
        let block =
            Block { x: &x, rows: part.rows.len(), w, next, runs: part.runs, levels: Levels::new(levels) };
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
