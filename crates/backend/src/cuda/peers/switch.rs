//! Which way a sum over the ranks takes, by its size.

use super::LANE_BYTES;

/// How a sum is formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Way {
    /// Every rank gets every part.
    OneShot,
    /// Every rank adds up its share and gives it to all.
    TwoShot,
    /// By the library (NCCL).
    Library,
}

/// Numbers of ranks that there are kernels for.
pub const SUM_RANKS: [usize; 3] = [2, 4, 8];

/// The switch points of one number of ranks, in bytes of one rank's part.
#[derive(Clone, Copy, Debug)]
struct Switch {
    ranks: usize,
    one_shot_max: usize,
    two_shot_max: usize,
}

/// Where the ways change. Two ranks: measured on two H200s joined by 18 NVLinks (`docs/performance.md`, "Sums over ranks");
/// there both ways move the same bytes and one shot waits once. With more ranks one shot moves (ranks - 1) times the message and two
/// shots twice; those points are estimates. `lockstep bench comm --device cuda --tp N` prints the ones that a machine suggests.
const SWITCHES: [Switch; SUM_RANKS.len()] = [
    Switch { ranks: 2, one_shot_max: 4 << 20, two_shot_max: 8 << 20 },
    Switch { ranks: 4, one_shot_max: 256 << 10, two_shot_max: 4 << 20 },
    Switch { ranks: 8, one_shot_max: 256 << 10, two_shot_max: 4 << 20 },
];

/// Largest part of a gather that kernels of ours move where there is a library.
pub(super) const GATHER_MAX: usize = 64 << 10;

/// Whether there are kernels for so many ranks.
pub(super) fn has_kernels(ranks: usize) -> bool {
    SUM_RANKS.contains(&ranks)
}

/// The way of a sum of `bytes` bytes over `ranks` ranks. Without a library the last of our own ways goes on for ever.
pub(super) fn way(ranks: usize, bytes: usize, has_library: bool) -> Way {
    let Some(switch) = SWITCHES.iter().find(|switch| switch.ranks == ranks) else { return Way::Library };
    match bytes {
        _ if bytes <= switch.one_shot_max => Way::OneShot,
        _ if bytes <= switch.two_shot_max || !has_library => Way::TwoShot,
        _ => Way::Library,
    }
}

/// Blocks that can wait at the same time on a GPU of `sms` multiprocessors with `threads` threads each, when `sharing`
/// ranks use it: all blocks of a grid wait for blocks of other ranks, so all must have a place, and two of 512 threads
/// have one on each multiprocessor.
pub(super) fn resident_blocks(sms: usize, threads: usize, sharing: usize) -> usize {
    let all = if threads <= 512 { 2 * sms } else { sms };
    // Where others compute meanwhile, half of this rank's share is left to them.
    let share = if sharing > 1 { all / (2 * sharing) } else { all };
    share.clamp(1, super::LANES)
}

/// Threads of a block for a plain sum of so many 16-byte vectors: small messages are spread over more blocks.
pub(super) fn sum_threads(vectors: usize) -> usize {
    match vectors {
        0..=1024 => 64,
        1025..=16_384 => 128,
        _ => 512,
    }
}

/// Threads of a block that takes a row of `row_bytes` at a time; `None` when no block can.
pub(super) fn row_threads(row_bytes: usize) -> Option<usize> {
    (row_bytes <= LANE_BYTES).then(|| (row_bytes / 16).next_multiple_of(32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_sums_take_the_next_way_and_without_a_library_the_last_of_ours() {
        assert_eq!(SWITCHES.map(|switch| switch.ranks), SUM_RANKS);
        for switch in SWITCHES {
            assert!(switch.one_shot_max <= switch.two_shot_max);
            let mut sizes =
                [1, switch.one_shot_max, switch.one_shot_max + 1, switch.two_shot_max, usize::MAX];
            sizes.sort_unstable();
            let order = |way: Way| match way {
                Way::OneShot => 0,
                Way::TwoShot => 1,
                Way::Library => 2,
            };
            let taken = sizes.map(|bytes| order(way(switch.ranks, bytes, true)));
            assert!(taken.is_sorted() && taken[0] == 0 && taken[4] == 2, "{switch:?}: {taken:?}");
            assert_eq!(way(switch.ranks, usize::MAX, false), Way::TwoShot);
        }
        assert_eq!(way(16, 1, true), Way::Library);
    }

    #[test]
    fn grids_fit_the_gpu_and_the_lanes() {
        assert_eq!(resident_blocks(132, 512, 1), 256);
        assert_eq!(resident_blocks(132, 1024, 1), 132);
        assert_eq!(resident_blocks(132, 512, 2), 66);
        assert_eq!(resident_blocks(1, 1024, 8), 1);
        for vectors in [1, 1024, 1025, 16_384, 1 << 20] {
            assert!(sum_threads(vectors).is_multiple_of(32) && sum_threads(vectors) * 16 <= LANE_BYTES);
        }
        assert_eq!(
            (row_threads(8192), row_threads(16_384), row_threads(16_400)),
            (Some(512), Some(1024), None)
        );
        assert_eq!(row_threads(576 * 2), Some(96));
    }
}
