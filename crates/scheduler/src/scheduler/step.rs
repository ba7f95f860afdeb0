//! Planning one step: decode rows first, then prefill chunks by precedence, then admissions.

use super::{Launched, LaunchedRow, Scheduler};
use crate::config::{SchedulerConfig, StepOrder};
use crate::entry::Slot;
use crate::plan::{History, PlanRow, RowInput, StepPlan};
use lockstep_core::StepId;
use lockstep_kvcache::Hasher64;
use serde::{Deserialize, Serialize};

/// The step being planned.
pub(super) struct Draft<'a> {
    step: StepId,
    plan: &'a mut StepPlan,
    launched: Launched,
    samples: u32,
    /// Prompt tokens whose logits the step may still compute.
    prompt_logits_left: usize,
}

/// Which kind of step was planned how often in a row while the other kind waited (`mixed == false`).
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Turns {
    prefill_run: u32,
    decode_run: u32,
}

/// What making room for decode rows came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Every request that can decode has a page for its next token.
    Ready,
    /// Likewise, after putting some requests back into the queue: nothing is admitted in this step.
    Retracted,
    /// A request must be retracted, but a launched step uses its pages: complete that first.
    MustDrain,
}

impl Scheduler {
    /// [`plan_into`](Self::plan_into) with a fresh plan.
    pub fn plan(&mut self) -> Option<StepPlan> {
        let mut plan = StepPlan::new();
        self.plan_into(&mut plan).then_some(plan)
    }

    /// Plans the next step into `plan` (its old content is dropped) and counts it as launched: it must be
    /// completed. With `overlap` it may be called while one earlier step has not completed, with several stages while
    /// fewer than those have not.
    ///
    /// False, with an empty plan, when nothing can run now: complete a launched step if there is one, else
    /// there is no work.
    pub fn plan_into(&mut self, plan: &mut StepPlan) -> bool {
        plan.clear(self.next_step);
        if self.launched.len() >= self.config.steps_in_flight_max() {
            return false;
        }
        let launched = self.spare.pop().unwrap_or_default();
        let prompt_logits_left = SchedulerConfig::PROMPT_LOGITS_MAX;
        let mut draft = Draft { step: self.next_step, plan, launched, samples: 0, prompt_logits_left };
        self.scratch.prefilling.clear();
        if self.config.mixed {
            self.fill_mixed(&mut draft);
        } else {
            self.fill_one_kind(&mut draft);
        }
        if draft.plan.rows.is_empty() {
            self.spare.push(draft.launched);
            return false;
        }
        self.launch(draft);
        true
    }

    fn fill_mixed(&mut self, draft: &mut Draft<'_>) {
        let room = self.make_room_for_decodes();
        if room == Room::MustDrain {
            return;
        }
        self.push_decodes(draft);
        let budget = self.config.token_budget;
        let left = budget.saturating_sub(draft.plan.rows.len()).max(budget.div_ceil(2));
        self.push_prefills(draft, left, room == Room::Ready);
    }

    /// Either kind alone; when the preferred one has nothing to do, the other.
    fn fill_one_kind(&mut self, draft: &mut Draft<'_>) {
        let has_decode = self.running.iter().any(|&slot| self.may_decode(slot));
        let decode_first = match self.config.step_order {
            StepOrder::PrefillFirst => self.turns.prefill_run >= SchedulerConfig::PREFILL_RUN_MAX,
            StepOrder::DecodeFirst => self.turns.decode_run < SchedulerConfig::DECODE_RUN_MAX,
        };
        if !(has_decode && decode_first) {
            self.push_prefills(draft, self.config.token_budget, true);
            if !draft.plan.rows.is_empty() {
                self.turns =
                    Turns { prefill_run: self.turns.prefill_run + u32::from(has_decode), decode_run: 0 };
                return;
            }
        }
        let room = self.make_room_for_decodes();
        if room == Room::MustDrain {
            return;
        }
        self.push_decodes(draft);
        if draft.plan.rows.is_empty() {
            // All that could decode were retracted in favour of a prefill.
            self.push_prefills(draft, self.config.token_budget, room == Room::Ready);
        } else {
            self.turns = Turns { prefill_run: 0, decode_run: self.turns.decode_run.saturating_add(1) };
        }
    }

    fn push_decodes(&mut self, draft: &mut Draft<'_>) {
        let mut decoding = std::mem::take(&mut self.scratch.decoding);
        decoding.extend(self.running.iter().copied().filter(|&slot| self.may_decode(slot)));
        let places = self.decode_rows_max();
        if decoding.len() > places {
            // Whose last row is longest ago, of equals by precedence: else steps without decode rows in between would let
            // the first ones take every turn.
            decoding.sort_by_key(|&slot| self.entries[slot].last_row);
            decoding.truncate(places);
            decoding.sort_unstable_by_key(|&slot| self.entries[slot].precedence());
        }
        for slot in decoding.drain(..) {
            self.push_row(draft, slot, 1);
        }
        self.scratch.decoding = decoding;
        if !draft.plan.rows.is_empty() {
            self.growth.decode_step_planned();
        }
    }

