//! The inner loop of products of few rows with codes, and how codes are unpacked.

use super::inputs::{BLOCK_ROWS, InputStep, SCALE_PARTS};
use crate::cpu::matmul::{HINT_AHEAD_BYTES, Levels, Run};
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use lockstep_core::{CODE_GROUP, CodeLayout};

/// Bytes of one factor of 16 outputs.
pub(super) const FACTOR_BYTES: usize = 2 * LANES;
/// Bytes of a vector or plane of codes.
pub(super) const VECTOR_BYTES: usize = 4 * LANES;
/// Inputs of a vector of codes.
pub(super) const INPUTS: usize = 4;

/// The sums of one or two rows times `T` tiles over some runs of inputs, with the tree of their leaves: codes are unpacked in
/// registers as they stream from memory.
pub(super) struct CodeBlock<'a> {
    /// The first row's first group and its steps, as [`CodedRows::at`](super::CodedRows::at) gives them; the other row is
    /// of the same block.
    pub x: (*const i8, *const InputStep),
    /// Rows, 1 or 2.
    pub rows: usize,
    /// The first group of the first tile; tiles follow at `tile_stride` bytes.
    pub w: *const u8,
    pub tile_stride: usize,
    pub layout: CodeLayout,
    pub runs: &'a [Run],
    pub levels: Levels,
}

impl CodeBlock<'_> {
    /// Runs the kernel for the rows.
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe; nobody else touches the levels; the machine supports `isa`.
    pub(super) unsafe fn run<const T: usize>(&self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.layout.bits() {
                4 => self.run_bits::<4, T>(isa),
                5 => self.run_bits::<5, T>(isa),
                6 => self.run_bits::<6, T>(isa),
                _ => self.run_bits::<8, T>(isa),
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_bits<const BITS: usize, const T: usize>(&self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.rows {
                1 => isa.run(Accumulate::<BITS, 1, T>(self)),
                2 => isa.run(Accumulate::<BITS, 2, T>(self)),
                rows => unreachable!("one or two rows, not {rows}"),
            }
        }
    }
}

/// [`CodeBlock`] in registers.
#[derive(Clone, Copy)]
struct Accumulate<'a, const BITS: usize, const M: usize, const T: usize>(&'a CodeBlock<'a>);

/// The integer sums of `M` rows and `T` tiles.
type Sums<S, const M: usize, const T: usize> = [[<S as Simd>::I; T]; M];

impl<const BITS: usize, const M: usize, const T: usize> Kernel for Accumulate<'_, BITS, M, T> {
    type Output = ();

    /// # Safety
    /// As [`CodeBlock::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let CodeBlock { x: (mut x, mut steps), mut w, layout, levels, .. } = *self.0;
        let (factors, group_bytes) = (layout.factors() * FACTOR_BYTES, LANES * layout.packed_group_bytes());
        let bases = if layout.has_base() { layout.scales() * FACTOR_BYTES } else { 0 };
        let (stride, halves) = (self.0.tile_stride, layout.scales() == 2);
        // SAFETY: every row, tile and group named is below the counts that the caller promises; a block has `M` rows
        // from the first on, and the runs' groups follow each other.
        unsafe {
            for run in self.0.runs {
                let mut acc = levels.begin::<S, M, T>(*run);
                for _ in 0..run.inputs / CODE_GROUP {
                    let codes = w.add(factors);
                    let mut sums = Self::start::<S>(steps);
                    Self::products::<S, 0>(codes, stride, x, &mut sums);
                    if halves {
                        Self::finish::<S>(&sums, (w, stride, bases), steps, &mut acc);
                        steps = steps.add(BLOCK_ROWS);
                        sums = Self::start::<S>(steps);
                    }
                    Self::products::<S, 1>(codes, stride, x, &mut sums);
                    let second = w.add(if halves { FACTOR_BYTES } else { 0 });
                    Self::finish::<S>(&sums, (second, stride, bases), steps, &mut acc);
                    steps = steps.add(BLOCK_ROWS);
                    x = x.add(BLOCK_ROWS * CODE_GROUP);
                    w = w.add(group_bytes);
                }
                levels.end::<S, M, T>(*run, acc);
            }
        }
    }
}

