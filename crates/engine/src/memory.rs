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

/// Refuses before any weight is read what cannot fit, instead of after minutes of loading.
pub fn check_before_loading(config: &RankConfig, expected: Committed) -> Result<()> {
    match expected.weight_bytes + expected.workspace_bytes < config.memory_budget_bytes {
        true => Ok(()),
        false => Err(too_little(config, expected, "nothing for KV pages".into())),
    }
}

fn too_little(config: &RankConfig, committed: Committed, left: String) -> EngineError {
    EngineError::Memory(format!(
        "{} may use {} MiB ({}), but weights take {} MiB and activations {} MiB, which leaves {left}; raise \
         --memory-ratio, lower --chunk or --max-running, or use a larger --tp",
        config.parallel.label(),
        config.memory_budget_bytes >> 20,
        config.memory_budget_origin,
        committed.weight_bytes >> 20,
        committed.workspace_bytes >> 20,
    ))
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
        let left = format!("no room for a KV page of {} KiB", layout.page_bytes() >> 10);
        return Err(too_little(config, committed, left));
    }
    let wanted = config.batching.running_max * context_max.div_ceil(layout.page_size);
    Ok(pages.min(wanted.max(1)))
}

/// Ranks that differ by more than this share of the largest are told of.
const IMBALANCE_TOLD: f64 = 0.05;
/// Ranks that differ by more are refused without `--allow-imbalance`.
const IMBALANCE_MAX: f64 = 0.20;

/// The smallest of all ranks' `pages`, and a warning sentence when they differ by more than 5 %.
///
/// Errors, on all ranks, when they differ by more than 20 % and `allow_imbalance` is not set: most of
/// the largest rank's memory would lie idle. **Collective: all ranks of the replica.**
pub fn agree_on_pages(
    group: &mut dyn ProcessGroup,
    pages: usize,
    allow_imbalance: bool,
    patience: Patience,
) -> Result<(usize, Option<String>)> {
    let mut all = vec![0u8; 8 * group.size()];
    group.all_gather(&(pages as u64).to_le_bytes(), &mut all, patience)?;
    let counts: Vec<u64> = all.as_chunks::<8>().0.iter().map(|c| u64::from_le_bytes(*c)).collect();
    let (min, max) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
    let imbalance = (max - min) as f64 / max.max(1) as f64;
    let each: Vec<String> = counts.iter().enumerate().map(|(rank, n)| format!("rank {rank}: {n}")).collect();
    let each = each.join(", ");
    if imbalance > IMBALANCE_MAX && !allow_imbalance {
        return Err(EngineError::Memory(format!(
            "ranks can hold very different numbers of KV pages ({each}), {:.0} % apart where at most {:.0} % is served; \
             free memory on the smallest rank's device, set --num-pages {min}, or pass --allow-imbalance",
            100.0 * imbalance,
            100.0 * IMBALANCE_MAX
        )));
    }
    let warning = (imbalance > IMBALANCE_TOLD).then(|| {
        format!("ranks can hold different numbers of KV pages ({each}); all use the smallest, {min}")
    });
    Ok((min as usize, warning))
}
