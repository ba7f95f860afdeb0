//! From this rank's logits to the step's tokens, equal on all ranks of the TP group.
//!
//! A step in which every row takes the most likely token, of all or of those that its grammar allows, exchanges
//! (logit, id) pairs only; otherwise whole rows of logits are gathered and every rank does the same with them. The
//! order for one row: the log-probabilities (from the logits as they are), then allowed tokens and the grammar, bias,
//! penalties, end tokens before `min_tokens` and bad words, and the sampler.
//!
//! A row whose request leaves no token ends: with an end token where its grammar is complete, whatever else forbids
//! that one, and with [`NO_TOKEN`] otherwise.

use crate::adjust::Adjustments;
use crate::grammars::GrammarSource;
use crate::histories::Histories;
use crate::logprobs::Distribution;
use crate::masks::MaskJob;
use crate::{EngineError, Result};
use lockstep_backend::sampler::{Sampler, argmax};
use lockstep_backend::{Choice, LogitChanges, RowChoice};
use lockstep_comm::collective::Collective;
use lockstep_core::shard::VocabShard;
use lockstep_core::{NO_TOKEN, RequestId, TokenId};
use lockstep_scheduler::{PlanRow, StepPlan};
use lockstep_wire::{StepLogprobs, TokenLogprobs, Vocabulary};

/// The logits that belong to one row of a plan.
pub(crate) struct LogitRow {
    /// Index of the row in the plan.
    pub(crate) row: usize,
    /// Index of its first row of logits.
    pub(crate) first: usize,
    /// Rows of logits: 1, or one per token of the row when the prompt's log-probabilities are wanted.
    pub(crate) count: usize,
}

/// What a step came to.
#[derive(Default)]
pub(crate) struct Chosen {
    /// One token per row that samples, in order.
    pub(crate) tokens: Vec<TokenId>,
    /// Of requests that asked for them; on the reporting rank only.
    pub(crate) logprobs: Vec<(RequestId, StepLogprobs)>,
}

impl Chosen {
    /// Empties it, keeping its memory.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.logprobs.clear();
    }
}

/// The last stage of a step.
pub(crate) struct LogitsReader {
    local_vocab: usize,
    first_id: usize,
    local_real: usize,
    vocab_size: usize,
    eos_tokens: Vec<TokenId>,
    reports_logprobs: bool,
    sampler: Sampler,
    adjustments: Adjustments,
    histories: Histories,
    grammars: GrammarSource,
    gathered: Vec<f32>,
    /// The logits of one position, whole vocabulary, as the model gave them.
    row: Vec<f32>,
    /// The same, changed.
    adjusted: Vec<f32>,
}

impl LogitsReader {
    /// For this rank's part of a vocabulary of `vocab_size`.
    pub(crate) fn new(
        shard: &VocabShard,
        vocab_size: usize,
        eos_tokens: Vec<TokenId>,
        reports_logprobs: bool,
    ) -> Self {
        Self {
            local_vocab: shard.padded.len(),
            first_id: shard.padded.start,
            local_real: shard.real.len(),
            vocab_size,
            eos_tokens,
            reports_logprobs,
            sampler: Sampler::default(),
            adjustments: Adjustments::default(),
            histories: Histories::default(),
            grammars: GrammarSource::default(),
            gathered: Vec::new(),
            row: Vec::new(),
            adjusted: Vec::new(),
        }
    }

    /// Width of a row of this rank's logits, padding included.
    pub(crate) fn local_vocab(&self) -> usize {
        self.local_vocab
    }

    /// What grammars need of the tokenizer.
    pub(crate) fn set_vocabulary(&mut self, vocabulary: Vocabulary) {
        self.grammars.begin(vocabulary, self.vocab_size, self.eos_tokens.clone());
    }

    /// Where grammars are prepared.
    pub(crate) fn grammars(&mut self) -> &mut GrammarSource {
        &mut self.grammars
    }

