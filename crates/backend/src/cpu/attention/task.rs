//! One task of attention: the walk over the segments.

use super::kernels::{Normalise, Segment, Softmax, WeightedSum};
use super::scores::scores;
use super::{HEAD_DIM_MAX, TASK_QUERIES, Task};
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

/// A task's part of the thread's scratch memory.
struct Memory<'a> {
    /// `[queries][64]`.
    weights: &'a mut [f32],
    /// `[queries][padded]`.
    sums: &'a mut [f32],
    max: &'a mut [f32],
    total: &'a mut [f32],
    /// `[dim][64]`.
    turned: &'a mut [f32],
}

impl<'a> Memory<'a> {
    /// Cuts the scratch memory and clears the sums of `queries` queries.
    fn new(scratch: &'a mut [f32], queries: usize, padded: usize) -> Self {
        let (weights, rest) = scratch.split_at_mut(TASK_QUERIES * ATTENTION_SEGMENT);
        let (sums, rest) = rest.split_at_mut(TASK_QUERIES * HEAD_DIM_MAX);
        let (max, rest) = rest.split_at_mut(TASK_QUERIES);
        let (total, turned) = rest.split_at_mut(TASK_QUERIES);
        sums[..queries * padded].fill(0.0);
        max[..queries].fill(f32::NEG_INFINITY);
        total[..queries].fill(0.0);
        Self { weights, sums, max, total, turned }
    }
}

/// A task with all it needs. Queries are numbered `token * heads + head` within the task.
pub(super) struct TaskRun<'a> {
    isa: Isa,
    task: Task,
    row: AttentionRow,
    /// The request's page table.
    pages: &'a [PageId],
    layer: usize,
    dim: usize,
    /// First query head of the task, local to the rank.
    first_head: usize,
    qkv: RowsIn<'a>,
    cache: &'a CpuKvCache,
}

impl<'a> TaskRun<'a> {
    pub(super) fn new(
        isa: Isa,
        task: Task,
        args: &Attention<'a>,
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
            layer: args.layer,
            dim: args.shape.head_dim,
            first_head: task.kv_head as usize * group + task.head as usize,
            qkv,
            cache,
        }
    }

    /// Computes the task's part of `out`; `scratch` is the thread's.
    pub(super) fn run(&self, scratch: &mut [f32], out: RowsOut<'_>) {
        let queries = (self.task.tokens * self.task.heads) as usize;
        let padded = self.dim.next_multiple_of(LANES);
        let mut memory = Memory::new(scratch, queries, padded);
        let mut q = [std::ptr::null(); TASK_QUERIES];
        for query in 0..queries {
            let (token, head) = self.place(query);
            q[query] = self.qkv.row(token)[head * self.dim..][..self.dim].as_ptr();
        }
        let positions = self.visible(queries - 1);
        let mut counts = [0; TASK_QUERIES];
        for first in (0..positions).step_by(ATTENTION_SEGMENT) {
            let rows = self.segment_rows(first, positions);
            for query in 0..queries {
                counts[query] = self.visible(query).saturating_sub(first).min(ATTENTION_SEGMENT);
            }
            let segment = Segment {
                queries,
                q: q.as_ptr(),
                counts: counts.as_ptr(),
                k: rows.k.as_ptr(),
                weights: memory.weights.as_mut_ptr(),
                dim: self.dim,
                scale: 1.0 / (self.dim as f32).sqrt(),
            };
            let softmax = Softmax {
                segment,
                max: memory.max.as_mut_ptr(),
                total: memory.total.as_mut_ptr(),
                sums: memory.sums.as_mut_ptr(),
            };
            // SAFETY: `q`, `counts` and the task's memory hold `queries` entries, `rows` 64 keys that
            // exist, and `turned` the keys of the largest head.
            unsafe {
                scores(self.isa, segment, memory.turned.as_mut_ptr());
                self.isa.run(softmax);
            }
            self.add_values(&counts[..queries], &rows, &mut memory);
        }
        for query in 0..queries {
            let (token, head) = self.place(query);
            let normalise = Normalise {
                sums: memory.sums[query * padded..].as_ptr(),
                total: memory.total[query],
                out: out.pointer(token, head * self.dim),
                len: self.dim,
            };
            // SAFETY: `dim` sums of this query; this head of this token belongs to this task alone.
            unsafe { self.isa.run(normalise) };
        }
    }

    /// How many positions query `query` sees.
    fn visible(&self, query: usize) -> usize {
        self.row.start_position as usize + self.task.token as usize + query / self.task.heads as usize + 1
    }

    /// Token (row of the activations) and local head of query `query`.
    fn place(&self, query: usize) -> (usize, usize) {
        let heads = self.task.heads as usize;
        let token = self.row.first_token as usize + self.task.token as usize + query / heads;
        (token, self.first_head + query % heads)
    }

    /// Pointers to the keys and values of the segment that starts at `from` of `positions`
    /// positions; places after the last one repeat it, so that lanes without a position read
    /// something that exists.
    fn segment_rows(&self, from: usize, positions: usize) -> SegmentRows {
        let to = positions.min(from + ATTENTION_SEGMENT);
        let page_size = self.cache.layout().page_size;
        let mut rows = SegmentRows { k: [std::ptr::null(); _], v: [std::ptr::null(); _] };
        let mut position = from;
        while position < to {
            let (k, v) =
                self.cache.page(self.layer, self.pages[position / page_size], self.task.kv_head as usize);
            let end = to.min((position / page_size + 1) * page_size);
            for p in position..end {
                let offset = p % page_size * self.dim;
                // SAFETY: `offset` is a slot of the page.
                (rows.k[p - from], rows.v[p - from]) = unsafe { (k.add(offset), v.add(offset)) };
            }
            position = end;
        }
        let last = to - from - 1;
        let (k, v) = (rows.k[last], rows.v[last]);
        rows.k[last..].fill(k);
        rows.v[last..].fill(v);
        rows
    }

    /// Adds the weighted values of the segment to the sums of all queries. Neighbouring queries
    /// share each load of a value for the positions that all of them see; what only some see
    /// follows for each alone, so that the order within a query stays ascending.
    fn add_values(&self, counts: &[usize], rows: &SegmentRows, memory: &mut Memory<'_>) {
        let padded = self.dim.next_multiple_of(LANES);
        let mut add = |query: usize, group: usize, positions: Range<usize>| {
            if positions.is_empty() {
                return;
            }
            let sum = WeightedSum {
                weights: memory.weights[query * ATTENTION_SEGMENT..].as_ptr(),
                values: rows.v.as_ptr(),
                from: positions.start,
                to: positions.end,
                sums: memory.sums[query * padded..].as_mut_ptr(),
                dim: self.dim,
            };
            // SAFETY: `group` queries from `query` on have weights and sums, and the positions
            // have values.
            unsafe { sum.run(self.isa, group) };
        };
        let group_max = if self.isa.accumulators() >= 24 { 6 } else { 3 };
        for first in (0..counts.len()).step_by(group_max) {
            let group = group_max.min(counts.len() - first);
            // Counts ascend: what the first query sees, all see.
            add(first, group, 0..counts[first]);
            for query in first + 1..first + group {
                add(query, 1, counts[first]..counts[query]);
            }
        }
    }
}
