//! Activations rounded to signed bytes, a scale for each group of 32.
//!
//! **Invariant:** a row's bytes and scales depend on the row alone.

use crate::Result;
use crate::cpu::memory::Region;
use crate::cpu::pointwise::for_rows;
use crate::cpu::pool::ThreadPool;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use crate::cpu::tensor::RowsIn;
use lockstep_core::{CODE_GROUP, CodeLayout};
use std::ops::Range;

/// What the memory is for, in errors.
const WHAT: &str = "rounded activations";
/// Steps of a group, at most.
const SCALES_MAX: usize = 2;
/// The largest rounded value.
const CODE_MAX: f32 = 127.0;
/// Groups whose largest element is smaller count as zero: 127 over it would not be finite, and what they could add is
/// below the precision of everything else.
const TINY: f32 = 1e-30;
/// Adding this to a float below 2^22 in size rounds it to an integer (ties to even), whose low byte it then holds.
const ROUNDER: f32 = 1.5 * (1 << 23) as f32;

/// Rows whose groups lie side by side in memory, so that a kernel walks one stream.
pub(in crate::cpu) const BLOCK_ROWS: usize = 8;

/// What kernels need of a group (or half group with a scale of its own) of a row besides its bytes.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct InputStep {
    /// What a rounded value is worth.
    pub scale: f32,
    /// `scale` times the sum of the rounded values.
    pub scaled_sum: f32,
    /// The lowest code times the sum of the rounded values: what products lack with codes that are counted from the lowest.
    pub start: i32,
    /// Keeps steps on 16 bytes.
    unused: u32,
}

/// Memory for the rounded activations of one product at a time.
pub(in crate::cpu) struct CodedInputs {
    bytes: Region,
    steps: Region,
}

impl CodedInputs {
    pub(in crate::cpu) fn new() -> Result<Self> {
        let none = || Region::own(0, false, WHAT);
        Ok(Self { bytes: none()?, steps: none()? })
    }

    /// Makes room for products of activations with so many rows and columns. Memory is resident only once used.
    pub(in crate::cpu) fn reserve(&mut self, rows: usize, cols: usize) -> Result<()> {
        let elements = rows.next_multiple_of(BLOCK_ROWS) * cols;
        if self.bytes.bytes() < elements {
            self.bytes = Region::own(elements, false, WHAT)?;
            let steps = SCALES_MAX * elements.div_ceil(CODE_GROUP);
            self.steps = Region::own(steps * size_of::<InputStep>(), false, WHAT)?;
        }
        Ok(())
    }

    /// Rounds the rows of `x`, which have whole groups, for a matrix of this layout. Panics without
    /// [room](Self::reserve) for them.
    pub(in crate::cpu) fn fill(
        &mut self,
        team: (Isa, &ThreadPool),
        x: RowsIn<'_>,
        layout: CodeLayout,
    ) -> CodedRows<'_> {
        let rows = x.data.len() / x.cols.max(1);
        self.fill_from(team, (rows, x.cols), layout, &|row| Some(x.row(row)))
    }

    /// Rounds what `source` gives for each of so many rows: as many columns, in whole groups. Rows without a source are
    /// there with any values.
    pub(in crate::cpu) fn fill_from<'x>(
        &mut self,
        (isa, pool): (Isa, &ThreadPool),
        (rows, cols): (usize, usize),
        layout: CodeLayout,
        source: &(dyn Fn(usize) -> Option<&'x [f32]> + Sync),
    ) -> CodedRows<'_> {
        let elements = rows.next_multiple_of(BLOCK_ROWS) * cols;
        assert!(cols.is_multiple_of(CODE_GROUP), "rows of whole groups");
        assert!(elements <= self.bytes.bytes(), "room was made when the activations were");
        let (groups, scales) = (cols / CODE_GROUP, layout.scales());
        let target = Target { bytes: self.bytes.as_mut_ptr(), steps: self.steps.as_mut_ptr() };
        for_rows(pool, rows, cols, &|row| {
            let Some(x) = source(row) else { return };
            assert_eq!(x.len(), cols, "columns of a source");
            let (block, in_block) = (row / BLOCK_ROWS * BLOCK_ROWS, row % BLOCK_ROWS);
            let target = &target;
            // SAFETY: a row's bytes and steps are inside the memory made above, and written by one thread; the
            // row has as many groups.
            unsafe {
                isa.run(Round {
                    x: x.as_ptr(),
                    groups,
                    scales,
                    lowest: layout.lowest(),
                    bytes: target.bytes.add(block * cols + in_block * CODE_GROUP),
                    steps: target.steps.add(block * groups * scales + in_block),
                });
            }
        });
        let steps = &self.steps.as_slice()[..elements / CODE_GROUP * scales];
        CodedRows { bytes: &self.bytes.as_slice()[..elements], steps, rows, groups, scales }
    }
}

/// Where rounded rows go.
struct Target {
    bytes: *mut i8,
    steps: *mut InputStep,
}

// SAFETY: threads write different rows of memory that is borrowed for all of them.
unsafe impl Sync for Target {}

/// Rounded rows in blocks of [`BLOCK_ROWS`]: `[block][group][row of the block][32]` bytes and
/// `[block][group][scale][row of the block]` steps. Rows that the last block lacks are there with any values.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct CodedRows<'a> {
    bytes: &'a [i8],
    steps: &'a [InputStep],
    rows: usize,
    /// Of a row.
    groups: usize,
    /// Steps of a group.
    scales: usize,
}

