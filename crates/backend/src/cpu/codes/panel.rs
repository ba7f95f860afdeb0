//! Products of several rows with codes: a group of tiles is unpacked once, then blocks of rows pass by.
//!
//! A panel has, of each group of 32 inputs, the scales times each of [`SCALE_PARTS`] `[scale][part][T][16]` and the bases
//! `[base][T][16]` in f32, then the codes `[8 vectors][T][64]`, a byte for each, whatever the layout is.

use super::inputs::{BLOCK_ROWS, InputStep, SCALE_PARTS};
use super::kernels::{FACTOR_BYTES, INPUTS, VECTOR_BYTES, by_power, scaled, unpack};
use crate::cpu::matmul::{HINT_AHEAD_BYTES, Levels, NextTiles, Run};
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use lockstep_core::{CODE_GROUP, CodeLayout};

/// Rows of a pass over a panel: with three tiles their integer and their float sums are all in registers. (Eight rows, whose float
/// sums were in memory, took 5 % longer.)
const ROWS: usize = 4;
/// Vectors of a group.
const VECTORS: usize = CODE_GROUP / INPUTS;
/// Bytes of a factor of 16 outputs in a panel.
const PANEL_FACTOR_BYTES: usize = size_of::<f32>() * LANES;

/// Bytes of a group of `tiles` tiles in a panel.
pub(super) const fn panel_group_bytes(layout: CodeLayout, tiles: usize) -> usize {
    tiles * (panel_factors(layout) * PANEL_FACTOR_BYTES + VECTORS * VECTOR_BYTES)
}

/// Factors of a group in a panel.
const fn panel_factors(layout: CodeLayout) -> usize {
    layout.factors() + (SCALE_PARTS.len() - 1) * layout.scales()
}

/// Fills a panel.
#[derive(Clone, Copy)]
pub(super) struct Unpack<const T: usize> {
    /// The first group of the first tile; tiles follow at `tile_stride` bytes.
    pub w: *const u8,
    pub tile_stride: usize,
    pub layout: CodeLayout,
    pub groups: usize,
    pub panel: *mut u8,
}

impl<const T: usize> Unpack<T> {
    /// # Safety
    /// `w` is valid for the groups of `T` tiles, `panel` for [`panel_group_bytes`] of each group; the machine
    /// supports `isa`.
    pub(super) unsafe fn run(self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self.layout.bits() {
                4 => isa.run(UnpackBits::<4, T>(self)),
                5 => isa.run(UnpackBits::<5, T>(self)),
                6 => isa.run(UnpackBits::<6, T>(self)),
                _ => isa.run(UnpackBits::<8, T>(self)),
            }
        }
    }
}

/// [`Unpack`] of codes with so many bits.
#[derive(Clone, Copy)]
struct UnpackBits<const BITS: usize, const T: usize>(Unpack<T>);

impl<const BITS: usize, const T: usize> Kernel for UnpackBits<BITS, T> {
    type Output = ();

    /// # Safety
    /// As [`Unpack::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Unpack { w, tile_stride, layout, groups, panel } = self.0;
        let (factors, group_bytes) = (layout.factors(), LANES * layout.packed_group_bytes());
        for group in 0..groups {
            for t in 0..T {
                // SAFETY: the group and the tile are below the counts that the caller promises.
                unsafe {
                    let w = w.add(group * group_bytes + t * tile_stride);
                    for line in 0..=BITS {
                        S::prefetch(w.wrapping_add(HINT_AHEAD_BYTES + line * VECTOR_BYTES));
                    }
                    let panel = panel.add(group * panel_group_bytes(layout, T));
                    let mut place = panel.add(t * PANEL_FACTOR_BYTES);
                    for factor in 0..factors {
                        let value = S::load_f16(w.add(factor * FACTOR_BYTES).cast());
                        for part in
                            &SCALE_PARTS[..if factor < layout.scales() { SCALE_PARTS.len() } else { 1 }]
                        {
                            S::store(place.cast(), S::mul(value, S::splat(*part)));
                            place = place.add(T * PANEL_FACTOR_BYTES);
                        }
                    }
                    let codes = w.add(factors * FACTOR_BYTES);
                    let place = panel.add(panel_factors(layout) * T * PANEL_FACTOR_BYTES + t * VECTOR_BYTES);
                    let at = |vector: usize| place.wrapping_add(vector * T * VECTOR_BYTES);
                    S::store_bytes(at(0), unpack::<S, BITS, 0>(codes));
                    S::store_bytes(at(1), unpack::<S, BITS, 1>(codes));
                    S::store_bytes(at(2), unpack::<S, BITS, 2>(codes));
                    S::store_bytes(at(3), unpack::<S, BITS, 3>(codes));
                    S::store_bytes(at(4), unpack::<S, BITS, 4>(codes));
                    S::store_bytes(at(5), unpack::<S, BITS, 5>(codes));
                    S::store_bytes(at(6), unpack::<S, BITS, 6>(codes));
                    S::store_bytes(at(7), unpack::<S, BITS, 7>(codes));
                }
            }
        }
    }
}

