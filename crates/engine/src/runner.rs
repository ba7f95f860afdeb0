//! Runs planned steps on a device: plan → forward → logits → tokens.

use crate::sampler::{Sampler, argmax};
use crate::{EngineError, Result};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend};
use lockstep_comm::collective::Collective;
use lockstep_core::{PageId, SamplingParams, StepId, TokenId};
use lockstep_model::{Decoder, ForwardInput, Workspace};
use lockstep_scheduler::{PlanRow, RowInput, StepPlan};
use std::collections::VecDeque;

/// What the rank loop needs of a device. The simulator has its own.
pub trait Runner {
    /// Queues one planned step. Rows whose input is the token of an earlier step find it on the
    /// device. **Collective: all ranks, same plan.**
    fn launch(&mut self, plan: &StepPlan) -> Result<()>;
    /// Waits for the oldest launched step; its tokens replace `tokens`, one per sampling row.
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId>;
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
    spare: Vec<Vec<TokenId>>,
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
}

/// The tokens of one launched step.
#[derive(Default)]
struct Launched {
    step: StepId,
    tokens: Vec<TokenId>,
}

/// Model inputs of one step, reused.
#[derive(Default)]
struct Inputs {
    token_ids: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    rows: Vec<AttentionRow>,
    logit_tokens: Vec<u32>,
}

impl<B: Backend> ModelRunner<B> {
    /// A runner over loaded parts.
    pub fn new(parts: RunnerParts<B>) -> Self {
        let shard = parts.decoder.vocab_shard();
        let logits = LogitsReader {
            local_vocab: shard.padded.len(),
            first_id: shard.padded.start,
            local_real: shard.real.len(),
            vocab_size: parts.vocab_size,
            eos_tokens: parts.eos_tokens,
            sampler: Sampler::default(),
            gathered: Vec::new(),
            row: Vec::new(),
        };
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
            newest: Launched { step: StepId::MAX, tokens: Vec::new() },
            spare: Vec::new(),
        }
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
        for row in &plan.rows {
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
            if row.samples {
                inputs.logit_tokens.push(row.first_token + row.token_count - 1);
            }
        }
        Ok(())
    }
}

/// The token sampled at `index` of step `step`, if that step is launched or the newest collected.
fn sampled(launched: &VecDeque<Launched>, newest: &Launched, step: StepId, index: u32) -> Option<TokenId> {
    let holder = launched.iter().find(|l| l.step == step).or((newest.step == step).then_some(newest))?;
    holder.tokens.get(index as usize).copied()
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
        let logits =
            self.decoder.forward((&mut self.backend, collective), &input, &mut self.cache, &mut self.work)?;
        let mut tokens = self.spare.pop().unwrap_or_default();
        tokens.clear();
        let sampling = plan.rows.iter().filter(|r| r.samples);
        let count = inputs.logit_tokens.len();
        if count > 0 {
            let local = self.backend.read(logits, count);
            if cfg!(debug_assertions)
                && local.iter().take(count * self.logits.local_vocab).any(|l| l.is_nan())
            {
                return Err(EngineError::Internal(format!(
                    "logits of step {} are not numbers: a freed page was read, or the weights are broken",
                    plan.step
                )));
            }
            self.logits.choose(&local, sampling, count, collective, &mut tokens)?;
        }
        self.launched.push_back(Launched { step: plan.step, tokens });
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
        tokens.extend_from_slice(&oldest.tokens);
        let step = oldest.step;
        let previous = std::mem::replace(&mut self.newest, oldest);
        self.spare.push(previous.tokens);
        Ok(step)
    }
}

/// From local logits to tokens, equal on all ranks.
struct LogitsReader {
    local_vocab: usize,
    first_id: usize,
    local_real: usize,
    vocab_size: usize,
    eos_tokens: Vec<TokenId>,
    sampler: Sampler,
    gathered: Vec<f32>,
    row: Vec<f32>,
}

impl LogitsReader {
    /// Appends one token per row of `local` `[count, local_vocab]`.
    ///
    /// When every row is greedy only (logit, id) pairs travel; otherwise whole rows are gathered.
    /// **Collective: all ranks of the TP group.**
    fn choose<'p>(
        &mut self,
        local: &[f32],
        rows: impl Iterator<Item = &'p PlanRow> + Clone,
        count: usize,
        collective: &dyn Collective,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        let plain = |r: &PlanRow| r.sampling.is_greedy() && r.output_index >= r.sampling.min_tokens;
        match rows.clone().all(plain) {
            true => self.choose_greedy(local, count, collective, tokens),
            false => self.choose_sampled(local, rows, count, collective, tokens),
        }
    }

    fn choose_greedy(
        &mut self,
        local: &[f32],
        count: usize,
        collective: &dyn Collective,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        self.row.clear();
        for logits in local.chunks_exact(self.local_vocab).take(count) {
            let (logit, index) = argmax(&logits[..self.local_real]).unwrap_or((f32::NEG_INFINITY, 0));
            // The id travels as the bits of an f32: gathers copy bytes, never values.
            self.row.extend([logit, f32::from_bits((self.first_id + index) as u32)]);
        }
        self.gathered.clear();
        self.gathered.resize(self.row.len() * collective.size(), 0.0);
        collective.all_gather_f32(&self.row, &mut self.gathered).map_err(EngineError::from)?;
        for row in 0..count {
            let mut best = (f32::NEG_INFINITY, 0);
            for rank in 0..collective.size() {
                let at = (rank * count + row) * 2;
                // Ranks hold ascending ids, so a strict comparison keeps the smaller id on ties.
                if self.gathered[at] > best.0 {
                    best = (self.gathered[at], self.gathered[at + 1].to_bits());
                }
            }
            tokens.push(best.1);
        }
        Ok(())
    }

    fn choose_sampled<'p>(
        &mut self,
        local: &[f32],
        rows: impl Iterator<Item = &'p PlanRow>,
        count: usize,
        collective: &dyn Collective,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        let sent = count * self.local_vocab;
        if self.gathered.len() < sent * collective.size() {
            self.gathered.resize(sent * collective.size(), 0.0);
        }
        let gathered = &mut self.gathered[..sent * collective.size()];
        collective.all_gather_f32(&local[..sent], gathered).map_err(EngineError::from)?;
        for (i, plan) in rows.enumerate() {
            self.row.clear();
            for rank in 0..collective.size() {
                let start = (rank * count + i) * self.local_vocab;
                let real = self.vocab_size.saturating_sub(rank * self.local_vocab).min(self.local_vocab);
                self.row.extend_from_slice(&gathered[start..start + real]);
            }
            if plan.output_index < plan.sampling.min_tokens {
                mask_end_tokens(&mut self.row, &self.eos_tokens, &plan.sampling);
            }
            tokens.push(self.sampler.sample(&self.row, &plan.sampling, plan.output_index));
        }
        Ok(())
    }
}

/// Makes every token that would end the request impossible.
fn mask_end_tokens(logits: &mut [f32], eos: &[TokenId], params: &SamplingParams) {
    for &id in eos.iter().chain(&params.stop_token_ids) {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
