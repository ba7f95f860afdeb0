//! The inner loops of the matrix product: accumulate, widen a panel, join leaves, store.
//!
//! **Invariant:** for an output, [`Accumulate`] performs `acc = fma(x[k], w[k], acc)` for ascending
//! `k`, whatever the register shape, so every shape gives the same bits.

use crate::cpu::simd::{Kernel, LANES, Simd};
use std::marker::PhantomData;

/// How a stored weight becomes f32 lanes.
pub(super) trait Weight: Copy {
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
pub(super) struct F32;
/// IEEE half precision.
#[derive(Clone, Copy)]
pub(super) struct F16;
/// The upper half of an f32.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

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

/// Adds the products of `inputs` inputs to the accumulators of `M` rows times `T` tiles.
#[derive(Clone, Copy)]
pub(super) struct Accumulate<W, const M: usize, const T: usize> {
    /// Input `k = 0` of the first row; the others follow at `x_stride` elements. Rows from
    /// `rows` on repeat the last one and their sums are dropped.
    pub x: *const f32,
    pub x_stride: usize,
    /// Rows that exist, `1..=M`.
    pub rows: usize,
    /// `[inputs][16]` elements of the first tile; input `k` is at `k * w_step` bytes, tile `t` at
    /// `t * tile_stride` bytes.
    pub w: *const u8,
    pub w_step: usize,
    pub tile_stride: usize,
    pub inputs: usize,
    /// `[rows][T][16]` accumulators.
    pub acc: *mut f32,
    /// Start from zero instead of from `acc`.
    pub fresh: bool,
    pub weight: PhantomData<W>,
}

impl<W: Weight, const M: usize, const T: usize> Kernel for Accumulate<W, M, T> {
    type Output = ();

    /// # Safety
    /// All pointers are valid for what the fields describe; nobody else touches `acc`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: `x` is read at `row < rows` and `k < inputs`, `w` at `k < inputs`, `tile < T`,
        // and `acc` at `row < rows`, `tile < T`, all valid by the caller's promise.
        unsafe {
            let mut x = [self.x; M];
            let mut acc = [[S::splat(0.0); T]; M];
            for m in 0..M {
                let row = m.min(self.rows - 1);
                x[m] = self.x.add(row * self.x_stride);
                if !self.fresh {
                    for t in 0..T {
                        acc[m][t] = S::load(self.acc.add((row * T + t) * LANES));
                    }
                }
            }
            let mut w = self.w;
            for k in 0..self.inputs {
                let mut weights = [S::splat(0.0); T];
                for t in 0..T {
                    weights[t] = W::load::<S>(w.add(t * self.tile_stride));
                }
                for m in 0..M {
                    let input = S::splat(*x[m].add(k));
                    for t in 0..T {
                        acc[m][t] = S::fma(input, weights[t], acc[m][t]);
                    }
                }
                w = w.wrapping_add(self.w_step);
            }
            for m in 0..M.min(self.rows) {
                for t in 0..T {
                    S::store(self.acc.add((m * T + t) * LANES), acc[m][t]);
                }
            }
        }
    }
}

/// Widens `inputs` inputs of `T` tiles into an f32 panel `[inputs][T][16]`, so that many rows can
/// use it from the first-level cache.
#[derive(Clone, Copy)]
pub(super) struct Widen<W, const T: usize> {
    pub w: *const u8,
    pub tile_stride: usize,
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
                    let v = W::load::<S>(self.w.add(t * self.tile_stride + k * W::ROW_BYTES));
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
