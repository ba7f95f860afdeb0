//! Blocks of 256 elements (ggml's K-quants): groups of 16 or 32 with small integer scales, and one
//! or two f16 scales for all.

use super::half_at;

/// `y = (d*scale)*q - dmin*min`: 16 groups of 16; a byte of `scales` holds scale (low) and minimum
/// (high); lane `l` of a half holds elements `l`, `l+32`, `l+64` and `l+96` in two bits each.
#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    let scales = block[..16].as_chunks::<8>().0;
    let quants = block[16..80].as_chunks::<32>().0;
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = scales[half][group];
            let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            let quants = quants[half].as_chunks::<16>().0[group % 2];
            let shift = group / 2 * 2;
            for (value, q) in out.iter_mut().zip(quants) {
                *value = d * f32::from((q >> shift) & 3) - m;
            }
        }
    }
}

/// `y = (d*(scale - 32))*(q - 4)`: lanes as in [`q2_k`]; the third bit of element `32*j + l` of half
/// `h` is bit `4*h + j` of byte `l` of the mask at the start.
#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let masks = block[..32].as_chunks::<16>().0;
    let quants = block[32..96].as_chunks::<32>().0;
    let packed = &block[96..108];
    for (index, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = packed[index % 8] >> (index / 8 * 4) & 15;
        let high = packed[8 + index % 4] >> (index / 4 * 2) & 3;
        let d = d * f32::from((low | high << 4) as i8 - 32);
        let (half, group) = (index / 8, index % 8);
        let quants = quants[half].as_chunks::<16>().0[group % 2];
        let (shift, bit) = (group / 2 * 2, half * 4 + group / 2);
        for ((value, q), mask) in out.iter_mut().zip(quants).zip(masks[group % 2]) {
            let third = (mask >> bit & 1) << 2;
            *value = d * f32::from((q >> shift & 3 | third) as i8 - 4);
        }
    }
}

/// `y = (d*scale)*q - (dmin*min)`: eight groups of 32.
#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let groups = scales_and_minima(block);
    let quants = block[16..].as_chunks::<32>().0;
    for (pair, (quants, out)) in quants.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let ((d_low, m_low), (d_high, m_high)) = (groups[2 * pair], groups[2 * pair + 1]);
        let (low, high) = out.split_at_mut(32);
        for (i, q) in quants.iter().enumerate() {
            low[i] = d_low * f32::from(q & 15) - m_low;
            high[i] = d_high * f32::from(q >> 4) - m_high;
        }
    }
}

/// [`q4_k`] with a fifth bit: bit `g` of byte `i` of the mask belongs to element `i` of group `g`.
#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let groups = scales_and_minima(block);
    let masks = &block[16..48];
    let quants = block[48..].as_chunks::<32>().0;
    for (pair, (quants, out)) in quants.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let ((d_low, m_low), (d_high, m_high)) = (groups[2 * pair], groups[2 * pair + 1]);
        let (low, high) = out.split_at_mut(32);
        for (i, (q, mask)) in quants.iter().zip(masks).enumerate() {
            let bits = mask >> (2 * pair);
            low[i] = d_low * f32::from(q & 15 | (bits & 1) << 4) - m_low;
            high[i] = d_high * f32::from(q >> 4 | (bits & 2) << 3) - m_high;
        }
    }
}

/// `d*scale` and `dmin*min` of the eight groups of `Q4_K` and `Q5_K`.
#[inline(always)]
fn scales_and_minima(block: &[u8]) -> [(f32, f32); 8] {
    let mut groups = [(0.0, 0.0); 8];
    for (j, group) in groups.iter_mut().enumerate() {
        *group = scale_and_minimum(block, j);
    }
    groups
}

/// The same of group `j`. The 6-bit numbers of all groups share the twelve bytes after the two f16.
#[inline(always)]
pub(super) fn scale_and_minimum(block: &[u8], j: usize) -> (f32, f32) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let (top_scale, top_min) = (packed[j - 4] >> 6, packed[j] >> 6);
        ((packed[j + 4] & 15) | (top_scale << 4), (packed[j + 4] >> 4) | (top_min << 4))
    };
    (d * f32::from(scale), dmin * f32::from(min))
}

/// `y = (d*scale)*(q - 32)`: two halves of 128; lane `l` of a half holds elements `l`, `l+32`, `l+64`
/// and `l+96`, their upper two bits in one byte.
#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let lows = block[..128].as_chunks::<64>().0;
    let highs = block[128..192].as_chunks::<32>().0;
    let scales = block[192..208].as_chunks::<8>().0;
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = d * f32::from(scales[half][group] as i8);
            // Groups 0..4 are low nibbles, 4..8 the high ones of the same bytes.
            let lows = lows[half].as_chunks::<16>().0[group % 4];
            let highs = highs[half].as_chunks::<16>().0[group % 2];
            let (nibble, pair) = (group / 4 * 4, group / 2 * 2);
            for ((value, low), high) in out.iter_mut().zip(lows).zip(highs) {
                *value = d * f32::from((low >> nibble & 15 | (high >> pair & 3) << 4) as i8 - 32);
            }
        }
    }
}
