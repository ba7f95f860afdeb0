//! NEON: sixteen lanes as four registers of four, with byte products in one instruction where the machine has it.

use super::{Kernel, LANES, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// How a machine multiplies bytes.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOT: u8>;

/// [`Neon`] with nothing beside NEON: products in 16 bits, added up in 32.
pub(super) const WIDEN: u8 = 0;
/// Four signed products at a time (`dotprod`).
pub(super) const SIGNED: u8 = 1;
/// Four products of unsigned and signed bytes at a time (`i8mm`).
pub(super) const MIXED: u8 = 2;

/// Runs a kernel.
///
/// # Safety
/// The machine has NEON; the kernel's contract holds.
#[target_feature(enable = "neon")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Neon<WIDEN>>() }
}

/// Runs a kernel with `dotprod` enabled.
///
/// # Safety
/// The machine has it; the kernel's contract holds.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn enter_dotprod<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Neon<SIGNED>>() }
}

/// Runs a kernel with `i8mm` enabled.
///
/// # Safety
/// The machine has it; the kernel's contract holds.
#[target_feature(enable = "neon,i8mm")]
pub(super) unsafe fn enter_i8mm<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Neon<MIXED>>() }
}

/// Lane `i` of `acc` plus the products of the signed bytes `4i..4i + 4`. The intrinsic is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_signed(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: an operation on registers, which the function's features include.
    unsafe {
        asm!("sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b", acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// The same with unsigned bytes in `a`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn dot_mixed(mut acc: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: an operation on registers, which the function's features include.
    unsafe {
        asm!("usdot {acc:v}.4s, {a:v}.16b, {b:v}.16b", acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// [`dot_mixed`] by `dotprod`: codes from 128 on are signed bytes once 128 is taken off, and what that lacks is twice 64
/// times the inputs.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_offset(acc: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let signed = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    let lacking = dot_signed(vdupq_n_s32(0), vdupq_n_s8(64), x);
    vaddq_s32(dot_signed(acc, signed, x), vaddq_s32(lacking, lacking))
}

/// [`dot_mixed`] by NEON alone: a product of an unsigned and a signed byte fits 16 bits.
#[inline]
#[target_feature(enable = "neon")]
fn dot_widened(acc: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let wide = |codes: uint8x8_t| vreinterpretq_s16_u16(vmovl_u8(codes));
    let low = vmulq_s16(wide(vget_low_u8(codes)), vmovl_s8(vget_low_s8(x)));
    let high = vmulq_s16(wide(vget_high_u8(codes)), vmovl_s8(vget_high_s8(x)));
    vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
}

/// Four rows of four lanes become columns.
#[inline]
#[target_feature(enable = "neon")]
fn transpose4(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    let even = |a, b| vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    let odd = |a, b| vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    let (even, odd) =
        ([even(rows[0], rows[1]), even(rows[2], rows[3])], [odd(rows[0], rows[1]), odd(rows[2], rows[3])]);
    [
        vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1])),
        vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1])),
        vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1])),
        vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1])),
    ]
}

/// The last two levels of the tree.
#[inline]
#[target_feature(enable = "neon")]
fn tree4(v: float32x4_t) -> f32 {
    let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    vget_lane_f32::<0>(vpadd_f32(v, v))
}

/// `a > b ? a : b`.
#[inline]
#[target_feature(enable = "neon")]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(a, b), a, b)
}

/// Which of the lanes `4 * part..4 * part + 4` are below `n`.
#[inline]
#[target_feature(enable = "neon")]
fn mask(part: usize, n: usize) -> uint32x4_t {
    let lanes = [0, 1, 2, 3].map(|lane| 4 * part as u32 + lane);
    // SAFETY: the array has four elements.
    vcltq_u32(unsafe { vld1q_u32(lanes.as_ptr()) }, vdupq_n_u32(n.min(LANES) as u32))
}

/// The bytes of four integers.
#[inline]
#[target_feature(enable = "neon")]
fn bytes(v: int32x4_t) -> uint8x16_t {
    vreinterpretq_u8_s32(v)
}

/// The value of an expression for each of the four registers, by number. Not a function of a closure, which the compiler
/// would not always take in under the features.
macro_rules! each {
    ($part:ident => $value:expr) => {
        [
            {
                let $part: usize = 0;
                $value
            },
            {
                let $part: usize = 1;
                $value
            },
            {
                let $part: usize = 2;
                $value
            },
            {
                let $part: usize = 3;
                $value
            },
        ]
    };
}

impl<const DOT: u8> Simd for Neon<DOT> {
    type V = [float32x4_t; 4];
    type I = [int32x4_t; 4];

