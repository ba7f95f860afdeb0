//! ggml blocks element by element in f64: slow, and written again from the layouts, so that the
//! engine's unpackers have something independent to agree with. Also makes random blocks.
//!
//! Every format is stated as "the value of element `i`"; bits are fetched one number at a time.
//! Layouts follow ggml's `ggml-common.h`.

use super::GgmlType;
use crate::random::Random;

/// The levels that the indices of `IQ4_NL` choose.
const IQ4_NL: [f64; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// Element `i` of one block, exact but for the rounding of f64.
///
/// Panics when `block` is not one block of `kind` or `i` lies beyond it.
pub fn element(kind: GgmlType, block: &[u8], i: usize) -> f64 {
    assert_eq!(block.len(), kind.block_bytes(), "one block of {kind:?}");
    assert!(i < kind.block_elements());
    let half = |at: usize| f64::from(half::f16::from_le_bytes([block[at], block[at + 1]]));
    match kind {
        GgmlType::F32 => f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
        GgmlType::F16 => half(0),
        GgmlType::Bf16 => f64::from(half::bf16::from_le_bytes([block[0], block[1]])),
        GgmlType::Q4_0 => half(0) * (nibble(&block[2..], i) - 8.0),
        GgmlType::Q4_1 => half(0) * nibble(&block[4..], i) + half(2),
        GgmlType::Q5_0 => half(0) * (nibble(&block[6..], i) + 16.0 * bit(&block[2..], i) - 16.0),
        GgmlType::Q5_1 => half(0) * (nibble(&block[8..], i) + 16.0 * bit(&block[4..], i)) + half(2),
        GgmlType::Q8_0 => half(0) * f64::from(block[2 + i] as i8),
        GgmlType::Iq4Nl => half(0) * IQ4_NL[nibble(&block[2..], i) as usize],
        GgmlType::Q2K => {
            let group = block[i / 16];
            half(80) * f64::from(group % 16) * two_bits(&block[16..], i) - half(82) * f64::from(group / 16)
        }
        GgmlType::Q3K => {
            let third = bit(&block[i % 32..], i / 32);
            half(108) * q3k_scale(&block[96..108], i / 16) * (two_bits(&block[32..], i) + 4.0 * third - 4.0)
        }
        GgmlType::Q4K => {
            let (scale, min) = six_bit_pair(&block[4..16], i / 32);
            half(0) * scale * pair_nibble(&block[16..], i) - half(2) * min
        }
        GgmlType::Q5K => {
            let (scale, min) = six_bit_pair(&block[4..16], i / 32);
            let fifth = bit(&block[16 + i % 32..], i / 32);
            half(0) * scale * (pair_nibble(&block[48..], i) + 16.0 * fifth) - half(2) * min
        }
        GgmlType::Q6K => {
            let (side, lane, quarter) = (i / 128, i % 32, i % 128 / 32);
            let byte = block[64 * side + 32 * (quarter % 2) + lane];
            let low = if quarter < 2 { byte % 16 } else { byte / 16 };
            let high = block[128 + 32 * side + lane] >> (2 * quarter) & 3;
            half(208)
                * f64::from(block[192 + i / 16] as i8)
                * (f64::from(low) + 16.0 * f64::from(high) - 32.0)
        }
    }
}

/// All elements of some blocks, in order.
pub fn elements(kind: GgmlType, blocks: &[u8]) -> Vec<f64> {
    let each = |block| (0..kind.block_elements()).map(move |i| element(kind, block, i));
    blocks.chunks(kind.block_bytes()).flat_map(each).collect()
}

/// `count` blocks of random bits, whose f16 scales are finite and of ordinary size.
pub fn random(kind: GgmlType, count: usize, random: &mut Random) -> Vec<u8> {
    let scales: &[usize] = match kind {
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => &[],
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::Iq4Nl => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
    };
    let mut blocks = Vec::new();
    for _ in 0..count {
        let start = blocks.len();
        match kind {
            GgmlType::F32 => blocks.extend((random.normal() as f32).to_le_bytes()),
            GgmlType::F16 => blocks.extend(half::f16::from_f64(random.normal()).to_le_bytes()),
            GgmlType::Bf16 => blocks.extend(half::bf16::from_f64(random.normal()).to_le_bytes()),
            _ => blocks.extend((0..kind.block_bytes()).map(|_| random.next_u64() as u8)),
        }
        for at in scales {
            let scale = half::f16::from_f64(0.05 * random.normal());
            blocks[start + at..start + at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    blocks
}

/// Bit `i` of a string of bytes, lowest bits first.
fn bit(bytes: &[u8], i: usize) -> f64 {
    f64::from(bytes[i / 8] >> (i % 8) & 1)
}

/// The number of element `i` of 32 whose halves share sixteen bytes.
fn nibble(bytes: &[u8], i: usize) -> f64 {
    f64::from(if i < 16 { bytes[i] % 16 } else { bytes[i - 16] / 16 })
}

/// The number of element `i` where 64 elements share 32 bytes, the first 32 in the low nibbles.
fn pair_nibble(bytes: &[u8], i: usize) -> f64 {
    let byte = bytes[i / 64 * 32 + i % 32];
    f64::from(if i % 64 < 32 { byte % 16 } else { byte / 16 })
}

/// The number of element `i` where 128 elements share 32 bytes, 32 in each two bits.
fn two_bits(bytes: &[u8], i: usize) -> f64 {
    f64::from(bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3)
}

/// Scale and minimum `j` of eight each that share twelve bytes: 0..4 in the low six bits of the
/// first eight bytes, 4..8 in the last four with their upper bits above the others.
fn six_bit_pair(bytes: &[u8], j: usize) -> (f64, f64) {
    let (scale, min) = match j {
        0..4 => (bytes[j] % 64, bytes[j + 4] % 64),
        _ => (bytes[j + 4] % 16 + bytes[j - 4] / 64 * 16, bytes[j + 4] / 16 + bytes[j] / 64 * 16),
    };
    (f64::from(scale), f64::from(min))
}

/// Scale `j` of sixteen six-bit ones: low four bits in the nibbles of eight bytes, high two in the
/// next four.
fn q3k_scale(bytes: &[u8], j: usize) -> f64 {
    let low = if j < 8 { bytes[j] % 16 } else { bytes[j - 8] / 16 };
    let high = bytes[8 + j % 4] >> (2 * (j / 4)) & 3;
    f64::from(low) + 16.0 * f64::from(high) - 32.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_known_blocks() {
        // A scale of 2 and the numbers 0..16 in the low, 15 in the high nibbles.
        let q4: Vec<u8> = [0x00, 0x40].into_iter().chain((0..16).map(|i| i | 0xf0)).collect();
        assert_eq!(element(GgmlType::Q4_0, &q4, 3), -10.0);
        assert_eq!(element(GgmlType::Q4_0, &q4, 16), 14.0);
        assert_eq!(element(GgmlType::Iq4Nl, &q4, 8), 2.0);
        // All scales -32, all third bits set: 2-bit numbers times -32.
        let mut q3 = vec![0xff; 32];
        q3.extend([0b11_10_01_00; 64]);
        q3.extend([0; 12]);
        q3.extend([0x00, 0x3c]);
        assert_eq!(
            [0, 32, 64, 96, 128].map(|i| element(GgmlType::Q3K, &q3, i)),
            [0.0, -32.0, -64.0, -96.0, 0.0]
        );
    }

    #[test]
    fn random_blocks_are_whole_and_finite() {
        let mut numbers = Random::new(4);
        for kind in GgmlType::ALL {
            let values = elements(kind, &random(kind, 3, &mut numbers));
            assert_eq!(values.len(), 3 * kind.block_elements());
            assert!(values.iter().all(|v| v.is_finite()), "{kind:?}");
        }
    }
}
