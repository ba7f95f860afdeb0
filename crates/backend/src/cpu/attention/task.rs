//! One task of attention: the walk over the segments of its splits.

use super::kernels::{Join, Normalise, Segment, Softmax, Span, WeightedSum};
use super::plan::{Part, STATE_LEN_MAX, Task};
use super::scores::scores;
use super::{SPLIT, TASK_QUERIES};
use crate::cpu::kv_cache::CpuKvCache;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::{RowsIn, RowsOut};
use crate::{Attention, AttentionRow};
use lockstep_core::PageId;
use lockstep_core::limits::ATTENTION_SEGMENT;
use std::ops::Range;

/// Where the keys and values of a segment's positions are.
struct SegmentRows {
    k: [*const f32; ATTENTION_SEGMENT],
    v: [*const f32; ATTENTION_SEGMENT],
}

/// What the queries have summed so far.
struct State<'a> {
    /// `[queries][padded]`.
    sums: &'a mut [f32],
    /// `[queries]`, -inf where nothing was seen.
    max: &'a mut [f32],
    /// `[queries]`.
    total: &'a mut [f32],
}

impl<'a> State<'a> {
    /// The state kept in `memory`, whose length is [`Task::state_len`].
    fn of(memory: &'a mut [f32], queries: usize) -> Self {
        let (sums, rest) = memory.split_at_mut(memory.len() - 2 * queries);
        let (max, total) = rest.split_at_mut(queries);
        Self { sums, max, total }
    }

    /// Nothing seen yet.
    fn cleared(memory: &'a mut [f32], queries: usize) -> Self {
        let state = Self::of(memory, queries);
        state.sums.fill(0.0);
        state.max.fill(f32::NEG_INFINITY);
        state.total.fill(0.0);
        state
    }

    /// Adds the state of the next split.
    fn join(&mut self, isa: Isa, next: &State<'_>) {
        let join = Join {
            queries: self.max.len(),
            padded: self.sums.len() / self.max.len(),
            max: self.max.as_mut_ptr(),
            total: self.total.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            next_max: next.max.as_ptr(),
            next_total: next.total.as_ptr(),
            next_sums: next.sums.as_ptr(),
        };
        // SAFETY: both states are of the same queries.
        unsafe { isa.run(join) };
    }
}

/// Working memory of a segment.
struct Work<'a> {
    /// `[queries][64]`.
    weights: &'a mut [f32],
    /// `[dim][64]`.
    turned: &'a mut [f32],
}

/// A task with all it needs. Queries are numbered `token * heads + head` within the task.
pub(super) struct TaskRun<'a> {
    isa: Isa,
    task: Task,
    row: AttentionRow,
    /// The request's page table.
    pages: &'a [PageId],
    args: &'a Attention<'a>,
    /// First query head of the task, local to the rank.
    first_head: usize,
    qkv: RowsIn<'a>,
    cache: &'a CpuKvCache,
}

impl<'a> TaskRun<'a> {
    pub(super) fn new(
        isa: Isa,
        task: Task,
        args: &'a Attention<'a>,
        qkv: RowsIn<'a>,
        cache: &'a CpuKvCache,
    ) -> Self {
        let row = args.batch.rows[task.row as usize];
        let group = args.shape.local_heads / args.shape.local_kv_heads;
        Self {
            isa,
            task,
            row,
            pages: &args.batch.pages[row.first_page as usize..],
            args,
            first_head: task.kv_head as usize * group + task.head as usize,
            qkv,
            cache,
        }
    }

    /// Computes the task's part; `scratch` is the thread's, `partials` one row for all tasks.
    pub(super) fn run(&self, scratch: &mut [f32], partials: RowsOut<'_>, out: RowsOut<'_>) {
        let queries = self.task.queries();
        let len = self.task.state_len(self.dim());
        let (weights, rest) = scratch.split_at_mut(TASK_QUERIES * ATTENTION_SEGMENT);
        let (first, rest) = rest.split_at_mut(STATE_LEN_MAX);
        let (second, turned) = rest.split_at_mut(STATE_LEN_MAX);
        let mut work = Work { weights, turned };
        // SAFETY: a walk of one split has its own element range, and merges (one for each group of
        // walks) run when all walks are done.
        let partial = |at: usize| unsafe { partials.part(0, at, len) };
        match self.task.part {
            Part::Whole => {
                let splits = self.task.splits(self.row, self.args.window);
                let mut state = State::cleared(&mut first[..len], queries);
                self.walk(splits.start, &mut state, &mut work);
                for split in splits.start + 1..splits.end {
                    let mut next = State::cleared(&mut second[..len], queries);
                    self.walk(split, &mut next, &mut work);
                    state.join(self.isa, &next);
                }
                self.finish(&state, out);
            }
            Part::Split { index, at } => {
                let mut state = State::cleared(partial(at as usize), queries);
                self.walk(index as usize, &mut state, &mut work);
            }
            Part::Merge { splits, at } => {
                let mut state = State::of(partial(at as usize), queries);
                for split in 1..splits as usize {
                    state.join(self.isa, &State::of(partial(at as usize + split * len), queries));
                }
                self.finish(&state, out);
            }
        }
    }

