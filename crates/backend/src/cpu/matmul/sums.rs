//! Rows of activations times a few tiles of a matrix, added to accumulators here and there over a run of inputs.
//!
//! Used by the mixture of experts for one expert after the other.

use super::kernels::{F32, Shape, Stream, Weight, Widen};
use super::{GROUP_TILES_MAX, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::RowsIn;
use std::marker::PhantomData;
use std::ops::Range;

/// Inputs of a widened panel: three tiles fill 36 of the 48 KiB of a first-level cache.
const PANEL_INPUTS: usize = 192;
/// Elements of the panel.
pub(in crate::cpu) const SUMS_PANEL_LEN: usize = PANEL_INPUTS * GROUP_TILES_MAX * LANES;
/// Passes of rows over a panel from which widening it first pays; with fewer, weights are widened in
/// registers as they stream in.
const WIDEN_PASSES_MIN: usize = 5;

/// Some rows of activations and where their sums go.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Sums<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    /// At least as many columns as the matrix has inputs.
    pub x: RowsIn<'a>,
    /// The first of the rows, which follow each other.
    pub first: usize,
    /// Accumulator row of each, all different.
    pub acc_rows: &'a [u32],
}

impl Sums<'_> {
    /// Rows of the register shape that covers most of the rows.
    fn shape_rows(&self) -> usize {
        self.acc_rows.len().min(rows_max(self.isa))
    }

    /// Adds the products of the inputs `inputs` of `T` tiles from `tile` on to `acc`
    /// `[accumulator rows][T][16]`. `panel` is working memory.
    pub(in crate::cpu) fn add<W: Weight, const T: usize>(
        &self,
        tile: usize,
        inputs: Range<usize>,
        acc: &mut [f32],
        panel: &mut [f32],
    ) {
        if inputs.is_empty() {
            return;
        }
        let passes = self.acc_rows.len().div_ceil(self.shape_rows());
        let step = if passes > 1 { PANEL_INPUTS } else { inputs.len() };
        for from in inputs.clone().step_by(step) {
            let part = from..inputs.end.min(from + step);
            let w = self.stream::<W>(tile, from);
            if passes < WIDEN_PASSES_MIN {
                self.all_rows::<W, T, true>(w, part, acc);
            } else if W::ROW_BYTES == F32::ROW_BYTES {
                self.all_rows::<W, T, false>(w, part, acc);
            } else {
                let w = self.widen::<W, T>(w, part.len(), panel);
                self.all_rows::<F32, T, false>(w, part, acc);
            }
        }
    }

    /// Where input `from` of tile `tile` is.
    fn stream<W: Weight>(&self, tile: usize, from: usize) -> Stream {
        let weights = self.weights;
        Stream { start: weights.tile(tile, from), step: W::ROW_BYTES, tile_stride: weights.tile_bytes() }
    }

    /// Widens `count` inputs of `T` tiles into the panel.
    fn widen<W: Weight, const T: usize>(&self, w: Stream, count: usize, panel: &mut [f32]) -> Stream {
        assert!(count * T * LANES <= panel.len(), "the panel holds {PANEL_INPUTS} inputs of 4 tiles");
        let widen = Widen::<W, T> { w, inputs: count, panel: panel.as_mut_ptr(), weight: PhantomData };
        // SAFETY: `T` tiles with `count` inputs from `w` on exist, and the panel holds them.
        unsafe { self.isa.run(widen) };
        Stream { start: panel.as_ptr().cast(), step: T * F32::ROW_BYTES, tile_stride: F32::ROW_BYTES }
    }

    /// Accumulates the inputs `part` for every row, in register shapes of up to `shape_rows` rows.
    fn all_rows<W: Weight, const T: usize, const HINT: bool>(
        &self,
        w: Stream,
        part: Range<usize>,
        acc: &mut [f32],
    ) {
        for (index, acc_rows) in self.acc_rows.chunks(self.shape_rows()).enumerate() {
            let row = self.first + index * self.shape_rows();
            let shape = Shape {
                x: self.x.data[row * self.x.cols..][part.clone()].as_ptr(),
                x_stride: self.x.cols,
                rows: acc_rows.len(),
                acc_rows: acc_rows.as_ptr(),
                w,
                inputs: part.len(),
                acc: acc.as_mut_ptr(),
            };
            // SAFETY: these rows of `x` exist and have the inputs `part`; `w` has as many inputs of `T` tiles; `acc` has
            // every accumulator row (the callers check the list).
            unsafe { shape.run::<W, T, HINT>(self.isa) };
        }
    }
}
