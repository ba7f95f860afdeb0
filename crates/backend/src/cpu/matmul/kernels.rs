//! The inner loops of the matrix product: accumulate, widen a panel, join leaves, store.
//!
//! **Invariant:** for an output, [`accumulate`] performs `acc = fma(x[k], w[k], acc)` for ascending
//! `k`, whatever the register shape, so every shape gives the same bits.

use super::SHAPE_ROWS_MAX;
use super::hints::{NextTiles, STRETCH};
use super::runs::{Run, TREE_LEVELS};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use std::marker::PhantomData;

/// How a stored weight becomes f32 lanes.
pub(in crate::cpu) trait Weight: Copy + Sync {
    /// Bytes of 16 elements.
    const ROW_BYTES: usize;

    /// Sixteen elements, widened exactly.
    ///
    /// # Safety
    /// `p` is valid for 16 elements and the machine supports `S`.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
}

/// IEEE single precision.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F32;
/// IEEE half precision.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F16;
/// The upper half of an f32.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Bf16;

impl Weight for F32 {
    const ROW_BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load(p.cast()) }
    }
}

impl Weight for F16 {
    const ROW_BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Weight for Bf16 {
    const ROW_BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { S::load_bf16(p.cast()) }
    }
}

/// How far ahead of a stream of weights the hints are.
pub(in crate::cpu) const HINT_AHEAD_BYTES: usize = 1024;

/// Weights of some tiles: input `k` of tile `t` is at `start + k * step + t * tile_stride` bytes.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    pub start: *const u8,
    pub step: usize,
    pub tile_stride: usize,
}

impl Stream {
    /// The inputs from `from` on of the tiles from `tile` on, as they lie in the matrix.
    pub(super) fn of<W: Weight>(weights: &PackedLinear, tile: usize, from: usize) -> Self {
        Self { start: weights.tile(tile, from), step: W::ROW_BYTES, tile_stride: weights.tile_bytes() }
    }

    /// `T` tiles in a panel.
    pub(super) fn panel<const T: usize>(panel: &[f32]) -> Self {
        Self { start: panel.as_ptr().cast(), step: T * F32::ROW_BYTES, tile_stride: F32::ROW_BYTES }
    }
}

/// From how many blocks of rows on it pays to widen weights once for all of them; with fewer, they are widened in
/// registers as they stream in. Floats of 32 bits are as wide as they get.
pub(super) fn pays_to_widen<W: Weight>(blocks: usize) -> bool {
    const BLOCKS_MIN: usize = 5;
    blocks >= BLOCKS_MIN && W::ROW_BYTES != F32::ROW_BYTES
}

/// Adds the products of `inputs` inputs of `M` rows and `T` tiles to `acc`. With `HINT` it asks for weights
/// [`HINT_AHEAD_BYTES`] ahead: hardware prefetch alone left 10 % of the memory bandwidth unused. Where weights are in a
/// near cache, hints cost 20 %.
///
/// # Safety
/// `x` points to the inputs of every row and `w` to those of every tile; the machine supports `S`.
#[inline(always)]
unsafe fn accumulate<S: Simd, W: Weight, const M: usize, const T: usize, const HINT: bool>(
    acc: &mut [[S::V; T]; M],
    x: &[*const f32; M],
    mut w: Stream,
    inputs: usize,
) {
    for k in 0..inputs {
        // SAFETY: `k < inputs` and `t < T`; hints need not be valid.
        unsafe {
            let mut weights = [S::splat(0.0); T];
            for t in 0..T {
                if HINT {
                    S::prefetch(w.start.wrapping_add(t * w.tile_stride + HINT_AHEAD_BYTES));
                }
                weights[t] = W::load::<S>(w.start.add(t * w.tile_stride));
            }
            for m in 0..M {
                let input = S::splat(*x[m].add(k));
                for t in 0..T {
                    acc[m][t] = S::fma(input, weights[t], acc[m][t]);
                }
            }
        }
        w.start = w.start.wrapping_add(w.step);
    }
}

