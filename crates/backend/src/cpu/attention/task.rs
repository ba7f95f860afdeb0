//! One task of attention: the walk over the segments.

use super::kernels::{Normalise, Scores, Softmax, WeightedSum};
use super::{HEAD_DIM_MAX, TASK_QUERIES, Task};
use crate::cpu::kv_cache::CpuKvCache;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::tensor::{RowsIn, RowsOut};
use crate::{Attention, AttentionRow};
use lockstep_core::PageId;
use lockstep_core::limits::ATTENTION_SEGMENT;

/// Where the keys and values of a segment's positions are.
struct SegmentRows {
    k: [*const f32; ATTENTION_SEGMENT],
    v: [*const f32; ATTENTION_SEGMENT],
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
        let (weights, rest) = scratch.split_at_mut(TASK_QUERIES * ATTENTION_SEGMENT);
        let (sums, state) = rest.split_at_mut(TASK_QUERIES * HEAD_DIM_MAX);
        let (max, total) = state.split_at_mut(TASK_QUERIES);
        sums[..queries * padded].fill(0.0);
        max[..queries].fill(f32::NEG_INFINITY);
        total[..queries].fill(0.0);
        let positions = self.visible(queries - 1);
        for segment in (0..positions).step_by(ATTENTION_SEGMENT) {
            let rows = self.segment_rows(segment, positions.min(segment + ATTENTION_SEGMENT));
            for query in 0..queries {
                let count = self.visible(query).saturating_sub(segment).min(ATTENTION_SEGMENT);
                if count == 0 {
                    continue;
                }
                let weights = &mut weights[query * ATTENTION_SEGMENT..][..ATTENTION_SEGMENT];
                let sums = &mut sums[query * padded..][..padded];
                self.weigh(query, count, &rows, weights);
                let softmax = Softmax {
                    weights: weights.as_mut_ptr(),
                    count,
                    max: &raw mut max[query],
                    total: &raw mut total[query],
                    sums: sums.as_mut_ptr(),
                    padded,
                };
                // SAFETY: 64 weights and `padded` sums of this query; `count` is 1..=64.
                unsafe { self.isa.run(softmax) };
            }
            self.add_values(segment, queries, &rows, (weights, sums));
        }
        for query in 0..queries {
            let (token, head) = self.place(query);
            let normalise = Normalise {
                sums: sums[query * padded..].as_ptr(),
                total: total[query],
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

    /// Pointers to the keys and values of positions `from..to`; the places after `to` repeat the
    /// last one, so that lanes without a position read something that exists.
    fn segment_rows(&self, from: usize, to: usize) -> SegmentRows {
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

    /// Scores of query `query` against the first `count` positions of the segment.
    fn weigh(&self, query: usize, count: usize, rows: &SegmentRows, scores: &mut [f32]) {
        let (token, head) = self.place(query);
        let q = self.qkv.row(token)[head * self.dim..][..self.dim].as_ptr();
        let scale = 1.0 / (self.dim as f32).sqrt();
        let call = |lanes: usize| (q, &raw const rows.k[lanes * LANES]);
        for lanes in 0..count.div_ceil(LANES) {
            let (q, k) = call(lanes);
            let out = scores[lanes * LANES..].as_mut_ptr();
            // SAFETY: 16 pointers to keys of `dim` elements each, a query of `dim` elements and 16
            // scores to write.
            unsafe {
                match self.dim {
                    32 => self.isa.run(Scores::<2> { q, k, out, dim: self.dim, scale }),
                    64 => self.isa.run(Scores::<4> { q, k, out, dim: self.dim, scale }),
                    80 => self.isa.run(Scores::<5> { q, k, out, dim: self.dim, scale }),
                    96 => self.isa.run(Scores::<6> { q, k, out, dim: self.dim, scale }),
                    128 => self.isa.run(Scores::<8> { q, k, out, dim: self.dim, scale }),
                    _ => self.isa.run(Scores::<0> { q, k, out, dim: self.dim, scale }),
                }
            }
        }
    }

    /// Adds the weighted values of the segment to the sums of all queries. Neighbouring queries
    /// share each load of a value for the positions that all of them see; what only some see
    /// follows for each alone, so that the order within a query stays ascending.
    fn add_values(
        &self,
        segment: usize,
        queries: usize,
        rows: &SegmentRows,
        (weights, sums): (&[f32], &mut [f32]),
    ) {
        let padded = self.dim.next_multiple_of(LANES);
        let count = |query: usize| self.visible(query).saturating_sub(segment).min(ATTENTION_SEGMENT);
        let shape_rows = if self.isa.accumulators() >= 24 { 6 } else { 3 };
        let mut first = 0;
        while first < queries {
            let group = shape_rows.min(queries - first);
            let common = count(first);
            let mut call = |query: usize, group: usize, positions: std::ops::Range<usize>| {
                if positions.is_empty() {
                    return;
                }
                let sum = WeightedSum::<1> {
                    weights: weights[query * ATTENTION_SEGMENT..].as_ptr(),
                    values: rows.v.as_ptr(),
                    from: positions.start,
                    to: positions.end,
                    sums: sums[query * padded..].as_mut_ptr(),
                    dim: self.dim,
                };
                // SAFETY: `group` queries from `query` on have weights and sums, and the positions
                // have values.
                unsafe { sum.run_for(self.isa, group) };
            };
            call(first, group, 0..common);
            for query in first + 1..first + group {
                call(query, 1, common..count(query));
            }
            first += group;
        }
    }
}
