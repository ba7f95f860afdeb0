//! `out = x · Wᵀ (+ bias)` for any number of rows.
//!
//! ```text
//! leaf_b = fma(x[k], w[k], ...) for ascending k of leaf b, from 0
//! out    = ((leaf_0 + leaf_1) + (leaf_2 + leaf_3)) + ... + bias
//! ```
//! Lanes are outputs, so this order holds in every register shape: one row or many, alone or in a
//! batch, on any thread, on any instruction set, the bits are the same.
//!
//! The grid of chunks is (bands of rows) x (ranges of tiles). A chunk walks its tiles in groups
//! that fill the registers; up to 8 rows pass over a group at once. With few rows the weights are
//! widened in registers as they stream from memory. With many, a group's weights for
//! [`PANEL_INPUTS`] inputs are widened once into a panel that stays in the first-level cache while
//! all rows of the band pass by; the accumulators wait in scratch memory meanwhile, which is exact.

mod kernels;
mod sums;

pub(super) use kernels::{Bf16, F16, F32, HINT_AHEAD_BYTES, Weight};
pub(super) use sums::{FloatSums, Sums};

use super::codes::{CodeSums, CodedRows};
use super::packed::PackedLinear;
use super::pool::ThreadPool;
use super::simd::{Isa, LANES};
use super::tensor::{RowsIn, RowsOut};
use kernels::{Finish, Join};
use lockstep_core::limits::K_LEAVES;
use lockstep_core::{DType, WeightType};
use std::ops::Range;

/// Rows of one register shape at most.
const SHAPE_ROWS_MAX: usize = 8;
/// Tiles of one group at most.
pub(super) const GROUP_TILES_MAX: usize = 4;
/// Inputs of a widened panel: three tiles fill 36 of the 48 KiB of a first-level cache.
pub(super) const PANEL_INPUTS: usize = 192;
/// Passes of rows over a panel from which widening it first pays; with fewer, weights are widened in
/// registers as they stream in.
const WIDEN_PASSES_MIN: usize = 5;
/// Bytes of `x` that a band of rows should stay below, so that it stays in the second-level cache.
const BAND_BYTES: usize = 640 << 10;
/// Rows of a band: enough to amortise widening, few enough for the scratch memory.
const BAND_ROWS_MIN: usize = 48;
const BAND_ROWS_MAX: usize = 192;
/// Multiply-adds below which the caller works alone; waking the helpers would cost more.
pub(super) const PARALLEL_OPS_MIN: usize = 64 << 10;
/// Levels of partial sums that wait for their sibling in the leaf tree, the current leaf included.
const TREE_LEVELS: usize = K_LEAVES.ilog2() as usize + 1;

/// Scratch elements of each thread: the accumulators of a band per tree level, and a panel.
pub(super) const SCRATCH_LEN: usize = TREE_LEVELS * LEVEL_LEN + PANEL_INPUTS * GROUP_TILES_MAX * LANES;
const LEVEL_LEN: usize = BAND_ROWS_MAX * GROUP_TILES_MAX * LANES;

/// One product.
#[derive(Clone, Copy)]
pub(super) struct Matmul<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    pub x: RowsIn<'a>,
    /// The rows of `x` rounded, for a matrix of codes, which needs all of them in order.
    pub codes: Option<CodedRows<'a>>,
    /// Which row of `x` each row of the product is made from; `None` for 0, 1, ...
    pub x_rows: Option<&'a [u32]>,
    pub bias: Option<&'a [f32]>,
    pub rows: usize,
    pub out: RowsOut<'a>,
}

