//! Blocks as codes with scales ([`CodeLayout`]), for kernels that multiply with codes.
//!
//! An element is `scale * code + base`, where the scale (and base) of each half group of 16 is what
//! [`super::unpack`] multiplies (and adds), rounded to f16: exact for blocks of 32 elements, whose scales are f16,
//! and within 2^-11 for those of 256, whose scales are products of an f16 and a small integer.

use super::blocks::{IQ4_NL_LEVELS, five_bits, four_bits};
use super::half_at;
use super::super_blocks::scale_and_minimum;
use crate::storage::StorageKind;
use half::f16;
use lockstep_core::{CODE_GROUP, CodeLayout, QuantizeFormat};
use std::ops::Range;

/// Thirty-two elements: of each half, the scale, the base and the codes.
struct Group {
    scales: [f32; 2],
    bases: [f32; 2],
    codes: [i8; CODE_GROUP],
}

/// Appends the elements `cut` of the blocks `bytes` of `kind` in `layout`, group after group as
/// [`CodeLayout::staged_group_bytes`] says.
///
/// # Panics
/// When `bytes` are not whole blocks that hold `cut`, `cut` is not whole groups, `kind` has no codes, or `layout`
/// does not hold them.
pub(crate) fn append(
    kind: StorageKind,
    bytes: &[u8],
    cut: Range<usize>,
    layout: CodeLayout,
    out: &mut Vec<u8>,
) {
    let own = kind.code_layout().expect("invariant: callers ask for codes of formats that have them");
    assert_eq!(own.join(layout), layout, "the layout holds the codes of {kind}");
    assert!(cut.start.is_multiple_of(CODE_GROUP) && cut.end.is_multiple_of(CODE_GROUP), "whole groups");
    let groups_per_block = kind.block_len() / CODE_GROUP;
    for index in cut.start / CODE_GROUP..cut.end / CODE_GROUP {
        let (block, index) = (index / groups_per_block, index % groups_per_block);
        let block = &bytes[block * kind.block_bytes()..][..kind.block_bytes()];
        group(kind, block, index).append(layout, out);
    }
}

impl Group {
    /// One scale and base for all.
    fn even(scale: f32, base: f32, codes: [i8; CODE_GROUP]) -> Self {
        Self { scales: [scale; 2], bases: [base; 2], codes }
    }

    fn append(&self, layout: CodeLayout, out: &mut Vec<u8>) {
        let factors = |factors: &[f32; 2], out: &mut Vec<u8>| {
            for factor in &factors[..layout.scales()] {
                out.extend_from_slice(&f16::from_f32(*factor).to_le_bytes());
            }
        };
        factors(&self.scales, out);
        if layout.has_base() {
            factors(&self.bases, out);
        }
        out.extend_from_slice(&self.codes.map(|code| code as u8));
    }
}

/// Group `index` of a block.
#[inline]
fn group(kind: StorageKind, block: &[u8], index: usize) -> Group {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    match kind {
        StorageKind::Q4_0 => Group::even(d, 0.0, four_bits(&block[2..]).map(|q| (q - 8) as i8)),
        StorageKind::Q4_1 => Group::even(d, m, four_bits(&block[4..]).map(|q| q as i8)),
        StorageKind::Q5_0 => Group::even(d, 0.0, five_bits(&block[2..]).map(|q| (q - 16) as i8)),
        StorageKind::Q5_1 => Group::even(d, m, five_bits(&block[4..]).map(|q| q as i8)),
        StorageKind::Q8_0 => Group::even(d, 0.0, std::array::from_fn(|i| block[2 + i] as i8)),
        StorageKind::Iq4Nl => {
            let level = |q: i32| IQ4_NL_LEVELS[q as usize] as i8;
            Group::even(d, 0.0, four_bits(&block[2..]).map(level))
        }
        StorageKind::Q2K => q2_k(block, index),
        StorageKind::Q3K => q3_k(block, index),
        StorageKind::Q4K => {
            let (scale, minimum) = scale_and_minimum(block, index);
            let quants = &block[16 + 32 * (index / 2)..];
            let shift = 4 * (index % 2);
            Group::even(scale, -minimum, std::array::from_fn(|i| (quants[i] >> shift & 15) as i8))
        }
        StorageKind::Q5K => {
            let (scale, minimum) = scale_and_minimum(block, index);
            let (masks, quants) = (&block[16..48], &block[48 + 32 * (index / 2)..]);
            let shift = 4 * (index % 2);
            let code = |i: usize| (quants[i] >> shift & 15 | (masks[i] >> index & 1) << 4) as i8;
            Group::even(scale, -minimum, std::array::from_fn(code))
        }
        StorageKind::Q6K => q6_k(block, index),
        other => unreachable!("{other} has no codes"),
    }
}

