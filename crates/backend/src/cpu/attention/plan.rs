//! How a step's attention is cut into tasks for the threads.
//!
//! Any cut gives the same bits: a task walks whole splits, and splits are merged in ascending order
//! whether one task walks them all or several tasks walk one each.

use super::{HEAD_DIM_MAX, SPLIT, TASK_QUERIES};
use crate::cpu::memory::Region;
use crate::cpu::simd::LANES;
use crate::cpu::tensor::RowsOut;
use crate::{Attention, AttentionRow, Result};
use std::ops::Range;

/// Tasks per thread from which cutting them by splits no longer helps.
const TASKS_PER_THREAD: usize = 4;
/// Elements for the states of tasks that walk a single split (9 MiB, resident once touched): the
/// splits of a request of 128k tokens with 64 heads of 128. Tasks that do not fit stay whole.
const PARTIALS_LEN: usize = 9 << 18;

/// Largest state of a task.
pub(super) const STATE_LEN_MAX: usize = TASK_QUERIES * (HEAD_DIM_MAX + 2);

/// Some tokens of one request times some query heads of one KV head.
#[derive(Clone, Copy)]
pub(super) struct Task {
    /// Index into the batch's rows.
    pub row: u32,
    /// First token, counted from the row's first.
    pub token: u32,
    pub tokens: u32,
    pub kv_head: u32,
    /// First query head, counted from the first head of the KV head's group.
    pub head: u32,
    pub heads: u32,
    pub part: Part,
}

/// Which positions a task walks.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// All that its queries see; it writes their results.
    Whole,
    /// One split; its state is left at element `at` of the partial sums.
    Split { index: u32, at: u32 },
    /// None: it merges the states of `splits` splits, the first at element `at`, and writes the
    /// results.
    Merge { splits: u32, at: u32 },
}

impl Task {
    /// Queries: tokens times heads.
    pub(super) fn queries(&self) -> usize {
        (self.tokens * self.heads) as usize
    }

    /// Elements of the state of its queries, for heads of `dim`.
    pub(super) fn state_len(&self, dim: usize) -> usize {
        self.queries() * (dim.next_multiple_of(LANES) + 2)
    }

    /// The absolute positions that the queries of token `token` of the task see.
    pub(super) fn visible(&self, row: AttentionRow, token: usize, window: Option<usize>) -> Range<usize> {
        let end = row.start_position as usize + self.token as usize + token + 1;
        window.map_or(0, |w| end.saturating_sub(w))..end
    }

    /// The splits that hold a position which some query sees.
    pub(super) fn splits(&self, row: AttentionRow, window: Option<usize>) -> Range<usize> {
        let first = self.visible(row, 0, window).start;
        let end = self.visible(row, self.tokens as usize - 1, window).end;
        first / SPLIT..end.div_ceil(SPLIT)
    }
}

/// The tasks of a step; keeps its memory between steps.
pub(in crate::cpu) struct Plan {
    /// Walks, [`Part::Whole`] and [`Part::Split`]; they may run in any order.
    pub(super) walks: Vec<Task>,
    /// [`Part::Merge`], to run after all walks.
    pub(super) merges: Vec<Task>,
    partials: Region,
}

impl Plan {
    /// An empty plan with the memory for partial sums.
    pub(in crate::cpu) fn new() -> Result<Self> {
        let partials = Region::own(PARTIALS_LEN * size_of::<f32>(), false, "attention's partial sums")?;
        Ok(Self { walks: Vec::new(), merges: Vec::new(), partials })
    }

    /// Plans a step for `threads` threads.
    pub(super) fn fill(&mut self, args: &Attention<'_>, threads: usize) {
        let kv_heads = args.shape.local_kv_heads;
        self.walks.clear();
        self.merges.clear();
        for (index, row) in args.batch.rows.iter().enumerate() {
            self.add_row(index as u32, row.token_count, kv_heads, args.shape.local_heads / kv_heads);
        }
        if threads > 1 && self.walks.len() < TASKS_PER_THREAD * threads {
            self.cut_by_splits(args);
        }
    }

    /// The tasks of one row. Late tokens see more positions: they come first, so that the end is
    /// evened out by small tasks.
    fn add_row(&mut self, row: u32, token_count: u32, kv_heads: usize, group: usize) {
        let heads = group.min(TASK_QUERIES);
        let tokens = (TASK_QUERIES / heads).max(1);
        for first in (0..token_count).step_by(tokens).rev() {
            for kv_head in 0..kv_heads as u32 {
                for head in (0..group).step_by(heads) {
                    self.walks.push(Task {
                        row,
                        token: first,
                        tokens: (tokens as u32).min(token_count - first),
                        kv_head,
                        head: head as u32,
                        heads: heads.min(group - head) as u32,
                        part: Part::Whole,
                    });
                }
            }
        }
    }