impl Matmul<'_> {
    /// Computes the product on the pool; `scratch` has a row of [`SCRATCH_LEN`] for each thread.
    pub(super) fn run(&self, pool: &ThreadPool, scratch: RowsOut<'_>) {
        self.check();
        if self.rows == 0 {
            return;
        }
        let grid = Grid::new(self, pool.threads());
        pool.run(grid.bands * grid.ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { scratch.part(thread, 0, SCRATCH_LEN) };
            let (rows, tiles) = grid.chunk(chunk);
            self.chunk(rows, tiles, scratch);
        });
    }

    /// Computes all rows of some tiles on the calling thread.
    pub(super) fn run_tiles(&self, tiles: Range<usize>, scratch: &mut [f32]) {
        self.check();
        for from in (0..self.rows).step_by(BAND_ROWS_MAX) {
            self.chunk(from..self.rows.min(from + BAND_ROWS_MAX), tiles.clone(), scratch);
        }
    }

    /// Panics when the operands do not fit together.
    fn check(&self) {
        let spec = self.weights.spec();
        assert_eq!(self.x.cols, spec.in_features, "columns of x are the matrix's inputs");
        assert_eq!(self.out.cols, spec.out_features, "columns of out are the matrix's outputs");
        assert!(self.bias.is_none_or(|b| b.len() == spec.out_features), "a bias for every output");
        let rows_of_x = self.x.data.len() / self.x.cols.max(1);
        let inside = |list: &[u32]| list.len() == self.rows && list.iter().all(|&r| (r as usize) < rows_of_x);
        assert!(self.x_rows.is_none_or(inside), "a row of x for every row of the product");
    }

    /// One chunk: some rows (at most [`BAND_ROWS_MAX`]), some tiles.
    fn chunk(&self, rows: Range<usize>, tiles: Range<usize>, scratch: &mut [f32]) {
        match self.weights.spec().weight_type {
            WeightType::Float(DType::F32) => self.floats::<F32>(rows).run(tiles, scratch),
            WeightType::Float(DType::F16) => self.floats::<F16>(rows).run(tiles, scratch),
            WeightType::Float(DType::Bf16) => self.floats::<Bf16>(rows).run(tiles, scratch),
            WeightType::Coded(layout) => {
                let x = self.codes.expect("invariant: whoever multiplies with codes rounds the activations");
                assert!(self.x_rows.is_none() && x.rows() >= rows.end, "all rows are rounded");
                let sums = CodeSums {
                    isa: self.isa,
                    weights: self.weights,
                    layout,
                    x,
                    first: rows.start,
                    rows: rows.len(),
                };
                Chunk { op: self, first: rows.start, sums }.run(tiles, scratch);
            }
        }
    }

    fn floats<W: Weight>(&self, rows: Range<usize>) -> Chunk<'_, FloatSums<'_, W>> {
        let sums = Sums {
            isa: self.isa,
            weights: self.weights,
            x: self.x,
            rows: rows.len(),
            first: rows.start,
            x_rows: self.x_rows,
            acc_rows: None,
        };
        Chunk { op: self, first: rows.start, sums: FloatSums::new(sums) }
    }
}

/// Products of some rows with some tiles, a run of inputs at a time.
pub(super) trait LeafSums {
    /// How many rows.
    fn rows(&self) -> usize;

    /// Tiles to take next of `left`, at least one: as many as fill the registers, at most [`GROUP_TILES_MAX`].
    fn tiles_at_once(&self, left: usize) -> usize;

    /// Puts the sums over the inputs `inputs` of `T` tiles from `tile` on into `acc` `[rows][T][16]`. `panel` is working
    /// memory. `T` is what [`tiles_at_once`](Self::tiles_at_once) said.
    fn add<const T: usize>(&self, tile: usize, inputs: Range<usize>, acc: &mut [f32], panel: &mut [f32]);
}

/// How the work is cut into chunks.
struct Grid {
    rows: usize,
    band_rows: usize,
    bands: usize,
    tiles: usize,
    ranges: usize,
}

impl Grid {
    fn new(op: &Matmul<'_>, threads: usize) -> Self {
        let spec = op.weights.spec();
        let tiles = op.weights.tiles();
        let row_bytes = size_of::<f32>() * spec.in_features.max(1);
        let limit =
            (BAND_BYTES / row_bytes).clamp(BAND_ROWS_MIN, BAND_ROWS_MAX) / SHAPE_ROWS_MAX * SHAPE_ROWS_MAX;
        let bands = op.rows.div_ceil(limit);
        let band_rows = op.rows.div_ceil(bands).next_multiple_of(SHAPE_ROWS_MAX).min(limit);
        let ops = op.rows * tiles * LANES * spec.in_features;
        let ranges = if threads == 1 || ops < PARALLEL_OPS_MIN {
            1
        } else {
            // At least 8 tiles a range keeps groups full; several ranges a thread even out threads
            // that lose their core for a while.
            threads * (tiles / (threads * 8)).clamp(1, 8)
        };
        Self {
            rows: op.rows,
            band_rows,
            bands: op.rows.div_ceil(band_rows),
            tiles,
            ranges: ranges.min(tiles),
        }
    }

    /// Rows and tiles of a chunk; the chunks of a band follow each other, so its `x` stays cached.
    fn chunk(&self, chunk: usize) -> (Range<usize>, Range<usize>) {
        let (band, range) = (chunk / self.ranges, chunk % self.ranges);
        let rows = band * self.band_rows..self.rows.min((band + 1) * self.band_rows);
        let tiles = range * self.tiles / self.ranges..(range + 1) * self.tiles / self.ranges;
        (rows, tiles)
    }
}

