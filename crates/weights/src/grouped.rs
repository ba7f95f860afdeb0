//! 4-bit matrices of GPTQ and AWQ checkpoints: `weight = scale * (q - zero)`, with scale and zero
//! for each output feature and group of input features.
//!
//! Follows the checkpoints of AutoGPTQ/GPTQModel and AutoAWQ ("gemm" version). Both keep the matrix
//! with input features outside, `[in, out]`, eight 4-bit numbers in a 32-bit word: GPTQ packs eight
//! input features of one output feature, lowest bits first; AWQ packs eight output features of one
//! input feature, the even ones in the lower half of the word. Zeros are packed along the output
//! features, in the same two orders. GPTQ's second format ("gptq_v2") and AWQ store them as they are;
//! its first stores each word less [`FIRST_FORMAT`], one in every four bits, with borrows between
//! them where a zero is 0.
//!
//! **Invariant:** `q - zero` and the product with an f16 scale are exact in f32, so an element is
//! rounded once, to bf16, and any slice is equal to the slice of the whole.

use crate::dequant::{self, Vectorised, bf16_bits, vectorise};
use crate::error::Fault;
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::Piece;
use std::ops::Range;

/// 4-bit numbers in a word.
pub(crate) const PER_WORD: usize = 8;
/// What GPTQ's first format takes from every word of zeros.
pub(crate) const FIRST_FORMAT: u32 = 0x1111_1111;
/// Where an AWQ word keeps its eight numbers, by output feature.
const AWQ_SHIFTS: [u32; PER_WORD] = [0, 16, 4, 20, 8, 24, 12, 28];
/// Eights of output features that are unpacked together: a cache line of AWQ words.
const TILE_EIGHTS: usize = 16;

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
        /// Added to every word of zeros: [`FIRST_FORMAT`], or 0 in the second format.
        zeros_offset: u32,
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
        let words = bytes.words.as_chunks().0;
        let unpack =
            Unpack { grouped: self, words, bytes, out_features: info.rows(), rows, cols, group_of, out };
        match self.packing {
            Packing::Gptq { .. } => vectorise(Packed::<false>(unpack)),
            Packing::Awq => vectorise(Packed::<true>(unpack)),
        }
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

    /// Scales and zeros of the eights of output features `eights`, for every group in turn.
    #[inline(always)]
    fn fill_tables(
        &self,
        bytes: &GroupedBytes,
        out_features: usize,
        eights: Range<usize>,
        tables: &mut Vec<Table>,
    ) {
        tables.clear();
        let zeros = bytes.zeros.as_chunks::<4>().0;
        for group in 0..self.groups {
            for eight in eights.clone() {
                let first = group * out_features + PER_WORD * eight;
                let mut word = u32::from_le_bytes(zeros[first / PER_WORD]);
                if let Packing::Gptq { zeros_offset } = self.packing {
                    word = word.wrapping_add(zeros_offset);
                }
                let mut table = Table { scale: [0.0; PER_WORD], zero: [0.0; PER_WORD] };
                for (i, scale) in table.scale.iter_mut().enumerate() {
                    *scale = dequant::plain(self.scales_kind, bytes.scales, first + i);
                }
                for (i, zero) in table.zero.iter_mut().enumerate() {
                    let number = match self.packing {
                        Packing::Gptq { .. } => word >> (4 * i),
                        Packing::Awq => word >> AWQ_SHIFTS[i],
                    };
                    *zero = (number & 15) as f32;
                }
                tables.push(table);
            }
        }
    }
}

/// Numbers of eight input by eight output features. Signed, as only those become floats in one
/// instruction.
type Square = [[i32; PER_WORD]; PER_WORD];

/// Scales and zeros of one group for eight output features.
struct Table {
    scale: [f32; PER_WORD],
    zero: [f32; PER_WORD],
}

/// [`Grouped::read`] for one packing, so that its inner loop does not ask which.
struct Packed<'a, const AWQ: bool>(Unpack<'a>);

impl<const AWQ: bool> Vectorised for Packed<'_, AWQ> {
    #[inline(always)]
    fn run(self) {
        self.0.run::<AWQ>();
    }
}

/// A loop over squares of eight output by eight input features.
struct Unpack<'a> {
    grouped: &'a Grouped,
    words: &'a [[u8; 4]],
    bytes: &'a GroupedBytes<'a>,
    out_features: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Of each of `cols`.
    group_of: Vec<usize>,
    out: &'a mut [u8],
}

