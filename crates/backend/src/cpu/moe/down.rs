//! The down projections of the chosen experts, summed per token.
//!
//! A chunk walks its tiles in groups. For a group it keeps the sums of every leaf of every row of
//! its band, lets the experts add to them one after the other, and joins the leaves at the end. An
//! expert's tiles are read from start to end, once for each band.

use super::coded::{CODED_SCRATCH_LEN, CodedExpert};
use super::{BAND_ROWS, CpuExperts, route::Routing};
use crate::cpu::codes::CodedRows;
use crate::cpu::matmul::{
    Bf16, F16, F32, GROUP_TILES_MAX, SUMS_PANEL_LEN, Sums, Weight, finish, group_tiles, join, rows_max,
};
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::{RowsIn, RowsOut};
use lockstep_core::limits::K_LEAVES;
use lockstep_core::{CodeLayout, DType, WeightType};
use std::marker::PhantomData;
use std::ops::Range;

const SUMS_LEN: usize = K_LEAVES * BAND_ROWS * GROUP_TILES_MAX * LANES;
/// Scratch elements of each thread: the leaves' sums of a band, and what one expert needs.
pub(super) const SCRATCH_LEN: usize =
    SUMS_LEN + if SUMS_PANEL_LEN > CODED_SCRATCH_LEN { SUMS_PANEL_LEN } else { CODED_SCRATCH_LEN };

/// One call for the pairs of a routing.
#[derive(Clone, Copy)]
pub(super) struct Down<'a> {
    pub isa: Isa,
    pub experts: &'a CpuExperts,
    pub routing: &'a Routing,
    /// Inputs of each slot, times its routing weight; the columns after them are not read.
    pub gated: RowsIn<'a>,
    /// The same rounded, where experts are codes.
    pub codes: Option<CodedRows<'a>>,
    /// Slots of the expert that has most.
    pub pairs_max: usize,
    pub out: RowsOut<'a>,
}

/// How one expert's pairs are added to the sums of every leaf.
trait AddExpert {
    /// Tiles that fill the registers for so many pairs.
    fn group_tiles(&self, pairs: usize) -> usize;

    /// Adds some slots of an expert to `sums`, `[leaf][row][T][16]` with `leaf_len` elements a leaf, for the `T`
    /// tiles from `tile` on. `scratch` is working memory.
    fn add<const T: usize>(
        &self,
        pairs: (u32, Range<usize>),
        tile: usize,
        sums: (&mut [f32], usize), // (sums, leaf_len)
        scratch: &mut [f32],
    );
}

impl Down<'_> {
    /// The rows `rows` of band `band` (at most [`BAND_ROWS`], from a multiple of it on) times some tiles.
    pub(super) fn run(&self, band: (usize, Range<usize>), tiles: Range<usize>, scratch: &mut [f32]) {
        match self.experts.down_spec().weight_type {
            WeightType::Float(DType::F32) => {
                self.walk(&Floats::<F32>(self, PhantomData), band, tiles, scratch)
            }
            WeightType::Float(DType::F16) => {
                self.walk(&Floats::<F16>(self, PhantomData), band, tiles, scratch)
            }
            WeightType::Float(DType::Bf16) => {
                self.walk(&Floats::<Bf16>(self, PhantomData), band, tiles, scratch)
            }
            WeightType::Coded(layout) => {
                let x = self.codes.expect("invariant: whoever multiplies with codes rounds the activations");
                self.walk(&Coded { down: self, layout, x }, band, tiles, scratch);
            }
        }
    }

    fn walk<E: AddExpert>(
        &self,
        expert: &E,
        band: (usize, Range<usize>),
        tiles: Range<usize>,
        scratch: &mut [f32],
    ) {
        let most = expert.group_tiles(self.pairs_max.min(band.1.len()));
        for tile in tiles.clone().step_by(most) {
            match most.min(tiles.end - tile) {
                1 => self.group::<E, 1>(expert, &band, tile, scratch),
                2 => self.group::<E, 2>(expert, &band, tile, scratch),
                3 => self.group::<E, 3>(expert, &band, tile, scratch),
                _ => self.group::<E, 4>(expert, &band, tile, scratch),
            }
        }
    }

    /// All rows times `T` tiles: experts, leaves, tree.
    fn group<E: AddExpert, const T: usize>(
        &self,
        expert: &E,
        (band, rows): &(usize, Range<usize>),
        tile: usize,
        scratch: &mut [f32],
    ) {
        let (sums, scratch) = scratch.split_at_mut(SUMS_LEN);
        let leaves = self.experts.down_spec().leaves.len() - 1;
        let len = rows.len() * T * LANES;
        sums[..leaves * len].fill(0.0);
        for &id in &self.routing.active {
            let pairs = self.routing.segment(id, *band);
            if !pairs.is_empty() {
                expert.add::<T>((id, pairs), tile, (&mut sums[..leaves * len], len), scratch);
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
}

/// Experts of floats of type `W`.
struct Floats<'a, W>(&'a Down<'a>, PhantomData<W>);

impl<W: Weight> AddExpert for Floats<'_, W> {
    fn group_tiles(&self, pairs: usize) -> usize {
        group_tiles(self.0.isa, pairs.min(rows_max(self.0.isa)))
    }

    fn add<const T: usize>(
        &self,
        (expert, pairs): (u32, Range<usize>),
        tile: usize,
        (sums, leaf_len): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let down = &self.0.experts.0[expert as usize].down;
        let products = Sums {
            isa: self.0.isa,
            weights: down,
            x: self.0.gated,
            first: pairs.start,
            acc_rows: &self.0.routing.places[pairs],
        };
        for (ends, sums) in down.spec().leaves.windows(2).zip(sums.chunks_exact_mut(leaf_len)) {
            products.add::<W, T>(tile, ends[0]..ends[1], sums, scratch);
        }
    }
}

/// Experts of codes.
struct Coded<'a> {
    down: &'a Down<'a>,
    layout: CodeLayout,
    /// Of all slots.
    x: CodedRows<'a>,
}

impl AddExpert for Coded<'_> {
    fn group_tiles(&self, pairs: usize) -> usize {
        self.expert(0, 0..0).group_tiles(pairs)
    }

    fn add<const T: usize>(
        &self,
        (expert, pairs): (u32, Range<usize>),
        tile: usize,
        sums: (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        self.expert(expert, pairs).add::<T>(tile, sums, scratch);
    }
}

impl Coded<'_> {
    fn expert(&self, expert: u32, pairs: Range<usize>) -> CodedExpert<'_> {
        CodedExpert {
            isa: self.down.isa,
            weights: &self.down.experts.0[expert as usize].down,
            layout: self.layout,
            x: self.x.part(pairs.clone()),
            places: &self.down.routing.places[pairs],
        }
    }
}
