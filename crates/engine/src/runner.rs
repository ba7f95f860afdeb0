//! Runs planned steps on a device: plan → forward → logits → tokens.

use crate::logits::{Chosen, LogitRow, LogitsReader, takes_only_best};
use crate::masks;
use crate::{EngineError, Result};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend};
use lockstep_comm::collective::Collective;
use lockstep_core::{Grammar, PageId, RequestId, StepId, TokenId};
use lockstep_model::{Decoder, ForwardInput, Workspace};
use lockstep_scheduler::{RowInput, StepPlan};
use lockstep_wire::{StepLogprobs, Vocabulary};
use std::collections::VecDeque;

/// What the rank loop needs of a device. The simulator has its own.
pub trait Runner {
    /// Queues one planned step. Rows whose input is the token of an earlier step find it on the
    /// device. **Collective: all ranks, same plan.**
    fn launch(&mut self, plan: &StepPlan) -> Result<()>;
    /// Waits for the oldest launched step; its tokens replace `tokens`, one per sampling row.
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId>;
    /// Appends the log-probabilities of the step collected last, of requests that asked for them. Only the
    /// primary's runner need have any.
    fn take_logprobs(&mut self, _into: &mut Vec<(RequestId, StepLogprobs)>) {}
    /// The model's vocabulary, before the first request with a grammar.
    fn set_vocabulary(&mut self, _vocabulary: Vocabulary) {}
    /// Begins to prepare a grammar, beside the steps. Requests with it are planned only once all ranks have
    /// prepared it.
    fn prepare_grammar(&mut self, _grammar: Grammar) {}
    /// How many grammars are prepared, of those that [`prepare_grammar`](Self::prepare_grammar) was called with;
    /// the default has nothing to prepare.
    fn grammars_prepared(&mut self) -> u64 {
        u64::MAX
    }
    /// Makes the content of freed pages unusable, so that whoever still reads them is found out. Called
    /// between plan and launch, and only when the scheduler tracks freed pages; they may already belong to
    /// a row of the plan about to be launched. Does nothing unless implemented.
    fn poison(&mut self, _freed: &[PageId]) -> Result<()> {
        Ok(())
    }
}

/// The runner of one rank: a decoder shard, its KV pool and the sampler.
pub struct ModelRunner<B: Backend> {
    backend: B,
    collective: Box<dyn Collective>,
    decoder: Decoder<B>,
    cache: B::KvCache,
    work: Workspace<B>,
    logits: LogitsReader,
    page_size: usize,
    inputs: Inputs,
    launched: VecDeque<Launched>,
    /// Tokens of the newest collected step, which a step planned before it was read may use.
    newest: Launched,
    spare: Vec<Chosen>,
}

/// Parts of a [`ModelRunner`] that the rank builds first.
pub struct RunnerParts<B: Backend> {
    /// The device.
    pub backend: B,
    /// The TP group's tensors.
    pub collective: Box<dyn Collective>,
    /// This rank's shard.
    pub decoder: Decoder<B>,
    /// This rank's KV pool.
    pub cache: B::KvCache,
    /// Activations.
    pub work: Workspace<B>,
    /// Tokens per page.
    pub page_size: usize,
    /// Rows of the vocabulary that exist.
    pub vocab_size: usize,
    /// Tokens masked while `min_tokens` is not reached.
    pub eos_tokens: Vec<TokenId>,
    /// Whether log-probabilities are computed for whoever asked; true on the rank that reports results.
    pub reports_logprobs: bool,
}

/// What one launched step chose.
struct Launched {
    step: StepId,
    chosen: Chosen,
}

/// Model inputs of one step, reused.
#[derive(Default)]
struct Inputs {
    token_ids: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    rows: Vec<AttentionRow>,
    logit_tokens: Vec<u32>,
    logit_rows: Vec<LogitRow>,
}

impl<B: Backend> ModelRunner<B> {
    /// A runner over loaded parts.
    pub fn new(parts: RunnerParts<B>) -> Self {
        let shard = parts.decoder.vocab_shard();
        let logits = LogitsReader::new(shard, parts.vocab_size, parts.eos_tokens, parts.reports_logprobs);
        Self {
            backend: parts.backend,
            collective: parts.collective,
            decoder: parts.decoder,
            cache: parts.cache,
            work: parts.work,
            logits,
            page_size: parts.page_size,
            inputs: Inputs::default(),
            launched: VecDeque::with_capacity(2),
            newest: Launched { step: StepId::MAX, chosen: Chosen::default() },
            spare: Vec::new(),
        }
    }

    /// Gives back what was made once for all requests; pool and activations end here. For callers that run one
    /// model under several schedules.
    pub fn into_device(self) -> (B, Decoder<B>, Box<dyn Collective>) {
        (self.backend, self.decoder, self.collective)
    }