    /// Takes in what `plan` tells of its requests; the masks that [`choose`](Self::choose) will need, to be
    /// computed meanwhile.
    pub(crate) fn begin<'a>(&'a mut self, plan: &'a StepPlan) -> (&'a GrammarSource, Vec<MaskJob<'a>>) {
        self.histories.begin(&plan.rows);
        (&self.grammars, self.histories.mask_jobs(&plan.rows))
    }

    /// Puts together what the rows change in their logits, for [`changes`](Self::changes). Their masks must be computed.
    pub(crate) fn prepare_changes(&mut self, plan: &StepPlan, rows: &[LogitRow]) -> Result<()> {
        self.adjustments.clear();
        for (at, row) in rows.iter().map(|row| &plan.rows[row.row]).enumerate() {
            if changes_logits(row) {
                self.adjustments.add(at, row, &self.histories, &self.eos_tokens)?;
            }
        }
        Ok(())
    }

    /// What rows change in their logits, by number.
    pub(crate) fn changes<'a>(
        &'a self,
        plan: &'a StepPlan,
        rows: &'a [LogitRow],
    ) -> Result<Vec<(usize, LogitChanges<'a>)>> {
        self.adjustments.list(|at| &plan.rows[rows[at].row], &self.histories)
    }

    /// The choice of a token for each row by the device, after `changes`.
    pub(crate) fn choice<'a>(
        &self,
        rows: &'a [RowChoice],
        changes: &'a [(usize, LogitChanges<'a>)],
    ) -> Choice<'a> {
        let Self { first_id, local_vocab, local_real, vocab_size, .. } = *self;
        Choice { rows, changes, first_id, local_vocab, local_real, vocab_size }
    }

    /// Takes in the tokens that the device chose for these rows, which changed their logits: the number of each among
    /// `tokens`. Where it found none, a row may still end.
    pub(crate) fn arrived(&mut self, rows: &[(usize, PlanRow)], tokens: &mut [TokenId]) -> Result<()> {
        for (at, row) in rows {
            let token = tokens.get_mut(*at).ok_or_else(|| {
                EngineError::Internal(format!("the device chose no token for row {at} of {}", row.id))
            })?;
            *token = self.decide(row, Some(*token).filter(|token| *token != NO_TOKEN))?;
        }
        Ok(())
    }

    /// Chooses one token per row of `plan` that samples, from `local` `[logits, local_vocab]`.
    /// **Collective: all ranks of the TP group.**
    pub(crate) fn choose(
        &mut self,
        local: &[f32],
        plan: &StepPlan,
        rows: &[LogitRow],
        collective: &dyn Collective,
        chosen: &mut Chosen,
    ) -> Result<()> {
        match takes_only_best(plan, rows) {
            true => self.choose_greedy(local, plan, rows, collective, &mut chosen.tokens),
            false => {
                let count = rows.last().map_or(0, |last| last.first + last.count);
                self.gather(local, count, collective)?;
                rows.iter().try_for_each(|row| self.choose_from_row(row, &plan.rows[row.row], count, chosen))
            }
        }
    }

    /// [`LogitsReader::choose`] where [`takes_only_best`] holds.
    fn choose_greedy(
        &mut self,
        local: &[f32],
        plan: &StepPlan,
        rows: &[LogitRow],
        collective: &dyn Collective,
        tokens: &mut Vec<TokenId>,
    ) -> Result<()> {
        self.row.clear();
        for (row, logits) in rows.iter().zip(local.chunks_exact(self.local_vocab)) {
            let (row, logits) = (&plan.rows[row.row], &logits[..self.local_real]);
            let best = match row.sampling.grammar {
                None => argmax(logits),
                Some(_) => self.histories.of(row)?.matcher().best(logits, self.first_id),
            };
            let (logit, column) = best.unwrap_or((f32::NEG_INFINITY, 0));
            // The id travels as the bits of an f32: gathers copy bytes, never values.
            self.row.extend([logit, f32::from_bits((self.first_id + column) as u32)]);
        }
        self.gathered.clear();
        self.gathered.resize(self.row.len() * collective.size(), 0.0);
        collective.all_gather_f32(&self.row, &mut self.gathered).map_err(EngineError::from)?;
        for (at, row) in rows.iter().enumerate() {
            let mut best = (f32::NEG_INFINITY, NO_TOKEN);
            for rank in 0..collective.size() {
                let at = (rank * rows.len() + at) * 2;
                // Ranks hold ascending ids, so a strict comparison keeps the smaller id on ties.
                if self.gathered[at] > best.0 {
                    best = (self.gathered[at], self.gathered[at + 1].to_bits());
                }
            }
            let row = &plan.rows[row.row];
            let found = (best.1 != NO_TOKEN).then_some(best.1);
            tokens.push(self.decide(row, found)?);
        }
        Ok(())
    }

    /// What a row comes to that `found` this token, or none: remembered where the next one depends on it. Decided
    /// here for all ways of choosing, from what all ranks know alike.
    fn decide(&mut self, row: &PlanRow, found: Option<TokenId>) -> Result<TokenId> {
        let params = &*row.sampling;
        let token = match found {
            Some(token) => token,
            None if params.grammar.is_some() => {
                self.histories.of(row)?.matcher().end_token(&self.eos_tokens).unwrap_or(NO_TOKEN)
            }
            None => NO_TOKEN,
        };
        if token == NO_TOKEN {
            let cause =
                if changes_logits(row) { "its constraints exclude all" } else { "no logit is a number" };
            tracing::warn!(request = %row.id, "no token can be chosen: {cause}");
        }
        if params.follows_output() {
            self.histories.of_mut(row)?.push(row, token)?;
        }
        Ok(token)
    }

    /// Whole rows of all ranks into `gathered` `[ranks, count, local_vocab]`.
    fn gather(&mut self, local: &[f32], count: usize, collective: &dyn Collective) -> Result<()> {
        let sent = count * self.local_vocab;
        let received = sent * collective.size();
        if self.gathered.len() < received {
            self.gathered.resize(received, 0.0);
        }
        // Only what this step gathered may be looked at: a shorter step leaves old logits behind it.
        self.gathered.truncate(received);
        collective.all_gather_f32(&local[..sent], &mut self.gathered).map_err(EngineError::from)
    }

    /// Everything one row of the plan wants of its logits; `count` rows were gathered in all.
    fn choose_from_row(
        &mut self,
        logits: &LogitRow,
        row: &PlanRow,
        count: usize,
        chosen: &mut Chosen,
    ) -> Result<()> {
        for at in 0..logits.count {
            let samples = row.samples && at + 1 == logits.count;
            if samples || self.reports_logprobs {
                self.assemble(logits.first + at, count);
            }
            if samples {
                let token = self.sample(row)?;
                chosen.tokens.push(token);
                self.report(row, token, chosen)?;
            } else if self.reports_logprobs {
                self.collect_prompt(row, row.start_position as usize + at + 1)?;
            }
        }
        Ok(())
    }

    /// The logits of gathered row `index` in vocabulary order, without padding, into `self.row`.
    fn assemble(&mut self, index: usize, count: usize) {
        self.row.clear();
        for (rank, logits) in self.gathered.chunks_exact(count * self.local_vocab).enumerate() {
            let real = self.vocab_size.saturating_sub(rank * self.local_vocab).min(self.local_vocab);
            self.row.extend_from_slice(&logits[index * self.local_vocab..][..real]);
        }
    }

    /// The next token of a row whose logits are in `self.row`.
    fn sample(&mut self, row: &PlanRow) -> Result<TokenId> {
        let logits = match changes_logits(row) {
            true => {
                self.adjust(row)?;
                &self.adjusted
            }
            false => &self.row,
        };
        let found = self.sampler.sample(logits, &RowChoice::new(&row.sampling, row.output_index));
        self.decide(row, found)
    }

    /// Copies `self.row` into `self.adjusted`, changed as the request wants.
    fn adjust(&mut self, row: &PlanRow) -> Result<()> {
        self.adjusted.clear();
        self.adjusted.extend_from_slice(&self.row);
        self.adjustments.clear();
        self.adjustments.add(0, row, &self.histories, &self.eos_tokens)?;
        for (_, changes) in self.adjustments.list(|_| row, &self.histories)? {
            changes.apply(&mut self.adjusted);
        }
        Ok(())
    }

    /// The log-probabilities that come with a sampled token.
    fn report(&mut self, row: &PlanRow, token: TokenId, chosen: &mut Chosen) -> Result<()> {
        if !self.reports_logprobs {
            return Ok(());
        }
        let mut step = StepLogprobs::default();
        if row.prompt_logits {
            step.prompt = self.histories.of_mut(row)?.take_prompt_logprobs();
        }
        if let Some(count) = row.sampling.logprobs.filter(|_| token != NO_TOKEN) {
            step.output.push(Distribution::of(&self.row).report(token, count));
        }
        if step != StepLogprobs::default() {
            chosen.logprobs.push((row.id, step));
        }
        Ok(())
    }

    /// The log-probabilities of the prompt's token at `position`, which follows the logits in `self.row`.
    fn collect_prompt(&mut self, row: &PlanRow, position: usize) -> Result<()> {
        let history = self.histories.of_mut(row)?;
        let Some(token) = history.prompt_token(position) else { return Ok(()) };
        let count = row.sampling.prompt_logprobs.unwrap_or(0);
        let logprobs: TokenLogprobs = Distribution::of(&self.row).report(token, count);
        history.push_prompt_logprobs(logprobs);
        Ok(())
    }
}