impl Unpack<'_> {
    #[inline(always)]
    fn run<const AWQ: bool>(mut self) {
        let mut tables = Vec::new();
        let (first, end) = (self.rows.start / PER_WORD, self.rows.end.div_ceil(PER_WORD));
        for start in (first..end).step_by(TILE_EIGHTS) {
            let eights = start..end.min(start + TILE_EIGHTS);
            self.grouped.fill_tables(self.bytes, self.out_features, eights.clone(), &mut tables);
            for col_eight in self.cols.start / PER_WORD..self.cols.end.div_ceil(PER_WORD) {
                let lanes = self.tables_of(col_eight, eights.len());
                for row_eight in eights.clone() {
                    let numbers =
                        if AWQ { self.awq(row_eight, col_eight) } else { self.gptq(row_eight, col_eight) };
                    self.store(row_eight, col_eight, &numbers, (&tables[row_eight - start..], &lanes));
                }
            }
        }
    }

    /// The stored numbers of a square, input features outside.
    #[inline(always)]
    fn gptq(&self, row_eight: usize, col_eight: usize) -> Square {
        let mut numbers = [[0; PER_WORD]; PER_WORD];
        let start = col_eight * self.out_features + PER_WORD * row_eight;
        let words = &self.words[start..start + PER_WORD];
        for (lane, numbers) in numbers.iter_mut().enumerate() {
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = (u32::from_le_bytes(*word) >> (4 * lane) & 15) as i32;
            }
        }
        numbers
    }

    /// The stored numbers of a square, input features outside.
    #[inline(always)]
    fn awq(&self, row_eight: usize, col_eight: usize) -> Square {
        let mut numbers = [[0; PER_WORD]; PER_WORD];
        for (lane, numbers) in numbers.iter_mut().enumerate() {
            let row_of_words = (PER_WORD * col_eight + lane) * (self.out_features / PER_WORD);
            let word = u32::from_le_bytes(self.words[row_of_words + row_eight]);
            for (number, shift) in numbers.iter_mut().zip(AWQ_SHIFTS) {
                *number = (word >> shift & 15) as i32;
            }
        }
        numbers
    }

    /// Where the tables of eight input features start, with `eights` of them for each group; any place
    /// for features that were not asked for.
    #[inline(always)]
    fn tables_of(&self, col_eight: usize, eights: usize) -> [usize; PER_WORD] {
        let mut starts = [0; PER_WORD];
        for (lane, start) in starts.iter_mut().enumerate() {
            let col = PER_WORD * col_eight + lane;
            if self.cols.contains(&col) {
                *start = self.group_of[col - self.cols.start] * eights;
            }
        }
        starts
    }

    /// Scales the numbers of a square, rounds them and writes those that were asked for.
    #[inline(always)]
    fn store(
        &mut self,
        row_eight: usize,
        col_eight: usize,
        numbers: &Square,
        (tables, lanes): (&[Table], &[usize; PER_WORD]),
    ) {
        let mut values = [[0u32; PER_WORD]; PER_WORD];
        for lane in 0..PER_WORD {
            let Table { scale, zero } = &tables[lanes[lane]];
            for i in 0..PER_WORD {
                values[lane][i] = bf16_bits((numbers[lane][i] as f32 - zero[i]) * scale[i]);
            }
        }
        // Four lanes side by side in 64 bits transpose the square with few instructions.
        let mut halves = [[0u64; PER_WORD]; 2];
        for (half, lanes) in halves.iter_mut().zip(values.as_chunks::<4>().0) {
            for (i, four) in half.iter_mut().enumerate() {
                let (low, high) = (lanes[0][i] | lanes[1][i] << 16, lanes[2][i] | lanes[3][i] << 16);
                *four = u64::from(low) | u64::from(high) << 32;
            }
        }
        let cols = PER_WORD * col_eight..PER_WORD * (col_eight + 1);
        let asked = self.cols.start.max(cols.start)..self.cols.end.min(cols.end);
        for row in self.rows.start.max(PER_WORD * row_eight)..self.rows.end.min(PER_WORD * (row_eight + 1)) {
            let i = row - PER_WORD * row_eight;
            let lanes = (u128::from(halves[0][i]) | u128::from(halves[1][i]) << 64).to_le_bytes();
            let at = 2 * ((row - self.rows.start) * self.cols.len() + asked.start - self.cols.start);
            if asked == cols {
                self.out[at..at + lanes.len()].copy_from_slice(&lanes);
            } else {
                let part = &lanes[2 * (asked.start - cols.start)..2 * (asked.end - cols.start)];
                self.out[at..at + part.len()].copy_from_slice(part);
            }
        }
    }
}
