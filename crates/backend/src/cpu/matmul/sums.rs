//! Rows of activations times a few tiles of a matrix, added to accumulators here and there over a run of inputs.
//!
//! Used by the mixture of experts for one expert after the other.

use super::kernels::{F32, Shape, Stream, Weight, pays_to_widen, widen};
use super::{GROUP_TILES_MAX, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::RowsIn;
use std::ops::Range;

/// Inputs of a widened panel: three tiles fill 36 of the 48 KiB of a first-level cache.
const PANEL_INPUTS: usize = 192;
/// Elements of the panel.
pub(in crate::cpu) const SUMS_PANEL_LEN: usize = PANEL_INPUTS * GROUP_TILES_MAX * LANES;
/// Passes of rows over the same weights from which hints cost more than they bring.
const HINT_PASSES_MAX: usize = 5;

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
            let w = Stream::of::<W>(self.weights, tile, from);
            if pays_to_widen::<W>(passes) {
                // SAFETY: `T` tiles have these inputs.
                unsafe { widen::<W, T>(self.isa, w, part.len(), panel) };
                self.all_rows::<F32, T, false>(Stream::panel::<T>(panel), part, acc);
            } else if passes < HINT_PASSES_MAX {
                self.all_rows::<W, T, true>(w, part, acc);
            } else {
                self.all_rows::<W, T, false>(w, part, acc);
            }
        }
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
