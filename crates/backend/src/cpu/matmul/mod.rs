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
//! that fill the registers, and its rows in blocks of up to 8. A block keeps its sums in registers for a whole leaf and
//! the leaves' tree in the first-level cache. With few rows the weights are widened in registers as they stream from
//! memory. With many, a group's weights are widened, some inputs at a time, into a panel that stays in the first-level cache
//! while all rows of the band pass by; every block's sums wait in scratch memory meanwhile, which is exact, and each block
//! asks for a part of the next group's weights.

mod blocks;
mod hints;
mod kernels;
mod runs;
mod sums;

use hints::ASKING_BLOCKS_MAX;
pub(super) use hints::NextTiles;
pub(super) use kernels::{Bf16, F16, F32, HINT_AHEAD_BYTES, Levels, Weight};
pub(super) use runs::{Run, TREE_LEVELS};
pub(super) use sums::{SUMS_PANEL_LEN, Sums};

use super::activation::Gated;
use super::codes::{CodeBlocks, CodedRows};
use super::packed::PackedLinear;
use super::pool::ThreadPool;
use super::simd::{Isa, LANES};
use super::tensor::{RowsIn, RowsOut};
use crate::LinearSpec;
use blocks::FloatBlocks;
use kernels::{Finish, Join};
use lockstep_core::config::Activation;
use lockstep_core::{DType, WeightType};
use runs::Runs;
use std::ops::Range;

/// Rows of one register shape at most.
pub(super) const SHAPE_ROWS_MAX: usize = 8;
/// Tiles of one group at most.
pub(super) const GROUP_TILES_MAX: usize = 4;
/// Elements of the largest panel, that of codes: 46 KiB are 18 groups of three tiles, so that many layers' inputs fit at once. With
/// half of that kernels were no faster, and what waits for the other half went through the second-level cache.
pub(super) const PANEL_LEN: usize = 23 << 9;
/// Rows of a band at most whose sums wait in scratch memory between parts of the inputs.
const WAITING_ROWS_MAX: usize = 192;
/// Rows of a band at least, where bands make work for many threads: each band widens all weights.
const BAND_ROWS_MIN: usize = 64;
/// Chunks a thread from which they even out threads that lose their core for a while.
const CHUNKS_PER_THREAD: usize = 4;
/// Multiply-adds below which the caller works alone; waking the helpers would cost more.
pub(super) const PARALLEL_OPS_MIN: usize = 64 << 10;

/// Scratch elements of each thread: a band's sums, a panel, and the gates of a band.
pub(super) const SCRATCH_LEN: usize = LEVELS_LEN + PANEL_LEN + GATES_LEN;
const GATES_LEN: usize = WAITING_ROWS_MAX * GROUP_TILES_MAX * LANES;
const LEVELS_LEN: usize =
    TREE_LEVELS * (WAITING_ROWS_MAX * (GROUP_TILES_MAX + 1) + GROUP_TILES_MAX + 1) * LANES;

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
    /// Of a fused gate|up matrix, whose halves are whole tiles.
    pub gate: Option<Activation>,
    /// `[rows, outputs]`, or half as wide with a gate: the activation of the first half of the outputs times the second.
    pub out: RowsOut<'a>,
}