/// Memory of a block of rows for the subtrees of leaves that wait for their sibling: `[level][rows][T][16]`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Levels {
    start: *mut f32,
    /// Elements of a level.
    stride: usize,
}

impl Levels {
    /// [`TREE_LEVELS`] levels of equal size.
    pub(in crate::cpu) fn new(memory: &mut [f32]) -> Self {
        Self { start: memory.as_mut_ptr(), stride: memory.len() / TREE_LEVELS }
    }

    /// The levels of the rows from `row` on.
    #[inline(always)]
    pub(in crate::cpu) fn rows_from<const T: usize>(self, row: usize) -> Self {
        Self { start: self.start.wrapping_add(row * T * LANES), ..self }
    }

    /// Where level `level` starts.
    #[inline(always)]
    fn at(&self, level: usize) -> *mut f32 {
        self.start.wrapping_add(level * self.stride)
    }

    /// The sums of a run's leaf so far.
    ///
    /// # Safety
    /// The levels hold `M` rows; nobody else touches them; the machine supports `S`.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn begin<S: Simd, const M: usize, const T: usize>(
        self,
        run: Run,
    ) -> [[S::V; T]; M] {
        // SAFETY: a level has `T` tiles for each row.
        unsafe {
            let mut acc = [[S::splat(0.0); T]; M];
            if !run.is_first {
                for m in 0..M {
                    for t in 0..T {
                        acc[m][t] = S::load(self.at(run.level).add((m * T + t) * LANES));
                    }
                }
            }
            acc
        }
    }

    /// Joins a run's sums with the subtrees that waited for them, if its leaf is complete, and leaves the result at its level.
    ///
    /// # Safety
    /// As [`begin`](Self::begin).
    #[inline(always)]
    pub(in crate::cpu) unsafe fn end<S: Simd, const M: usize, const T: usize>(
        self,
        run: Run,
        mut acc: [[S::V; T]; M],
    ) {
        // SAFETY: a level has `T` tiles for each row; a run joins no more levels than are below its own.
        unsafe {
            for below in 1..=run.joins {
                let left = self.at(run.level - below);
                for m in 0..M {
                    for t in 0..T {
                        acc[m][t] = S::add(S::load(left.add((m * T + t) * LANES)), acc[m][t]);
                    }
                }
            }
            let into = self.at(run.level - run.joins);
            for m in 0..M {
                for t in 0..T {
                    S::store(into.add((m * T + t) * LANES), acc[m][t]);
                }
            }
        }
    }
}

/// Runs the smallest kernel that holds the rows (1..=8), `$M` of them.
macro_rules! by_rows {
    ($isa:expr, $rows:expr, $M:ident => $kernel:expr) => {
        match $rows {
            1 => by_rows!(@run $isa, $M = 1, $kernel),
            2 => by_rows!(@run $isa, $M = 2, $kernel),
            3 => by_rows!(@run $isa, $M = 3, $kernel),
            4 => by_rows!(@run $isa, $M = 4, $kernel),
            5 | 6 => by_rows!(@run $isa, $M = 6, $kernel),
            7 | 8 => by_rows!(@run $isa, $M = 8, $kernel),
            rows => unreachable!("kernels take 1 to 8 rows, not {rows}"),
        }
    };
    (@run $isa:expr, $M:ident = $count:literal, $kernel:expr) => {{
        const $M: usize = $count;
        $isa.run($kernel)
    }};
}

/// Sums of some rows times `T` tiles over some runs of inputs, with the tree of their leaves. References all the way: copying
/// pointers that were just written stalls a core.
pub(super) struct Block<'a> {
    /// The first of the inputs in each row; what is beyond `rows` is not read.
    pub x: &'a [*const f32; SHAPE_ROWS_MAX],
    /// Rows, 1 to 8.
    pub rows: usize,
    /// 16 elements of each input of each tile.
    pub w: Stream,
    pub next: NextTiles,
    pub runs: &'a [Run],
    pub levels: Levels,
}

