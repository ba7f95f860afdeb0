//! Elementwise operations: gated activations, scale, soft cap.
//!
//! ```text
//! silu(g)      = g / (1 + exp(-g))
//! gelu_tanh(g) = g / (1 + exp(-2 sqrt(2/pi) * v)), v = fma(g² * g, 0.044715, g)
//! gated        = (act(g) * u) * factor
//! ```
//! The second line is `g/2 * (1 + tanh(sqrt(2/pi) * v))` (Hendrycks & Gimpel 2016) written as a
//! logistic function, which has no cancellation for large negative `g`. The factor is 1, which
//! changes no bit, except for the experts of a mixture, where it is the routing weight.

use super::exp::exp;
use super::pointwise::for_rows;
use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd, load_at, store_at};
use super::tanh::softcap;
use super::tensor::{RowsIn, RowsOut};
use lockstep_core::config::Activation;

/// `2 * sqrt(2 / pi)`.
const GELU_SLOPE: f32 = 1.595_769;
/// Weight of the cube in the tanh form of GELU.
const GELU_CUBE: f32 = 0.044_715;

/// `out = act(gate) * up * factor` of some rows, which lie one after the other in `gate` and in `up`.
#[derive(Clone, Copy)]
pub(super) struct Gated {
    pub activation: Activation,
    pub gate: *const f32,
    pub up: *const f32,
    /// May be `gate` itself.
    pub out: *mut f32,
    /// Elements of a row.
    pub len: usize,
    pub rows: usize,
    /// Elements from one row of `out` to the next.
    pub out_stride: usize,
    pub factor: f32,
}

/// The activation of one vector.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
unsafe fn activate<S: Simd>(activation: Activation, gate: S::V) -> S::V {
    // SAFETY: register operations only; the caller promises the instruction set.
    unsafe {
        let minus_slope = match activation {
            Activation::Silu => S::sub(S::splat(0.0), gate),
            Activation::GeluTanh => {
                let cube = S::mul(S::mul(gate, gate), gate);
                S::mul(S::fma(cube, S::splat(GELU_CUBE), gate), S::splat(-GELU_SLOPE))
            }
        };
        S::div(gate, S::add(S::splat(1.0), exp::<S>(minus_slope)))
    }
}

impl Kernel for Gated {
    type Output = ();

    /// # Safety
    /// All are valid for `len` elements of `rows` rows; `out` may equal `gate` with the same rows but overlaps nothing
    /// otherwise.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.rows {
            // SAFETY: `row < rows`.
            let (gate, up, out) = unsafe {
                let at = row * self.len;
                (self.gate.add(at), self.up.add(at), self.out.add(row * self.out_stride))
            };
            for i in (0..self.len).step_by(LANES) {
                // SAFETY: `i < len`.
                unsafe {
                    let gate = load_at::<S>(gate, i, self.len);
                    let up = load_at::<S>(up, i, self.len);
                    let gated = S::mul(activate::<S>(self.activation, gate), up);
                    store_at::<S>(out, i, self.len, S::mul(gated, S::splat(self.factor)));
                }
            }
        }
    }
}

/// One row changed in place.
#[derive(Clone, Copy)]
struct ChangeRow {
    x: *mut f32,
    len: usize,
    change: Change,
}

/// What happens to each element.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// `x * factor`.
    Scale(f32),
    /// `cap * tanh(x / cap)`.
    Softcap(f32),
}

impl Kernel for ChangeRow {
    type Output = ();

    /// # Safety
    /// `x` is valid for `len` elements and nobody else touches them.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.len).step_by(LANES) {
            // SAFETY: `i < len`.
            unsafe {
                let x = load_at::<S>(self.x, i, self.len);
                let x = match self.change {
                    Change::Scale(factor) => S::mul(x, S::splat(factor)),
                    Change::Softcap(cap) => softcap::<S>(x, cap),
                };
                store_at::<S>(self.x, i, self.len, x);
            }
        }
    }
}

/// `out = act(x[.., ..n]) * x[.., n..]` for every row of `x`, `n` columns of `out`.
pub(super) fn gated(isa: Isa, pool: &ThreadPool, activation: Activation, x: RowsIn<'_>, out: RowsOut<'_>) {
    let len = out.cols;
    assert_eq!(x.cols, 2 * len, "gate and up are as wide as out");
    for_rows(pool, x.data.len() / x.cols.max(1), len, &|row| {
        let (gate, up) = x.row(row).split_at(len);
        let (gate, up, out) = (gate.as_ptr(), up.as_ptr(), out.pointer(row, 0));
        // SAFETY: `len` elements of each; row `row` of `out` belongs to this call alone.
        unsafe { isa.run(Gated { activation, gate, up, out, len, rows: 1, out_stride: len, factor: 1.0 }) };
    });
}

/// Changes every element of the first `rows` rows of `x`.
pub(super) fn change(isa: Isa, pool: &ThreadPool, change: Change, x: RowsOut<'_>, rows: usize) {
    for_rows(pool, rows, x.cols, &|row| {
        // SAFETY: each row belongs to one call alone.
        let part = unsafe { x.part(row, 0, x.cols) };
        // SAFETY: the slice is exclusively borrowed for its length.
        unsafe { isa.run(ChangeRow { x: part.as_mut_ptr(), len: part.len(), change }) };
    });
}