/// Lanes as [`super::super_blocks::q2_k`] has them: group `index` is the `index % 4`-th pair of bits of a half.
fn q2_k(block: &[u8], index: usize) -> Group {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    let scales: [u8; 2] = std::array::from_fn(|half| block[2 * index + half]);
    let quants = &block[16 + 32 * (index / 4)..];
    let shift = 2 * (index % 4);
    Group {
        scales: scales.map(|scale| d * f32::from(scale & 15)),
        bases: scales.map(|scale| -(dmin * f32::from(scale >> 4))),
        codes: std::array::from_fn(|i| (quants[i] >> shift & 3) as i8),
    }
}

/// Lanes as [`super::super_blocks::q3_k`] has them.
fn q3_k(block: &[u8], index: usize) -> Group {
    let d = half_at(block, 108);
    let packed = &block[96..108];
    let scale = |half: usize| {
        let index = 2 * index + half;
        let low = packed[index % 8] >> (index / 8 * 4) & 15;
        let high = packed[8 + index % 4] >> (index / 4 * 2) & 3;
        d * f32::from((low | high << 4) as i8 - 32)
    };
    let quants = &block[32 + 32 * (index / 4)..];
    let shift = 2 * (index % 4);
    let code = |i: usize| (quants[i] >> shift & 3 | (block[i] >> index & 1) << 2) as i8 - 4;
    Group { scales: [scale(0), scale(1)], bases: [0.0; 2], codes: std::array::from_fn(code) }
}

/// Lanes as [`super::super_blocks::q6_k`] has them: of a half of 128, groups 0 and 1 are low nibbles, 2 and 3 the
/// high ones of the same bytes.
fn q6_k(block: &[u8], index: usize) -> Group {
    let d = half_at(block, 208);
    let (half, quarter) = (index / 4, index % 4);
    let lows = &block[64 * half + 32 * (quarter % 2)..];
    let highs = &block[128 + 32 * half..];
    let (nibble, pair) = (quarter / 2 * 4, 2 * quarter);
    let code = |i: usize| (lows[i] >> nibble & 15 | (highs[i] >> pair & 3) << 4) as i8 - 32;
    let scale = |part: usize| d * f32::from(block[192 + 2 * index + part] as i8);
    Group { scales: [scale(0), scale(1)], bases: [0.0; 2], codes: std::array::from_fn(code) }
}

/// Quantises rows of f32 to `format` and appends them in `layout`, group after group. The formulas are ggml's for
/// `Q8_0` and `Q4_0`; for 4 bits with a base, scale and base span the smallest and the largest element.
///
/// # Panics
/// When `values` are not whole groups, or `layout` is not that of the format.
pub(crate) fn append_quantised(
    format: QuantizeFormat,
    values: &[f32],
    layout: CodeLayout,
    out: &mut Vec<u8>,
) {
    assert_eq!(format.layout().join(layout), layout, "the layout holds the format's codes");
    let (groups, rest) = values.as_chunks::<CODE_GROUP>();
    assert!(rest.is_empty(), "whole groups");
    for values in groups {
        let group = match format {
            QuantizeFormat::Q8_0 => {
                let largest = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
                symmetric(values, largest / 127.0, (-127.0, 127.0))
            }
            QuantizeFormat::Q4_0 => {
                let largest =
                    values.iter().fold(0.0f32, |most, v| if v.abs() > most.abs() { *v } else { most });
                symmetric(values, largest / -8.0, (-8.0, 7.0))
            }
            QuantizeFormat::Q4K => spanning(values),
        };
        group.append(layout, out);
    }
}

/// The f16 nearest to `value`.
fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// Codes of `values` as multiples of `scale`, which is rounded to f16 first.
fn symmetric(values: &[f32; CODE_GROUP], scale: f32, (lowest, highest): (f32, f32)) -> Group {
    let scale = rounded(scale);
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let code = |v: f32| (v * inverse).round_ties_even().clamp(lowest, highest) as i8;
    Group::even(scale, 0.0, values.map(code))
}

