//! Products with codes: which kernel takes what.

use super::inputs::{BLOCK_ROWS, CodedRows};
use super::kernels::CodeBlock;
use super::panel::{PanelBlock, Source, Unpack, panel_group_bytes};
use crate::cpu::matmul::{Blocks, Cut, Levels, PANEL_LEN, Part, rows_max};
use crate::cpu::packed::PackedLinear;
use crate::cpu::simd::{Isa, LANES};
use lockstep_core::{CODE_GROUP, CodeLayout};
use std::ops::Range;

/// Rows up to which codes are unpacked in registers, as they stream from memory.
const STREAM_ROWS_MAX: usize = 2;

/// Rounded rows and a matrix of codes.
pub(in crate::cpu) struct CodeBlocks<'a> {
    pub isa: Isa,
    pub weights: &'a PackedLinear,
    pub layout: CodeLayout,
    pub x: CodedRows<'a>,
}

impl CodeBlocks<'_> {
    /// Whether there are registers for several tiles and a whole block of rows.
    fn is_wide(&self) -> bool {
        rows_max(self.isa) >= BLOCK_ROWS
    }

    /// Whether blocks read a panel, not the matrix itself.
    fn unpacks(&self, cut: Cut) -> bool {
        cut.block_rows > STREAM_ROWS_MAX && (cut.blocks > 1 || !matches!(self.layout.bits(), 4 | 8))
    }
}

impl Blocks for CodeBlocks<'_> {
    fn shape(&self, rows: usize) -> (usize, usize) {
        match (rows, self.is_wide()) {
            (..=STREAM_ROWS_MAX, true) => (rows, 4),
            (..=STREAM_ROWS_MAX, false) => (rows, 1),
            (..=4, true) => (4, 3),
            (_, true) => (BLOCK_ROWS, 3),
            (_, false) => (4, 1),
        }
    }

    fn inputs_at_once(&self, tiles: usize, cut: Cut) -> usize {
        if !self.unpacks(cut) {
            return usize::MAX;
        }
        size_of::<f32>() * PANEL_LEN / panel_group_bytes(self.layout, tiles) * CODE_GROUP
    }

    fn prepare<const T: usize>(&self, tile: usize, inputs: &Range<usize>, cut: Cut, panel: &mut [f32]) {
        if !self.unpacks(cut) {
            return;
        }
        let groups = inputs.len() / CODE_GROUP;
        let panel = &mut panel[..groups * panel_group_bytes(self.layout, T) / size_of::<f32>()];
        let unpack = Unpack::<T> {
            w: self.weights.tile(tile, inputs.start),
            tile_stride: self.weights.tile_bytes(),
            layout: self.layout,
            groups,
            panel: panel.as_mut_ptr().cast(),
        };
        // SAFETY: `T` tiles have these groups, and the panel holds them.
        unsafe { unpack.run(self.isa) };
    }

    fn add<const T: usize>(&self, part: &Part<'_>, levels: &mut [f32]) {
        let (x, levels) = (self.x.at(part.rows.start, part.inputs.start / CODE_GROUP), Levels::new(levels));
        let matrix = || (self.weights.tile(part.tile, part.inputs.start), self.weights.tile_bytes());
        let (layout, runs) = (self.layout, part.runs);
        if part.cut.block_rows <= STREAM_ROWS_MAX {
            let (w, tile_stride) = matrix();
            let block = CodeBlock { x, rows: part.cut.block_rows, w, tile_stride, layout, runs, levels };
            // SAFETY: these rows and groups of `x` and tiles of the matrix exist; each level holds the rows.
            return unsafe { block.run::<T>(self.isa) };
        }
        let source = match self.unpacks(part.cut) {
            true => Source::Panel(part.panel.as_ptr().cast()),
            false => {
                let (w, tile_stride) = matrix();
                Source::Matrix(w, tile_stride)
            }
        };
        let next = part.next_group(self.weights, T, LANES * layout.packed_group_bytes());
        let rows = part.cut.block_rows;
        let block = PanelBlock { x, rows, source, layout, runs, levels, next };
        // SAFETY: a block starts at a multiple of its rows, so that all of them have memory in `x`, as they have in each
        // level; the source has these groups of `T` tiles.
        unsafe { block.run::<T>(self.isa) };
    }
}
