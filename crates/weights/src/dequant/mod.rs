//! Unpacks stored elements: ggml blocks and plain floats to f32 or bf16, eight-bit floats to f32.
//!
//! Follows the formulas of ggml (`ggml-quants.c`, `dequantize_row_*`) in f32 with the same
//! association, so results are equal to its reference bit for bit. [`blocks`] has the formats of
//! 32 elements, [`super_blocks`] those of 256, [`float8`] the eight-bit floats; [`codes`] leaves blocks as small integers with scales.
//!
//! Everything is scalar code in loops over fixed-size arrays, which the compiler vectorises; on
//! x86-64 the same code is compiled a second time for AVX2. Hot loops call neither closures nor
//! `array::map`: what is not inlined is compiled without AVX2. **Invariant:** both give the same
//! bits, because Rust never contracts or reorders float operations.

mod blocks;
pub(crate) mod codes;
pub(crate) mod float8;
mod super_blocks;

use crate::storage::StorageKind;
use half::bf16;
use std::ops::Range;

/// Elements that are unpacked to f32 before they are rounded: a multiple of every block, and small
/// enough for the first-level cache.
const CHUNK: usize = 2048;

/// Unpacks whole blocks of `kind` into `out`.
///
/// # Panics
/// When `bytes` and `out` are not the same whole number of blocks, or the kind is not a sequence of
/// blocks that can be read.
pub(crate) fn to_f32(kind: StorageKind, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len() / kind.block_bytes(), out.len() / kind.block_len(), "whole blocks");
    unpack(kind, bytes, out);
}

/// A loop that is worth compiling for wider vectors.
pub(crate) trait Vectorised {
    /// Does the work; `#[inline(always)]` in every implementation, as is all that it calls.
    fn run(self);
}

/// Runs `work`, compiled for AVX2 where the processor has it.
pub(crate) fn vectorise<V: Vectorised>(work: V) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn avx2<V: Vectorised>(work: V) {
            work.run();
        }
        // SAFETY: the processor has AVX2, the only feature that the function asks for.
        unsafe { avx2(work) };
        return;
    }
    work.run();
}

/// Unpacks blocks of a quantised `kind` and appends the elements `cut` of them as little-endian
/// bf16, rounded to nearest even.
///
/// # Panics
/// When `bytes` are not whole blocks of `kind` that hold `cut`.
pub(crate) fn append_bf16(kind: StorageKind, bytes: &[u8], cut: Range<usize>, out: &mut Vec<u8>) {
    let end = out.len() + 2 * cut.len();
    vectorise(AppendBf16 { kind, bytes, cut, out });
    assert_eq!(out.len(), end, "the blocks hold the cut");
}

/// [`append_bf16`], chunk by chunk.
struct AppendBf16<'a> {
    kind: StorageKind,
    bytes: &'a [u8],
    cut: Range<usize>,
    out: &'a mut Vec<u8>,
}

impl Vectorised for AppendBf16<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { kind, bytes, cut, out } = self;
        let chunk_bytes = CHUNK / kind.block_len() * kind.block_bytes();
        let mut unpacked = [0.0f32; CHUNK];
        for (index, bytes) in bytes.chunks(chunk_bytes).enumerate() {
            let first = index * CHUNK;
            let len = bytes.len() / kind.block_bytes() * kind.block_len();
            unpack(kind, bytes, &mut unpacked[..len]);
            let from = cut.start.saturating_sub(first).min(len);
            let to = cut.end.saturating_sub(first).min(len);
            append_rounded(&unpacked[from..to], out);
        }
    }
}

/// Calls a function of `(&[u8; B], &mut [f32; N])` for each block of `B` bytes and `N` elements.
///
/// A macro, because a function that is passed as a value is compiled on its own, without the wider
/// vectors of the caller.
macro_rules! each {
    ($bytes:expr, $out:expr, $unpack:path) => {
        for (block, values) in $bytes.as_chunks().0.iter().zip($out.as_chunks_mut().0) {
            $unpack(block, values);
        }
    };
}

