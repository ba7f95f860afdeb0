//! How many KV pages a rank can hold, and the agreement on the smallest.
//!
//! Every rank computes its own number from its own budget; the pool of the group is the minimum,
//! so no rank ever hands out a page that another does not have.

use crate::config::RankConfig;
use crate::{EngineError, Result};
use lockstep_backend::KvLayout;
use lockstep_comm::group::{Patience, ProcessGroup};

/// Bytes a rank has committed before its KV pool.
#[derive(Clone, Copy, Debug)]
pub struct Committed {
    /// Packed weights.
    pub weight_bytes: usize,
    /// Activation buffers.
    pub workspace_bytes: usize,
}

/// Pages this rank could hold: `--num-pages`, or what the budget leaves, at most what
/// `running_max` requests of `context_max` tokens need.
///
/// Errors with the numbers when not even one request of two tokens fits.
pub fn local_pages(
    config: &RankConfig,
    layout: KvLayout,
    committed: Committed,
    context_max: usize,
) -> Result<usize> {
    if let Some(pages) = config.num_pages {
        return Ok(pages);
    }
    let used = committed.weight_bytes + committed.workspace_bytes;
    let left = config.memory_budget_bytes.saturating_sub(used);
    let pages = left / layout.page_bytes();
    if pages == 0 {
        return Err(EngineError::Memory(format!(
            "{} may use {} MiB ({}), but weights take {} MiB and activations {} MiB, which leaves no room for a KV \
             page of {} KiB; raise --memory-ratio, lower --chunk or --max-running, or use a larger --tp",
            config.parallel.label(),
            config.memory_budget_bytes >> 20,
            config.memory_budget_origin,
            committed.weight_bytes >> 20,
            committed.workspace_bytes >> 20,
            layout.page_bytes() >> 10,
        )));
    }
    let wanted = config.batching.running_max * context_max.div_ceil(layout.page_size);
    Ok(pages.min(wanted.max(1)))
}

/// The smallest of all ranks' `pages`, and a warning sentence when they differ by more than 5 %.
///
/// **Collective: all ranks of the replica.**
pub fn agree_on_pages(
    group: &mut dyn ProcessGroup,
    pages: usize,
    patience: Patience,
) -> Result<(usize, Option<String>)> {
    let mut all = vec![0u8; 8 * group.size()];
    group.all_gather(&(pages as u64).to_le_bytes(), &mut all, patience)?;
    let counts: Vec<u64> = all.as_chunks::<8>().0.iter().map(|c| u64::from_le_bytes(*c)).collect();
    let (min, max) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
    let warning = (max as f64 > min as f64 * 1.05).then(|| {
        let each: Vec<String> =
            counts.iter().enumerate().map(|(rank, n)| format!("rank {rank}: {n}")).collect();
        format!(
            "ranks can hold different numbers of KV pages ({}); all use the smallest, {min}",
            each.join(", ")
        )
    });
    Ok((min as usize, warning))
}
