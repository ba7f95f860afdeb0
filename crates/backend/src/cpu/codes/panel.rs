//! Products of several rows with codes: a group of tiles is unpacked once, then blocks of rows pass by.
//!
//! A panel has, of each group of 32 inputs, the factors `[scales then bases][T][16]` in f32 and the codes
//! `[8 vectors][T][64]`, a byte for each, whatever the layout is.

use super::inputs::{BLOCK_ROWS, InputStep};
use super::kernels::{FACTOR_BYTES, INPUTS, VECTOR_BYTES, unpack};
use crate::cpu::matmul::{HINT_AHEAD_BYTES, Levels, NextTiles, Run};
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use lockstep_core::{CODE_GROUP, CodeLayout};

/// Vectors of a group.
const VECTORS: usize = CODE_GROUP / INPUTS;
/// Bytes of a factor of 16 outputs in a panel.
const PANEL_FACTOR_BYTES: usize = size_of::<f32>() * LANES;

/// Bytes of a group of `tiles` tiles in a panel.
pub(super) const fn panel_group_bytes(layout: CodeLayout, tiles: usize) -> usize {
    tiles * (layout.factors() * PANEL_FACTOR_BYTES + VECTORS * VECTOR_BYTES)
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
                    for factor in 0..factors {
                        let place = panel.add((factor * T + t) * PANEL_FACTOR_BYTES);
                        S::store(place.cast(), S::load_f16(w.add(factor * FACTOR_BYTES).cast()));
                    }
                    let codes = w.add(factors * FACTOR_BYTES);
                    let place = panel.add(factors * T * PANEL_FACTOR_BYTES + t * VECTOR_BYTES);
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
            match self.rows {
                4 => isa.run(PanelRows::<BITS, NARROW, 4, T>(self)),
                // A constant, so that kernels with too few registers are not even compiled.
                8 if const { T <= 3 } => isa.run(PanelRows::<BITS, NARROW, 8, T>(self)),
                rows => unreachable!("no kernel takes {rows} rows of {T} tiles"),
            }
        }
    }
}

/// [`PanelBlock`] for `M` rows. Integer sums are in registers; float sums, needed once a group, are in the levels. `BITS` of codes in the matrix, or 0 for a panel. `NARROW`: codes are below 64.
#[derive(Clone, Copy)]
struct PanelRows<'a, const BITS: usize, const NARROW: bool, const M: usize, const T: usize>(
    &'a PanelBlock<'a>,
);

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

impl<const BITS: usize, const NARROW: bool, const M: usize, const T: usize> Kernel
    for PanelRows<'_, BITS, NARROW, M, T>
{
    type Output = ();

    /// # Safety
    /// As [`PanelBlock::run`].
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PanelBlock { x: (mut x, mut steps), layout, levels, mut next, .. } = *self.0;
        let (mut w, strides) = self.source();
        let (scales, base) = (layout.scales(), layout.scales() * strides.factor);
        // SAFETY: every row, tile and group named is below the counts that the caller promises; a block has `M` rows
        // from the first on, and the runs' groups follow each other.
        unsafe {
            for run in self.0.runs {
                let mut is_first = run.is_first;
                let acc = levels.at(run.level);
                for _ in 0..run.inputs / CODE_GROUP {
                    next.ask::<S, T>();
                    let (mut codes, mut x_at) = (w.add(strides.factors), x);
                    for scale in 0..scales {
                        let sums =
                            Self::products::<S>((&mut codes, &mut x_at), steps, VECTORS / scales, strides);
                        let scale = w.add(scale * strides.factor);
                        let factors = (scale, scale.wrapping_add(base), strides.tile_factor);
                        match (is_first, layout.has_base()) {
                            (true, true) => Self::finish::<S, true, true>(&sums, factors, steps, acc),
                            (true, false) => Self::finish::<S, true, false>(&sums, factors, steps, acc),
                            (false, true) => Self::finish::<S, false, true>(&sums, factors, steps, acc),
                            (false, false) => Self::finish::<S, false, false>(&sums, factors, steps, acc),
                        }
                        is_first = false;
                        steps = steps.add(BLOCK_ROWS);
                    }
                    x = x.add(BLOCK_ROWS * CODE_GROUP);
                    w = w.add(strides.group);
                }
                // A leaf without inputs is zero.
                if run.joins > 0 || is_first {
                    let run_so_far = Run { is_first, ..*run };
                    let acc = levels.begin::<S, M, T>(run_so_far);
                    levels.end::<S, M, T>(*run, acc);
                }
            }
        }
    }
}

impl<const BITS: usize, const NARROW: bool, const M: usize, const T: usize>
    PanelRows<'_, BITS, NARROW, M, T>
{
    /// The first group and how things follow.
    #[inline(always)]
    fn source(self) -> (*const u8, Strides) {
        let layout = self.0.layout;
        match self.0.source {
            Source::Panel(panel) => {
                let strides = Strides {
                    group: panel_group_bytes(layout, T),
                    factors: layout.factors() * T * PANEL_FACTOR_BYTES,
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
    /// `w` and `x` are valid for the vectors of `T` tiles and `M` rows, `steps` for `M` rows.
    #[inline(always)]
    unsafe fn products<S: Simd>(
        (w, x): (&mut *const u8, &mut *const i8),
        steps: *const InputStep,
        vectors: usize,
        strides: Strides,
    ) -> [[S::I; T]; M] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[S::splat_i32(0); T]; M];
            for m in 0..M {
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
    /// `x` is valid for the inputs of `M` rows.
    #[inline(always)]
    unsafe fn dots<S: Simd>(sums: &mut [[S::I; T]; M], codes: &[S::I; T], x: *const i8) {
        for m in 0..M {
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

    /// Adds the scaled sums, and with `BASE` the bases, to the float sums, which count as zero if they are the `FIRST`.
    ///
    /// # Safety
    /// `steps` and `acc` are valid for `M` rows, `scale` and, with `BASE`, `base` for `T` tiles, which follow at `stride`
    /// bytes.
    #[inline(always)]
    unsafe fn finish<S: Simd, const FIRST: bool, const BASE: bool>(
        sums: &[[S::I; T]; M],
        (scale, base, stride): (*const u8, *const u8, usize),
        steps: *const InputStep,
        acc: *mut f32,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            let factor = |p: *const u8, t: usize| p.add(t * stride);
            for m in 0..M {
                let step = *steps.add(m);
                let (x_scale, scaled_sum) = (S::splat(step.scale), S::splat(step.scaled_sum));
                for t in 0..T {
                    let place = acc.add((m * T + t) * LANES);
                    let before = if FIRST { S::splat(0.0) } else { S::load(place) };
                    let sum = S::mul(x_scale, S::to_f32(sums[m][t]));
                    let mut sum = S::fma(Self::load_factor::<S>(factor(scale, t)), sum, before);
                    if BASE {
                        sum = S::fma(Self::load_factor::<S>(factor(base, t)), scaled_sum, sum);
                    }
                    S::store(place, sum);
                }
            }
        }
    }

    /// A factor of 16 outputs.
    ///
    /// # Safety
    /// `p` is valid for it.
    #[inline(always)]
    unsafe fn load_factor<S: Simd>(p: *const u8) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { if BITS == 0 { S::load(p.cast()) } else { S::load_f16(p.cast()) } }
    }
}
