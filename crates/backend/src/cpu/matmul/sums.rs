//! Rows of activations times a few tiles of a matrix, added to accumulators over a run of inputs.
//!
//! Used by the matrix product for one leaf after the other, and by the mixture of experts, whose rows
//! are scattered, for one expert after the other.

use super::kernels::{F32, Shape, Stream, Weight, Widen};
use super::{GROUP_TILES_MAX, LeafSums, PANEL_INPUTS, WIDEN_PASSES_MIN, group_tiles, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::RowsIn;
use std::marker::PhantomData;
use std::ops::Range;

/// Some rows of activations and where their sums go.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Sums<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    /// At least as many columns as the matrix has inputs.
    pub x: RowsIn<'a>,
    /// The rows of `x`, in the order of the accumulators.
    pub rows: usize,
    /// First row of `x`, or of `x_rows` if there is such a list.
    pub first: usize,
    pub x_rows: Option<&'a [u32]>,
    /// Accumulator row of each, all different; `None` for 0, 1, ...
    pub acc_rows: Option<&'a [u32]>,
}

/// [`Sums`] with weights of one type, for the matrix product.
pub(in crate::cpu) struct FloatSums<'a, W> {
    sums: Sums<'a>,
    weight: PhantomData<W>,
}

impl<'a, W> FloatSums<'a, W> {
    pub(super) fn new(sums: Sums<'a>) -> Self {
        Self { sums, weight: PhantomData }
    }
}

impl<W: Weight> LeafSums for FloatSums<'_, W> {
    fn rows(&self) -> usize {
        self.sums.rows
    }

    fn tiles_at_once(&self, left: usize) -> usize {
        group_tiles(self.sums.isa, self.sums.shape_rows()).min(left)
    }

    fn add<const T: usize>(&self, tile: usize, inputs: Range<usize>, acc: &mut [f32], panel: &mut [f32]) {
        self.sums.add::<W, T>(tile, inputs, (acc, true), panel);
    }
}

impl Sums<'_> {
    /// Rows of the register shape that covers most of the rows.
    fn shape_rows(&self) -> usize {
        self.rows.min(rows_max(self.isa))
    }

    /// Adds the products of the inputs `inputs` of `T` tiles from `tile` on to `acc`
    /// `[accumulator rows][T][16]`, which counts as zero if `fresh`. `panel` is working memory.
    pub(in crate::cpu) fn add<W: Weight, const T: usize>(
        &self,
        tile: usize,
        inputs: Range<usize>,
        (acc, fresh): (&mut [f32], bool),
        panel: &mut [f32],
    ) {
        if inputs.is_empty() {
            if fresh {
                acc.fill(0.0);
            }
            return;
        }
        let passes = self.rows.div_ceil(self.shape_rows());
        let step = if passes > 1 { PANEL_INPUTS } else { inputs.len() };
        for from in inputs.clone().step_by(step) {
            let part = from..inputs.end.min(from + step);
            let fresh = fresh && from == inputs.start;
            let w = self.stream::<W>(tile, from);
            if passes < WIDEN_PASSES_MIN {
                self.all_rows::<W, T, true>(w, part, acc, fresh);
            } else if W::ROW_BYTES == F32::ROW_BYTES {
                self.all_rows::<W, T, false>(w, part, acc, fresh);
            } else {
                let w = self.widen::<W, T>(w, part.len(), panel);
                self.all_rows::<F32, T, false>(w, part, acc, fresh);
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
        assert!(
            count * T * LANES <= panel.len(),
            "the panel holds {PANEL_INPUTS} inputs of {GROUP_TILES_MAX} tiles"
        );
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
        fresh: bool,
    ) {
        let list = |rows: Option<&[u32]>, from: usize, len: usize| {
            rows.map_or(std::ptr::null(), |r| r[from..from + len].as_ptr())
        };
        let mut row = 0;
        while row < self.rows {
            let rows = self.shape_rows().min(self.rows - row);
            let at = self.first + row;
            let x = if self.x_rows.is_some() { self.x.data } else { &self.x.data[at * self.x.cols..] };
            let first_acc = if self.acc_rows.is_some() { 0 } else { row * T * LANES };
            let shape = Shape {
                x: x[part.clone()].as_ptr(),
                x_stride: self.x.cols,
                rows,
                x_rows: list(self.x_rows, at, rows),
                acc_rows: list(self.acc_rows, row, rows),
                w,
                inputs: part.len(),
                acc: acc[first_acc..].as_mut_ptr(),
                fresh,
            };
            // SAFETY: these rows of `x` exist (the callers check the lists) and have the inputs
            // `part`; `w` has as many inputs of `T` tiles; `acc` has every accumulator row.
            unsafe { shape.run::<W, T, HINT>(self.isa) };
            row += rows;
        }
    }
}