impl Block<'_> {
    /// Runs the smallest kernel that holds the rows.
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe; nobody else touches the levels; the machine supports `isa`.
    pub(super) unsafe fn run<W: Weight, const T: usize, const HINT: bool>(&self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe { by_rows!(isa, self.rows, M => BlockRows::<W, M, T, HINT>(self, PhantomData)) }
    }
}

/// [`Block`] in registers: `M` rows, of which those from `rows` on repeat the last one and are dropped.
#[derive(Clone, Copy)]
struct BlockRows<'a, W, const M: usize, const T: usize, const HINT: bool>(&'a Block<'a>, PhantomData<W>);

impl<W: Weight, const M: usize, const T: usize, const HINT: bool> Kernel for BlockRows<'_, W, M, T, HINT> {
    type Output = ();

    /// # Safety
    /// As [`Block::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let block = self.0;
        let (mut w, mut next) = (block.w, block.next);
        // SAFETY: rows, runs and levels are below the counts that the caller promises; the runs' inputs follow each
        // other in `x` and `w`.
        unsafe {
            let mut x = [block.x[0]; M];
            for m in 1..M {
                x[m] = block.x[m.min(block.rows - 1)];
            }
            for run in block.runs {
                let mut acc = block.levels.begin::<S, M, T>(*run);
                let mut left = run.inputs;
                while left > 0 {
                    // All at once when there is nothing to ask for in between.
                    let inputs = if next.lines == 0 { left } else { left.min(STRETCH) };
                    next.ask::<S, T>();
                    accumulate::<S, W, M, T, HINT>(&mut acc, &x, w, inputs);
                    for m in 0..M {
                        x[m] = x[m].wrapping_add(inputs);
                    }
                    w.start = w.start.wrapping_add(inputs * w.step);
                    left -= inputs;
                }
                block.levels.end::<S, M, T>(*run, acc);
            }
        }
    }
}

/// Adds the products of `inputs` inputs to the accumulators of some rows, here and there, times `T` tiles.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Input `k = 0` of row 0 of the activations; the others follow at `x_stride` elements.
    pub x: *const f32,
    pub x_stride: usize,
    /// Rows, at least 1.
    pub rows: usize,
    /// Which row of `acc` each adds to.
    pub acc_rows: *const u32,
    /// 16 elements of each input of each tile.
    pub w: Stream,
    pub inputs: usize,
    /// `[][T][16]` accumulators.
    pub acc: *mut f32,
}

impl Shape {
    /// Runs the smallest kernel that holds the rows (1..=8).
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe; `acc_rows` names no row twice; nobody
    /// else touches these rows of `acc`; the machine supports `isa`.
    pub(super) unsafe fn run<W: Weight, const T: usize, const HINT: bool>(self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe { by_rows!(isa, self.rows, M => ShapeRows::<W, M, T, HINT>(self, PhantomData)) }
    }
}

/// [`Shape`] in registers: `M` rows, of which those from `rows` on repeat the last one and are
/// dropped.
#[derive(Clone, Copy)]
struct ShapeRows<W, const M: usize, const T: usize, const HINT: bool>(Shape, PhantomData<W>);

impl<W: Weight, const M: usize, const T: usize, const HINT: bool> Kernel for ShapeRows<W, M, T, HINT> {
    type Output = ();

    /// # Safety
    /// As [`Shape::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let shape = self.0;
        // SAFETY: `x` is read at its rows and `k < inputs`, `w` at `k < inputs`, `tile < T`, and
        // `acc` at its rows, `tile < T`, all valid by the caller's promise.
        unsafe {
            let mut x = [shape.x; M];
            let mut places = [shape.acc; M];
            let mut acc = [[S::splat(0.0); T]; M];
            for m in 0..M {
                let row = m.min(shape.rows - 1);
                x[m] = shape.x.add(row * shape.x_stride);
                places[m] = shape.acc.add(*shape.acc_rows.add(row) as usize * T * LANES);
                for t in 0..T {
                    acc[m][t] = S::load(places[m].add(t * LANES));
                }
            }
            accumulate::<S, W, M, T, HINT>(&mut acc, &x, shape.w, shape.inputs);
            for m in 0..M.min(shape.rows) {
                for t in 0..T {
                    S::store(places[m].add(t * LANES), acc[m][t]);
                }
            }
        }
    }
}

