//! The inner loops of the matrix product: accumulate, widen a panel, join leaves, store.
//!
//! **Invariant:** for an output, [`Accumulate`] performs `acc = fma(x[k], w[k], acc)` for ascending
//! `k`, whatever the register shape, so every shape gives the same bits.

use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use std::marker::PhantomData;

/// How a stored weight becomes f32 lanes.
pub(in crate::cpu) trait Weight: Copy {
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

/// Adds the products of `inputs` inputs to the accumulators of some rows times `T` tiles.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Input `k = 0` of row 0 of the activations; the others follow at `x_stride` elements.
    pub x: *const f32,
    pub x_stride: usize,
    /// Rows, at least 1.
    pub rows: usize,
    /// Which row of the activations each is, or null for 0, 1, ...
    pub x_rows: *const u32,
    /// Which row of `acc` each adds to, or null for 0, 1, ...
    pub acc_rows: *const u32,
    /// 16 elements of each input of each tile.
    pub w: Stream,
    pub inputs: usize,
    /// `[][T][16]` accumulators.
    pub acc: *mut f32,
    /// Start from zero instead of from `acc`.
    pub fresh: bool,
}

impl Shape {
    /// Runs the smallest kernel that holds the rows (1..=8).
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe; `acc_rows` names no row twice; nobody
    /// else touches these rows of `acc`; the machine supports `isa`.
    pub(super) unsafe fn run<W: Weight, const T: usize, const HINT: bool>(self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.rows {
                1 => isa.run(Accumulate::<W, 1, T, HINT>(self, PhantomData)),
                2 => isa.run(Accumulate::<W, 2, T, HINT>(self, PhantomData)),
                3 => isa.run(Accumulate::<W, 3, T, HINT>(self, PhantomData)),
                4 => isa.run(Accumulate::<W, 4, T, HINT>(self, PhantomData)),
                5 | 6 => isa.run(Accumulate::<W, 6, T, HINT>(self, PhantomData)),
                7 | 8 => isa.run(Accumulate::<W, 8, T, HINT>(self, PhantomData)),
                rows => unreachable!("shapes have 1 to 8 rows, not {rows}"),
            }
        }
    }
}

/// Entry `row` of a list, or `row` itself without one.
///
/// # Safety
/// `list` is null or has the entry.
#[inline(always)]
unsafe fn listed(list: *const u32, row: usize) -> usize {
    // SAFETY: passed on to the caller.
    if list.is_null() { row } else { unsafe { *list.add(row) as usize } }
}

/// [`Shape`] in registers: `M` rows, of which those from `rows` on repeat the last one and are
/// dropped. With `HINT` it asks for weights [`HINT_AHEAD_BYTES`] ahead: hardware prefetch alone left
/// 10 % of the memory bandwidth unused. Where weights are in a near cache, hints cost 20 %.
#[derive(Clone, Copy)]
struct Accumulate<W, const M: usize, const T: usize, const HINT: bool>(Shape, PhantomData<W>);

impl<W: Weight, const M: usize, const T: usize, const HINT: bool> Kernel for Accumulate<W, M, T, HINT> {
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
                x[m] = shape.x.add(listed(shape.x_rows, row) * shape.x_stride);
                places[m] = shape.acc.add(listed(shape.acc_rows, row) * T * LANES);
                if !shape.fresh {
                    for t in 0..T {
                        acc[m][t] = S::load(places[m].add(t * LANES));
                    }
                }
            }
            let mut w = shape.w.start;
            for k in 0..shape.inputs {
                let mut weights = [S::splat(0.0); T];
                for t in 0..T {
                    if HINT {
                        S::prefetch(w.wrapping_add(t * shape.w.tile_stride + HINT_AHEAD_BYTES));
                    }
                    weights[t] = W::load::<S>(w.add(t * shape.w.tile_stride));
                }
                for m in 0..M {
                    let input = S::splat(*x[m].add(k));
                    for t in 0..T {
                        acc[m][t] = S::fma(input, weights[t], acc[m][t]);
                    }
                }
                w = w.wrapping_add(shape.w.step);
            }
            for m in 0..M.min(shape.rows) {
                for t in 0..T {
                    S::store(places[m].add(t * LANES), acc[m][t]);
                }
            }
        }
    }
}

/// Widens `inputs` inputs of `T` tiles into an f32 panel `[inputs][T][16]`, so that many rows can
/// use it from the first-level cache.
#[derive(Clone, Copy)]
pub(super) struct Widen<W, const T: usize> {
    pub w: Stream,
    pub inputs: usize,
    pub panel: *mut f32,
    pub weight: PhantomData<W>,
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