/// Where a block finds factors and codes.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// A panel.
    Panel(*const u8),
    /// The first group of the first tile of the matrix; tiles follow at the second field's bytes. Only codes of 4 and 8
    /// bits, which take little to unpack: for a single block a panel would cost more.
    Matrix(*const u8, usize),
}

/// The sums of a block of rows times `T` tiles over some runs of inputs, with the tree of their leaves.
pub(super) struct PanelBlock<'a> {
    /// The first row's first group and its steps, as [`CodedRows::at`](super::CodedRows::at) gives them; the other rows
    /// are of the same block.
    pub x: (*const i8, *const InputStep),
    /// Rows: 4 or 8, which all have memory, wanted or not.
    pub rows: usize,
    pub source: Source,
    pub layout: CodeLayout,
    pub runs: &'a [Run],
    pub levels: Levels,
    pub next: NextTiles,
}

impl PanelBlock<'_> {
    /// Runs the kernel for the rows.
    ///
    /// # Safety
    /// The pointers are valid for what the fields describe, the source for `T` tiles; nobody else touches the levels; the
    /// machine supports `isa`.
    pub(super) unsafe fn run<const T: usize>(&self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            match (self.source, self.layout.bits()) {
                (Source::Matrix(..), 4) => self.run_form::<4, true, T>(isa),
                (Source::Matrix(..), 8) => self.run_form::<8, false, T>(isa),
                (Source::Matrix(..), bits) => unreachable!("codes of {bits} bits are unpacked into a panel"),
                (Source::Panel(_), 8) => self.run_form::<0, false, T>(isa),
                (Source::Panel(_), _) => self.run_form::<0, true, T>(isa),
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_form<const BITS: usize, const NARROW: bool, const T: usize>(&self, isa: Isa) {
        // SAFETY: passed on to the caller.
        unsafe {
            for first in (0..self.rows).step_by(ROWS) {
                isa.run(PanelRows::<BITS, NARROW, T> { block: self, first });
            }
        }
    }
}

/// Four rows of a [`PanelBlock`] in registers. `BITS` of codes in the matrix, or 0 for a panel. `NARROW`: codes are below 64.
#[derive(Clone, Copy)]
struct PanelRows<'a, const BITS: usize, const NARROW: bool, const T: usize> {
    block: &'a PanelBlock<'a>,
    /// The first of the rows.
    first: usize,
}

/// Bytes from one thing to the next.
#[derive(Clone, Copy)]
struct Strides {
    group: usize,
    /// From the factors of a group to its codes.
    factors: usize,
    factor: usize,
    /// From a factor, or a vector of codes, of one tile to that of the next.
    tile_factor: usize,
    tile_vector: usize,
    vector: usize,
}

impl<const BITS: usize, const NARROW: bool, const T: usize> Kernel for PanelRows<'_, BITS, NARROW, T> {
    type Output = ();

    /// # Safety
    /// As [`PanelBlock::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PanelBlock { x: (x, steps), layout, levels, mut next, .. } = *self.block;
        let (mut x, mut steps) = (x.wrapping_add(self.first * CODE_GROUP), steps.wrapping_add(self.first));
        let levels = levels.rows_from::<T>(self.first);
        let (mut w, strides) = self.source();
        // A scale is there once in the matrix, with each part in a panel.
        let parts = if BITS == 0 { SCALE_PARTS.len() } else { 1 };
        let scales = layout.scales();
        // SAFETY: every row, tile and group named is below the counts that the caller promises; a block has four rows
        // from the first on, and the runs' groups follow each other.
        unsafe {
            for run in self.block.runs {
                let mut acc = levels.begin::<S, ROWS, T>(*run);
                for _ in 0..run.inputs / CODE_GROUP {
                    next.ask::<S, T>();
                    let (mut codes, mut x_at) = (w.add(strides.factors), x);
                    for scale in 0..scales {
                        let sums =
                            Self::products::<S>((&mut codes, &mut x_at), steps, VECTORS / scales, strides);
                        Self::scale::<S>(
                            &sums,
                            w.add(scale * parts * strides.factor),
                            strides,
                            steps,
                            &mut acc,
                        );
                        if layout.has_base() {
                            let base = w.add((scales * parts + scale) * strides.factor);
                            Self::add_base::<S>(base, strides, steps, &mut acc);
                        }
                        steps = steps.add(BLOCK_ROWS);
                    }
                    x = x.add(BLOCK_ROWS * CODE_GROUP);
                    w = w.add(strides.group);
                }
                levels.end::<S, ROWS, T>(*run, acc);
            }
        }
    }
}

