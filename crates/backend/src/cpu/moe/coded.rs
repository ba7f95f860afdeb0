//! An expert's down projection kept as codes, added to the sums of every leaf.
//!
//! ```text
//! leaf_b(e) = the sum of leaf b as `codes` says, from 0, of the expert's rounded rows
//! s_b       = (0 + leaf_b(e)) + leaf_b(e') + ...      for ascending chosen e
//! ```
//! Leaves stay apart until all experts have added to them, since a rank may hold only some.

use crate::cpu::codes::{BLOCK_ROWS, CodeBlocks, CodedRows};
use crate::cpu::matmul::{Blocks, Cut, GROUP_TILES_MAX, PANEL_LEN, Part, Run, TREE_LEVELS};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use lockstep_core::CodeLayout;
use std::ops::Range;

/// Rows whose sums of some leaves wait in scratch memory until they are added.
const PASS_ROWS: usize = 8 * BLOCK_ROWS;
/// Elements of a block's sums at most: a row and a line more than it has, as in `matmul`.
const BLOCK_LEN: usize = TREE_LEVELS * ((BLOCK_ROWS + 1) * GROUP_TILES_MAX + 1) * LANES;
/// A block of fewer rows takes less memory, but there are more of them.
const SUMS_LEN: usize = PASS_ROWS * TREE_LEVELS * (2 * GROUP_TILES_MAX + 1) * LANES;
const _: () = assert!(SUMS_LEN >= PASS_ROWS / BLOCK_ROWS * BLOCK_LEN, "blocks of any size fit");
/// Scratch elements of each thread.
pub(super) const CODED_SCRATCH_LEN: usize = SUMS_LEN + PANEL_LEN;

/// One expert's pairs of a band.
pub(super) struct CodedExpert<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    pub layout: CodeLayout,
    /// The pairs' rounded rows.
    pub x: CodedRows<'a>,
    /// Row of the sums of each pair.
    pub places: &'a [u32],
}

impl CodedExpert<'_> {
    /// Tiles that fill the registers where no expert has more pairs than this.
    pub(super) fn group_tiles(&self, pairs_max: usize) -> usize {
        self.blocks().shape(pairs_max).1
    }

    fn blocks(&self) -> CodeBlocks<'_> {
        CodeBlocks { isa: self.isa, weights: self.weights, layout: self.layout, x: self.x }
    }

    /// Adds to `sums`, `[leaf][row][T][16]` with `leaf_len` elements a leaf, for the `T` tiles from `tile` on.
    pub(super) fn add<const T: usize>(
        &self,
        tile: usize,
        (sums, leaf_len): (&mut [f32], usize),
        scratch: &mut [f32],
    ) {
        let blocks = self.blocks();
        let bounds = &self.weights.spec().leaves;
        let (levels, panel) = scratch[..CODED_SCRATCH_LEN].split_at_mut(SUMS_LEN);
        let block_rows = blocks.shape(self.places.len()).0;
        let level_len = ((block_rows + 1) * T + 1) * LANES;
        let block_len = TREE_LEVELS * level_len;
        for from in (0..self.places.len()).step_by(PASS_ROWS) {
            let rows = from..self.places.len().min(from + PASS_ROWS);
            let cut = Cut { block_rows, blocks: rows.len().div_ceil(block_rows) };
            for first in (0..bounds.len() - 1).step_by(TREE_LEVELS) {
                let last = (bounds.len() - 1).min(first + TREE_LEVELS);
                let leaves = &bounds[first..=last];
                let mut inputs = leaves[0]..leaves[0];
                while inputs.end < leaves[last - first] {
                    let at_once = blocks.inputs_at_once(T, cut).max(1);
                    inputs = inputs.end..leaves[last - first].min(inputs.end.saturating_add(at_once));
                    let (runs, count) = runs(leaves, &inputs);
                    blocks.prepare::<T>(tile, &inputs, cut, panel);
                    for block in 0..cut.blocks {
                        let row = rows.start + block * block_rows;
                        let part = Part {
                            rows: row..rows.end.min(row + block_rows),
                            cut,
                            block,
                            tile,
                            inputs: inputs.clone(),
                            runs: &runs[..count],
                            panel,
                        };
                        blocks.add::<T>(&part, &mut levels[block * block_len..][..block_len]);
                    }
                }
                for level in (0..last - first).filter(|level| leaves[*level] < leaves[level + 1]) {
                    let sums = &mut sums[(first + level) * leaf_len..][..leaf_len];
                    for block in 0..cut.blocks {
                        let row = rows.start + block * block_rows;
                        let places = &self.places[row..rows.end.min(row + block_rows)];
                        let from = &levels[block * block_len + level * level_len..][..level_len];
                        add_rows(self.isa, (sums, from), places, T * LANES);
                    }
                }
            }
        }
    }
}

/// What `inputs` have of each of these leaves, whose sums are kept apart: the first at level 0, and so on.
fn runs(leaves: &[usize], inputs: &Range<usize>) -> ([Run; TREE_LEVELS], usize) {
    let (mut runs, mut count) = ([Run::default(); TREE_LEVELS], 0);
    for (level, ends) in leaves.windows(2).enumerate() {
        let own = ends[0].max(inputs.start)..ends[1].min(inputs.end);
        if own.start < own.end {
            runs[count] = Run { inputs: own.len(), is_first: own.start == ends[0], level, joins: 0 };
            count += 1;
        }
    }
    (runs, count)
}

/// `sums[places[i]] += from[i]`, rows of `len` elements, a multiple of 16.
fn add_rows(isa: Isa, (sums, from): (&mut [f32], &[f32]), places: &[u32], len: usize) {
    let inside = places.iter().all(|place| (*place as usize + 1) * len <= sums.len());
    assert!(inside && places.len() * len <= from.len() && len.is_multiple_of(LANES), "rows of the sums");
    // SAFETY: every row lies inside its slice, as was just checked; the slices do not overlap.
    unsafe { isa.run(AddRows { sums: sums.as_mut_ptr(), from: from.as_ptr(), places, len }) };
}

#[derive(Clone, Copy)]
struct AddRows<'a> {
    sums: *mut f32,
    from: *const f32,
    places: &'a [u32],
    len: usize,
}

impl Kernel for AddRows<'_> {
    type Output = ();

    /// # Safety
    /// `sums` is valid for row `places[i]`, `from` for row `i`, for every `i`; they do not overlap.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (i, place) in self.places.iter().enumerate() {
            for k in (0..self.len).step_by(LANES) {
                // SAFETY: inside the rows by the caller's promise.
                unsafe {
                    let sum = self.sums.add(*place as usize * self.len + k);
                    S::store(sum, S::add(S::load(sum), S::load(self.from.add(i * self.len + k))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_leaf_is_summed_apart_however_the_inputs_are_cut() {
        let leaves = [64, 64, 128, 224];
        let list = |inputs: Range<usize>| {
            let (runs, count) = runs(&leaves, &inputs);
            runs[..count]
                .iter()
                .map(|run| (run.level, run.inputs, run.is_first, run.joins))
                .collect::<Vec<_>>()
        };
        assert_eq!(list(64..224), [(1, 64, true, 0), (2, 96, true, 0)]);
        assert_eq!(list(64..96), [(1, 32, true, 0)]);
        assert_eq!(list(96..160), [(1, 32, false, 0), (2, 32, true, 0)]);
        assert_eq!(list(160..224), [(2, 64, false, 0)]);
    }
}
