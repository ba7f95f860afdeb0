//! What a rank will hold before it loads, how many KV pages are left for it, and the agreement on the smallest.
//!
//! [`check_before_loading`] is what every command asks that loads a model, whether a rank of a server or all ranks of a
//! verification are about to.
//!
//! Every rank computes its own number from its own budget; the pool of the group is the minimum,
//! so no rank ever hands out a page that another does not have.

use crate::config::RankConfig;
use crate::{EngineError, Result};
use lockstep_backend::{Backend, KvLayout};
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_core::{ParallelInfo, StageLayers, WeightMode};
use lockstep_model::{ModelRules, ShardBytes, WeightSource, Workspace, weight_types};

/// Bytes committed before a KV pool that takes what is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Packed weights.
    pub weight_bytes: usize,
    /// Activation buffers.
    pub workspace_bytes: usize,
    /// KV pages and results, where their number is known beforehand.
    pub kept_bytes: usize,
}

impl Committed {
    /// What the rank at `p` will load of `source`, matrices as `mode` asks, and its activations
    /// in steps of at most (tokens, rows of logits). From the rules that the loader follows; reads headers only.
    /// Panics when the tp size is illegal.
    pub fn expected<B: Backend>(
        source: &dyn WeightSource,
        p: ParallelInfo,
        mode: WeightMode,
        sizes: (usize, usize),
    ) -> Self {
        Self::of_stage::<B>(source, (p, StageLayers::whole(source.config().num_layers)), mode, sizes)
    }

    /// The same where the rank has the layers of one pipeline stage.
    pub fn of_stage<B: Backend>(
        source: &dyn WeightSource,
        (p, stage): (ParallelInfo, StageLayers),
        mode: WeightMode,
        (tokens_max, rows_max): (usize, usize),
    ) -> Self {
        let model = source.config();
        let type_of = weight_types(source, mode, B::TAKES_CODES);
        Self {
            weight_bytes: ShardBytes::of(&ModelRules::of_stage(model, stage), p, type_of).total(),
            workspace_bytes: Workspace::<B>::bytes(model, p, tokens_max, rows_max),
            kept_bytes: 0,
        }
    }

    /// The same of several ranks together.
    pub fn and(self, other: Self) -> Self {
        Self {
            weight_bytes: self.weight_bytes + other.weight_bytes,
            workspace_bytes: self.workspace_bytes + other.workspace_bytes,
            kept_bytes: self.kept_bytes + other.kept_bytes,
        }
    }

    /// All of it.
    pub fn total(self) -> usize {
        self.weight_bytes + self.workspace_bytes + self.kept_bytes
    }
}

/// What somebody may use of memory, in words that an error can give.
#[derive(Clone, Debug)]
pub struct Allowance<'a> {
    /// Who: a rank's label, or several ranks.
    pub who: &'a str,
    /// How much.
    pub bytes: usize,
    /// How that came about.
    pub origin: &'a str,
    /// What the rest is for.
    pub rest: &'a str,
    /// What to change when it is too little.
    pub remedy: &'a str,
}

impl Allowance<'_> {
    fn too_little(&self, committed: Committed, left: &str) -> EngineError {
        let kept = match committed.kept_bytes {
            0 => String::new(),
            bytes => format!(", KV pages and results {} MiB", bytes >> 20),
        };
        EngineError::Memory(format!(
            "{} may use {} MiB ({}), but weights take {} MiB and activations {} MiB{kept}, which leaves {left}; {}",
            self.who,
            self.bytes >> 20,
            self.origin,
            committed.weight_bytes >> 20,
            committed.workspace_bytes >> 20,
            self.remedy,
        ))
    }
}

/// Refuses before any weight is read what cannot fit, instead of after minutes of loading.
pub fn check_before_loading(allowed: &Allowance<'_>, expected: Committed) -> Result<()> {
    match expected.total() < allowed.bytes {
        true => Ok(()),
        false => Err(allowed.too_little(expected, &format!("nothing for {}", allowed.rest))),
    }
}

/// What a rank of a server may use.
pub(crate) fn allowance<'a>(config: &'a RankConfig, label: &'a str) -> Allowance<'a> {
    Allowance {
        who: label,
        bytes: config.memory_budget_bytes,
        origin: &config.memory_budget_origin,
        rest: "KV pages",
        remedy: "raise --memory-ratio, lower --chunk or --max-running, or use a larger --tp or --pp",
    }
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
    let left = config.memory_budget_bytes.saturating_sub(committed.total());
    let pages = left / layout.page_bytes();
    if pages == 0 {
        let left = format!("no room for a KV page of {} KiB", layout.page_bytes() >> 10);
        return Err(allowance(config, &config.parallel.label()).too_little(committed, &left));
    }
    let wanted = config.batching.running_max * context_max.div_ceil(layout.page_size);
    Ok(pages.min(wanted.max(1)))
}

/// Ranks that differ by more than this share of the largest are told of.
const IMBALANCE_TOLD: f64 = 0.05;
/// Ranks that differ by more are refused without `--allow-imbalance`.
const IMBALANCE_MAX: f64 = 0.20;

/// The smallest of all ranks' `pages`, and a warning sentence when those of a stage's `tp_size` ranks differ by more
/// than 5 %.
///
/// Errors, on all ranks, when they differ by more than 20 % and `allow_imbalance` is not set: most of
/// the largest rank's memory would lie idle. Stages have other numbers of layers, hence pages of other sizes: that they
/// differ is no sign of anything. **Collective: all ranks of the replica.**
pub fn agree_on_pages(
    group: &mut dyn ProcessGroup,
    pages: usize,
    (tp_size, allow_imbalance): (usize, bool),
    patience: Patience,
) -> Result<(usize, Option<String>)> {
    let mut all = vec![0u8; 8 * group.size()];
    group.all_gather(&(pages as u64).to_le_bytes(), &mut all, patience)?;
    let counts: Vec<u64> = all.as_chunks::<8>().0.iter().map(|c| u64::from_le_bytes(*c)).collect();
    let range = |counts: &[u64]| {
        (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0))
    };
    let (min, _) = range(&counts);
    let imbalances = counts.chunks(tp_size).map(|stage| {
        let (min, max) = range(stage);
        (max - min) as f64 / max.max(1) as f64
    });
    let imbalance = imbalances.fold(0.0, f64::max);
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