impl<const BITS: usize, const NARROW: bool, const T: usize> PanelRows<'_, BITS, NARROW, T> {
    /// The first group and how things follow.
    #[inline(always)]
    fn source(self) -> (*const u8, Strides) {
        let layout = self.block.layout;
        match self.block.source {
            Source::Panel(panel) => {
                let strides = Strides {
                    group: panel_group_bytes(layout, T),
                    factors: panel_factors(layout) * T * PANEL_FACTOR_BYTES,
                    factor: T * PANEL_FACTOR_BYTES,
                    tile_factor: PANEL_FACTOR_BYTES,
                    tile_vector: VECTOR_BYTES,
                    vector: T * VECTOR_BYTES,
                };
                (panel, strides)
            }
            Source::Matrix(w, tile_stride) => {
                let strides = Strides {
                    group: LANES * layout.packed_group_bytes(),
                    factors: layout.factors() * FACTOR_BYTES,
                    factor: FACTOR_BYTES,
                    tile_factor: tile_stride,
                    tile_vector: tile_stride,
                    vector: VECTOR_BYTES,
                };
                (w, strides)
            }
        }
    }

    /// The integer sums over `vectors` vectors. The compiler does not know how many: unrolled, it took the tiles apart and
    /// kept all inputs in memory meanwhile, at half the speed.
    ///
    /// # Safety
    /// `w` and `x` are valid for the vectors of `T` tiles and four rows, `steps` for four rows.
    #[inline(always)]
    unsafe fn products<S: Simd>(
        (w, x): (&mut *const u8, &mut *const i8),
        steps: *const InputStep,
        vectors: usize,
        strides: Strides,
    ) -> [[S::I; T]; ROWS] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::splat_i32(0); T]; ROWS];
            for m in 0..ROWS {
                sums[m] = [S::splat_i32((*steps.add(m)).start); T];
            }
            for _ in 0..if BITS == 4 { vectors / 2 } else { vectors } {
                let mut codes = [S::splat_i32(0); T];
                for t in 0..T {
                    codes[t] = S::load_bytes(w.add(t * strides.tile_vector));
                }
                if BITS == 4 {
                    let mut low = codes;
                    for t in 0..T {
                        (low[t], codes[t]) = (S::field::<0>(codes[t], 15), S::field::<4>(codes[t], 15));
                    }
                    Self::dots::<S>(&mut sums, &low, *x);
                    *x = x.add(INPUTS);
                }
                Self::dots::<S>(&mut sums, &codes, *x);
                *x = x.add(INPUTS);
                *w = w.add(strides.vector);
            }
            sums
        }
    }

    /// Adds the products of four inputs of each row. An input is broadcast once for all tiles, since a core can broadcast
    /// one a cycle but multiply two.
    ///
    /// # Safety
    /// `x` is valid for the inputs of four rows.
    #[inline(always)]
    unsafe fn dots<S: Simd>(sums: &mut [[S::I; T]; ROWS], codes: &[S::I; T], x: *const i8) {
        for m in 0..ROWS {
            // SAFETY: passed on to the caller.
            unsafe {
                // The bytes of `x` are in memory order, as the codes are.
                let four = x.add(m * CODE_GROUP).cast::<i32>().read_unaligned();
                let four = S::splat_i32(i32::from_le(four));
                for t in 0..T {
                    sums[m][t] = S::dot::<NARROW>(sums[m][t], codes[t], four);
                }
            }
        }
    }

    /// Adds the scaled sums to the float sums.
    ///
    /// # Safety
    /// `steps` is valid for four rows, `scale` for `T` tiles and, in a panel, for each part.
    #[inline(always)]
    unsafe fn scale<S: Simd>(
        sums: &[[S::I; T]; ROWS],
        scale: *const u8,
        strides: Strides,
        steps: *const InputStep,
        acc: &mut [[S::V; T]; ROWS],
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for m in 0..ROWS {
                let step = &*steps.add(m);
                if BITS == 0 {
                    let scale = scale.add(step.part as usize * strides.factor);
                    for t in 0..T {
                        let scale = S::load(scale.add(t * strides.tile_factor).cast());
                        acc[m][t] = S::fma(scale, by_power::<S>(sums[m][t], step), acc[m][t]);
                    }
                } else {
                    for t in 0..T {
                        let scale = S::load_f16(scale.add(t * strides.tile_factor).cast());
                        acc[m][t] = S::fma(scale, scaled::<S>(sums[m][t], step), acc[m][t]);
                    }
                }
            }
        }
    }

    /// Adds the bases times the sums of the inputs to the float sums.
    ///
    /// # Safety
    /// `steps` is valid for four rows, `base` for `T` tiles.
    #[inline(always)]
    unsafe fn add_base<S: Simd>(
        base: *const u8,
        strides: Strides,
        steps: *const InputStep,
        acc: &mut [[S::V; T]; ROWS],
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for t in 0..T {
                let base = base.add(t * strides.tile_factor);
                let base = if BITS == 0 { S::load(base.cast()) } else { S::load_f16(base.cast()) };
                for m in 0..ROWS {
                    acc[m][t] = S::fma(base, S::splat((*steps.add(m)).scaled_sum), acc[m][t]);
                }
            }
        }
    }
}
