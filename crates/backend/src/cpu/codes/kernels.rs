//! The inner loop of products with codes.

use super::inputs::{BLOCK_ROWS, InputStep};
use crate::cpu::matmul::HINT_AHEAD_BYTES;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use lockstep_core::{CODE_GROUP, CodeLayout};

/// Bytes of one factor of 16 outputs.
const FACTOR_BYTES: usize = 2 * LANES;
/// Bytes of a vector or plane of codes.
const VECTOR_BYTES: usize = 4 * LANES;
/// Float sums that a kernel keeps in registers beside its integer sums.
const FLOATS_IN_REGISTERS: usize = 8;
/// Inputs of a vector of codes.
const INPUTS: usize = 4;

/// The sums over some groups of some rows times `T` tiles.
#[derive(Clone, Copy)]
pub(super) struct CodeShape {
    /// The first row's first group and its steps, as [`CodedRows::at`](super::CodedRows::at) gives them; the other rows are
    /// of the same block.
    pub x: (*const i8, *const InputStep),
    /// Rows, at least 1.
    pub rows: usize,
    /// The first group of the first tile; tiles follow at `tile_stride` bytes.
    pub w: *const u8,
    pub tile_stride: usize,
    pub layout: CodeLayout,
    pub groups: usize,
    /// `[rows][T][16]` sums, which are written.
    pub sums: *mut f32,
}

impl CodeShape {
    /// Rows that the next kernel takes of `left`, of at most `most` at once.
    pub(super) const fn rows_at_once(left: usize, most: usize) -> usize {
        match left {
            8.. if most == 8 => 8,
            // One pass with a row too much costs less than three.
            7 if most == 8 => 7,
            4.. if most >= 4 => 4,
            2.. => 2,
            _ => 1,
        }
    }

    /// Runs the kernel for the rows: as many as [`rows_at_once`](Self::rows_at_once) says, with four tiles one or two.
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe; nobody else touches these rows of `sums`; the machine
    /// supports `isa`.
    pub(super) unsafe fn run<const T: usize>(self, isa: Isa) {
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
    unsafe fn run_bits<const BITS: usize, const T: usize>(self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.rows {
                1 => isa.run(Accumulate::<BITS, 1, T>(self)),
                2 => isa.run(Accumulate::<BITS, 2, T>(self)),
                // Constants, so that kernels with too few registers are not even compiled.
                4 if const { T <= 2 } => isa.run(Accumulate::<BITS, 4, T>(self)),
                7 | 8 if const { T <= 2 } => isa.run(Accumulate::<BITS, 8, T>(self)),
                rows => unreachable!("no kernel takes {rows} rows of {T} tiles"),
            }
        }
    }
}

/// [`CodeShape`] in registers: `M` rows, of which those from `rows` on are dropped.
#[derive(Clone, Copy)]
struct Accumulate<const BITS: usize, const M: usize, const T: usize>(CodeShape);

/// The integer sums of `M` rows and `T` tiles.
type Sums<S, const M: usize, const T: usize> = [[<S as Simd>::I; T]; M];

impl<const BITS: usize, const M: usize, const T: usize> Kernel for Accumulate<BITS, M, T> {
    type Output = ();

    /// # Safety
    /// As [`CodeShape::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let CodeShape { x: (mut x, mut steps), w, layout, .. } = self.0;
        let (factors, group_bytes) = (layout.factors() * FACTOR_BYTES, LANES * layout.packed_group_bytes());
        let bases = if layout.has_base() { layout.scales() * FACTOR_BYTES } else { 0 };
        let (stride, halves) = (self.0.tile_stride, layout.scales() == 2);
        // SAFETY: every row, tile and group named is below the counts that the caller promises; a block has `M` rows
        // from the first on.
        unsafe {
            let mut acc = [[S::splat(0.0); T]; M];
            let mut w = w;
            for _ in 0..self.0.groups {
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
                if const { M * T > FLOATS_IN_REGISTERS } {
                    // Needed once a group: in memory, so that the integer sums have the registers.
                    std::hint::black_box(&mut acc);
                }
            }
            for m in 0..M.min(self.0.rows) {
                for t in 0..T {
                    S::store(self.0.sums.add((m * T + t) * LANES), acc[m][t]);
                }
            }
        }
    }
}

impl<const BITS: usize, const M: usize, const T: usize> Accumulate<BITS, M, T> {
    /// What the products of a step start from.
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
                    let sum = S::mul(S::splat((*steps.add(m)).scale), S::to_f32(sums[m][t]));
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
            if M <= 2 {
                for t in 0..T {
                    for line in 0..BITS / 2 {
                        let ahead = HINT_AHEAD_BYTES + (HALF * (BITS / 2) + line) * 64;
                        S::prefetch(codes.wrapping_add(t * tile_stride + ahead));
                    }
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

/// Vector `VECTOR` of a group, a byte for each code.
///
/// # Safety
/// `codes` is valid for a group's codes of one tile; the machine supports `S`.
#[inline(always)]
unsafe fn unpack<S: Simd, const BITS: usize, const VECTOR: usize>(codes: *const u8) -> S::I {
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