    /// Fills [`Inputs`] from a plan.
    fn prepare(&mut self, plan: &StepPlan) -> Result<()> {
        let page_size = self.page_size as u32;
        let inputs = &mut self.inputs;
        inputs.token_ids.clear();
        inputs.token_ids.extend_from_slice(&plan.token_ids);
        inputs.positions.clear();
        inputs.slots.clear();
        inputs.rows.clear();
        inputs.logit_tokens.clear();
        inputs.logit_rows.clear();
        for (row_index, row) in plan.rows.iter().enumerate() {
            if let RowInput::SampledBy { step, sample_index } = row.input {
                let token = sampled(&self.launched, &self.newest, step, sample_index).ok_or_else(|| {
                    EngineError::Internal(format!(
                        "step {} needs token {sample_index} of step {step}",
                        plan.step
                    ))
                })?;
                inputs.token_ids[row.first_token as usize] = token;
            }
            let pages = &plan.pages[row.first_page as usize..][..row.page_count as usize];
            for position in row.start_position..row.start_position + row.token_count {
                inputs.positions.push(position);
                inputs.slots.push(pages[(position / page_size) as usize] * page_size + position % page_size);
            }
            inputs.rows.push(AttentionRow {
                first_token: row.first_token,
                token_count: row.token_count,
                start_position: row.start_position,
                first_page: row.first_page,
            });
            let end = row.first_token + row.token_count;
            let wanted = match row.prompt_logits {
                true => row.first_token..end,
                false if row.samples => end - 1..end,
                false => continue,
            };
            let first = inputs.logit_tokens.len();
            inputs.logit_rows.push(LogitRow { row: row_index, first, count: wanted.len() });
            inputs.logit_tokens.extend(wanted);
        }
        Ok(())
    }
}

/// The token sampled at `index` of step `step`, if that step is launched or the newest collected.
fn sampled(launched: &VecDeque<Launched>, newest: &Launched, step: StepId, index: u32) -> Option<TokenId> {
    let holder = launched.iter().find(|l| l.step == step).or((newest.step == step).then_some(newest))?;
    holder.chosen.tokens.get(index as usize).copied()
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn launch(&mut self, plan: &StepPlan) -> Result<()> {
        self.prepare(plan)?;
        let inputs = &self.inputs;
        let input = ForwardInput {
            token_ids: &inputs.token_ids,
            positions: &inputs.positions,
            slots: &inputs.slots,
            batch: AttentionBatch { rows: &inputs.rows, pages: &plan.pages },
            logit_tokens: &inputs.logit_tokens,
        };
        let collective = &*self.collective;
        let (grammars, masks) = self.logits.begin(plan);
        let logits = std::thread::scope(|scope| {
            masks::compute(scope, grammars, masks);
            self.decoder.forward((&mut self.backend, collective), &input, &mut self.cache, &mut self.work)
        })?;
        let mut chosen = self.spare.pop().unwrap_or_default();
        chosen.clear();
        let count = inputs.logit_tokens.len();
        if count > 0 {
            let best = match takes_only_best(plan, &inputs.logit_rows) {
                true => self.backend.argmax(logits, count, self.logits.local_real())?,
                false => None,
            };
            if let Some(best) = best {
                self.logits.choose_best(&best, collective, &mut chosen.tokens)?;
                self.launched.push_back(Launched { step: plan.step, chosen });
                return Ok(());
            }
            let local = self.backend.read(logits, count)?;
            if cfg!(debug_assertions)
                && local.iter().take(count * self.logits.local_vocab()).any(|l| l.is_nan())
            {
                return Err(EngineError::Internal(format!(
                    "logits of step {} are not numbers: a freed page was read, or the weights are broken",
                    plan.step
                )));
            }
            self.logits.choose(&local, plan, &inputs.logit_rows, collective, &mut chosen)?;
        }
        self.launched.push_back(Launched { step: plan.step, chosen });
        Ok(())
    }

    fn poison(&mut self, freed: &[PageId]) -> Result<()> {
        self.backend.poison(&mut self.cache, freed);
        Ok(())
    }

    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
        let oldest = self
            .launched
            .pop_front()
            .ok_or_else(|| EngineError::Internal("no step is in flight, so none can be collected".into()))?;
        tokens.clear();
        tokens.extend_from_slice(&oldest.chosen.tokens);
        let step = oldest.step;
        let previous = std::mem::replace(&mut self.newest, oldest);
        self.spare.push(previous.chosen);
        Ok(step)
    }

    fn set_vocabulary(&mut self, vocabulary: Vocabulary) {
        self.logits.set_vocabulary(vocabulary);
    }

    fn prepare_grammar(&mut self, grammar: Grammar) {
        self.logits.grammars().prepare(grammar);
    }

    fn grammars_prepared(&mut self) -> u64 {
        self.logits.grammars().prepared()
    }

    fn take_logprobs(&mut self, into: &mut Vec<(RequestId, StepLogprobs)>) {
        into.append(&mut self.newest.chosen.logprobs);
    }
}
