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

use super::packed::PackedLinear;
use super::pool::ThreadPool;
use super::simd::{Isa, LANES};
use super::tensor::{RowsIn, RowsOut};
use kernels::{Bf16, F16, F32, Finish, Join, Shape, Stream, Weight, Widen};
use lockstep_core::DType;
use lockstep_core::limits::K_LEAVES;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of one register shape at most.
const SHAPE_ROWS_MAX: usize = 8;
/// Tiles of one group at most.
const GROUP_TILES_MAX: usize = 4;
/// Inputs of a widened panel: three tiles fill 36 of the 48 KiB of a first-level cache.
const PANEL_INPUTS: usize = 192;
/// Passes of rows over a panel from which widening it first pays; with fewer, weights are widened in
/// registers as they stream in.
const WIDEN_PASSES_MIN: usize = 5;
/// Bytes of `x` that a band of rows should stay below, so that it stays in the second-level cache.
const BAND_BYTES: usize = 640 << 10;
/// Rows of a band: enough to amortise widening, few enough for the scratch memory.
const BAND_ROWS_MIN: usize = 48;
const BAND_ROWS_MAX: usize = 192;
/// Multiply-adds below which the caller works alone; waking the helpers would cost more.
const PARALLEL_OPS_MIN: usize = 64 << 10;
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
    pub bias: Option<&'a [f32]>,
    pub rows: usize,
    pub out: RowsOut<'a>,
}

impl Matmul<'_> {
    /// Computes the product on the pool; `scratch` has a row of [`SCRATCH_LEN`] for each thread.
    pub(super) fn run(&self, pool: &ThreadPool, scratch: RowsOut<'_>) {
        let spec = self.weights.spec();
        assert_eq!(self.x.cols, spec.in_features, "columns of x are the matrix's inputs");
        assert_eq!(self.out.cols, spec.out_features, "columns of out are the matrix's outputs");
        assert!(self.bias.is_none_or(|b| b.len() == spec.out_features), "a bias for every output");
        if self.rows == 0 {
            return;
        }
        let grid = Grid::new(self, pool.threads());
        pool.run(grid.bands * grid.ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { scratch.part(thread, 0, SCRATCH_LEN) };
            let (rows, tiles) = grid.chunk(chunk);
            let chunk = Chunk { op: self, first_row: rows.start, rows: rows.len() };
            match spec.dtype {
                DType::F32 => chunk.run::<F32>(tiles, scratch),
                DType::F16 => chunk.run::<F16>(tiles, scratch),
                DType::Bf16 => chunk.run::<Bf16>(tiles, scratch),
            }
        });
    }
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
struct Chunk<'a> {
    op: &'a Matmul<'a>,
    first_row: usize,
    rows: usize,
}

impl Chunk<'_> {
    /// Walks the tiles in groups that fill the registers.
    fn run<W: Weight>(&self, tiles: Range<usize>, scratch: &mut [f32]) {
        let shape_rows = self.shape_rows();
        let mut tile = tiles.start;
        while tile < tiles.end {
            let left = tiles.end - tile;
            let group = group_tiles(self.op.isa, shape_rows).min(left);
            match group {
                1 => self.group::<W, 1>(tile, scratch),
                2 => self.group::<W, 2>(tile, scratch),
                3 => self.group::<W, 3>(tile, scratch),
                _ => self.group::<W, 4>(tile, scratch),
            }
            tile += group.min(GROUP_TILES_MAX);
        }
    }

    /// Rows of the register shape that covers most of this chunk.
    fn shape_rows(&self) -> usize {
        self.rows.min(rows_max(self.op.isa))
    }

    /// All rows of the chunk times `T` tiles: leaves, tree, bias.
    fn group<W: Weight, const T: usize>(&self, tile: usize, scratch: &mut [f32]) {
        let spec = self.op.weights.spec();
        let (levels, panel) = scratch.split_at_mut(TREE_LEVELS * LEVEL_LEN);
        let len = self.rows * T * LANES;
        let mut waiting = 0;
        for (leaf, ends) in spec.leaves.windows(2).enumerate() {
            self.leaf::<W, T>(tile, ends[0]..ends[1], &mut levels[waiting * LEVEL_LEN..][..len], panel);
            // Binary counter: a subtree joins its left sibling as soon as it is complete.
            for _ in 0..(leaf + 1).trailing_zeros() {
                waiting -= 1;
                let (left, right) = levels[waiting * LEVEL_LEN..].split_at_mut(LEVEL_LEN);
                let join = Join { into: left.as_mut_ptr(), sibling: right.as_ptr(), len };
                // SAFETY: both slices hold `len` elements and are disjoint.
                unsafe { self.op.isa.run(join) };
            }
            waiting += 1;
        }
        let first = tile * LANES;
        let finish = Finish {
            acc: levels.as_ptr(),
            rows: self.rows,
            tiles: T,
            out: self.op.out.pointer(self.first_row, first),
            out_stride: self.op.out.cols,
            outputs: (T * LANES).min(spec.out_features - first),
            bias: self.op.bias.map_or(std::ptr::null(), |b| b[first..].as_ptr()),
        };
        // SAFETY: level 0 holds the sums of the rows; these outputs of these rows belong to this
        // chunk alone, and rows and outputs lie inside `out` (checked against `spec` in `run`).
        unsafe { self.op.isa.run(finish) };
    }

    /// The sums of one leaf into `acc` `[rows][T][16]`.
    fn leaf<W: Weight, const T: usize>(
        &self,
        tile: usize,
        inputs: Range<usize>,
        acc: &mut [f32],
        panel: &mut [f32],
    ) {
        if inputs.is_empty() {
            return acc.fill(0.0);
        }
        let passes = self.rows.div_ceil(self.shape_rows());
        let step = if passes > 1 { PANEL_INPUTS } else { inputs.len() };
        for from in inputs.clone().step_by(step) {
            let part = from..inputs.end.min(from + step);
            let fresh = from == inputs.start;
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
        let weights = self.op.weights;
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
        unsafe { self.op.isa.run(widen) };
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
        let mut row = 0;
        while row < self.rows {
            let rows = self.shape_rows().min(self.rows - row);
            let shape = Shape {
                x: self.op.x.row(self.first_row + row)[part.clone()].as_ptr(),
                x_stride: self.op.x.cols,
                rows,
                w,
                inputs: part.len(),
                acc: acc[row * T * LANES..].as_mut_ptr(),
                fresh,
            };
            // SAFETY: `rows` rows of `x` from here on exist and have the inputs `part`; `w` has as
            // many inputs of `T` tiles; `acc` has `rows * T * 16` elements from here on.
            unsafe { shape.run::<W, T, HINT>(self.op.isa) };
            row += rows;
        }
    }
}

/// Rows of the tallest register shape.
const fn rows_max(isa: Isa) -> usize {
    if isa.accumulators() >= 3 * SHAPE_ROWS_MAX { SHAPE_ROWS_MAX } else { 6 }
}

/// Tiles that fit beside each other for a shape of `rows` rows.
fn group_tiles(isa: Isa, rows: usize) -> usize {
    (isa.accumulators() / rows).clamp(1, GROUP_TILES_MAX)
}