#[inline(always)]
fn unpack(kind: StorageKind, bytes: &[u8], out: &mut [f32]) {
    match kind {
        StorageKind::F32 => each!(bytes, out, plain_f32),
        StorageKind::F16 => each!(bytes, out, plain_f16),
        StorageKind::Bf16 => each!(bytes, out, plain_bf16),
        StorageKind::Q4_0 => each!(bytes, out, blocks::q4_0),
        StorageKind::Q4_1 => each!(bytes, out, blocks::q4_1),
        StorageKind::Q5_0 => each!(bytes, out, blocks::q5_0),
        StorageKind::Q5_1 => each!(bytes, out, blocks::q5_1),
        StorageKind::Q8_0 => each!(bytes, out, blocks::q8_0),
        StorageKind::Iq4Nl => each!(bytes, out, blocks::iq4_nl),
        StorageKind::Q2K => each!(bytes, out, super_blocks::q2_k),
        StorageKind::Q3K => each!(bytes, out, super_blocks::q3_k),
        StorageKind::Q4K => each!(bytes, out, super_blocks::q4_k),
        StorageKind::Q5K => each!(bytes, out, super_blocks::q5_k),
        StorageKind::Q6K => each!(bytes, out, super_blocks::q6_k),
        StorageKind::Fp8E4m3 | StorageKind::Fp8E5m2 | StorageKind::Gptq4 | StorageKind::Awq4 => {
            unreachable!("{kind} has scales in other tensors and readers of its own")
        }
        StorageKind::Unsupported(name) => unreachable!("callers refuse {name} by its missing dtype"),
    }
}

#[inline(always)]
fn plain_f32(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

#[inline(always)]
fn plain_f16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = half_at(bytes, 0);
}

#[inline(always)]
fn plain_bf16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16::from_le_bytes(*bytes).to_f32();
}

/// Appends `values` as little-endian bf16. For a few thousand at a time: they are written twice.
#[inline(always)]
fn append_rounded(values: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + 2 * values.len(), 0);
    for (bytes, value) in out[start..].as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *bytes = (bf16_bits(*value) as u16).to_le_bytes();
    }
}

/// The bits of the bf16 nearest to `value`, ties to even; NaN stays a (quiet) NaN. Without branches
/// and as wide as its argument, so that a loop of it vectorises.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    if value.is_nan() { quiet } else { rounded }
}

/// The value of the f16 with these bits, exactly; NaN stays a NaN.
///
/// Inline, unlike the `half` crate's, which asks the processor for its features at every call.
#[inline(always)]
pub(crate) fn half_to_f32(bits: u16) -> f32 {
    let (sign, exponent, rest) = (u32::from(bits & 0x8000) << 16, bits >> 10 & 31, u32::from(bits & 0x7fff));
    let magnitude = match exponent {
        // A subnormal is its mantissa times 2^-24: made as 2^-14 + m*2^-24, minus 2^-14.
        0 => (f32::from_bits((rest << 13) + (113 << 23)) - f32::from_bits(113 << 23)).to_bits(),
        31 => (rest << 13) | 0x7f80_0000 | if rest == 0x7c00 { 0 } else { 0x40_0000 },
        _ => (rest << 13) + (112 << 23),
    };
    f32::from_bits(sign | magnitude)
}

/// Element `index` of plain floats.
///
/// # Panics
/// When `kind` is not one, or there is no such element.
#[inline(always)]
pub(crate) fn plain(kind: StorageKind, bytes: &[u8], index: usize) -> f32 {
    match kind {
        StorageKind::F32 => f32::from_le_bytes(bytes.as_chunks::<4>().0[index]),
        StorageKind::F16 => half_to_f32(u16::from_le_bytes(bytes.as_chunks::<2>().0[index])),
        StorageKind::Bf16 => bf16::from_le_bytes(bytes.as_chunks::<2>().0[index]).to_f32(),
        other => unreachable!("{other} is not a plain float"),
    }
}

/// The f16 at byte `at`.
#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn bf16_rounds_like_the_half_crate_everywhere() {
        let steps = (0..=u32::MAX / 997).map(|i| i * 997);
        let ties = (0..=0xffffu32).flat_map(|high| [0x7fff, 0x8000, 0x8001].map(|low| (high << 16) | low));
        for bits in steps.chain(ties) {
            let value = f32::from_bits(bits);
            assert_eq!(bf16_bits(value) as u16, bf16::from_f32(value).to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn every_f16_has_the_value_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            assert_eq!(half_to_f32(bits).to_bits(), f16::from_bits(bits).to_f32().to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn rounding_in_chunks_is_rounding_the_whole() {
        let kind = StorageKind::Q8_0;
        let blocks = 2 * CHUNK / 32 + 3;
        let bytes: Vec<u8> = (0..blocks)
            .flat_map(|b| {
                f16::from_f32(0.01 * (b + 1) as f32)
                    .to_le_bytes()
                    .into_iter()
                    .chain((0..32).map(move |i| (b * 7 + i * 5) as u8))
            })
            .collect();
        let mut whole = vec![0.0; blocks * 32];
        to_f32(kind, &bytes, &mut whole);
        for cut in
            [0..whole.len(), 5..CHUNK, CHUNK - 1..CHUNK + 1, CHUNK..CHUNK, 2 * CHUNK + 7..whole.len() - 1]
        {
            let mut out = vec![9];
            append_bf16(kind, &bytes, cut.clone(), &mut out);
            let expected = whole[cut].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
            assert_eq!(out, [9].into_iter().chain(expected).collect::<Vec<u8>>());
        }
    }
}
