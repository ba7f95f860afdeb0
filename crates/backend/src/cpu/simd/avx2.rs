//! AVX2 + FMA + F16C: sixteen lanes as two registers of eight.

use super::{Kernel, LANES, Simd};
use std::arch::x86_64::*;

/// Lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Runs a kernel with the features enabled.
///
/// # Safety
/// The machine has the features; the kernel's contract holds.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Avx2>() }
}

/// Which of the lanes `first..first+8` are below `n`, as a mask for `maskload` and `blendv`.
#[inline]
#[target_feature(enable = "avx2")]
fn mask(first: usize, n: usize) -> __m256i {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let count = n.saturating_sub(first).min(8);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lane)
}

/// The last three levels of the tree; level one is the sum of the two registers.
#[inline]
#[target_feature(enable = "avx2")]
fn tree8(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// The products of unsigned bytes below 64 and signed bytes, added up by fours.
#[inline]
#[target_feature(enable = "avx2")]
fn dot_narrow(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    let pairs = _mm256_maddubs_epi16(codes, x);
    _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// The same for all bytes: sums of two products of nibbles fit 16 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn dot_wide(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    let low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(15));
    let high = dot_narrow(_mm256_setzero_si256(), high, x);
    dot_narrow(_mm256_add_epi32(acc, _mm256_slli_epi32::<4>(high)), low, x)
}

impl Simd for Avx2 {
    type V = (__m256, __m256);
    type I = (__m256i, __m256i);

    const ACCUMULATORS: usize = 6;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn splat(x: f32) -> Self::V {
        (_mm256_set1_ps(x), _mm256_set1_ps(x))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V {
        // SAFETY: the masks touch only the first `n` elements, valid by the trait's contract.
        unsafe { (_mm256_maskload_ps(p, mask(0, n)), _mm256_maskload_ps(p.wrapping_add(8), mask(8, n))) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let (lo, hi) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        (
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(lo))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(hi))),
        )
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let (lo, hi) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        (_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the masks touch only the first `n` elements, valid by the trait's contract.
        unsafe {
            _mm256_maskstore_ps(p, mask(0, n), v.0);
            _mm256_maskstore_ps(p.wrapping_add(8), mask(8, n), v.1);
        }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        (_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn exponent(v: Self::V) -> Self::V {
        let bias = _mm256_set1_epi32(126 << 23);
        (
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<23>(_mm256_castps_si256(v.0)), bias)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<23>(_mm256_castps_si256(v.1)), bias)),
        )
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        (
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x.0, limit.0), v.0),
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x.1, limit.1), v.1),
        )
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn keep_first(v: Self::V, n: usize, fill: Self::V) -> Self::V {
        (
            _mm256_blendv_ps(fill.0, v.0, _mm256_castsi256_ps(mask(0, n))),
            _mm256_blendv_ps(fill.1, v.1, _mm256_castsi256_ps(mask(8, n))),
        )
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sum(v: Self::V) -> f32 {
        tree8(_mm256_add_ps(v.0, v.1))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn largest(v: Self::V) -> f32 {
        let v = _mm256_max_ps(v.0, v.1);
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(v: [Self::V; LANES]) -> Self::V {
        let mut sums = [0.0f32; LANES];
        for i in 0..LANES {
            sums[i] = tree8(_mm256_add_ps(v[i].0, v[i].1));
        }
        // SAFETY: the array has 16 elements.
        unsafe { Self::load(sums.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn transpose(v: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut lanes = [[0.0f32; LANES]; LANES];
        for i in 0..LANES {
            // SAFETY: each row has 16 elements.
            unsafe { Self::store(lanes[i].as_mut_ptr(), v[i]) };
        }
        let mut out = v;
        for i in 0..LANES {
            let mut column = [0.0f32; LANES];
            for j in 0..LANES {
                column[j] = lanes[j][i];
            }
            // SAFETY: the column has 16 elements.
            out[i] = unsafe { Self::load(column.as_ptr()) };
        }
        out
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast())
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn prefetch_far(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(p.cast())
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat_i32(x: i32) -> Self::I {
        (_mm256_set1_epi32(x), _mm256_set1_epi32(x))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_bytes(p: *const u8) -> Self::I {
        // SAFETY: valid for 64 bytes by the trait's contract.
        unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store_bytes(p: *mut u8, v: Self::I) {
        // SAFETY: valid for 64 bytes by the trait's contract.
        unsafe {
            _mm256_storeu_si256(p.cast(), v.0);
            _mm256_storeu_si256(p.add(32).cast(), v.1);
        }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store_low_bytes(p: *mut i8, v: Self::V) {
        // The lowest bytes of four lanes become the first word of each half.
        let low = _mm256_setr_epi8(
            0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1,
            -1, -1, -1, -1, -1, -1,
        );
        for (i, half) in [v.0, v.1].into_iter().enumerate() {
            let words = _mm256_shuffle_epi8(_mm256_castps_si256(half), low);
            let words = [_mm256_extract_epi32::<0>(words), _mm256_extract_epi32::<4>(words)];
            // SAFETY: valid for 16 bytes by the trait's contract.
            unsafe { p.add(8 * i).cast::<[i32; 2]>().write_unaligned(words) };
        }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn field<const RIGHT: i32>(v: Self::I, mask: u8) -> Self::I {
        let (count, mask) = (_mm_cvtsi32_si128(RIGHT.abs()), _mm256_set1_epi8(mask as i8));
        if RIGHT < 0 {
            let shifted = (_mm256_sll_epi16(v.0, count), _mm256_sll_epi16(v.1, count));
            return (_mm256_and_si256(shifted.0, mask), _mm256_and_si256(shifted.1, mask));
        }
        let shifted = (_mm256_srl_epi16(v.0, count), _mm256_srl_epi16(v.1, count));
        (_mm256_and_si256(shifted.0, mask), _mm256_and_si256(shifted.1, mask))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        (_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot<const NARROW: bool>(acc: Self::I, codes: Self::I, x: Self::I) -> Self::I {
        if NARROW {
            return (dot_narrow(acc.0, codes.0, x.0), dot_narrow(acc.1, codes.1, x.1));
        }
        (dot_wide(acc.0, codes.0, x.0), dot_wide(acc.1, codes.1, x.1))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn as_floats(v: Self::I) -> Self::V {
        (_mm256_castsi256_ps(v.0), _mm256_castsi256_ps(v.1))
    }
}
