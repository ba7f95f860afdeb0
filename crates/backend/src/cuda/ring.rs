//! Experts' products through a ring of shared memory (`ring.cuh`): the tiles that are compiled, and how they use an
//! architecture's shared memory.

use super::device::shared_bytes;
use super::launch::Grid;

/// Threads of a block.
const THREADS: usize = 256;
/// Places of a ring, at most: more would fill while the block before computes, and gain nothing.
const STAGES_MAX: usize = 8;
/// Tokens whose sums are in shared memory at once, and floats between those of two tokens.
const SUM_TOKENS: usize = 32;
const SUM_PADDING: usize = 4;
/// Shared memory that the system takes of each block, and what kernels declare themselves.
const TAKEN_BYTES: usize = 1024 + 64;

/// A tile: `rows` outputs times `tokens` tokens, `depth` inputs at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingTile {
    /// Rows of weights.
    pub rows: usize,
    /// Rows of x.
    pub tokens: usize,
    /// Inputs of a place of the ring.
    pub depth: usize,
}

const fn tile(rows: usize, tokens: usize, depth: usize) -> RingTile {
    RingTile { rows, tokens, depth }
}

/// The tiles of `experts.cu`, by tokens.
pub(super) const TILES: [RingTile; 4] =
    [tile(64, 16, 128), tile(128, 32, 64), tile(128, 64, 64), tile(128, 128, 64)];
/// Blocks that a multiprocessor shall hold: one computes while the other is between two tiles.
const RESIDENT: usize = 2;

/// How a tile's kernel uses an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingPlan {
    /// Places of the ring.
    pub stages: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a multiprocessor at once.
    pub resident: usize,
}

/// The plan of each of [`TILES`] on `architecture`, in NVRTC's name.
pub(super) fn plans(architecture: &str) -> [RingPlan; TILES.len()] {
    TILES.map(|tile| tile.plan(architecture, RESIDENT))
}

/// What the compiler is told: `-DSTAGES_i=..` for each tile.
pub(super) fn options(architecture: &str) -> impl Iterator<Item = String> {
    let plans = plans(architecture).into_iter().enumerate();
    plans.map(|(i, plan)| format!("-DSTAGES_{i}={}", plan.stages))
}

impl RingTile {
    /// For `resident` blocks of a multiprocessor, or for one where two places for each do not fit.
    fn plan(&self, architecture: &str, resident: usize) -> RingPlan {
        let stage = (self.rows + self.tokens) * self.depth * size_of::<u16>();
        let sums = self.tokens.min(SUM_TOKENS) * (self.rows + SUM_PADDING) * size_of::<f32>();
        let room = shared_bytes(architecture) / resident;
        let stages = (room.saturating_sub(TAKEN_BYTES + sums) / stage).min(STAGES_MAX);
        if stages < 2 && resident > 1 {
            return self.plan(architecture, 1);
        }
        RingPlan { stages, shared_bytes: (stages * stage + sums) as u32, resident }
    }
}

/// The launch of `blocks` blocks of any tile's kernel.
pub(super) fn grid(blocks: usize) -> Grid {
    Grid::rows(blocks, THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_fits_every_architecture() {
        for architecture in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
            for plan in plans(architecture) {
                assert!((2..=STAGES_MAX).contains(&plan.stages), "{architecture}: {plan:?}");
                let block = plan.shared_bytes as usize + TAKEN_BYTES;
                assert!(plan.resident * block <= shared_bytes(architecture), "{architecture}: {plan:?}");
            }
        }
        let on_hopper = plans("sm_90a").map(|plan| (plan.stages, plan.resident));
        assert_eq!(on_hopper, [(5, 2), (4, 2), (4, 2), (3, 2)]);
    }
}