    /// Decode rows of one step: an even part, rounded up, of those that the steps of all stages share, so that each stage
    /// has one to compute.
    fn decode_rows_max(&self) -> usize {
        match self.config.stages {
            1 => usize::MAX,
            stages => {
                let decoding = self.running.iter().filter(|&&slot| self.entries[slot].can_decode());
                decoding.count().div_ceil(stages)
            }
        }
    }

    /// Chunks of the running requests, then of new ones if `may_admit`; `room` tokens in all.
    fn push_prefills(&mut self, draft: &mut Draft<'_>, mut room: usize, may_admit: bool) {
        self.scratch.prefilling.clear();
        for at in 0..self.running.len() {
            let slot = self.running[at];
            if self.entries[slot].is_prefilling() {
                self.scratch.prefilling.push(slot);
                room -= self.push_prefill(draft, slot, room);
            }
        }
        if may_admit {
            self.admit(draft, room);
        }
    }

    /// Plans the next chunk of one request; returns its tokens, possibly 0.
    pub(super) fn push_prefill(&mut self, draft: &mut Draft<'_>, slot: Slot, room: usize) -> usize {
        let entry = &self.entries[slot];
        let mut count = entry.prefill_remaining().min(room);
        if entry.wants_prompt_logits() {
            count = count.min(draft.prompt_logits_left);
            draft.prompt_logits_left -= count;
        }
        if count > 0 {
            self.push_row(draft, slot, count);
        }
        count
    }

    /// Adds a row of `count` tokens; the request's table has the pages.
    fn push_row(&mut self, draft: &mut Draft<'_>, slot: Slot, count: usize) {
        let entry = &mut self.entries[slot];
        let (start, end) = (entry.computed, entry.computed + count);
        let page_count = end.div_ceil(self.config.page_size);
        let samples = end >= entry.prefill_end;
        let history = std::mem::take(&mut entry.history_due)
            .then(|| History { tokens: entry.tokens.as_slice().into(), prompt_len: entry.prompt_len });
        let plan = &mut *draft.plan;
        plan.rows.push(PlanRow {
            id: entry.id,
            first_token: plan.token_ids.len() as u32,
            token_count: count as u32,
            start_position: start as u32,
            first_page: plan.pages.len() as u32,
            page_count: page_count as u32,
            input: match entry.pending {
                Some((step, sample_index)) => RowInput::SampledBy { step, sample_index },
                None => RowInput::Known,
            },
            is_prefill: start < entry.prefill_end,
            samples,
            output_index: if samples { (end - entry.prompt_len) as u32 } else { 0 },
            sampling: entry.sampling.clone(),
            prompt_logits: entry.wants_prompt_logits() && start < entry.prompt_len,
            history,
        });
        match entry.pending {
            Some(_) => plan.token_ids.push(StepPlan::PLACEHOLDER),
            None => plan.token_ids.extend_from_slice(&entry.tokens[start..end]),
        }
        plan.pages.extend_from_slice(&entry.table.pages()[..page_count]);
        entry.computed = end;
        entry.launched += 1;
        entry.last_row = draft.step;
        if samples {
            entry.pending = Some((draft.step, draft.samples));
            draft.samples += 1;
        }
        draft.launched.rows.push(LaunchedRow { slot, end, samples });
        self.totals.computed_tokens += count as u64;
    }

    fn launch(&mut self, mut draft: Draft<'_>) {
        self.digest.step = draft.step;
        self.digest.plan_hash = self.plan_hash(draft.plan);
        let mut pages = Hasher64::new(draft.step);
        for row in &draft.launched.rows {
            pages.word(self.entries[row.slot].table.fingerprint());
        }
        self.digest.page_hash = pages.finish();
        draft.launched.step = draft.step;
        self.launched.push_back(draft.launched);
        self.next_step += 1;
    }

    fn plan_hash(&self, plan: &StepPlan) -> u64 {
        let mut hash = self.inputs_hash;
        hash.word(plan.step);
        for row in &plan.rows {
            hash.word(row.id.0);
            hash.word(u64::from(row.start_position) << 32 | u64::from(row.token_count));
            hash.word(u64::from(row.output_index) << 1 | u64::from(row.samples));
            if let RowInput::SampledBy { step, sample_index } = row.input {
                hash.word(step);
                hash.word(u64::from(sample_index));
            }
        }
        let pages = self.kv.counts();
        for count in [self.queue.len(), self.running.len(), pages.free, pages.cached] {
            hash.word(count as u64);
        }
        hash.finish()
    }
}
