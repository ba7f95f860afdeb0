//! Blocks of 32 elements, one f16 scale each. Low nibbles are elements 0..16, high ones 16..32.

use super::half_at;

/// The sixteen levels of `IQ4_NL`, from ggml's `kvalues_iq4nl`.
pub(super) const IQ4_NL_LEVELS: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// `y = d*(q - 8)`.
#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in out.iter_mut().zip(four_bits(&block[2..])) {
        *value = d * (q - 8) as f32;
    }
}

/// `y = d*q + m`.
#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (value, q) in out.iter_mut().zip(four_bits(&block[4..])) {
        *value = q as f32 * d + m;
    }
}

/// Thirty-two 4-bit numbers, apart from their use: so both loops vectorise.
#[inline(always)]
pub(super) fn four_bits(packed: &[u8]) -> [i32; 32] {
    let mut quants = [0; 32];
    let (low, high) = quants.split_at_mut(16);
    for (i, q) in packed[..16].iter().enumerate() {
        low[i] = i32::from(q & 15);
        high[i] = i32::from(q >> 4);
    }
    quants
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
pub(super) fn five_bits(packed: &[u8]) -> [i32; 32] {
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
    let mut quants = [0i32; 32];
    for (wide, q) in quants.iter_mut().zip(&block[2..]) {
        *wide = i32::from(*q as i8);
    }
    for (value, q) in out.iter_mut().zip(quants) {
        *value = d * q as f32;
    }
}

/// `y = d*level(q)`.
#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    // Sixteen products instead of thirty-two, and the look-ups need no conversion.
    let mut levels = [0.0; 16];
    for (product, level) in levels.iter_mut().zip(IQ4_NL_LEVELS) {
        *product = d * level;
    }
    let (low, high) = out.split_at_mut(16);
    for (i, q) in block[2..].iter().enumerate() {
        low[i] = levels[usize::from(q & 15)];
        high[i] = levels[usize::from(q >> 4)];
    }
}
