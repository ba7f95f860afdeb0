//! The portable form and the definition of every result.

use super::{LANES, Simd};
use half::{bf16, f16};

/// Sixteen lanes as an array. `f32::mul_add` is an instruction on aarch64 (and a slow library call
/// on x86-64 machines without FMA).
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

/// Applies `f` to each lane.
#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Folds the lanes by the fixed tree.
#[inline(always)]
fn tree(mut v: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            v[i] = f(v[i], v[i + half]);
        }
    }
    v[0]
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

impl Simd for Portable {
    type V = [f32; LANES];
    type I = [i32; LANES];

    const ACCUMULATORS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract; arrays of f32 read unaligned.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V {
        let mut v = [0.0; LANES];
        // SAFETY: valid for `n <= 16` elements by the trait's contract.
        unsafe { std::ptr::copy_nonoverlapping(p, v.as_mut_ptr(), n.min(LANES)) };
        v
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| bf16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: valid for `n <= 16` elements by the trait's contract.
        unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), p, n.min(LANES)) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, larger)
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn exponent(v: Self::V) -> Self::V {
        v.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(126 << 23)))
    }
    #[inline(always)]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn keep_first(v: Self::V, n: usize, fill: Self::V) -> Self::V {
        std::array::from_fn(|i| if i < n { v[i] } else { fill[i] })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        tree(v, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        tree(v, larger)
    }
    #[inline(always)]
    unsafe fn sums(v: [Self::V; LANES]) -> Self::V {
        v.map(|x| tree(x, |a, b| a + b))
    }
    #[inline(always)]
    unsafe fn transpose(v: [Self::V; LANES]) -> [Self::V; LANES] {
        std::array::from_fn(|i| std::array::from_fn(|j| v[j][i]))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::I {
        // SAFETY: valid for 64 bytes by the trait's contract; arrays of bytes read unaligned.
        let lanes = unsafe { p.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        lanes.map(i32::from_le_bytes)
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, v: Self::I) {
        // SAFETY: valid for 64 bytes by the trait's contract; arrays of bytes write unaligned.
        unsafe { p.cast::<[[u8; 4]; LANES]>().write_unaligned(v.map(i32::to_le_bytes)) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(p: *mut i8, v: Self::V) {
        // SAFETY: valid for 16 bytes by the trait's contract.
        unsafe { p.cast::<[i8; LANES]>().write(v.map(|x| x.to_bits() as i8)) }
    }
    #[inline(always)]
    unsafe fn field<const RIGHT: i32>(v: Self::I, mask: u8) -> Self::I {
        let mask = i32::from_le_bytes([mask; 4]);
        v.map(|x| if RIGHT < 0 { x << RIGHT.unsigned_abs() } else { x >> RIGHT.unsigned_abs() } & mask)
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn dot<const NARROW: bool>(acc: Self::I, codes: Self::I, x: Self::I) -> Self::I {
        std::array::from_fn(|i| {
            let (codes, x) = (codes[i].to_le_bytes(), x[i].to_le_bytes());
            (0..4).fold(acc[i], |sum, j| sum.wrapping_add(i32::from(codes[j]) * i32::from(x[j] as i8)))
        })
    }
    #[inline(always)]
    unsafe fn as_floats(v: Self::I) -> Self::V {
        v.map(|x| f32::from_bits(x as u32))
    }
}