/// Widens `inputs` inputs of `T` tiles into an f32 panel `[inputs][T][16]`, so that many rows can
/// use it from the first-level cache. Panics when the panel is too small.
///
/// # Safety
/// `w` is valid for `inputs` inputs of `T` tiles; the machine supports `isa`.
pub(super) unsafe fn widen<W: Weight, const T: usize>(isa: Isa, w: Stream, inputs: usize, panel: &mut [f32]) {
    let panel = &mut panel[..inputs * T * LANES];
    let widen = Widen::<W, T> { w, inputs, panel: panel.as_mut_ptr(), weight: PhantomData };
    // SAFETY: the panel holds them; the rest is passed on to the caller.
    unsafe { isa.run(widen) };
}

/// See [`widen`].
#[derive(Clone, Copy)]
struct Widen<W, const T: usize> {
    w: Stream,
    inputs: usize,
    panel: *mut f32,
    weight: PhantomData<W>,
}

impl<W: Weight, const T: usize> Kernel for Widen<W, T> {
    type Output = ();

    /// # Safety
    /// `w` is valid for `inputs` inputs of `T` tiles, `panel` for `inputs * T * 16` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the indices stay inside the ranges the caller promises.
        unsafe {
            for k in 0..self.inputs {
                for t in 0..T {
                    let w = self.w.start.add(t * self.w.tile_stride + k * W::ROW_BYTES);
                    S::prefetch(w.wrapping_add(HINT_AHEAD_BYTES));
                    let v = W::load::<S>(w);
                    S::store(self.panel.add((k * T + t) * LANES), v);
                }
            }
        }
    }
}

/// `into += sibling`, elementwise: joins two subtrees of leaves.
#[derive(Clone, Copy)]
pub(super) struct Join {
    pub into: *mut f32,
    pub sibling: *const f32,
    /// Elements, a multiple of 16.
    pub len: usize,
}

impl Kernel for Join {
    type Output = ();

    /// # Safety
    /// Both are valid for `len` elements and do not overlap.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.len).step_by(LANES) {
            // SAFETY: `i + 16 <= len`.
            unsafe {
                let sum = S::add(S::load(self.into.add(i)), S::load(self.sibling.add(i)));
                S::store(self.into.add(i), sum);
            }
        }
    }
}

/// Writes accumulators `[rows][tiles][16]` to rows of the result, the bias added.
#[derive(Clone, Copy)]
pub(super) struct Finish {
    pub acc: *const f32,
    pub rows: usize,
    pub tiles: usize,
    /// First output of the tiles in the first row; rows follow at `out_stride` elements.
    pub out: *mut f32,
    pub out_stride: usize,
    /// Outputs that exist, at most `tiles * 16`.
    pub outputs: usize,
    /// Bias of the first output, or null.
    pub bias: *const f32,
}

impl Kernel for Finish {
    type Output = ();

    /// # Safety
    /// `acc` is valid for `rows * tiles * 16` elements, `out` for `outputs` elements in each row,
    /// `bias` (unless null) for `outputs`; nobody else touches these parts of `out`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.rows {
            for from in (0..self.outputs).step_by(LANES) {
                let n = LANES.min(self.outputs - from);
                // SAFETY: `from + n <= outputs`, and the accumulator row has `tiles * 16` elements.
                unsafe {
                    let mut v = S::load(self.acc.add(row * self.tiles * LANES + from));
                    if !self.bias.is_null() {
                        v = S::add(v, S::load_partial(self.bias.add(from), n));
                    }
                    S::store_partial(self.out.add(row * self.out_stride + from), v, n);
                }
            }
        }
    }
}