    const ACCUMULATORS: usize = 6;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(x: f32) -> Self::V {
        [vdupq_n_f32(x); 4]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V {
        let mut lanes = [0.0; LANES];
        // SAFETY: valid for `n <= 16` elements by the trait's contract; the array has 16.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min(LANES));
            Self::load(lanes.as_ptr())
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let (low, high) = unsafe { (vld1q_u16(p), vld1q_u16(p.add(8))) };
        let wide = |v| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(v)));
        [
            wide(vget_low_u16(low)),
            wide(vget_high_u16(low)),
            wide(vget_low_u16(high)),
            wide(vget_high_u16(high)),
        ]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let (low, high) = unsafe { (vld1q_u16(p), vld1q_u16(p.add(8))) };
        let wide = |v| vcvt_f32_f16(vreinterpret_f16_u16(v));
        [
            wide(vget_low_u16(low)),
            wide(vget_high_u16(low)),
            wide(vget_low_u16(high)),
            wide(vget_high_u16(high)),
        ]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(p: *mut f32, v: Self::V) {
        for part in 0..4 {
            // SAFETY: valid for 16 elements by the trait's contract.
            unsafe { vst1q_f32(p.add(4 * part), v[part]) };
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize) {
        let mut lanes = [0.0; LANES];
        // SAFETY: valid for `n <= 16` elements by the trait's contract; the array has 16.
        unsafe {
            Self::store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n.min(LANES));
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each!(part => vaddq_f32(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each!(part => vsubq_f32(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each!(part => vmulq_f32(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each!(part => vdivq_f32(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each!(part => vfmaq_f32(c[part], a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        each!(part => larger(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        each!(part => vbslq_f32(vcltq_f32(a[part], b[part]), a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn exponent(v: Self::V) -> Self::V {
        each!(part => {
            let bits = vshlq_n_s32::<23>(vreinterpretq_s32_f32(v[part]));
            vreinterpretq_f32_s32(vaddq_s32(bits, vdupq_n_s32(126 << 23)))
        })
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        each!(part => vbslq_f32(vcltq_f32(x[part], limit[part]), vdupq_n_f32(0.0), v[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn keep_first(v: Self::V, n: usize, fill: Self::V) -> Self::V {
        each!(part => vbslq_f32(mask(part, n), v[part], fill[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum(v: Self::V) -> f32 {
        tree4(vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn largest(v: Self::V) -> f32 {
        let v = larger(larger(v[0], v[2]), larger(v[1], v[3]));
        let (low, high) = (vget_low_f32(v), vget_high_f32(v));
        let v = vbsl_f32(vcgt_f32(low, high), low, high);
        let (first, second) = (vget_lane_f32::<0>(v), vget_lane_f32::<1>(v));
        if first > second { first } else { second }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sums(v: [Self::V; LANES]) -> Self::V {
        let mut sums = [0.0f32; LANES];
        for i in 0..LANES {
            // SAFETY: the machine has NEON by the trait's contract.
            sums[i] = unsafe { Self::sum(v[i]) };
        }
        // SAFETY: the array has 16 elements.
        unsafe { Self::load(sums.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn transpose(v: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut out = v;
        for row in 0..4 {
            for column in 0..4 {
                let rows = [0, 1, 2, 3].map(|i| v[4 * row + i][column]);
                for (i, turned) in transpose4(rows).into_iter().enumerate() {
                    out[4 * column + i][row] = turned;
                }
            }
        }
        out
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a hint, which never faults.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) };
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn prefetch_far(p: *const u8) {
        // SAFETY: a hint, which never faults.
        unsafe { asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) };
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat_i32(x: i32) -> Self::I {
        [vdupq_n_s32(x); 4]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bytes(p: *const u8) -> Self::I {
        // SAFETY: valid for 64 bytes by the trait's contract.
        unsafe {
            let load = |p| vreinterpretq_s32_u8(vld1q_u8(p));
            [load(p), load(p.add(16)), load(p.add(32)), load(p.add(48))]
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_bytes(p: *mut u8, v: Self::I) {
        for part in 0..4 {
            // SAFETY: valid for 64 bytes by the trait's contract.
            unsafe { vst1q_u8(p.add(16 * part), bytes(v[part])) };
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store_low_bytes(p: *mut i8, v: Self::V) {
        let halves = |a, b| {
            let narrow = |v| vmovn_u32(vreinterpretq_u32_f32(v));
            vmovn_u16(vcombine_u16(narrow(a), narrow(b)))
        };
        let low = vcombine_u8(halves(v[0], v[1]), halves(v[2], v[3]));
        // SAFETY: valid for 16 bytes by the trait's contract.
        unsafe { vst1q_u8(p.cast(), low) };
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn field<const RIGHT: i32>(v: Self::I, mask: u8) -> Self::I {
        each!(part => {
            let shifted = vshlq_u8(bytes(v[part]), vdupq_n_s8(-RIGHT as i8));
            vreinterpretq_s32_u8(vandq_u8(shifted, vdupq_n_u8(mask)))
        })
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        each!(part => vorrq_s32(a[part], b[part]))
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn dot<const NARROW: bool>(acc: Self::I, codes: Self::I, x: Self::I) -> Self::I {
        each!(part => {
            let (codes, x) = (bytes(codes[part]), vreinterpretq_s8_s32(x[part]));
            // SAFETY: the functions that enter with a `DOT` are the only way here, and their callers promised its
            // feature.
            unsafe {
                match (DOT, NARROW) {
                    (MIXED, _) => dot_mixed(acc[part], codes, x),
                    (SIGNED, true) => dot_signed(acc[part], vreinterpretq_s8_u8(codes), x),
                    (SIGNED, false) => dot_offset(acc[part], codes, x),
                    _ => dot_widened(acc[part], codes, x),
                }
            }
        })
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn as_floats(v: Self::I) -> Self::V {
        each!(part => vreinterpretq_f32_s32(v[part]))
    }
}
