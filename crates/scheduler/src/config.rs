//! What a scheduler is told once, at start; the same on every rank.

use lockstep_core::TokenId;
use lockstep_core::limits::PAGE_SIZE_MAX;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Whether prefixes are kept and shared between requests (`--cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CachePolicy {
    /// Full pages of every request stay in a radix tree until the pool needs them.
    Radix,
    /// Pages are freed when their request ends; nothing is shared.
    None,
}

/// Which waiting request of the same priority is admitted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueueOrder {
    /// First come, first served.
    Fcfs,
    /// The longest cached prefix first, within the overtaking bound of `docs/scheduling.md`.
    LongestPrefix,
}

/// What goes first when prefill and decode cannot share a step (`mixed == false`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepOrder {
    /// Prefill steps first; running decodes wait for at most [`SchedulerConfig::PREFILL_RUN_MAX`] in a row.
    PrefillFirst,
    /// Decode steps first; prefill waits for at most [`SchedulerConfig::DECODE_RUN_MAX`] in a row.
    DecodeFirst,
}

/// Sizes and policies of one scheduler. Start from `SchedulerConfig::default()` and set what differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerConfig {
    /// Tokens in a page, `1..=PAGE_SIZE_MAX`.
    pub page_size: usize,
    /// Pages of the KV pool: the smallest number that fits on all ranks.
    pub num_pages: usize,
    /// Requests that may be prefilling or decoding at once.
    pub max_running: usize,
    /// Tokens a step aims at (`--chunk`). Decode rows come first; prefill gets the rest, but never less
    /// than half, so that neither starves. See [`SchedulerConfig::step_tokens_max`].
    pub token_budget: usize,
    /// Tokens of prompt plus answer at most. The limit in force is also bounded by the pool; see
    /// [`Scheduler::context_max`](crate::Scheduler::context_max).
    pub context_max: usize,
    /// Prefix sharing.
    pub cache: CachePolicy,
    /// Whether one step may hold both decode rows and prefill chunks.
    pub mixed: bool,
    /// Whether a step may be planned while the one before it has not completed.
    pub overlap: bool,
    /// Pipeline stages: with more than one, as many steps are in flight, overlap or not, and none of them needs a
    /// token that another one samples.
    pub stages: usize,
    /// End tokens of the model, from every source.
    pub eos_tokens: Vec<TokenId>,
    /// Requests that may wait while `max_running` run; one more is refused with a 503.
    pub waiting_max: usize,
    /// Admission order among equal priorities.
    pub queue_order: QueueOrder,
    /// Step order when `mixed` is false.
    pub step_order: StepOrder,
    /// How much of the estimated growth of running requests admission keeps free, `0..=100`. Less admits more
    /// and retracts more often; 0 admits whatever fits now.
    pub reserve_percent: usize,
    /// Record freed pages for [`Scheduler::take_freed_pages`](crate::Scheduler::take_freed_pages), so that
    /// the engine can poison them. A debugging aid.
    pub track_freed: bool,
}

/// A configuration no scheduler can run with.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A size is outside its range.
    #[error("{name} is {got}, but must be in {min}..={max}")]
    OutOfRange {
        /// The field.
        name: &'static str,
        /// Its value.
        got: usize,
        /// Smallest legal value.
        min: usize,
        /// Largest legal value.
        max: usize,
    },
}

impl SchedulerConfig {
    /// Prefill-only steps in a row while decodes wait (`StepOrder::PrefillFirst`, not mixed).
    pub const PREFILL_RUN_MAX: u32 = 4;
    /// Decode-only steps in a row while a prefill waits (`StepOrder::DecodeFirst`, not mixed).
    pub const DECODE_RUN_MAX: u32 = 8;

    /// Prompt tokens of one step whose logits are computed beside those that sample
    /// ([`SamplingParams::prompt_logprobs`](lockstep_core::SamplingParams)). Buffers are sized by it: a row of
    /// logits is as wide as the vocabulary.
    pub const PROMPT_LOGITS_MAX: usize = 32;

    /// Whether a scheduler can be built; the message names the field at fault.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const COUNT_MAX: usize = u32::MAX as usize / 2;
        let fields = [
            ("page_size", self.page_size, 1, PAGE_SIZE_MAX),
            ("num_pages", self.num_pages, 1, COUNT_MAX),
            ("max_running", self.max_running, 1, COUNT_MAX),
            ("token_budget", self.token_budget, 1, COUNT_MAX),
            ("context_max", self.context_max, 2, COUNT_MAX),
            ("stages", self.stages, 1, COUNT_MAX),
            ("reserve_percent", self.reserve_percent, 0, 100),
        ];
        for (name, got, min, max) in fields {
            if got < min || got > max {
                return Err(ConfigError::OutOfRange { name, got, min, max });
            }
        }
        let pool_tokens = self.num_pages.saturating_mul(self.page_size);
        if !(2..=COUNT_MAX).contains(&pool_tokens) {
            return Err(ConfigError::OutOfRange {
                name: "num_pages * page_size",
                got: pool_tokens,
                min: 2,
                max: COUNT_MAX,
            });
        }
        Ok(())
    }

    /// Steps planned and not completed, at most.
    pub fn steps_in_flight_max(&self) -> usize {
        match self.stages {
            1 => 1 + usize::from(self.overlap),
            stages => stages,
        }
    }

    /// No step holds more tokens than this; buffers of the engine are sized by it.
    pub fn step_tokens_max(&self) -> usize {
        self.max_running + self.token_budget
    }

    /// Tokens of a step whose logits are computed, at most: rows that sample, and prompt tokens.
    pub fn step_rows_max(&self) -> usize {
        self.max_running + Self::PROMPT_LOGITS_MAX
    }
}

impl Default for SchedulerConfig {
    /// The flags' defaults on a CPU, with a pool of 1,024 pages.
    fn default() -> Self {
        Self {
            page_size: 16,
            num_pages: 1024,
            max_running: 64,
            token_budget: 512,
            context_max: 4096,
            cache: CachePolicy::Radix,
            mixed: true,
            overlap: true,
            stages: 1,
            eos_tokens: Vec::new(),
            waiting_max: 4096,
            queue_order: QueueOrder::Fcfs,
            step_order: StepOrder::PrefillFirst,
            reserve_percent: 100,
            track_freed: false,
        }
    }
}
