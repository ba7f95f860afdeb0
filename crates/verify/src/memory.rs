//! Whether a verification fits in memory, before anything is loaded.
//!
//! **Invariant:** what is counted is what is held at the same time: all ranks of one place (they are threads of this
//! process), the pages and activations of its largest run, and the results that are kept to be compared. The rules
//! are those that a server asks ([`lockstep_engine::memory`]).

use crate::forward;
use crate::greedy;
use crate::place::{Device, Place};
use crate::{Options, Result, Subject, VerifyError};
use lockstep_backend::cpu::CpuBackend;
use lockstep_backend::cuda::CudaBackend;
use lockstep_backend::{Backend, KvLayout};
use lockstep_core::shard::{self, HeadShard};
use lockstep_core::{DType, ModelConfig, ParallelInfo, StageLayers, WeightMode};
use lockstep_engine::memory::{Allowance, Committed, check_before_loading};
use lockstep_model::WeightSource;

/// Share of the memory free before loading that may be used: the rest of the machine goes on living.
pub const MEMORY_RATIO: f64 = 0.9;

/// What to change when a place does not fit.
const REMEDY: &str =
    "give fewer or shorter --prompts, fewer --tokens or --dtype bf16, or use a machine with more memory";

/// Sizes of all runs of one verification.
#[derive(Clone, Copy, Debug)]
pub struct RunSizes {
    /// Prompts.
    prompts: usize,
    /// Longest sequence, answer included.
    longest: usize,
    /// Tokens of all sequences together, which share one step of a batched run.
    tokens: usize,
    /// Positions whose logits are kept.
    rows: usize,
    /// Residual streams are kept too.
    layers: bool,
}

impl RunSizes {
    /// Of the runs that `options` ask for.
    pub fn of(options: &Options) -> Self {
        let lengths = || options.prompts.iter().map(|prompt| prompt.len() + options.tokens);
        let kept = forward::POSITIONS_MAX + options.tokens + 1;
        Self {
            prompts: options.prompts.len(),
            longest: lengths().max().unwrap_or(0),
            tokens: lengths().sum(),
            rows: lengths().map(|len| len.min(kept)).sum(),
            layers: options.bisect,
        }
    }

    /// Tokens of the largest step.
    pub fn tokens_max(&self) -> usize {
        self.tokens.max(greedy::CHUNK + self.prompts)
    }

    /// What the rank at `p` holds beside its weights and activations: the pages of the largest pool, and its copies of
    /// what is compared.
    fn kept_bytes(self, config: &ModelConfig, (p, stage): (ParallelInfo, StageLayers), kv: DType) -> usize {
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let layout = KvLayout {
            local_layers: stage.count(),
            local_kv_heads: heads.kv_heads.len(),
            head_dim: config.head_dim,
            page_size: 1,
            // Greedy texts have room for twice all prompts.
            num_pages: 2 * self.prompts * (self.longest + 1).next_multiple_of(16),
            dtype: kv,
        };
        let logits = self.rows * config.vocab_size * size_of::<f32>();
        let streams = self.tokens * config.hidden_size * (config.num_layers + 1) * size_of::<f32>();
        // Gathered, and sorted into sequences.
        let results = 2 * logits + if self.layers { streams } else { 0 };
        // Those of the reference and of this place's first run, once for all ranks.
        let compared = if p.is_sampler() { results } else { 0 };
        layout.pool_bytes() + results + compared
    }

    fn expected<B: Backend>(
        self,
        source: &dyn WeightSource,
        (p, stage): (ParallelInfo, StageLayers),
        (weights, kv): (WeightMode, DType),
    ) -> Committed {
        let committed = Committed::of_stage::<B>(source, (p, stage), weights, (self.tokens, self.rows));
        Committed { kept_bytes: self.kept_bytes(source.config(), (p, stage), kv), ..committed }
    }
}

/// Fails with the numbers when the ranks of some place on CPUs do not fit in what `options` allow.
pub fn check(subject: &dyn Subject, options: &Options, places: &[Place]) -> Result<()> {
    let sizes = RunSizes::of(options);
    for place in places {
        let Device::Cpu { weights, .. } = place.device else { continue };
        let ranks = || place.topology().places();
        // A size that the model cannot be cut into is the finding of that place.
        if ranks().any(|p| shard::check_tp_size(subject.source(p).config(), place.tp as i64).is_err()) {
            continue;
        }
        let of_rank = |p: ParallelInfo| {
            let source = subject.source(p);
            let stage = stage_of(source, p)?;
            Ok(sizes.expected::<CpuBackend>(source, (p, stage), (weights, DType::F32)))
        };
        let expected = ranks().map(of_rank).collect::<Result<Vec<_>>>()?;
        let expected = expected.into_iter().fold(Committed::default(), Committed::and);
        let who = format!("the ranks of {}", place.words());
        check_before_loading(&allowance(&who, options.memory_bytes, &options.memory_origin), expected)?;
    }
    Ok(())
}

/// The layers of the rank at `p`. Errors when there are more stages than layers.
pub fn stage_of(source: &dyn WeightSource, p: ParallelInfo) -> Result<StageLayers> {
    let stages = StageLayers::of_stages(source.config(), p.pp_size, None);
    Ok(stages.map_err(|error| VerifyError::Invalid(error.to_string()))?[p.pp_rank])
}

/// [`check`] for one rank on its GPU, which `sharing` ranks take, when `free_bytes` of it are free.
pub fn check_gpu(
    source: &dyn WeightSource,
    (p, stage): (ParallelInfo, StageLayers),
    dtype: DType,
    sizes: RunSizes,
    (free_bytes, sharing): (usize, usize),
) -> Result<()> {
    let expected = sizes.expected::<CudaBackend>(source, (p, stage), (WeightMode::Cast(dtype), dtype));
    // Results are kept in this machine's memory.
    let expected = Committed { kept_bytes: 0, ..expected };
    let bytes = (free_bytes as f64 * MEMORY_RATIO / sharing as f64) as usize;
    let origin = format!("{:.0} % of {} MiB free on the GPU", 100.0 * MEMORY_RATIO, free_bytes >> 20);
    Ok(check_before_loading(&allowance(&p.label(), bytes, &origin), expected)?)
}

fn allowance<'a>(who: &'a str, bytes: usize, origin: &'a str) -> Allowance<'a> {
    Allowance { who, bytes, origin, rest: "anything else", remedy: REMEDY }
}
