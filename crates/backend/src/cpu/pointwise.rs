//! Row-wise operations: RMSNorm and the residual add.
//!
//! ```text
//! rms_norm: s = sum of x[k]², lane k mod 16 by fma from 0, lanes by the fixed tree
//!           out[k] = (x[k] * (1 / sqrt(s / n + eps))) * weight[k]
//! ```
//! Each row depends on nothing but itself, so results do not depend on the batch or the threads.

use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd, load_at, store_at};
use super::tensor::{RowsIn, RowsOut};

/// Elements below which the caller works alone.
const PARALLEL_LEN_MIN: usize = 16 << 10;

/// Calls `row` for every row in `0..rows`, on the pool when there is enough to do. `cols` is the
/// work of a row in elements.
pub(super) fn for_rows(pool: &ThreadPool, rows: usize, cols: usize, row: &(dyn Fn(usize) + Sync)) {
    let chunks = if rows * cols < PARALLEL_LEN_MIN { 1 } else { 4 * pool.threads() }.min(rows);
    pool.run(chunks, &|chunk, _| {
        for i in chunk * rows / chunks..(chunk + 1) * rows / chunks {
            row(i);
        }
    });
}

/// RMSNorm of one row (or one head), possibly in place.
#[derive(Clone, Copy)]
pub(super) struct RmsNorm {
    pub x: *const f32,
    pub weight: *const f32,
    pub out: *mut f32,
    pub len: usize,
    pub eps: f32,
}

impl Kernel for RmsNorm {
    type Output = ();

    /// # Safety
    /// All three are valid for `len` elements; `out` may equal `x` but not overlap it otherwise.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: `i < len` throughout.
        unsafe {
            let mut squares = S::splat(0.0);
            for i in (0..self.len).step_by(LANES) {
                let x = load_at::<S>(self.x, i, self.len);
                squares = S::fma(x, x, squares);
            }
            let mean = S::sum(squares) / self.len as f32;
            let scale = S::splat(1.0 / (mean + self.eps).sqrt());
            for i in (0..self.len).step_by(LANES) {
                let x = load_at::<S>(self.x, i, self.len);
                let w = load_at::<S>(self.weight, i, self.len);
                store_at::<S>(self.out, i, self.len, S::mul(S::mul(x, scale), w));
            }
        }
    }
}

/// `residual += x (+ bias)` of one row: the bias is added to `x` first.
#[derive(Clone, Copy)]
struct AddRow {
    residual: *mut f32,
    x: *const f32,
    /// `[len]`, or null.
    bias: *const f32,
    len: usize,
}

impl Kernel for AddRow {
    type Output = ();

    /// # Safety
    /// All are valid for `len` elements and do not overlap; `bias` may be null.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.len).step_by(LANES) {
            // SAFETY: `i < len`.
            unsafe {
                let mut x = load_at::<S>(self.x, i, self.len);
                if !self.bias.is_null() {
                    x = S::add(x, load_at::<S>(self.bias, i, self.len));
                }
                let sum = S::add(load_at::<S>(self.residual, i, self.len), x);
                store_at::<S>(self.residual, i, self.len, sum);
            }
        }
    }
}

/// RMSNorm of every row of `x`.
pub(super) fn rms_norm(
    isa: Isa,
    pool: &ThreadPool,
    x: RowsIn<'_>,
    weight: &[f32],
    eps: f32,
    out: RowsOut<'_>,
) {
    let (rows, cols) = (x.data.len() / x.cols.max(1), x.cols);
    assert!(weight.len() == cols && out.cols == cols, "x, weight and out have the same columns");
    for_rows(pool, rows, cols, &|row| {
        let x = x.row(row).as_ptr();
        let norm = RmsNorm { x, weight: weight.as_ptr(), out: out.pointer(row, 0), len: cols, eps };
        // SAFETY: one row of each, and row `row` of `out` belongs to this call alone.
        unsafe { isa.run(norm) };
    });
}

/// The local part of `reduce_add_norm`: `sum = x + bias`, with `post_weight` `sum = rms_norm(sum)`,
/// then `residual += sum`, `out = rms_norm(residual)`.
pub(super) struct AddNorm<'a> {
    /// Overwritten when there is a `post_weight`.
    pub x: RowsOut<'a>,
    pub rows: usize,
    pub bias: Option<&'a [f32]>,
    pub post_weight: Option<&'a [f32]>,
    pub weight: &'a [f32],
    pub eps: f32,
    pub residual: RowsOut<'a>,
    pub out: RowsOut<'a>,
}

impl AddNorm<'_> {
    /// The first `rows` rows.
    pub(super) fn run(&self, isa: Isa, pool: &ThreadPool) {
        let len = self.x.cols;
        let vector = |v: Option<&[f32]>| v.map_or(len, <[f32]>::len);
        let vectors = [self.weight.len(), vector(self.bias), vector(self.post_weight)];
        assert_eq!(vectors, [len; 3], "all vectors have the columns of x");
        assert_eq!([self.residual.cols, self.out.cols], [len; 2], "all operands have the columns of x");
        for_rows(pool, self.rows, len, &|row| self.row(isa, row));
    }

    fn row(&self, isa: Isa, row: usize) {
        let (len, eps) = (self.x.cols, self.eps);
        let (x, residual, out) =
            (self.x.pointer(row, 0), self.residual.pointer(row, 0), self.out.pointer(row, 0));
        let mut bias = self.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        if let Some(post) = self.post_weight {
            if !bias.is_null() {
                // SAFETY: row `row` of `x` belongs to this call alone, and the bias is as long.
                unsafe { isa.run(AddRow { residual: x, x: bias, bias: std::ptr::null(), len }) };
                bias = std::ptr::null();
            }
            // SAFETY: as above, for the norm weight; in place.
            unsafe { isa.run(RmsNorm { x, weight: post.as_ptr(), out: x, len, eps }) };
        }
        let norm = RmsNorm { x: residual, weight: self.weight.as_ptr(), out, len, eps };
        // SAFETY: one row of each operand; row `row` of each belongs to this call alone.
        unsafe {
            isa.run(AddRow { residual, x, bias, len });
            isa.run(norm);
        }
    }
}
