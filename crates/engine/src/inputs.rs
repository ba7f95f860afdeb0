//! The numbers of one step as a forward pass takes them, filled from a plan.

use crate::logits::LogitRow;
use crate::{EngineError, Result};
use lockstep_backend::{AttentionBatch, AttentionRow, ForwardInput};
use lockstep_core::{PageId, StepId, TokenId};
use lockstep_scheduler::{RowInput, StepPlan};

/// Model inputs of one step, reused.
pub(crate) struct Inputs {
    page_size: u32,
    token_ids: Vec<TokenId>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    rows: Vec<AttentionRow>,
    pages: Vec<PageId>,
    logit_tokens: Vec<u32>,
    logit_rows: Vec<LogitRow>,
    /// Rows that [`Inputs::pad`] added.
    padding: usize,
}

impl Inputs {
    /// For pages of `page_size` tokens.
    pub(crate) fn new(page_size: usize) -> Self {
        Self {
            page_size: page_size as u32,
            token_ids: Vec::new(),
            positions: Vec::new(),
            slots: Vec::new(),
            rows: Vec::new(),
            pages: Vec::new(),
            logit_tokens: Vec::new(),
            logit_rows: Vec::new(),
            padding: 0,
        }
    }

    fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.rows.clear();
        self.pages.clear();
        self.logit_tokens.clear();
        self.logit_rows.clear();
        self.padding = 0;
    }

    /// The step of `plan`. `sampled` gives the token that a step chose at an index, or what stands for it.
    pub(crate) fn fill(
        &mut self,
        plan: &StepPlan,
        sampled: impl Fn(StepId, u32) -> Option<TokenId>,
    ) -> Result<()> {
        self.clear();
        self.token_ids.extend_from_slice(&plan.token_ids);
        self.pages.extend_from_slice(&plan.pages);
        let page_size = self.page_size;
        for (row_index, row) in plan.rows.iter().enumerate() {
            if let RowInput::SampledBy { step, sample_index } = row.input {
                let token = sampled(step, sample_index).ok_or_else(|| {
                    EngineError::Internal(format!(
                        "step {} needs token {sample_index} of step {step}",
                        plan.step
                    ))
                })?;
                self.token_ids[row.first_token as usize] = token;
            }
            let pages = &plan.pages[row.first_page as usize..][..row.page_count as usize];
            for position in row.start_position..row.start_position + row.token_count {
                self.positions.push(position);
                self.slots.push(pages[(position / page_size) as usize] * page_size + position % page_size);
            }
            self.rows.push(AttentionRow {
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
            let first = self.logit_tokens.len();
            self.logit_rows.push(LogitRow { row: row_index, first, count: wanted.len() });
            self.logit_tokens.extend(wanted);
        }
        Ok(())
    }

    /// A step of nothing but padding.
    pub(crate) fn fill_with_padding(&mut self, rows: usize, page: PageId) {
        self.clear();
        self.pad(rows, page);
    }

    /// Adds rows of one token until there are `rows`; they read and write `page` and belong to no request.
    pub(crate) fn pad(&mut self, rows: usize, page: PageId) {
        let first_page = self.pages.len() as u32;
        if self.rows.len() < rows {
            self.pages.push(page);
        }
        for first_token in self.rows.len() as u32..rows as u32 {
            self.token_ids.push(0);
            self.positions.push(0);
            self.slots.push(page * self.page_size);
            self.rows.push(AttentionRow { first_token, token_count: 1, start_position: 0, first_page });
            self.logit_tokens.push(first_token);
            self.padding += 1;
        }
    }

    /// The number of rows when each is one token whose logits are wanted, as in decode steps.
    pub(crate) fn decode_rows(&self) -> Option<usize> {
        let rows = self.rows.len();
        (rows == self.token_ids.len() && rows == self.logit_tokens.len()).then_some(rows)
    }

    /// For the decoder.
    pub(crate) fn forward_input(&self) -> ForwardInput<'_> {
        ForwardInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            slots: &self.slots,
            batch: self.batch(),
            logit_tokens: &self.logit_tokens,
        }
    }

    fn batch(&self) -> AttentionBatch<'_> {
        AttentionBatch { rows: &self.rows, pages: &self.pages }
    }

    /// Which logits belong to which row of the plan.
    pub(crate) fn logit_rows(&self) -> &[LogitRow] {
        &self.logit_rows
    }

    /// Rows of logits, without those of padding.
    pub(crate) fn logit_count(&self) -> usize {
        self.logit_tokens.len() - self.padding
    }
}
