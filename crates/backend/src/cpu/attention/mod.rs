//! Causal grouped-query attention straight on the page table, prefill and decode alike.
//!
//! A query `q` at absolute position `t` sees the positions `max(0, t - window + 1)..=t`. They are
//! walked in segments of [`ATTENTION_SEGMENT`] absolute positions, whatever the pages, chunks, batch
//! or threads are (online softmax, Milakov and Gimelshein 2018; Dao et al. 2022, but per fixed
//! segment):
//! ```text
//! s[p]  = softcap(dot(q, k[p]) * scale);            dot: lane d mod 16 by fma from 0, lanes by the tree
//! m'    = max(m, max s[p] of the segment)                      m starts at -inf
//! a     = exp(m - m')
//! w[p]  = exp(s[p] - m')
//! l     = fma(l, a, sum w[p]); sum: lane p mod 16 ascending, lanes by the tree
//! o[d]  = o[d] * a, then o[d] = fma(w[p], v[p][d], o[d]) for ascending p
//! ```
//! [`SPLIT`] absolute positions, a whole number of segments, are one split, for which `m`, `l` and
//! `o` start afresh. Splits are joined in ascending order (Dao et al. 2023, flash-decoding, but at
//! fixed places):
//! ```text
//! m'    = max(m1, m2), a = exp(m1 - m'), b = exp(m2 - m')
//! l     = fma(l1, a, l2 * b), o[d] = fma(o1[d], a, o2[d] * b)
//! out   = o[d] / l
//! ```
//! Positions out of sight are not part of any sum, and no position that no query of a task sees is
//! read: the pages before a window may be gone. Segments before the window are not walked.
//!
//! A task is a few consecutive tokens of one request times the query heads that share one KV head,
//! so each key and value is loaded once for all of them. A step with fewer tasks than threads can
//! share, which is decode of a long context, is cut further, by splits.

mod kernels;
mod plan;
mod scores;
mod task;

pub(super) use plan::Plan;

use super::kv_cache::CpuKvCache;
use super::pool::ThreadPool;
use super::simd::Isa;
use super::tensor::{RowsIn, RowsOut};
use crate::Attention;
use lockstep_core::limits::ATTENTION_SEGMENT;
use task::TaskRun;

/// Largest head; bounds the scratch memory.
pub(super) const HEAD_DIM_MAX: usize = 512;
/// Queries (tokens times heads) of a task at most: enough to amortise turning a segment of keys,
/// few enough that scores and sums stay in the second-level cache.
const TASK_QUERIES: usize = 64;

/// Positions of a split: small enough that a few thousand occupy several threads, large enough that
/// joining states is lost beside the walk (0.3 %).
const SPLIT: usize = 8 * ATTENTION_SEGMENT;

/// Scratch elements of each thread: scores, two states, turned keys.
pub(super) const SCRATCH_LEN: usize =
    TASK_QUERIES * ATTENTION_SEGMENT + 2 * plan::STATE_LEN_MAX + HEAD_DIM_MAX * ATTENTION_SEGMENT;

/// Where one operation runs.
pub(super) struct Runtime<'a> {
    pub isa: Isa,
    pub pool: &'a ThreadPool,
    /// A row of [`SCRATCH_LEN`] for each thread.
    pub scratch: RowsOut<'a>,
    pub plan: &'a mut Plan,
}

/// See [`crate::Backend::attention`].
pub(super) fn attention(
    runtime: Runtime<'_>,
    args: &Attention<'_>,
    qkv: RowsIn<'_>,
    cache: &CpuKvCache,
    out: RowsOut<'_>,
) {
    check(args, qkv.cols, out.cols, cache);
    let (isa, pool, scratch) = (runtime.isa, runtime.pool, runtime.scratch);
    runtime.plan.fill(args, pool.threads());
    let (walks, merges, partials) = runtime.plan.parts();
    for tasks in [walks, merges] {
        pool.run(tasks.len(), &|index, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { scratch.part(thread, 0, SCRATCH_LEN) };
            TaskRun::new(isa, tasks[index], args, qkv, cache).run(scratch, partials, out);
        });
    }
}

/// Panics when the operands do not fit together.
fn check(args: &Attention<'_>, qkv_cols: usize, out_cols: usize, cache: &CpuKvCache) {
    let shape = &args.shape;
    let dim = shape.head_dim;
    assert!(dim <= HEAD_DIM_MAX, "head_dim {dim} is at most {HEAD_DIM_MAX}");
    assert!(shape.local_heads.is_multiple_of(shape.local_kv_heads), "query heads come in equal groups");
    let columns = (shape.local_heads + 2 * shape.local_kv_heads) * dim;
    assert_eq!(qkv_cols, columns, "qkv has the columns of its heads");
    assert_eq!(out_cols, shape.local_heads * dim, "out has the columns of the query heads");
    assert_eq!(cache.layout().head_dim, dim, "the cache is made for these heads");
    assert_ne!(args.window, Some(0), "a token sees at least itself");
    assert!(args.softcap.is_none_or(|cap| cap > 0.0), "a soft cap is positive");
}