    /// Replaces tasks that walk several splits by one task for each and a merge.
    fn cut_by_splits(&mut self, args: &Attention<'_>) {
        let whole = self.walks.len();
        let mut used = 0;
        for index in 0..whole {
            let task = self.walks[index];
            let splits = task.splits(args.batch.rows[task.row as usize], args.window);
            let state_len = task.state_len(args.shape.head_dim);
            if splits.len() < 2 || used + splits.len() * state_len > PARTIALS_LEN {
                self.walks.push(task);
                continue;
            }
            let part = Part::Merge { splits: splits.len() as u32, at: used as u32 };
            self.merges.push(Task { part, ..task });
            for split in splits {
                let part = Part::Split { index: split as u32, at: used as u32 };
                self.walks.push(Task { part, ..task });
                used += state_len;
            }
        }
        self.walks.drain(..whole);
    }

    /// The tasks, and the partial sums as one row.
    pub(super) fn parts(&mut self) -> (&[Task], &[Task], RowsOut<'_>) {
        (&self.walks, &self.merges, RowsOut::new(self.partials.as_mut_slice(), PARTIALS_LEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionBatch, QkvShape};

    /// Plans decode of requests with so many cached tokens, 8 query heads on 2 KV heads of 128.
    fn decode(starts: &[u32], window: Option<usize>, threads: usize) -> Plan {
        let rows: Vec<AttentionRow> = (0..)
            .zip(starts)
            .map(|(first_token, &start_position)| AttentionRow {
                first_token,
                token_count: 1,
                start_position,
                first_page: 0,
            })
            .collect();
        let shape = QkvShape { local_heads: 8, local_kv_heads: 2, head_dim: 128, norm_eps: 0.0 };
        let batch = AttentionBatch { rows: &rows, pages: &[] };
        let args = Attention { layer: 0, shape, batch, scale: 1.0, softcap: None, window };
        let mut plan = Plan::new().unwrap();
        plan.fill(&args, threads);
        plan
    }

    /// Splits walked alone, by (row, KV head), with their place in the partial sums.
    fn cut(plan: &Plan) -> Vec<(u32, u32, u32, u32)> {
        let part = |t: &Task| match t.part {
            Part::Split { index, at } => Some((t.row, t.kv_head, index, at)),
            _ => None,
        };
        plan.walks.iter().filter_map(part).collect()
    }

    #[test]
    fn few_long_tasks_are_cut_by_splits_with_a_place_for_each() {
        let plan = decode(&[1100, 3], None, 4);
        let len = 4 * 130;
        let want = [(0, 0, 0, 0), (0, 0, 1, len), (0, 0, 2, 2 * len)];
        let want = want.into_iter().chain(want.map(|(row, _, index, at)| (row, 1, index, at + 3 * len)));
        assert_eq!(cut(&plan), want.collect::<Vec<_>>());
        assert_eq!((plan.walks.len(), plan.merges.len()), (6 + 2, 2));
        assert!(matches!(plan.merges[1].part, Part::Merge { splits: 3, at } if at == 3 * len));
    }

    #[test]
    fn a_window_leaves_its_own_splits_only() {
        let plan = decode(&[5000], Some(600), 4);
        // Positions 4401..=5000 lie in the splits 8 and 9.
        assert_eq!(cut(&plan).iter().map(|c| c.2).collect::<Vec<_>>(), [8, 9, 8, 9]);
    }

    #[test]
    fn many_tasks_one_thread_and_full_memory_keep_tasks_whole() {
        for plan in [decode(&[5000; 8], None, 4), decode(&[5000], None, 1)] {
            assert!(plan.merges.is_empty() && cut(&plan).is_empty());
        }
        // 2^20 tokens: 2048 splits of 520 elements fit twice, not four times.
        let plan = decode(&[1 << 20; 2], None, 4);
        assert_eq!((plan.merges.len(), cut(&plan).len(), plan.walks.len()), (2, 2 * 2049, 2 * 2049 + 2));
        assert!(cut(&plan).iter().all(|c| c.3 as usize + 520 <= PARTIALS_LEN));
    }
}
