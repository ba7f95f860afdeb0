//! AVX-512 (F, BW, DQ, VL): sixteen lanes are one register.

use super::{Kernel, LANES, Simd};
use std::arch::x86_64::*;

/// One `zmm` register. `VNNI`: the machine multiplies bytes in one instruction.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const VNNI: bool>;

/// Runs a kernel with the features enabled.
///
/// # Safety
/// The machine has the features; the kernel's contract holds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Avx512<false>>() }
}

/// Runs a kernel with the features and VNNI enabled.
///
/// # Safety
/// The machine has them; the kernel's contract holds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn enter_vnni<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Avx512<true>>() }
}

/// The products of unsigned and signed bytes, added up by fours.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot_vnni(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
    _mm512_dpbusd_epi32(acc, codes, x)
}

/// [`dot_vnni`] for codes below 64: sums of two products fit 16 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn dot_narrow(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
    let pairs = _mm512_maddubs_epi16(codes, x);
    _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
}

/// The lanes below `n`.
#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    if n >= LANES { !0 } else { (1 << n) - 1 }
}

/// Swaps the lanes `i` and `i ^ 8`, then `^ 4`, `^ 2`, `^ 1`, by level; the first lane of the
/// folded register is the tree's result because every level combines `i` with `i + half`.
#[inline]
#[target_feature(enable = "avx512f")]
fn swaps(v: __m512, level: usize) -> __m512 {
    match level {
        0 => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
        1 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
        2 => _mm512_permute_ps::<0b01_00_11_10>(v),
        _ => _mm512_permute_ps::<0b10_11_00_01>(v),
    }
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    type I = __m512i;

    const ACCUMULATORS: usize = 24;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(x: f32) -> Self::V {
        _mm512_set1_ps(x)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V {
        // SAFETY: the mask touches only the first `n` elements, valid by the trait's contract.
        unsafe { _mm512_maskz_loadu_ps(mask(n), p) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        let bits = unsafe { _mm256_loadu_si256(p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for 16 elements by the trait's contract.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: the mask touches only the first `n` elements, valid by the trait's contract.
        unsafe { _mm512_mask_storeu_ps(p, mask(n), v) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        _mm512_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        _mm512_sub_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        _mm512_div_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        _mm512_max_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        _mm512_min_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn exponent(v: Self::V) -> Self::V {
        let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(v));
        _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(126 << 23)))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn zero_below(v: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit);
        _mm512_maskz_mov_ps(!below, v)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn keep_first(v: Self::V, n: usize, fill: Self::V) -> Self::V {
        _mm512_mask_mov_ps(fill, mask(n), v)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sum(v: Self::V) -> f32 {
        let mut v = v;
        for level in 0..4 {
            v = _mm512_add_ps(v, swaps(v, level));
        }
        _mm512_cvtss_f32(v)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn largest(v: Self::V) -> f32 {
        let mut v = v;
        for level in 0..4 {
            v = _mm512_max_ps(v, swaps(v, level));
        }
        _mm512_cvtss_f32(v)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sums(v: [Self::V; LANES]) -> Self::V {
        // Each level folds two registers into one, so 16 sums cost 15 additions and 30 shuffles.
        // The pairing puts the sum of v[i] in lane i: level one joins i and i+8, then i+4, ...
        let mut a = [_mm512_setzero_ps(); 8];
        for i in 0..8 {
            let (x, y) = (v[i], v[i + 8]);
            a[i] = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(x, y),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(x, y),
            );
        }
        let mut b = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let (x, y) = (a[i], a[i + 4]);
            b[i] = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(x, y),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(x, y),
            );
        }
        // Chunks (four lanes) of b[i] now belong to v[i], v[i+8], v[i+4], v[i+12].
        let fold2 = |x, y| {
            let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
            _mm512_add_ps(
                _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)),
            )
        };
        let (c0, c1) = (fold2(b[0], b[2]), fold2(b[1], b[3]));
        let d = _mm512_add_ps(
            _mm512_shuffle_ps::<0b10_00_10_00>(c0, c1),
            _mm512_shuffle_ps::<0b11_01_11_01>(c0, c1),
        );
        // Within a chunk the lanes are v[0], v[2], v[1], v[3] of the chunk's own offset.
        let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
        _mm512_permutexvar_ps(order, d)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose(v: [Self::V; LANES]) -> [Self::V; LANES] {
        // Four rows at a time: afterwards chunk c (four lanes) of row k holds column 4c + k of
        // these four rows.
        let mut a = v;
        for g in (0..LANES).step_by(4) {
            let (lo01, hi01) = (_mm512_unpacklo_ps(v[g], v[g + 1]), _mm512_unpackhi_ps(v[g], v[g + 1]));
            let (lo23, hi23) =
                (_mm512_unpacklo_ps(v[g + 2], v[g + 3]), _mm512_unpackhi_ps(v[g + 2], v[g + 3]));
            let pd = |x| _mm512_castps_pd(x);
            a[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(lo01), pd(lo23)));
            a[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(lo01), pd(lo23)));
            a[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(hi01), pd(hi23)));
            a[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(hi01), pd(hi23)));
        }
        // Then the chunks of each k change places with the four groups.
        let mut out = a;
        for k in 0..4 {
            let lo01 = _mm512_shuffle_f32x4::<0b01_00_01_00>(a[k], a[k + 4]);
            let hi01 = _mm512_shuffle_f32x4::<0b11_10_11_10>(a[k], a[k + 4]);
            let lo23 = _mm512_shuffle_f32x4::<0b01_00_01_00>(a[k + 8], a[k + 12]);
            let hi23 = _mm512_shuffle_f32x4::<0b11_10_11_10>(a[k + 8], a[k + 12]);
            out[k] = _mm512_shuffle_f32x4::<0b10_00_10_00>(lo01, lo23);
            out[k + 4] = _mm512_shuffle_f32x4::<0b11_01_11_01>(lo01, lo23);
            out[k + 8] = _mm512_shuffle_f32x4::<0b10_00_10_00>(hi01, hi23);
            out[k + 12] = _mm512_shuffle_f32x4::<0b11_01_11_01>(hi01, hi23);
        }
        out
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast())
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn prefetch_far(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(p.cast())
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat_i32(x: i32) -> Self::I {
        _mm512_set1_epi32(x)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bytes(p: *const u8) -> Self::I {
        // SAFETY: valid for 64 bytes by the trait's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_bytes(p: *mut u8, v: Self::I) {
        // SAFETY: valid for 64 bytes by the trait's contract.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_low_bytes(p: *mut i8, v: Self::V) {
        // SAFETY: valid for 16 bytes by the trait's contract.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn field<const RIGHT: i32>(v: Self::I, mask: u8) -> Self::I {
        let count = _mm_cvtsi32_si128(RIGHT.abs());
        let shifted = if RIGHT < 0 { _mm512_sll_epi16(v, count) } else { _mm512_srl_epi16(v, count) };
        _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        _mm512_or_si512(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn dot<const NARROW: bool>(acc: Self::I, codes: Self::I, x: Self::I) -> Self::I {
        if VNNI {
            // SAFETY: `enter_vnni` is the only way here, and its caller promised VNNI.
            return unsafe { dot_vnni(acc, codes, x) };
        }
        if NARROW {
            return dot_narrow(acc, codes, x);
        }
        let low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15));
        let high = dot_narrow(_mm512_setzero_si512(), high, x);
        dot_narrow(_mm512_add_epi32(acc, _mm512_slli_epi32::<4>(high)), low, x)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn as_floats(v: Self::I) -> Self::V {
        _mm512_castsi512_ps(v)
    }
}
