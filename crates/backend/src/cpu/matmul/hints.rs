//! What a block of rows asks for beside its own work.

use crate::cpu::simd::Simd;

/// Lines of the next tiles that a block asks for beside its own work, some of each tile for every stretch of its inputs.
/// Bursts of memory traffic that nothing overlaps with would cost as much as the products of a few rows.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct NextTiles {
    start: *const u8,
    pub(super) lines: usize,
    stretch_bytes: usize,
    tile_bytes: usize,
}

/// Inputs after which a block of floats asks again: the end of a short loop is mispredicted each time.
pub(super) const STRETCH: usize = 96;
/// Blocks from which the bursts are too rare to matter.
pub(super) const ASKING_BLOCKS_MAX: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;

impl NextTiles {
    /// Nothing to ask for.
    pub(in crate::cpu) const NONE: Self =
        Self { start: std::ptr::null(), lines: 0, stretch_bytes: 0, tile_bytes: 0 };

    /// The part of block `block` of `blocks`: tiles start at `start` and have `stretch_bytes` for every stretch.
    pub(in crate::cpu) fn new(
        start: *const u8,
        (block, blocks): (usize, usize),
        (stretch_bytes, tile_bytes): (usize, usize),
    ) -> Self {
        let lines = stretch_bytes.div_ceil(LINE).div_ceil(blocks);
        let skipped = block * lines * LINE;
        if skipped >= stretch_bytes {
            return Self::NONE;
        }
        Self { start: start.wrapping_add(skipped), lines, stretch_bytes, tile_bytes }
    }

    /// Asks for one stretch of `T` tiles.
    ///
    /// # Safety
    /// The machine supports `S`.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn ask<S: Simd, const T: usize>(&mut self) {
        for t in 0..T {
            for line in 0..self.lines {
                // SAFETY: hints need not be valid.
                unsafe { S::prefetch_far(self.start.wrapping_add(t * self.tile_bytes + line * LINE)) };
            }
        }
        self.start = self.start.wrapping_add(self.stretch_bytes);
    }
}