impl CodedRows<'_> {
    /// How many rows.
    pub(in crate::cpu) fn rows(&self) -> usize {
        self.rows
    }

    /// Some of the rows, from a multiple of [`BLOCK_ROWS`] on. Panics when there are fewer.
    pub(in crate::cpu) fn part(&self, rows: Range<usize>) -> Self {
        assert!(rows.start.is_multiple_of(BLOCK_ROWS) && rows.end <= self.rows, "whole blocks of these rows");
        let groups = rows.start * self.groups;
        let (bytes, steps) = (&self.bytes[groups * CODE_GROUP..], &self.steps[groups * self.scales..]);
        Self { bytes, steps, rows: rows.len(), ..*self }
    }

    /// Group `group` of row `row`; rows of the same block follow at 32 bytes and at one step, groups at a block's
    /// bytes and steps.
    pub(super) fn at(&self, row: usize, group: usize) -> (*const i8, *const InputStep) {
        let (block, in_block) = (row / BLOCK_ROWS, row % BLOCK_ROWS);
        let index = (block * self.groups + group) * BLOCK_ROWS;
        (
            self.bytes[(index + in_block) * CODE_GROUP..].as_ptr(),
            self.steps[index * self.scales + in_block..].as_ptr(),
        )
    }
}

/// Rounds one row.
#[derive(Clone, Copy)]
struct Round {
    x: *const f32,
    groups: usize,
    /// Steps of a group.
    scales: usize,
    lowest: i32,
    /// First group; the others follow at a block's bytes.
    bytes: *mut i8,
    /// First step; the others follow at [`BLOCK_ROWS`].
    steps: *mut InputStep,
}

/// Groups rounded at a time: what is one number for a group is a lane for sixteen.
const ROUND_GROUPS: usize = LANES;

impl Kernel for Round {
    type Output = ();

    /// # Safety
    /// `x` is valid for 32 elements of each group, `bytes` and `steps` for what comes of them.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for first in (0..self.groups).step_by(ROUND_GROUPS) {
            // SAFETY: these groups are below the count that the caller promises.
            unsafe { self.groups::<S>(first, ROUND_GROUPS.min(self.groups - first)) };
        }
    }
}

impl Round {
    /// Rounds `count` groups from `first` on, at most [`ROUND_GROUPS`].
    ///
    /// # Safety
    /// As the kernel, for these groups.
    #[inline(always)]
    unsafe fn groups<S: Simd>(self, first: usize, count: usize) {
        // SAFETY: all indices are below the counts that the caller promises.
        unsafe {
            let zero = S::splat(0.0);
            let size = |x: S::V| S::max(x, S::sub(zero, x));
            let x = self.x.add(first * CODE_GROUP);
            let load = |group: usize| {
                let start = x.add(group * CODE_GROUP);
                [S::load(start), S::load(start.add(LANES))]
            };
            let mut sizes = [zero; ROUND_GROUPS];
            for group in 0..count {
                let [low, high] = load(group);
                sizes[group] = S::max(size(low), size(high));
            }
            let largest = largest_of_each::<S>(sizes);
            // Nothing where the group is too small.
            let inverse = S::div(S::splat(CODE_MAX), largest);
            let inverse = S::zero_below(inverse, largest, S::splat(TINY));
            let worth = S::div(largest, S::splat(CODE_MAX));
            let worth = S::zero_below(worth, largest, S::splat(TINY));
            let mut inverses = [0.0; LANES];
            S::store(inverses.as_mut_ptr(), inverse);
            let mut rounded = [[zero; ROUND_GROUPS]; 2];
            for group in 0..count {
                let x = load(group);
                for half in 0..2 {
                    let word = S::fma(x[half], S::splat(inverses[group]), S::splat(ROUNDER));
                    let place = (first + group) * BLOCK_ROWS * CODE_GROUP + half * LANES;
                    S::store_low_bytes(self.bytes.add(place), word);
                    rounded[half][group] = S::sub(word, S::splat(ROUNDER));
                }
            }
            // Small whole numbers, or NaN when an element is not finite: it is NaN itself, or `inverse` is 0.
            let sums = match self.scales {
                1 => {
                    for group in 0..count {
                        rounded[0][group] = S::add(rounded[0][group], rounded[1][group]);
                    }
                    let sums = S::sums(rounded[0]);
                    [sums, sums]
                }
                _ => rounded.map(|half| S::sums(half)),
            };
            let scale = S::fma(zero, S::add(sums[0], sums[1]), worth);
            let mut scales = [0.0; LANES];
            S::store(scales.as_mut_ptr(), scale);
            for (index, sums) in sums.into_iter().enumerate().take(self.scales) {
                let mut values = [0.0; LANES];
                S::store(values.as_mut_ptr(), sums);
                for group in 0..count {
                    let (scale, sum) = (scales[group], values[group]);
                    let (scaled_sum, start) = (scale * sum, self.lowest * sum as i32);
                    let step = InputStep { scale, scaled_sum, start, unused: 0 };
                    self.steps.add(((first + group) * self.scales + index) * BLOCK_ROWS).write(step);
                }
            }
        }
    }
}

/// Lane `i` is the largest lane of `v[i]`.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
unsafe fn largest_of_each<S: Simd>(v: [S::V; LANES]) -> S::V {
    // SAFETY: register operations only; the caller promises the instruction set.
    unsafe {
        let mut v = S::transpose(v);
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                v[lane] = S::max(v[lane], v[lane + half]);
            }
            half /= 2;
        }
        v[0]
    }
}
