//! 4-bit matrices of GPTQ and AWQ checkpoints: `weight = scale * (q - zero)`, with scale and zero
//! for each output feature and group of input features.
//!
//! Follows the checkpoints of AutoGPTQ/GPTQModel and AutoAWQ ("gemm" version). Both keep the matrix
//! with input features outside, `[in, out]`, eight 4-bit numbers in a 32-bit word: GPTQ packs eight
//! input features of one output feature, lowest bits first; AWQ packs eight output features of one
//! input feature, the even ones in the lower half of the word. Zeros are packed along the output
//! features, in the same two orders. GPTQ's first format stores `zero - 1` in each four bits (so that 15 is the zero
//! 0); its second ("gptq_v2") and AWQ store the zero.
//!
//! **Invariant:** `q - zero` and the product with an f16 scale are exact in f32, so an element is
//! rounded once, to bf16, and any slice is equal to the slice of the whole.

use crate::dequant::{Vectorised, bf16_bits, half_to_f32, vectorise};
use crate::error::Fault;
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::Piece;
use std::ops::Range;

/// 4-bit numbers in a word.
pub(crate) const PER_WORD: usize = 8;
/// Output features that are unpacked together: two cache lines of GPTQ words.
const TILE: usize = 32;

/// What belongs to a packed matrix besides its words.
#[derive(Debug)]
pub(crate) struct Grouped {
    pub packing: Packing,
    /// Packed zeros `[groups, out / 8]`.
    pub zeros: Piece,
    /// `[groups, out]`.
    pub scales: Piece,
    /// A plain float type.
    pub scales_kind: StorageKind,
    /// At least 1.
    pub groups: usize,
    pub membership: Membership,
}

/// How numbers lie in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Words `[in / 8, out]`.
    Gptq {
        /// Added to a stored zero, within four bits: 1 in the first format, 0 in the second.
        zero_offset: u8,
    },
    /// Words `[in, out / 8]`.
    Awq,
}

/// Which group an input feature belongs to.
#[derive(Debug)]
pub(crate) enum Membership {
    /// Groups of this many neighbours.
    Even(usize),
    /// A tensor of i32 `[in]` (GPTQ's `g_idx`, which "desc_act" makes irregular).
    Listed(Piece),
}

/// The mapped bytes of one matrix.
pub(crate) struct GroupedBytes<'a> {
    pub words: &'a [u8],
    pub zeros: &'a [u8],
    pub scales: &'a [u8],
    /// Of [`Membership::Listed`].
    pub listed: Option<&'a [u8]>,
}

impl Grouped {
    /// Writes rows `rows` x columns `cols` (output x input features) as bf16; `out` has their size.
    ///
    /// Errors: an input feature names a group that does not exist.
    pub fn read(
        &self,
        info: &TensorInfo,
        bytes: &GroupedBytes,
        (rows, cols): (Range<usize>, Range<usize>),
        out: &mut [u8],
    ) -> Result<(), Fault> {
        let group_of = self.groups_of(bytes.listed, cols.clone())?;
        vectorise(Unpack { grouped: self, bytes, out_features: info.rows(), rows, cols, group_of, out });
        Ok(())
    }

    /// The group of each of the input features `cols`.
    fn groups_of(&self, listed: Option<&[u8]>, cols: Range<usize>) -> Result<Vec<usize>, Fault> {
        let group = |col: usize| match (&self.membership, listed) {
            (Membership::Listed(_), Some(listed)) => {
                i32::from_le_bytes(listed.as_chunks::<4>().0[col]) as usize
            }
            (Membership::Even(size), _) => col / size,
            (Membership::Listed(_), None) => unreachable!("the caller maps the list"),
        };
        let groups: Vec<usize> = cols.clone().map(group).collect();
        match groups.iter().zip(cols).find(|(group, _)| **group >= self.groups) {
            None => Ok(groups),
            Some((group, col)) => Err(Fault::new(
                format!("group of input feature {col} (g_idx)"),
                format!("0..{}", self.groups),
                (*group as i32).to_string(),
            )),
        }
    }

    /// Scale and zero of output features `first..first + width`, for every group in turn.
    #[inline(always)]
    fn tables(&self, bytes: &GroupedBytes, first: usize, width: usize, tables: &mut [Table]) {
        let size = self.scales_kind.block_bytes();
        let out_features = bytes.scales.len() / size / self.groups;
        let zeros = bytes.zeros.as_chunks::<4>().0;
        for (group, table) in tables.iter_mut().enumerate() {
            let start = group * out_features + first;
            for i in 0..width {
                table.scale[i] = scale_at(self.scales_kind, bytes.scales, start + i);
            }
            for (word, zeros) in
                zeros[start / PER_WORD..].iter().zip(table.zero[..width].chunks_mut(PER_WORD))
            {
                let word = u32::from_le_bytes(*word);
                for (feature, zero) in zeros.iter_mut().enumerate() {
                    *zero = f32::from(match self.packing {
                        Packing::Gptq { zero_offset } => (number_at(word, feature) + zero_offset) & 15,
                        Packing::Awq => number_at(word, awq_position(feature)),
                    });
                }
            }
        }
    }
}

