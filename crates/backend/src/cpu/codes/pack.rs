//! Codes as the kernels read them.
//!
//! A group of 32 inputs of a tile of 16 outputs is its factors, `[scales then bases][16]` f16, and its codes, counted
//! from the layout's lowest. Four inputs of an output are a word of four bytes, and sixteen outputs' words a
//! vector of 64 bytes; a group has eight. Codes of 8 bits are these vectors; of narrower ones the low four bits of
//! vectors `2p` and `2p + 1` share the nibbles of packed vector `p`, and further bits lie in planes
//! behind: bit `v` of a byte belongs to vector `v` (5 bits), or bits `2i` and `2i + 1` of plane `q` to vector
//! `4q + i` (6 bits). **Invariant:** outputs share no byte, so threads may pack different rows of a tile.

use crate::cpu::simd::LANES;
use half::f16;
use lockstep_core::{CODE_GROUP, CodeLayout};

/// Bytes of a word in each byte: the low four bits, the fifth, the fifth and sixth.
const NIBBLES: u32 = 0x0f0f_0f0f;
const FIFTHS: u32 = 0x0101_0101;
const UPPER_PAIRS: u32 = 0x0303_0303;
/// Words of a group of one output.
const WORDS: usize = CODE_GROUP / 4;

/// Writes a row on its way (`staged`, as [`CodeLayout::staged_group_bytes`] says) as output `lane` of a tile.
///
/// # Safety
/// `tile` is valid for as many groups of 16 outputs, and nobody else touches output `lane` of them.
pub(in crate::cpu) unsafe fn pack_row(layout: CodeLayout, staged: &[u8], tile: *mut u8, lane: usize) {
    assert!(lane < LANES, "an output of the tile");
    for (group, staged) in staged.chunks_exact(layout.staged_group_bytes()).enumerate() {
        let (factors, codes) = staged.split_at(2 * layout.factors());
        // SAFETY: the tile has this group by the caller's promise.
        let target = unsafe { tile.add(group * LANES * layout.packed_group_bytes()) };
        for (index, factor) in factors.as_chunks::<2>().0.iter().enumerate() {
            // SAFETY: a factor of the lane; arrays of bytes need no alignment.
            unsafe { target.cast::<[u8; 2]>().add(index * LANES + lane).write(*factor) };
        }
        let mut words = [0u32; WORDS];
        for (word, codes) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(codes.map(|code| code.wrapping_sub(layout.lowest() as u8)));
        }
        // SAFETY: the codes follow the factors; below, `vector` stays inside the group.
        let vectors = unsafe { target.add(2 * layout.factors() * LANES) };
        let write = |vector: usize, word: u32| {
            // SAFETY: a word of the lane.
            unsafe { vectors.cast::<[u8; 4]>().add(vector * LANES + lane).write(word.to_le_bytes()) };
        };
        if layout.bits() == 8 {
            words.iter().enumerate().for_each(|(vector, word)| write(vector, *word));
            continue;
        }
        for (pair, two) in words.as_chunks::<2>().0.iter().enumerate() {
            write(pair, (two[0] & NIBBLES) | (two[1] & NIBBLES) << 4);
        }
        let plane = |words: &[u32], mask: u32, bits: usize| {
            words.iter().enumerate().fold(0, |plane, (i, word)| plane | (word >> 4 & mask) << (bits * i))
        };
        match layout.bits() {
            5 => write(WORDS / 2, plane(&words, FIFTHS, 1)),
            6 => {
                write(WORDS / 2, plane(&words[..4], UPPER_PAIRS, 2));
                write(WORDS / 2 + 1, plane(&words[4..], UPPER_PAIRS, 2));
            }
            _ => {}
        }
    }
}

/// The elements of output `lane` of a tile of whole groups: `scale * code + base`.
pub(in crate::cpu) fn unpack_row(layout: CodeLayout, tile: &[u8], lane: usize, out: &mut [f32]) {
    let groups = tile.chunks_exact(LANES * layout.packed_group_bytes());
    for (group, out) in groups.zip(out.as_chunks_mut::<CODE_GROUP>().0) {
        let (factors, vectors) = group.split_at(2 * layout.factors() * LANES);
        let factor = |index: usize| {
            let at = 2 * (index * LANES + lane);
            f16::from_le_bytes([factors[at], factors[at + 1]]).to_f32()
        };
        for (i, value) in out.iter_mut().enumerate() {
            let half = i / (CODE_GROUP / 2) * (layout.scales() - 1);
            let base = if layout.has_base() { factor(layout.scales() + half) } else { 0.0 };
            let code = i32::from(code_at(layout, vectors, lane, i)) + layout.lowest();
            *value = factor(half) * code as f32 + base;
        }
    }
}

/// Input `i` of output `lane`, counted from the lowest code.
fn code_at(layout: CodeLayout, vectors: &[u8], lane: usize, i: usize) -> u8 {
    let byte = |vector: usize| vectors[(vector * LANES + lane) * 4 + i % 4];
    let vector = i / 4;
    if layout.bits() == 8 {
        return byte(vector);
    }
    let low = byte(vector / 2) >> (vector % 2 * 4) & 15;
    low | match layout.bits() {
        5 => (byte(WORDS / 2) >> vector & 1) << 4,
        6 => (byte(WORDS / 2 + vector / 4) >> (vector % 4 * 2) & 3) << 4,
        _ => 0,
    }
}
