//! The one exponential of the CPU backend, used by attention, activations, soft caps
//! and routing, in lanes and tails alike.
//!
//! `exp(x) = 2^n * exp(r)` with `n = round(x / ln 2)` and `r = x - n ln 2` in two steps (Cody and
//! Waite), `exp(r)` by the degree-7 polynomial of Cephes `expf`. Relative error at most 2 units
//! in the last place. Below [`ZERO_BELOW`] the result is exactly 0, above 88.73 it is infinity, NaN
//! stays NaN.

use super::simd::Simd;

/// Arguments below give 0 (the true value is under 2^-124).
const ZERO_BELOW: f32 = -86.0;
/// Arguments above are infinity in any case; clamping keeps the exponent in range.
const CLAMP: f32 = 89.0;
/// Adding it to `|x| < 2^22` rounds to an integer that sits in the low bits.
const ROUND: f32 = 12_582_912.0;
/// Upper part of ln 2: nine bits, so that `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
/// ln 2 - `LN2_HIGH`.
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Polynomial of `(exp(r) - 1 - r) / r²`, highest power first.
const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `exp` of each lane.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
pub(super) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: register operations only; the caller promises the instruction set.
    unsafe {
        // min(limit, x) keeps a NaN of x.
        let clamped = S::min(S::splat(CLAMP), x);
        let rounded = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(rounded, S::splat(ROUND));
        let r = S::fma(n, S::splat(-LN2_HIGH), clamped);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::add(S::fma(S::mul(r, r), p, r), S::splat(1.0));
        // Half of 2^n, then doubled, so that n = 128 (results near f32::MAX) needs no special case.
        let y = S::mul(S::mul(p, S::exponent(rounded)), S::splat(2.0));
        S::zero_below(y, x, S::splat(ZERO_BELOW))
    }
}
