//! The down projections of the chosen experts, summed per token.
//!
//! A chunk walks its tiles in groups. For a group it keeps the sums of every leaf of every row of
//! its band, lets the experts add to them one after the other, and joins the leaves at the end. An
//! expert's tiles are read from start to end, once for each band.

use super::{BAND_ROWS, CpuExperts, route::Routing};
use crate::cpu::matmul::{
    Bf16, F16, F32, GROUP_TILES_MAX, SUMS_PANEL_LEN, Sums, Weight, finish, groups, join, rows_max,
};
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::{RowsIn, RowsOut};
use lockstep_core::DType;
use lockstep_core::limits::K_LEAVES;
use std::ops::Range;

const SUMS_LEN: usize = K_LEAVES * BAND_ROWS * GROUP_TILES_MAX * LANES;
/// Scratch elements of each thread: the leaves' sums of a band, and a panel.
pub(super) const SCRATCH_LEN: usize = SUMS_LEN + SUMS_PANEL_LEN;

/// One call for the pairs of a routing.
#[derive(Clone, Copy)]
pub(super) struct Down<'a> {
    pub isa: Isa,
    pub experts: &'a CpuExperts,
    pub routing: &'a Routing,
    /// `places[i]` is the accumulator row of the pair `i`: its row modulo [`BAND_ROWS`].
    pub places: &'a [u32],
    /// Inputs of each pair, times its routing weight; the columns after them are not read.
    pub gated: RowsIn<'a>,
    /// Pairs of the expert that has most.
    pub pairs_max: usize,
    pub out: RowsOut<'a>,
}

impl Down<'_> {
    /// The rows `rows` (a band: at most [`BAND_ROWS`], from a multiple of it on) times some tiles.
    pub(super) fn run(&self, rows: Range<usize>, tiles: Range<usize>, scratch: &mut [f32]) {
        match self.experts.down_spec().weight_type.as_float() {
            DType::F32 => self.typed::<F32>(rows, tiles, scratch),
            DType::F16 => self.typed::<F16>(rows, tiles, scratch),
            DType::Bf16 => self.typed::<Bf16>(rows, tiles, scratch),
        }
    }

    fn typed<W: Weight>(&self, rows: Range<usize>, tiles: Range<usize>, scratch: &mut [f32]) {
        let shape_rows = self.pairs_max.min(rows.len()).min(rows_max(self.isa));
        for (tile, group) in groups(self.isa, shape_rows, tiles) {
            match group {
                1 => self.group::<W, 1>(&rows, tile, scratch),
                2 => self.group::<W, 2>(&rows, tile, scratch),
                3 => self.group::<W, 3>(&rows, tile, scratch),
                _ => self.group::<W, 4>(&rows, tile, scratch),
            }
        }
    }

    /// All rows times `T` tiles: experts, leaves, tree.
    fn group<W: Weight, const T: usize>(&self, rows: &Range<usize>, tile: usize, scratch: &mut [f32]) {
        let (sums, panel) = scratch.split_at_mut(SUMS_LEN);
        let leaves = self.experts.down_spec().leaves.len() - 1;
        let len = rows.len() * T * LANES;
        sums[..leaves * len].fill(0.0);
        for &expert in &self.routing.active {
            let pairs = self.routing.pairs_within(expert, rows);
            if !pairs.is_empty() {
                self.expert::<W, T>(expert, pairs, tile, sums[..leaves * len].chunks_exact_mut(len), panel);
            }
        }
        let mut step = 1;
        while step < leaves {
            for leaf in (0..leaves).step_by(2 * step) {
                let (left, right) = sums.split_at_mut((leaf + step) * len);
                join(self.isa, &mut left[leaf * len..][..len], &right[..len]);
            }
            step *= 2;
        }
        finish::<T>(self.isa, &sums[..len], tile, None, self.out.rows_from(rows.start));
    }

    /// Adds one expert's pairs to the sums of every leaf.
    fn expert<'s, W: Weight, const T: usize>(
        &self,
        expert: u32,
        pairs: Range<usize>,
        tile: usize,
        leaves: impl Iterator<Item = &'s mut [f32]>,
        panel: &mut [f32],
    ) {
        let down = &self.experts.0[expert as usize].down;
        let sums = Sums {
            isa: self.isa,
            weights: down,
            x: self.gated,
            first: pairs.start,
            acc_rows: &self.places[pairs],
        };
        for (ends, acc) in down.spec().leaves.windows(2).zip(leaves) {
            sums.add::<W, T>(tile, ends[0]..ends[1], acc, panel);
        }
    }
}