impl Matmul<'_> {
    /// Computes the product on the pool; `scratch` has a row of [`SCRATCH_LEN`] for each thread.
    pub(super) fn run(&self, pool: &ThreadPool, scratch: RowsOut<'_>) {
        self.with_blocks(Work::All(pool, scratch));
    }

    /// Computes all rows of some tiles on the calling thread.
    pub(super) fn run_tiles(&self, tiles: Range<usize>, scratch: &mut [f32]) {
        self.with_blocks(Work::Tiles(tiles, scratch));
    }

    /// Tiles that are walked, each with its other half if there is a gate.
    fn tiles(&self) -> usize {
        if self.gate.is_some() { self.weights.tiles() / 2 } else { self.weights.tiles() }
    }

    fn with_blocks(&self, work: Work<'_>) {
        self.check();
        match self.weights.spec().weight_type {
            WeightType::Float(DType::F32) => self.walk(&FloatBlocks::<F32>::new(self), work),
            WeightType::Float(DType::F16) => self.walk(&FloatBlocks::<F16>::new(self), work),
            WeightType::Float(DType::Bf16) => self.walk(&FloatBlocks::<Bf16>::new(self), work),
            WeightType::Coded(layout) => {
                let x = self.codes.expect("invariant: whoever multiplies with codes rounds the activations");
                assert!(self.x_rows.is_none() && x.rows() >= self.rows, "all rows are rounded");
                self.walk(&CodeBlocks { isa: self.isa, weights: self.weights, layout, x }, work);
            }
        }
    }

    fn walk<B: Blocks>(&self, blocks: &B, work: Work<'_>) {
        if self.rows == 0 {
            return;
        }
        match work {
            Work::All(pool, scratch) => {
                let grid = Grid::new(self, blocks, pool.threads());
                pool.run(grid.bands * grid.ranges, &|chunk, thread| {
                    // SAFETY: the scratch row of a thread is used by one chunk at a time.
                    let scratch = unsafe { scratch.part(thread, 0, SCRATCH_LEN) };
                    let (rows, tiles) = grid.chunk(chunk);
                    Chunk { op: self, blocks, rows }.run(tiles, scratch);
                });
            }
            Work::Tiles(tiles, scratch) => {
                for from in (0..self.rows).step_by(WAITING_ROWS_MAX) {
                    let rows = from..self.rows.min(from + WAITING_ROWS_MAX);
                    Chunk { op: self, blocks, rows }.run(tiles.clone(), scratch);
                }
            }
        }
    }

    /// Panics when the operands do not fit together.
    fn check(&self) {
        let spec = self.weights.spec();
        assert_eq!(self.x.cols, spec.in_features, "columns of x are the matrix's inputs");
        let halves = if self.gate.is_some() { 2 } else { 1 };
        assert_eq!(halves * self.out.cols, spec.out_features, "columns of out are the matrix's outputs");
        assert!(halves == 1 || can_gate(spec), "gate and up are whole tiles");
        assert!(self.bias.is_none_or(|b| b.len() == spec.out_features), "a bias for every output");
        let rows_of_x = self.x.data.len() / self.x.cols.max(1);
        let inside = |list: &[u32]| list.len() == self.rows && list.iter().all(|&r| (r as usize) < rows_of_x);
        assert!(self.x_rows.is_none_or(inside), "a row of x for every row of the product");
    }
}

/// Whether the halves of a matrix, gate and up, are whole tiles.
pub(super) fn can_gate(spec: &LinearSpec) -> bool {
    spec.out_features.is_multiple_of(2 * LANES)
}

/// What to compute of a product, and where.
enum Work<'a> {
    /// All of it, by a team with scratch memory.
    All(&'a ThreadPool, RowsOut<'a>),
    /// All rows of some tiles, here.
    Tiles(Range<usize>, &'a mut [f32]),
}

/// Weights of one form times rows, a block of rows and a group of tiles at a time.
pub(super) trait Blocks: Sync {
    /// Rows of a block, and the tiles that fill the registers beside it (at most [`GROUP_TILES_MAX`]), for
    /// `rows` rows.
    fn shape(&self, rows: usize) -> (usize, usize);

    /// How many inputs of `tiles` tiles are taken at a time: no more than the panel holds, if these blocks need one.
    fn inputs_at_once(&self, tiles: usize, cut: Cut) -> usize;

    /// Makes `inputs` of the `T` tiles from `tile` on ready in the panel, if these blocks need that.
    fn prepare<const T: usize>(&self, tile: usize, inputs: &Range<usize>, cut: Cut, panel: &mut [f32]);

    /// Adds the products of one block and `T` tiles to `levels`, where each level has `[rows of a block][T][16]` elements.
    fn add<const T: usize>(&self, part: &Part<'_>, levels: &mut [f32]);
}

/// Rows cut into blocks.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Rows of each block; the last one may have fewer.
    pub block_rows: usize,
    pub blocks: usize,
}

/// One block of rows, one group of tiles, some inputs.
pub(super) struct Part<'a> {
    /// Rows of the product.
    pub rows: Range<usize>,
    pub cut: Cut,
    /// Which block it is.
    pub block: usize,
    /// First tile.
    pub tile: usize,
    pub inputs: Range<usize>,
    /// The inputs, leaf by leaf.
    pub runs: &'a [Run],
    /// What [`Blocks::prepare`] left.
    pub panel: &'a [f32],
}

