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
/// Scales are rounded up to so many bits behind the point.
const SCALE_BITS: u32 = 2;
/// Bits of a float behind the point.
const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;
/// What the last of a scale's bits can make of the power of two below it.
pub(super) const SCALE_PARTS: [f32; 1 << SCALE_BITS] = [1.0, 1.25, 1.5, 1.75];
/// Groups whose largest element is smaller count as zero: what they could add is below the precision of everything else.
const TINY: f32 = 1e-30;
/// Adding this to a float below 2^22 in size rounds it to an integer (ties to even), whose low byte it then holds.
const ROUNDER: f32 = 1.5 * (1 << 23) as f32;

/// Rows whose groups lie side by side in memory, so that a kernel walks one stream.
pub(in crate::cpu) const BLOCK_ROWS: usize = 8;

/// What kernels need of a group (or half group with a scale of its own) of a row besides its bytes.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct InputStep {
    /// [`ROUNDER`] times the power of two in what a rounded value is worth, so that its last place is worth just that.
    pub zero: f32,
    /// What a rounded value is worth times the sum of the rounded values.
    pub scaled_sum: f32,
    /// The bits of `zero`, plus the lowest code times the sum of the rounded values: what products lack with codes that
    /// are counted from the lowest. Products added to it are the bits of a float that is above `zero` by them times the power.
    pub start: i32,
    /// Which of [`SCALE_PARTS`] the power is to be multiplied by.
    pub part: u32,
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
            let count = ROUND_GROUPS.min(self.groups - first);
            // SAFETY: these groups are below the count that the caller promises.
            unsafe {
                // A form for a known count keeps the groups in registers.
                if count == ROUND_GROUPS {
                    self.groups::<S>(first, ROUND_GROUPS);
                } else {
                    self.groups::<S>(first, count);
                }
            }
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
            let scales = lanes::<S>(largest).map(scale_of);
            let inverses = scales.map(|scale| if scale == 0.0 { 0.0 } else { scale.recip() });
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
            // Small whole numbers, or NaN when an element is not finite: it is NaN itself, or its inverse is 0.
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
            let not_finite = S::mul(zero, S::add(sums[0], sums[1]));
            let powers = scales.map(|scale| split(scale).0);
            let zeros = S::fma(S::load(powers.as_ptr()), S::splat(ROUNDER), not_finite);
            // Infinite where the power is 2^105 or more, for a largest element above 127 * 1.75 * 2^104, about 1.74 * 2^111:
            // NaN as well.
            let zeros = lanes::<S>(S::add(zeros, S::sub(zeros, zeros)));
            let parts = scales.map(|scale| split(scale).1);
            for (index, sums) in sums.into_iter().enumerate().take(self.scales) {
                let scaled_sums = lanes::<S>(S::mul(S::load(scales.as_ptr()), sums));
                // As integers, in a way that takes any bits: where they are none, `zero` is NaN.
                let sums = lanes::<S>(S::add(sums, S::splat(ROUNDER)));
                let integers = sums.map(|sum| sum.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32);
                let steps = self.steps.add((first * self.scales + index) * BLOCK_ROWS);
                for group in 0..count {
                    let zero = zeros[group];
                    let lowest = self.lowest.wrapping_mul(integers[group]);
                    let start = (zero.to_bits() as i32).wrapping_add(lowest);
                    let step = InputStep { zero, scaled_sum: scaled_sums[group], start, part: parts[group] };
                    steps.add(group * self.scales * BLOCK_ROWS).write(step);
                }
            }
        }
    }
}

/// The lanes as numbers.
///
/// # Safety
/// The machine supports `S`.
#[inline(always)]
unsafe fn lanes<S: Simd>(v: S::V) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    // SAFETY: there is room for all lanes.
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    lanes
}

/// What a rounded value of a group with this largest element is worth.
#[inline(always)]
fn scale_of(largest: f32) -> f32 {
    let rest = (1 << (MANTISSA_BITS - SCALE_BITS)) - 1;
    // Of a NaN any bits may come, since its elements show by themselves.
    let scale = f32::from_bits((largest / CODE_MAX).to_bits().wrapping_add(rest) & !rest);
    if largest < TINY { 0.0 } else { scale }
}

/// The power of two and the index of the part that make a scale.
#[inline(always)]
fn split(scale: f32) -> (f32, u32) {
    let bits = scale.to_bits();
    let part = bits >> (MANTISSA_BITS - SCALE_BITS) & (SCALE_PARTS.len() as u32 - 1);
    (f32::from_bits(bits >> MANTISSA_BITS << MANTISSA_BITS), part)
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