/// The 4-bit number at `position` of a word.
#[inline(always)]
fn number_at(word: u32, position: usize) -> u8 {
    (word >> (4 * position) & 15) as u8
}

/// Where an AWQ word keeps the `feature`-th of its eight numbers.
#[inline(always)]
fn awq_position(feature: usize) -> usize {
    feature / 2 + feature % 2 * 4
}

/// Scales and zeros of one group for a tile of output features.
#[derive(Clone)]
struct Table {
    scale: [f32; TILE],
    zero: [f32; TILE],
}

/// Element `index` of the scales, whose type was checked to be a plain float.
#[inline(always)]
fn scale_at(kind: StorageKind, scales: &[u8], index: usize) -> f32 {
    match kind {
        StorageKind::F32 => f32::from_le_bytes(scales.as_chunks::<4>().0[index]),
        StorageKind::Bf16 => half::bf16::from_le_bytes(scales.as_chunks::<2>().0[index]).to_f32(),
        _ => half_to_f32(u16::from_le_bytes(scales.as_chunks::<2>().0[index])),
    }
}

/// [`Grouped::read`] as one vectorised loop.
struct Unpack<'a> {
    grouped: &'a Grouped,
    bytes: &'a GroupedBytes<'a>,
    out_features: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Of each of `cols`.
    group_of: Vec<usize>,
    out: &'a mut [u8],
}

impl Vectorised for Unpack<'_> {
    #[inline(always)]
    fn run(mut self) {
        let mut tables = vec![Table { scale: [0.0; TILE], zero: [0.0; TILE] }; self.grouped.groups];
        for tile in self.rows.start / TILE..self.rows.end.div_ceil(TILE) {
            let first = tile * TILE;
            let width = TILE.min(self.out_features - first);
            self.grouped.tables(self.bytes, first, width, &mut tables);
            for eight in self.cols.start / PER_WORD..self.cols.end.div_ceil(PER_WORD) {
                let mut numbers = [[0u8; TILE]; PER_WORD];
                self.numbers(eight, first, width, &mut numbers);
                self.store(eight, first, &numbers, &tables);
            }
        }
    }
}

impl Unpack<'_> {
    /// The stored numbers of input features `8*eight..` and output features `first..first + width`.
    #[inline(always)]
    fn numbers(&self, eight: usize, first: usize, width: usize, out: &mut [[u8; TILE]; PER_WORD]) {
        let words = self.bytes.words.as_chunks::<4>().0;
        match self.grouped.packing {
            Packing::Gptq { .. } => {
                let start = eight * self.out_features + first;
                let mut tile = [0u32; TILE];
                for (word, stored) in tile.iter_mut().zip(&words[start..start + width]) {
                    *word = u32::from_le_bytes(*stored);
                }
                for (lane, out) in out.iter_mut().enumerate() {
                    for (number, word) in out.iter_mut().zip(&tile) {
                        *number = number_at(*word, lane);
                    }
                }
            }
            Packing::Awq => {
                for (lane, out) in out.iter_mut().enumerate() {
                    let start = ((PER_WORD * eight + lane) * self.out_features + first) / PER_WORD;
                    for (word, out) in words[start..].iter().zip(out[..width].as_chunks_mut::<PER_WORD>().0) {
                        let word = u32::from_le_bytes(*word);
                        *out = std::array::from_fn(|feature| number_at(word, awq_position(feature)));
                    }
                }
            }
        }
    }

    /// Scales the numbers, rounds them and writes those that were asked for.
    #[inline(always)]
    fn store(&mut self, eight: usize, first: usize, numbers: &[[u8; TILE]; PER_WORD], tables: &[Table]) {
        let from = self.cols.start.saturating_sub(eight * PER_WORD);
        let to = (self.cols.end - eight * PER_WORD).min(PER_WORD);
        let start = eight * PER_WORD + from - self.cols.start;
        let mut values = [[0u16; TILE]; PER_WORD];
        for (lane, group) in (from..to).zip(&self.group_of[start..]) {
            let Table { scale, zero } = &tables[*group];
            for i in 0..TILE {
                values[lane][i] = bf16_bits((f32::from(numbers[lane][i]) - zero[i]) * scale[i]);
            }
        }
        let row_bytes = 2 * self.cols.len();
        for row in self.rows.start.max(first)..self.rows.end.min(first + TILE) {
            let lanes: [[u8; 2]; PER_WORD] =
                std::array::from_fn(|lane| values[lane][row - first].to_le_bytes());
            let at = (row - self.rows.start) * row_bytes + 2 * start;
            if to - from == PER_WORD {
                self.out[at..at + 2 * PER_WORD].copy_from_slice(lanes.as_flattened());
            } else {
                self.out[at..at + 2 * (to - from)].copy_from_slice(lanes[from..to].as_flattened());
            }
        }
    }
}