impl Part<'_> {
    /// What a block of a group of `tiles` tiles asks for: its part of the same inputs of the next group, if any, which
    /// have `stretch_bytes` for every stretch.
    pub(super) fn next_group(&self, weights: &PackedLinear, tiles: usize, stretch_bytes: usize) -> NextTiles {
        let next = self.tile + tiles;
        if self.cut.blocks > ASKING_BLOCKS_MAX || next + tiles > weights.tiles() {
            return NextTiles::NONE;
        }
        let start = weights.tile(next, self.inputs.start);
        NextTiles::new(start, (self.block, self.cut.blocks), (stretch_bytes, weights.tile_bytes()))
    }
}

/// How the work is cut into chunks.
struct Grid {
    rows: usize,
    band_rows: usize,
    bands: usize,
    tiles: usize,
    /// Tiles that stay together.
    group: usize,
    ranges: usize,
}

impl Grid {
    fn new(op: &Matmul<'_>, blocks: &impl Blocks, threads: usize) -> Self {
        let spec = op.weights.spec();
        let (block_rows, most) = blocks.shape(op.rows);
        // A group that is not full costs as much as a full one where products bound the time, which they do
        // not with few rows: these are cut evenly.
        let group = if op.rows < SHAPE_ROWS_MAX { 1 } else { most };
        let tiles = op.tiles();
        let ops = op.rows * op.weights.tiles() * LANES * spec.in_features;
        let ranges = if threads == 1 || ops < PARALLEL_OPS_MIN {
            1
        } else {
            threads * (tiles / (threads * 2 * most)).clamp(1, 2 * CHUNKS_PER_THREAD)
        };
        let ranges = ranges.min(tiles.div_ceil(group)).max(1);
        let wanted = if threads == 1 { 1 } else { (CHUNKS_PER_THREAD * threads).div_ceil(ranges) };
        let cut = Cut { block_rows, blocks: op.rows.div_ceil(block_rows) };
        let waits = op.gate.is_some() || spec.in_features > blocks.inputs_at_once(most, cut);
        let least = if waits { op.rows.div_ceil(WAITING_ROWS_MAX / block_rows * block_rows) } else { 1 };
        let bands = wanted.min(op.rows / BAND_ROWS_MIN).max(least);
        let band_rows = op.rows.div_ceil(bands).next_multiple_of(block_rows);
        Self { rows: op.rows, band_rows, bands: op.rows.div_ceil(band_rows), tiles, group, ranges }
    }

    /// Rows and tiles of a chunk; the chunks of a band follow each other, so its `x` stays cached.
    fn chunk(&self, chunk: usize) -> (Range<usize>, Range<usize>) {
        let (band, range) = (chunk / self.ranges, chunk % self.ranges);
        let rows = band * self.band_rows..self.rows.min((band + 1) * self.band_rows);
        let groups = self.tiles.div_ceil(self.group);
        let tile = |range: usize| (range * groups / self.ranges * self.group).min(self.tiles);
        (rows, tile(range)..tile(range + 1))
    }
}

/// One chunk: some rows, some tiles.
struct Chunk<'a, B> {
    op: &'a Matmul<'a>,
    blocks: &'a B,
    rows: Range<usize>,
}