/// Whether each of `rows` takes its most likely token, so that nothing else of the logits is looked at.
fn takes_only_best(plan: &StepPlan, rows: &[LogitRow]) -> bool {
    rows.iter().all(|row| takes_most_likely(&plan.rows[row.row]))
}

/// Whether a row wants nothing but the most likely token, of all or of those that its grammar allows.
fn takes_most_likely(row: &PlanRow) -> bool {
    // A grammar says where the answer ends, so `min_tokens` does not.
    row.sampling.is_greedy() && (leaves_logits(row) || row.sampling.is_only_masked() && reports_nothing(row))
}

/// Whether a row wants no log-probabilities.
pub(crate) fn reports_nothing(row: &PlanRow) -> bool {
    row.sampling.logprobs.is_none() && !row.prompt_logits
}

/// Whether a row wants nothing but a token, chosen from the logits as the model gave them.
fn leaves_logits(row: &PlanRow) -> bool {
    reports_nothing(row) && !changes_logits(row)
}

/// Whether a row's token is chosen from logits that are changed before.
pub(crate) fn changes_logits(row: &PlanRow) -> bool {
    is_early(row) || row.sampling.changes_logits()
}

/// Whether the answer may not end with the row's token, unless a grammar says so.
pub(crate) fn is_early(row: &PlanRow) -> bool {
    row.output_index < row.sampling.min_tokens
}