    /// Adds what the queries see of one split.
    fn walk(&self, split: usize, state: &mut State<'_>, work: &mut Work<'_>) {
        let queries = self.task.queries();
        let mut q = [std::ptr::null(); TASK_QUERIES];
        for query in 0..queries {
            let (token, head) = self.place(query);
            q[query] = self.qkv.row(token)[head * self.dim()..][..self.dim()].as_ptr();
        }
        let seen = self.visible(0).start..self.visible(queries - 1).end;
        let from = seen.start.max(split * SPLIT) / ATTENTION_SEGMENT * ATTENTION_SEGMENT;
        let mut spans = [Span::default(); TASK_QUERIES];
        for first in (from..seen.end.min((split + 1) * SPLIT)).step_by(ATTENTION_SEGMENT) {
            for query in 0..queries {
                spans[query] = Span::new(&self.visible(query), first);
            }
            let rows = self.segment_rows(first, &seen);
            let segment = Segment {
                queries,
                q: q.as_ptr(),
                spans: spans.as_ptr(),
                seen: Span::new(&seen, first),
                k: rows.k.as_ptr(),
                weights: work.weights.as_mut_ptr(),
                dim: self.dim(),
                scale: self.args.scale,
                cap: self.args.softcap.unwrap_or(0.0),
            };
            let softmax = Softmax {
                segment,
                max: state.max.as_mut_ptr(),
                total: state.total.as_mut_ptr(),
                sums: state.sums.as_mut_ptr(),
            };
            // SAFETY: `q`, `spans`, the scores and the state hold `queries` entries, `rows` 64 keys
            // that exist, and `turned` the keys of the largest head.
            unsafe {
                scores(self.isa, segment, work.turned.as_mut_ptr());
                self.isa.run(softmax);
            }
            self.add_values(&spans[..queries], &rows, state, work);
        }
    }

    /// Writes the results.
    fn finish(&self, state: &State<'_>, out: RowsOut<'_>) {
        let padded = self.dim().next_multiple_of(LANES);
        for query in 0..self.task.queries() {
            let (token, head) = self.place(query);
            let normalise = Normalise {
                sums: state.sums[query * padded..].as_ptr(),
                total: state.total[query],
                out: out.pointer(token, head * self.dim()),
                len: self.dim(),
            };
            // SAFETY: `dim` sums of this query; this head of this token belongs to this task alone.
            unsafe { self.isa.run(normalise) };
        }
    }

    fn dim(&self) -> usize {
        self.args.shape.head_dim
    }

    /// The absolute positions that query `query` sees.
    fn visible(&self, query: usize) -> Range<usize> {
        self.task.visible(self.row, query / self.task.heads as usize, self.args.window)
    }

    /// Token (row of the activations) and local head of query `query`.
    fn place(&self, query: usize) -> (usize, usize) {
        let heads = self.task.heads as usize;
        let token = self.row.first_token as usize + self.task.token as usize + query / heads;
        (token, self.first_head + query % heads)
    }

    /// Pointers to the keys and values of the positions of the segment at `first` that lie in
    /// `seen`. Places outside repeat the nearest, so that lanes without a position read something
    /// that exists; slots that no query sees may hold anything.
    fn segment_rows(&self, first: usize, seen: &Range<usize>) -> SegmentRows {
        let (from, to) = (seen.start.max(first), seen.end.min(first + ATTENTION_SEGMENT));
        let page_size = self.cache.layout().page_size;
        let mut rows = SegmentRows { k: [std::ptr::null(); _], v: [std::ptr::null(); _] };
        let mut position = from;
        while position < to {
            let page = self.pages[position / page_size];
            let (k, v) = self.cache.page(self.args.layer, page, self.task.kv_head as usize);
            let end = to.min((position / page_size + 1) * page_size);
            for p in position..end {
                let offset = p % page_size * self.dim();
                // SAFETY: `offset` is a slot of the page.
                (rows.k[p - first], rows.v[p - first]) = unsafe { (k.add(offset), v.add(offset)) };
            }
            position = end;
        }
        for side in [&mut rows.k, &mut rows.v] {
            let (lowest, highest) = (side[from - first], side[to - 1 - first]);
            side[..from - first].fill(lowest);
            side[to - first..].fill(highest);
        }
        rows
    }

    /// Adds the weighted values of the segment to the sums of all queries. Neighbouring queries
    /// share each load of a value for the positions that all of them see; what only some see
    /// comes before or after for each alone, so that the order within a query stays ascending.
    fn add_values(&self, spans: &[Span], rows: &SegmentRows, state: &mut State<'_>, work: &Work<'_>) {
        let padded = self.dim().next_multiple_of(LANES);
        let mut add = |query: usize, group: usize, from: usize, to: usize| {
            if from >= to {
                return;
            }
            let sum = WeightedSum {
                weights: work.weights[query * ATTENTION_SEGMENT..].as_ptr(),
                values: rows.v.as_ptr(),
                from,
                to,
                sums: state.sums[query * padded..].as_mut_ptr(),
                dim: self.dim(),
            };
            // SAFETY: `group` queries from `query` on have weights and sums, and the positions
            // have values.
            unsafe { sum.run(self.isa, group) };
        };
        let group_max = if self.isa.accumulators() >= 24 { 6 } else { 3 };
        for first in (0..spans.len()).step_by(group_max) {
            let group = &spans[first..spans.len().min(first + group_max)];
            // Both ends of the spans ascend: all see what the first and the last see.
            let (from, to) = (group[group.len() - 1].from, group[0].to);
            if from >= to {
                for (i, span) in group.iter().enumerate() {
                    add(first + i, 1, span.from, span.to);
                }
                continue;
            }
            for (i, span) in group.iter().enumerate() {
                add(first + i, 1, span.from, from);
            }
            add(first, group.len(), from, to);
            for (i, span) in group.iter().enumerate() {
                add(first + i, 1, to, span.to);
            }
        }
    }
}