impl<B: Blocks> Chunk<'_, B> {
    /// Walks the tiles in groups that fill the registers.
    fn run(&self, tiles: Range<usize>, scratch: &mut [f32]) {
        let (block_rows, most) = self.blocks.shape(self.rows.len());
        let mut tile = tiles.start;
        while tile < tiles.end {
            let count = most.min(tiles.end - tile);
            match count {
                1 => self.tiles::<1>(block_rows, tile, scratch),
                2 => self.tiles::<2>(block_rows, tile, scratch),
                3 => self.tiles::<3>(block_rows, tile, scratch),
                _ => self.tiles::<4>(block_rows, tile, scratch),
            }
            tile += count;
        }
    }

    /// All rows of the chunk times `T` tiles and, with a gate, the `T` tiles half a matrix further.
    fn tiles<const T: usize>(&self, block_rows: usize, tile: usize, scratch: &mut [f32]) {
        let op = self.op;
        let (scratch, gates) = scratch.split_at_mut(LEVELS_LEN + PANEL_LEN);
        let Some(activation) = op.gate else {
            return self.group::<T>(block_rows, tile, scratch, &mut |sums, first| {
                finish::<T>(op.isa, sums, tile, op.bias, op.out.rows_from(first));
            });
        };
        let width = T * LANES;
        let place = |first: usize| (first - self.rows.start) * width;
        // Gates stay here, in a near cache, until the other half of the products is there.
        self.group::<T>(block_rows, tile, scratch, &mut |sums, first| {
            let gates = &mut gates[place(first)..][..sums.len()];
            gates.copy_from_slice(sums);
            add_bias(op.isa, gates, op.bias.map(|bias| &bias[tile * LANES..][..width]));
        });
        let up = tile + op.tiles();
        self.group::<T>(block_rows, up, scratch, &mut |sums, first| {
            add_bias(op.isa, sums, op.bias.map(|bias| &bias[up * LANES..][..width]));
            let (rows, out) = (sums.len() / width, op.out.rows_from(first));
            // The last row's place is checked here, the first one's by its own pointer.
            out.pointer(rows - 1, tile * LANES);
            let gated = Gated {
                activation,
                gate: gates[place(first)..][..sums.len()].as_ptr(),
                up: sums.as_ptr(),
                out: out.pointer(0, tile * LANES),
                len: width,
                rows,
                out_stride: out.cols,
                factor: 1.0,
            };
            // SAFETY: `rows` rows of gates and of sums; these columns of these rows of `out` belong to this chunk alone.
            unsafe { op.isa.run(gated) };
        });
    }

    /// All rows of the chunk times `T` tiles: leaves and tree. `done` is given the sums `[rows][T][16]` of each block, and
    /// its first row.
    fn group<const T: usize>(
        &self,
        block_rows: usize,
        tile: usize,
        scratch: &mut [f32],
        done: &mut dyn FnMut(&mut [f32], usize),
    ) {
        let spec = self.op.weights.spec();
        let (levels, panel) = scratch.split_at_mut(LEVELS_LEN);
        let cut = Cut { block_rows, blocks: self.rows.len().div_ceil(block_rows) };
        let at_once = self.blocks.inputs_at_once(T, cut).min(spec.in_features).max(1);
        // A row more, for kernels that take one more than there are, and a line more, so that blocks do not compete
        // for the same places of the caches.
        let stride = TREE_LEVELS * ((block_rows + 1) * T + 1) * LANES;
        // Blocks that are done at once use the same memory one after the other.
        let waits = at_once < spec.in_features;
        let mut from = 0;
        loop {
            let inputs = from..spec.in_features.min(from + at_once);
            let is_last = inputs.end == spec.in_features;
            self.blocks.prepare::<T>(tile, &inputs, cut, panel);
            let runs = Runs::new(&spec.leaves, &inputs);
            for block in 0..cut.blocks {
                let first = self.rows.start + block * block_rows;
                let rows = first..self.rows.end.min(first + block_rows);
                let count = rows.len();
                let levels = &mut levels[if waits { block * stride } else { 0 }..][..stride];
                let (inputs, runs) = (inputs.clone(), runs.list());
                let part = Part { rows, cut, block, tile, inputs, runs, panel };
                self.blocks.add::<T>(&part, levels);
                if is_last {
                    done(&mut levels[..count * T * LANES], first);
                }
            }
            if is_last {
                return;
            }
            from += at_once;
        }
    }
}

/// Adds a bias, if there is one, to rows of its length.
fn add_bias(isa: Isa, sums: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        sums.chunks_exact_mut(bias.len()).for_each(|row| join(isa, row, bias));
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

/// Tiles that fill the registers beside `shape_rows` rows.
pub(super) fn group_tiles(isa: Isa, shape_rows: usize) -> usize {
    (isa.accumulators() / shape_rows).clamp(1, GROUP_TILES_MAX)
}

/// Rows of the tallest register shape.
pub(super) const fn rows_max(isa: Isa) -> usize {
    if isa.accumulators() >= 3 * SHAPE_ROWS_MAX { SHAPE_ROWS_MAX } else { 6 }
}
