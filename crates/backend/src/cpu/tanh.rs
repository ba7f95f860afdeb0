//! The one hyperbolic tangent of the CPU backend, and the soft cap made of it.
//!
//! ```text
//! |x| < 0.625: tanh|x| = |x| + |x|³ * P(x²)            degree-4 polynomial of Cephes tanhf
//! otherwise:   tanh|x| = 1 - 2 / (exp(2|x|) + 1)
//! softcap(x, c) = c * tanh(x / c)
//! ```
//! The sign is put back last, so the function is odd to the bit. Near 0, where most attention scores
//! are after division by the cap, the polynomial keeps full relative precision; the form with exp
//! alone would lose it to cancellation. NaN stays NaN.

use super::exp::exp;
use super::simd::Simd;

/// Arguments below use the polynomial.
const NEAR: f32 = 0.625;
/// Polynomial of `(tanh(x) - x) / x³` in `x²`, highest power first.
const POLYNOMIAL: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

/// `tanh` of each lane.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
pub(super) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: register operations only; the caller promises the instruction set.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        let size = S::max(x, S::sub(zero, x));
        let limit = S::splat(NEAR);
        // Clamped, so that what is not taken is finite and drops out as an exact zero.
        let small = S::min(size, limit);
        let square = S::mul(small, small);
        let mut p = S::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = S::fma(p, square, S::splat(*c));
        }
        let near = S::fma(S::mul(square, small), p, small);
        let quotient = S::div(S::splat(2.0), S::add(exp::<S>(S::add(size, size)), one));
        let far = S::zero_below(S::sub(one, quotient), size, limit);
        let result = S::add(far, S::sub(near, S::zero_below(near, size, limit)));
        let positive = S::zero_below(result, x, zero);
        S::sub(positive, S::sub(result, positive))
    }
}

/// `cap * tanh(x / cap)` of each lane.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
pub(super) unsafe fn softcap<S: Simd>(x: S::V, cap: f32) -> S::V {
    // SAFETY: register operations only; the caller promises the instruction set.
    unsafe {
        let cap = S::splat(cap);
        S::mul(cap, tanh::<S>(S::div(x, cap)))
    }
}