/// Sixteen levels from the smallest value to the largest.
fn spanning(values: &[f32; CODE_GROUP]) -> Group {
    let lowest = values.iter().copied().fold(f32::INFINITY, f32::min);
    let highest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scale, base) = (rounded((highest - lowest) / 15.0), rounded(lowest));
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let code = |v: f32| ((v - base) * inverse).round_ties_even().clamp(0.0, 15.0) as i8;
    Group::even(scale, base, values.map(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::random::splitmix64;

    /// `scale * code + base` of staged groups.
    fn values(layout: CodeLayout, staged: &[u8]) -> Vec<f32> {
        let mut values = Vec::new();
        for group in staged.chunks_exact(layout.staged_group_bytes()) {
            let factor = |index: usize| f16::from_le_bytes([group[2 * index], group[2 * index + 1]]).to_f32();
            let codes = &group[2 * layout.factors()..];
            for (i, code) in codes.iter().enumerate() {
                let half = i / (CODE_GROUP / 2) * (layout.scales() - 1);
                let base = if layout.has_base() { factor(layout.scales() + half) } else { 0.0 };
                values.push(factor(half) * f32::from(*code as i8) + base);
            }
        }
        values
    }

    /// Blocks of random bits with scales of ordinary size.
    fn blocks(kind: StorageKind, count: usize) -> Vec<u8> {
        let mut seed = 7;
        let mut bytes: Vec<u8> =
            (0..count * kind.block_bytes()).map(|_| (splitmix64(&mut seed) >> 40) as u8).collect();
        let scales: &[usize] = match kind {
            StorageKind::Q2K => &[80, 82],
            StorageKind::Q3K => &[108],
            StorageKind::Q6K => &[208],
            StorageKind::Q4_1 | StorageKind::Q5_1 | StorageKind::Q4K | StorageKind::Q5K => &[0, 2],
            _ => &[0],
        };
        for (i, block) in bytes.chunks_exact_mut(kind.block_bytes()).enumerate() {
            for (at, sign) in scales.iter().zip([1.0, -1.0]) {
                let scale = f16::from_f32(sign * (0.003 + 0.0007 * i as f32));
                block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn codes_have_the_values_of_the_blocks() {
        for kind in StorageKind::SUPPORTED {
            let Some(own) = kind.code_layout() else { continue };
            let bytes = blocks(kind, 5);
            let mut unpacked = vec![0.0; 5 * kind.block_len()];
            super::super::to_f32(kind, &bytes, &mut unpacked);
            let exact = kind.block_len() == CODE_GROUP;
            for layout in [own, own.join(CodeLayout::new(-8, 7, true, true))] {
                let cut = CODE_GROUP..4 * kind.block_len();
                let mut staged = Vec::new();
                append(kind, &bytes, cut.clone(), layout, &mut staged);
                assert_eq!(staged.len(), cut.len() / CODE_GROUP * layout.staged_group_bytes());
                let close = unpacked.iter().fold(0.0f32, |most, v| most.max(v.abs())) / 1024.0;
                for (i, (got, want)) in values(layout, &staged).iter().zip(&unpacked[cut]).enumerate() {
                    let fine = if exact { got == want } else { (got - want).abs() <= close };
                    assert!(fine, "{kind} {layout:?} element {i}: {got} instead of {want}");
                }
            }
        }
    }

    #[test]
    fn quantised_floats_are_within_half_a_step() {
        let mut seed = 3;
        let floats: Vec<f32> = (0..64 * CODE_GROUP)
            .map(|_| (splitmix64(&mut seed) >> 40) as f32 / (1 << 24) as f32 - 0.4)
            .collect();
        for (format, step) in [
            (QuantizeFormat::Q8_0, 0.6 / 127.0),
            (QuantizeFormat::Q4_0, 0.6 / 8.0),
            (QuantizeFormat::Q4K, 1.0 / 15.0),
        ] {
            let mut staged = Vec::new();
            append_quantised(format, &floats, format.layout(), &mut staged);
            for (got, want) in values(format.layout(), &staged).iter().zip(&floats) {
                // Q4_0 has no ninth level on the side of its largest element: up to a whole step there.
                let bound = if format == QuantizeFormat::Q4_0 { 1.01 * step } else { 0.52 * step };
                assert!((got - want).abs() <= bound, "{format:?}: {got} for {want}");
            }
            let mut zeros = Vec::new();
            append_quantised(format, &[0.0; CODE_GROUP], format.layout(), &mut zeros);
            assert!(values(format.layout(), &zeros).iter().all(|v| *v == 0.0), "{format:?}");
        }
    }
}