/// One chunk: some rows, some tiles.
struct Chunk<'a, L> {
    op: &'a Matmul<'a>,
    /// First row.
    first: usize,
    sums: L,
}

impl<L: LeafSums> Chunk<'_, L> {
    /// Walks the tiles in groups that fill the registers.
    fn run(&self, tiles: Range<usize>, scratch: &mut [f32]) {
        let mut tile = tiles.start;
        while tile < tiles.end {
            let count = self.sums.tiles_at_once(tiles.end - tile);
            match count {
                1 => self.group::<1>(tile, scratch),
                2 => self.group::<2>(tile, scratch),
                3 => self.group::<3>(tile, scratch),
                _ => self.group::<4>(tile, scratch),
            }
            tile += count;
        }
    }

    /// All rows of the chunk times `T` tiles: leaves, tree, bias.
    fn group<const T: usize>(&self, tile: usize, scratch: &mut [f32]) {
        let (op, rows) = (self.op, self.sums.rows());
        let (levels, panel) = scratch.split_at_mut(TREE_LEVELS * LEVEL_LEN);
        let len = rows * T * LANES;
        let mut waiting = 0;
        for (leaf, ends) in op.weights.spec().leaves.windows(2).enumerate() {
            let acc = &mut levels[waiting * LEVEL_LEN..][..len];
            self.sums.add::<T>(tile, ends[0]..ends[1], acc, panel);
            // Binary counter: a subtree joins its left sibling as soon as it is complete.
            for _ in 0..(leaf + 1).trailing_zeros() {
                waiting -= 1;
                let (left, right) = levels[waiting * LEVEL_LEN..].split_at_mut(LEVEL_LEN);
                join(op.isa, &mut left[..len], &right[..len]);
            }
            waiting += 1;
        }
        finish::<T>(op.isa, &levels[..len], tile, op.bias, op.out.rows_from(self.first));
    }
}

/// `into += sibling`: joins two subtrees of leaves. The lengths are the same multiple of 16.
pub(super) fn join(isa: Isa, into: &mut [f32], sibling: &[f32]) {
    assert!(into.len() == sibling.len() && into.len().is_multiple_of(LANES), "subtrees of the same rows");
    let join = Join { into: into.as_mut_ptr(), sibling: sibling.as_ptr(), len: into.len() };
    // SAFETY: both slices hold `len` elements and are disjoint.
    unsafe { isa.run(join) };
}

/// Writes the sums `[rows][T][16]` of the `T` tiles from `tile` on to the first rows of `out`, whose
/// columns are the matrix's outputs, the bias added. The caller owns these outputs of these rows.
pub(super) fn finish<const T: usize>(
    isa: Isa,
    sums: &[f32],
    tile: usize,
    bias: Option<&[f32]>,
    out: RowsOut<'_>,
) {
    let (first, rows) = (tile * LANES, sums.len() / (T * LANES));
    if rows == 0 {
        return;
    }
    // The last row's place is checked here, the first one's by its own pointer.
    out.pointer(rows - 1, first);
    let finish = Finish {
        acc: sums.as_ptr(),
        rows,
        tiles: T,
        out: out.pointer(0, first),
        out_stride: out.cols,
        outputs: (T * LANES).min(out.cols - first),
        bias: bias.map_or(std::ptr::null(), |b| b[first..].as_ptr()),
    };
    // SAFETY: `sums` has 16 elements of `T` tiles for every row; the outputs exist in every row of
    // `out` and belong to the caller alone.
    unsafe { isa.run(finish) };
}

/// `tiles` in groups that fill the registers for shapes of `shape_rows` rows: first tile and count.
pub(super) fn groups(
    isa: Isa,
    shape_rows: usize,
    tiles: Range<usize>,
) -> impl Iterator<Item = (usize, usize)> {
    let count = group_tiles(isa, shape_rows);
    tiles.clone().step_by(count).map(move |tile| (tile, count.min(tiles.end - tile)))
}

/// Tiles that fill the registers beside `shape_rows` rows.
fn group_tiles(isa: Isa, shape_rows: usize) -> usize {
    (isa.accumulators() / shape_rows).clamp(1, GROUP_TILES_MAX)
}

/// Rows of the tallest register shape.
pub(super) const fn rows_max(isa: Isa) -> usize {
    if isa.accumulators() >= 3 * SHAPE_ROWS_MAX { SHAPE_ROWS_MAX } else { 6 }
}
