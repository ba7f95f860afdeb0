//! How a pass over some inputs of a matrix goes through the tree of its leaves.
//!
//! Leaves are summed one after the other, and a subtree joins its left sibling as soon as it is complete, as
//! in a binary counter: the subtrees that wait are as many as the leaf's number has ones.

use lockstep_core::limits::K_LEAVES;
use std::ops::Range;

/// Subtrees that wait for their sibling at most, the current leaf included.
pub(in crate::cpu) const TREE_LEVELS: usize = K_LEAVES.ilog2() as usize + 1;

/// Consecutive inputs of one leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cpu) struct Run {
    /// How many.
    pub inputs: usize,
    /// They are the leaf's first: its sums start from zero.
    pub is_first: bool,
    /// Level of the leaf's sums; the subtrees that wait are at the levels below.
    pub level: usize,
    /// Levels below which the leaf joins once these inputs are added, 0 unless they are its last.
    pub joins: usize,
}

/// The runs of some consecutive inputs.
pub(in crate::cpu) struct Runs {
    list: [Run; K_LEAVES],
    count: usize,
}

impl Runs {
    /// The runs of `inputs`, for leaves that end at `leaves[1..]`. When a pass over all inputs is cut, each leaf without
    /// inputs belongs to the first part that reaches it.
    pub(super) fn new(leaves: &[usize], inputs: &Range<usize>) -> Self {
        let mut runs = Self { list: [Run::default(); K_LEAVES], count: 0 };
        for (leaf, ends) in leaves.windows(2).enumerate() {
            let (start, end) = (ends[0], ends[1]);
            let was_done = end <= inputs.start && inputs.start > 0;
            let begins_later = start >= inputs.end && end > inputs.end;
            if was_done || begins_later {
                continue;
            }
            runs.list[runs.count] = Run {
                inputs: end.min(inputs.end) - start.max(inputs.start),
                is_first: start >= inputs.start,
                level: leaf.count_ones() as usize,
                joins: if end <= inputs.end { (leaf + 1).trailing_zeros() as usize } else { 0 },
            };
            runs.count += 1;
        }
        runs
    }

    /// In the order of their inputs.
    pub(in crate::cpu) fn list(&self) -> &[Run] {
        &self.list[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What kernels do with runs, over strings: the tree that they build.
    fn tree(leaves: &[usize], cuts: &[usize]) -> String {
        let mut levels = vec![String::new(); TREE_LEVELS];
        let mut input = 0;
        for cut in cuts.windows(2) {
            for run in Runs::new(leaves, &(cut[0]..cut[1])).list() {
                let mut sum = if run.is_first { String::from("_") } else { levels[run.level].clone() };
                for _ in 0..run.inputs {
                    sum += &input.to_string();
                    input += 1;
                }
                for below in 1..=run.joins {
                    sum = format!("({}+{sum})", levels[run.level - below]);
                }
                levels[run.level - run.joins] = sum;
            }
        }
        levels.swap_remove(0)
    }

    #[test]
    fn leaves_are_joined_as_a_tree_however_the_inputs_are_cut() {
        let leaves = [0, 1, 2, 4, 5, 5, 7, 8, 9];
        let want = "(((_0+_1)+(_23+_4))+((_+_56)+(_7+_8)))";
        for cuts in [vec![0, 9], vec![0, 3, 9], vec![0, 5, 9], vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9]] {
            assert_eq!(tree(&leaves, &cuts), want, "cut at {cuts:?}");
        }
    }

    #[test]
    fn a_single_leaf_and_no_inputs_are_trees_too() {
        assert_eq!(tree(&[0, 3], &[0, 2, 3]), "_012");
        assert_eq!(tree(&[0, 0], &[0, 0]), "_");
        assert_eq!(tree(&[0, 0, 0, 2, 2], &[0, 2]), "((_+_)+(_01+_))");
    }
}