impl<const BITS: usize, const M: usize, const T: usize> Accumulate<'_, BITS, M, T> {
    /// What the products of a step are added to.
    ///
    /// # Safety
    /// `steps` is valid for `M` rows.
    #[inline(always)]
    unsafe fn start<S: Simd>(steps: *const InputStep) -> Sums<S, M, T> {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::splat_i32(0); T]; M];
            for m in 0..M {
                sums[m] = [S::splat_i32((*steps.add(m)).start); T];
            }
            sums
        }
    }

    /// Scales the products of a step, whose scales are at `w` and whose bases, if there are any, `bases` bytes behind.
    ///
    /// # Safety
    /// `steps` is valid for `M` rows, `w` for the factors of `T` tiles.
    #[inline(always)]
    unsafe fn finish<S: Simd>(
        sums: &Sums<S, M, T>,
        (w, tile_stride, bases): (*const u8, usize, usize),
        steps: *const InputStep,
        acc: &mut [[S::V; T]; M],
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for t in 0..T {
                let w = w.add(t * tile_stride);
                let scale = S::load_f16(w.cast());
                for m in 0..M {
                    let sum = scaled::<S>(sums[m][t], &*steps.add(m));
                    acc[m][t] = S::fma(scale, sum, acc[m][t]);
                }
                if bases > 0 {
                    let base = S::load_f16(w.add(bases).cast());
                    for m in 0..M {
                        acc[m][t] = S::fma(base, S::splat((*steps.add(m)).scaled_sum), acc[m][t]);
                    }
                }
            }
        }
    }

    /// Adds the products of half `HALF` of a group.
    ///
    /// # Safety
    /// `codes` is the group's codes of the first tile, and `x` the group's bytes of the first row.
    #[inline(always)]
    unsafe fn products<S: Simd, const HALF: usize>(
        codes: *const u8,
        tile_stride: usize,
        x: *const i8,
        sums: &mut Sums<S, M, T>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for t in 0..T {
                for line in 0..BITS / 2 {
                    let ahead = HINT_AHEAD_BYTES + (HALF * (BITS / 2) + line) * VECTOR_BYTES;
                    S::prefetch(codes.wrapping_add(t * tile_stride + ahead));
                }
            }
            if HALF == 0 {
                Self::vector::<S, 0>(codes, tile_stride, x, sums);
                Self::vector::<S, 1>(codes, tile_stride, x, sums);
                Self::vector::<S, 2>(codes, tile_stride, x, sums);
                Self::vector::<S, 3>(codes, tile_stride, x, sums);
            } else {
                Self::vector::<S, 4>(codes, tile_stride, x, sums);
                Self::vector::<S, 5>(codes, tile_stride, x, sums);
                Self::vector::<S, 6>(codes, tile_stride, x, sums);
                Self::vector::<S, 7>(codes, tile_stride, x, sums);
            }
        }
    }

    /// Adds the products of vector `VECTOR` of a group: four inputs of each output. An input is broadcast once for
    /// all tiles, since a core can broadcast one a cycle but multiply two.
    ///
    /// # Safety
    /// As [`products`](Self::products).
    #[inline(always)]
    unsafe fn vector<S: Simd, const VECTOR: usize>(
        codes: *const u8,
        tile_stride: usize,
        x: *const i8,
        sums: &mut Sums<S, M, T>,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut vectors = [S::splat_i32(0); T];
            for t in 0..T {
                vectors[t] = unpack::<S, BITS, VECTOR>(codes.add(t * tile_stride));
            }
            for m in 0..M {
                // The bytes of `x` are in memory order, as the codes are.
                let four = x.add(m * CODE_GROUP + VECTOR * INPUTS).cast::<i32>().read_unaligned();
                let four = S::splat_i32(i32::from_le(four));
                for t in 0..T {
                    sums[m][t] = match BITS {
                        8 => S::dot::<false>(sums[m][t], vectors[t], four),
                        _ => S::dot::<true>(sums[m][t], vectors[t], four),
                    };
                }
            }
        }
    }
}

/// The sum of a step's products times the power of two in its scale, exactly.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
pub(super) unsafe fn by_power<S: Simd>(sum: S::I, step: &InputStep) -> S::V {
    // SAFETY: register operations only.
    unsafe { S::sub(S::as_floats(sum), S::splat(step.zero)) }
}

/// The same times the whole scale.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd>(sum: S::I, step: &InputStep) -> S::V {
    // SAFETY: register operations only.
    unsafe { S::mul(by_power::<S>(sum, step), S::splat(SCALE_PARTS[step.part as usize])) }
}

/// Vector `VECTOR` of a group, a byte for each code.
///
/// # Safety
/// `codes` is valid for a group's codes of one tile; the machine supports `S`.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, const BITS: usize, const VECTOR: usize>(codes: *const u8) -> S::I {
    // SAFETY: the vectors named exist by the layout of `pack`.
    unsafe {
        if BITS == 8 {
            return S::load_bytes(codes.add(VECTOR * VECTOR_BYTES));
        }
        let pair = S::load_bytes(codes.add(VECTOR / 2 * VECTOR_BYTES));
        let low = if VECTOR.is_multiple_of(2) { S::field::<0>(pair, 15) } else { S::field::<4>(pair, 15) };
        if BITS == 4 {
            return low;
        }
        let plane = if BITS == 5 { 0 } else { VECTOR / 4 };
        let plane = S::load_bytes(codes.add((4 + plane) * VECTOR_BYTES));
        let upper = if BITS == 5 {
            match VECTOR {
                0 => S::field::<-4>(plane, 16),
                1 => S::field::<-3>(plane, 16),
                2 => S::field::<-2>(plane, 16),
                3 => S::field::<-1>(plane, 16),
                4 => S::field::<0>(plane, 16),
                5 => S::field::<1>(plane, 16),
                6 => S::field::<2>(plane, 16),
                _ => S::field::<3>(plane, 16),
            }
        } else {
            match VECTOR % 4 {
                0 => S::field::<-4>(plane, 48),
                1 => S::field::<-2>(plane, 48),
                2 => S::field::<0>(plane, 48),
                _ => S::field::<2>(plane, 48),
            }
        };
        S::or(low, upper)
    }
}
