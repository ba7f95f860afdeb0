//! Blocks of 32 elements, one f16 scale each. Low nibbles are elements 0..16, high ones 16..32.

use super::half_at;

/// The sixteen levels of `IQ4_NL`, from ggml's `kvalues_iq4nl`.
const IQ4_NL_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `y = d*(q - 8)`.
#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[2..].iter().enumerate() {
        low[i] = d * (i32::from(q & 15) - 8) as f32;
        high[i] = d * (i32::from(q >> 4) - 8) as f32;
    }
}

/// `y = d*q + m`.
#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[4..].iter().enumerate() {
        low[i] = f32::from(q & 15) * d + m;
        high[i] = f32::from(q >> 4) * d + m;
    }
}

/// `y = d*(q - 16)`.
#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let quants = five_bits(&block[2..]);
    for (value, q) in out.iter_mut().zip(quants) {
        *value = d * (q - 16) as f32;
    }
}

/// `y = d*q + m`.
#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let quants = five_bits(&block[4..]);
    for (value, q) in out.iter_mut().zip(quants) {
        *value = q as f32 * d + m;
    }
}

/// Thirty-two 5-bit numbers: bit `i` of the word at the start is the fifth bit of element `i`, the
/// nibbles after it are the others.
#[inline(always)]
fn five_bits(packed: &[u8]) -> [i32; 32] {
    let fifth = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    let mut quants = [0; 32];
    let (low, high) = quants.split_at_mut(16);
    for (i, q) in packed[4..20].iter().enumerate() {
        low[i] = (u32::from(q & 15) | ((fifth >> i) & 1) << 4) as i32;
        high[i] = (u32::from(q >> 4) | ((fifth >> (i + 16)) & 1) << 4) as i32;
    }
    quants
}

/// `y = d*q`.
#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(*q as i8);
    }
}

/// `y = d*level(q)`.
#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    // Sixteen products instead of thirty-two, and the look-ups need no conversion.
    let levels = IQ4_NL_LEVELS.map(|level| d * f32::from(level));
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[2..].iter().enumerate() {
        low[i] = levels[usize::from(q & 15)];
        high[i] = levels[usize::from(q >> 4)];
    }
}
