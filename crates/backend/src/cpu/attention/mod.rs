//! Causal grouped-query attention straight on the page table, prefill and decode alike.
//!
//! For a query `q` at absolute position `t` the positions `0..=t` are walked in segments of
//! [`ATTENTION_SEGMENT`] absolute positions, whatever the pages, chunks, batch or threads are
//! (online softmax, Milakov and Gimelshein 2018; Dao et al. 2022, but per fixed segment):
//! ```text
//! s[p]  = dot(q, k[p]) * (1 / sqrt(head_dim)); dot: lane d mod 16 by fma from 0, lanes by the tree
//! m'    = max(m, max s[p] of the segment)                      m starts at -inf
//! a     = exp(m - m')
//! w[p]  = exp(s[p] - m')
//! l     = fma(l, a, sum w[p]); sum: lane p mod 16 ascending, lanes by the tree
//! o[d]  = o[d] * a, then o[d] = fma(w[p], v[p][d], o[d]) for ascending p
//! out   = o[d] / l
//! ```
//! Positions after `t` are not part of any sum, and no position beyond the last query of a task is
//! read.
//!
//! A task is a few consecutive tokens of one request times the query heads that share one KV head,
//! so each key and value is loaded once for all of them.

mod kernels;
mod scores;
mod task;

use super::kv_cache::CpuKvCache;
use super::pool::ThreadPool;
use super::simd::Isa;
use super::tensor::{RowsIn, RowsOut};
use crate::{Attention, AttentionRow};
use lockstep_core::limits::ATTENTION_SEGMENT;
use task::TaskRun;

/// Largest head; bounds the scratch memory.
pub(super) const HEAD_DIM_MAX: usize = 512;
/// Queries (tokens times heads) of a task at most: enough to amortise turning a segment of keys,
/// few enough that scores and sums stay in the second-level cache.
const TASK_QUERIES: usize = 64;

/// Scratch elements of each thread.
pub(super) const SCRATCH_LEN: usize =
    TASK_QUERIES * (ATTENTION_SEGMENT + HEAD_DIM_MAX + 2) + HEAD_DIM_MAX * ATTENTION_SEGMENT;

/// Some tokens of one request times some query heads of one KV head.
#[derive(Clone, Copy)]
pub(super) struct Task {
    /// Index into the batch's rows.
    row: u32,
    /// First token, counted from the row's first.
    token: u32,
    tokens: u32,
    kv_head: u32,
    /// First query head, counted from the first head of the KV head's group.
    head: u32,
    heads: u32,
}

/// Cuts a batch into tasks; `tasks` keeps its memory between steps.
fn plan(tasks: &mut Vec<Task>, rows: &[AttentionRow], kv_heads: usize, group: usize) {
    tasks.clear();
    let heads = group.min(TASK_QUERIES);
    let tokens = (TASK_QUERIES / heads).max(1) as u32;
    for (index, row) in rows.iter().enumerate() {
        // Late tokens see more positions: they come first, so that the end is evened out by
        // small tasks.
        for first in (0..row.token_count).step_by(tokens as usize).rev() {
            for kv_head in 0..kv_heads as u32 {
                for head in (0..group).step_by(heads) {
                    tasks.push(Task {
                        row: index as u32,
                        token: first,
                        tokens: tokens.min(row.token_count - first),
                        kv_head,
                        head: head as u32,
                        heads: heads.min(group - head) as u32,
                    });
                }
            }
        }
    }
}

/// Where one operation runs.
pub(super) struct Runtime<'a> {
    pub isa: Isa,
    pub pool: &'a ThreadPool,
    /// A row of [`SCRATCH_LEN`] for each thread.
    pub scratch: RowsOut<'a>,
    /// Reused from step to step.
    pub tasks: &'a mut Vec<Task>,
}

/// See [`crate::Backend::attention`].
pub(super) fn attention(
    runtime: Runtime<'_>,
    args: &Attention<'_>,
    qkv: RowsIn<'_>,
    cache: &CpuKvCache,
    out: RowsOut<'_>,
) {
    let shape = &args.shape;
    let dim = shape.head_dim;
    assert!(dim <= HEAD_DIM_MAX, "head_dim {dim} is at most {HEAD_DIM_MAX}");
    assert!(shape.local_heads.is_multiple_of(shape.local_kv_heads), "query heads come in equal groups");
    assert_eq!(
        qkv.cols,
        (shape.local_heads + 2 * shape.local_kv_heads) * dim,
        "qkv has the columns of its heads"
    );
    assert_eq!(out.cols, shape.local_heads * dim, "out has the columns of the query heads");
    assert_eq!(cache.layout().head_dim, dim, "the cache is made for these heads");
    let group = shape.local_heads / shape.local_kv_heads;
    plan(runtime.tasks, args.batch.rows, shape.local_kv_heads, group);
    let (tasks, isa, scratch) = (&*runtime.tasks, runtime.isa, runtime.scratch);
    runtime.pool.run(tasks.len(), &|index, thread| {
        // SAFETY: the scratch row of a thread is used by one chunk at a time.
        let scratch = unsafe { scratch.part(thread, 0, SCRATCH_LEN) };
        TaskRun::new(isa, tasks[index], args, qkv, cache).run(scratch, out);
    });
}
