//! One planned step: its rows, input tokens and page tables.

use lockstep_core::{PageId, RequestId, SamplingParams, StepId, TokenId};
use std::sync::Arc;

/// Everything a model runner needs to know about one step. Reuse one value for all steps
/// ([`Scheduler::plan_into`](crate::Scheduler::plan_into)): its buffers then stop growing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Number of the step; the steps of a scheduler count from 0 without gap.
    pub step: StepId,
    /// Decode rows first, then prefill chunks; one row per request.
    pub rows: Vec<PlanRow>,
    /// Inputs of all rows, flattened; [`StepPlan::PLACEHOLDER`] where the input is
    /// [`RowInput::SampledBy`].
    pub token_ids: Vec<TokenId>,
    /// Page tables of all rows, flattened.
    pub pages: Vec<PageId>,
}

/// The run of tokens of one request in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRow {
    /// The request.
    pub id: RequestId,
    /// Index of its first token in [`StepPlan::token_ids`].
    pub first_token: u32,
    /// Tokens computed: 1 for decode, one chunk for prefill. Never 0.
    pub token_count: u32,
    /// Absolute position of the first token: the tokens whose KV exists before this step.
    pub start_position: u32,
    /// Where its page table starts in [`StepPlan::pages`].
    pub first_page: u32,
    /// Pages of its table: exactly those that hold positions `0..start_position + token_count`.
    pub page_count: u32,
    /// Where the input tokens come from.
    pub input: RowInput,
    /// A prefill chunk; otherwise the row decodes.
    pub is_prefill: bool,
    /// Whether the row's last token yields a sampled token (all but unfinished prefill chunks).
    pub samples: bool,
    /// Generated tokens before the one this row samples: the position key of its random numbers.
    /// 0 when `samples` is false.
    pub output_index: u32,
    /// How to sample.
    pub sampling: Arc<SamplingParams>,
    /// Whether the logits of all its tokens are wanted, for log-probabilities of the prompt.
    pub prompt_logits: bool,
    /// On the first row after each admission of a request whose sampling needs its earlier tokens
    /// ([`SamplingParams::needs_history`]): the runner adds what it samples itself.
    pub history: Option<History>,
}

/// All tokens of a request when it was admitted.
#[derive(Clone, Debug, PartialEq)]
pub struct History {
    /// Prompt, then (after a retraction) generated tokens.
    pub tokens: Arc<[TokenId]>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

/// Where the input tokens of a row come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowInput {
    /// All are in [`StepPlan::token_ids`].
    Known,
    /// The one input token is what `step`, launched but not completed, samples for this request.
    SampledBy {
        /// The step before this one. There is none such where a pipeline has several stages.
        step: StepId,
        /// Index among that step's sampling rows, in row order.
        sample_index: u32,
    },
}

impl StepPlan {
    /// Stands in [`StepPlan::token_ids`] for a token that is not known yet. A legal id, so that a
    /// runner that forgets to replace it computes nonsense instead of reading out of bounds.
    pub const PLACEHOLDER: TokenId = 0;

    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Rows that sample, hence tokens that `complete` expects.
    pub fn sample_count(&self) -> usize {
        self.rows.iter().filter(|row| row.samples).count()
    }

    /// Empties the buffers, keeping their memory.
    pub(crate) fn clear(&mut self, step: StepId) {
        self.step = step;
        self.rows.clear();
        self.token_ids.clear();
        self.pages.clear();
    }
}
