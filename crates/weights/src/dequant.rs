//! Unpacks stored elements: ggml blocks and plain floats to f32, f32 to bf16.
//!
//! Follows the formulas of ggml (`ggml-quants.c`, `dequantize_row_*`) in f32 with the same
//! association, so results are equal to its reference bit for bit. Scalar code over fixed-size
//! arrays, which the compiler vectorises.

use crate::storage::StorageKind;
use half::{bf16, f16};

/// Unpacks whole blocks of `kind` into `out`.
///
/// # Panics
/// When `bytes` and `out` are not the same whole number of blocks, or the kind cannot be read.
pub(crate) fn to_f32(kind: StorageKind, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len() / kind.block_bytes(), out.len() / kind.block_len(), "whole blocks");
    match kind {
        StorageKind::F32 => each(bytes, out, |b: &[u8; 4], o: &mut [f32; 1]| o[0] = f32::from_le_bytes(*b)),
        StorageKind::F16 => each(bytes, out, |b: &[u8; 2], o: &mut [f32; 1]| o[0] = half_at(b, 0)),
        StorageKind::Bf16 => {
            each(bytes, out, |b: &[u8; 2], o: &mut [f32; 1]| o[0] = bf16::from_le_bytes(*b).to_f32())
        }
        StorageKind::Q4_1 => each(bytes, out, q4_1),
        StorageKind::Q5_0 => each(bytes, out, q5_0),
        StorageKind::Q8_0 => each(bytes, out, q8_0),
        StorageKind::Q4K => each(bytes, out, q4_k),
        StorageKind::Q6K => each(bytes, out, q6_k),
        StorageKind::Unsupported(name) => unreachable!("callers refuse {name} by its missing dtype"),
    }
}

/// Appends `values` as little-endian bf16, rounded to nearest even.
pub(crate) fn append_bf16(values: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + 2 * values.len(), 0);
    for (bytes, value) in out[start..].as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *bytes = bf16_bits(*value).to_le_bytes();
    }
}

/// The bf16 nearest to `value`, ties to even; NaN stays a (quiet) NaN. Without branches, so that a
/// loop of it vectorises.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

/// Calls `unpack` for each block of `B` bytes and `N` elements.
fn each<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (block, values) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        unpack(block, values);
    }
}

/// The f16 at byte `at`.
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// `y = d*q + m`; low nibbles are elements 0..16, high ones 16..32.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[4..].iter().enumerate() {
        low[i] = f32::from(q & 15) * d + m;
        high[i] = f32::from(q >> 4) * d + m;
    }
}

/// `y = d*(q - 16)`; the fifth bit of element `i` is bit `i` of the word after the scale.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[6..].iter().enumerate() {
        let bit_low = ((fifth >> i) & 1) << 4;
        let bit_high = ((fifth >> (i + 16)) & 1) << 4;
        low[i] = d * ((u32::from(q & 15) | bit_low) as i32 - 16) as f32;
        high[i] = d * ((u32::from(q >> 4) | bit_high) as i32 - 16) as f32;
    }
}

/// `y = d*q`.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(*q as i8);
    }
}

/// `y = (d*scale)*q - (dmin*min)`: eight groups of 32, whose 6-bit scales and minima share 12 bytes.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    let scale_and_min = |j: usize| {
        let (scale, min) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            let (top_scale, top_min) = (packed[j - 4] >> 6, packed[j] >> 6);
            ((packed[j + 4] & 15) | (top_scale << 4), (packed[j + 4] >> 4) | (top_min << 4))
        };
        (d * f32::from(scale), dmin * f32::from(min))
    };
    let quants = block[16..].as_chunks::<32>().0;
    for (pair, (quants, out)) in quants.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let (d_low, m_low) = scale_and_min(2 * pair);
        let (d_high, m_high) = scale_and_min(2 * pair + 1);
        let (low, high) = out.split_at_mut(32);
        for (i, q) in quants.iter().enumerate() {
            low[i] = d_low * f32::from(q & 15) - m_low;
            high[i] = d_high * f32::from(q >> 4) - m_high;
        }
    }
}

/// `y = (d*scale)*(q - 32)`: two halves of 128; lane `l` of a half holds elements `l`, `l+32`, `l+64`
/// and `l+96`, their upper two bits in one byte.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let lows = block[..128].as_chunks::<64>().0;
    let highs = block[128..192].as_chunks::<32>().0;
    let scales = block[192..208].as_chunks::<8>().0;
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let (low, high) = (&lows[half], &highs[half]);
        let scale = scales[half].map(|s| d * f32::from(s as i8));
        let (first, second) = low.split_at(32);
        for (l, value) in out[..32].iter_mut().enumerate() {
            *value = scale[l / 16] * centred(first[l] & 15, high[l]);
        }
        for (l, value) in out[32..64].iter_mut().enumerate() {
            *value = scale[2 + l / 16] * centred(second[l] & 15, high[l] >> 2);
        }
        for (l, value) in out[64..96].iter_mut().enumerate() {
            *value = scale[4 + l / 16] * centred(first[l] >> 4, high[l] >> 4);
        }
        for (l, value) in out[96..].iter_mut().enumerate() {
            *value = scale[6 + l / 16] * centred(second[l] >> 4, high[l] >> 6);
        }
    }
}

/// A 6-bit number from four low bits and the low two bits of `high`, around 32.
fn centred(low: u8, high: u8) -> f32 {
    f32::from((low | ((high & 3) << 4)) as i8 - 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_like_the_half_crate_everywhere() {
        let steps = (0..=u32::MAX / 997).map(|i| i * 997);
        let ties = (0..=0xffffu32).flat_map(|high| [0x7fff, 0x8000, 0x8001].map(|low| (high << 16) | low));
        for bits in steps.chain(ties) {
            let value = f32::from_bits(bits);
            assert_eq!(bf16_bits(value), bf16::from_f32(value).to_bits(), "{bits:#x}");
        }
    }
}
