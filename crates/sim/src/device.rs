//! One rank's device: a KV memory and the fake model, run in launch order.
//!
//! **Lazy** devices run a step when it is collected, the latest legal moment: whoever frees or overwrites
//! a page that a launched step still uses is found out. **Eager** ones run it at launch, like the CPU backend.

use crate::oracle::{Expected, attend, kv_of, sample};
use lockstep_core::{PageId, RequestId, StepId, TokenId};
use lockstep_kvcache::Hasher64;
use lockstep_scheduler::{PlanRow, RowInput, SchedulerConfig, StepPlan};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// Every request sent, computed alone.
pub type Oracle = BTreeMap<RequestId, Expected>;

/// What one slot of a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kv {
    position: u32,
    value: u64,
}

struct Launched {
    plan: Rc<StepPlan>,
    tokens: Option<Vec<TokenId>>,
}

/// See the module documentation.
pub struct Device {
    page_size: usize,
    /// `None`: never written, or poisoned.
    slots: Vec<Option<Kv>>,
    launched: VecDeque<Launched>,
    /// Tokens of the step collected last, for rows planned before it was.
    newest: Option<(StepId, Vec<TokenId>)>,
    is_lazy: bool,
    /// Pipeline stages: with several, nobody has the tokens of a step in flight.
    stages: usize,
    tokens_max: usize,
    rows_max: usize,
}

impl Device {
    /// An empty device for steps of a scheduler with this configuration.
    pub fn new(config: &SchedulerConfig, is_lazy: bool) -> Self {
        Self {
            page_size: config.page_size,
            slots: vec![None; config.num_pages * config.page_size],
            launched: VecDeque::new(),
            newest: None,
            is_lazy,
            stages: config.stages,
            tokens_max: config.step_tokens_max(),
            rows_max: config.step_rows_max(),
        }
    }

    /// Queues a step. The error is a finding.
    pub fn launch(&mut self, plan: Rc<StepPlan>, oracle: &Oracle) -> Result<(), String> {
        self.check_shape(&plan)?;
        let tokens = if self.is_lazy { None } else { Some(self.run(&plan, oracle)?) };
        self.launched.push_back(Launched { plan, tokens });
        Ok(())
    }

    /// Runs the oldest launched step if it has not run; its number and its tokens. The error is a finding.
    pub fn collect(&mut self, oracle: &Oracle) -> Result<(StepId, Vec<TokenId>), String> {
        let oldest = self.launched.pop_front().ok_or("a step is collected that was not launched")?;
        let tokens = match oldest.tokens {
            Some(tokens) => tokens,
            None => self.run(&oldest.plan, oracle)?,
        };
        self.newest = Some((oldest.plan.step, tokens.clone()));
        Ok((oldest.plan.step, tokens))
    }

    /// Steps launched and not collected.
    pub fn in_flight(&self) -> usize {
        self.launched.len()
    }

    /// Forgets the content of freed pages.
    pub fn poison(&mut self, pages: &[PageId]) {
        for &page in pages {
            let first = page as usize * self.page_size;
            self.slots[first..first + self.page_size].fill(None);
        }
    }

    /// Rows fill the step without gap and overlap, within the limits, and no page that a row writes is
    /// mapped by another one.
    fn check_shape(&self, plan: &StepPlan) -> Result<(), String> {
        let (mut tokens, mut pages, mut ids) = (0, 0, BTreeSet::new());
        for row in &plan.rows {
            let end = (row.start_position + row.token_count) as usize;
            let is_sound = ids.insert(row.id)
                && (self.stages == 1 || row.input == RowInput::Known)
                && row.token_count > 0
                && (row.first_token, row.first_page) == (tokens, pages)
                && row.page_count as usize == end.div_ceil(self.page_size);
            if !is_sound {
                return Err(format!("step {} has a malformed row: {row:?}", plan.step));
            }
            (tokens, pages) = (tokens + row.token_count, pages + row.page_count);
        }
        let is_whole = (tokens as usize, pages as usize) == (plan.token_ids.len(), plan.pages.len());
        if !is_whole || tokens as usize > self.tokens_max || plan.rows.len() > self.rows_max {
            return Err(format!(
                "step {} has {} tokens in {} rows, its rows say {tokens}; at most {} tokens and {} rows are legal",
                plan.step,
                plan.token_ids.len(),
                plan.rows.len(),
                self.tokens_max,
                self.rows_max
            ));
        }
        let mut uses: BTreeMap<PageId, u32> = BTreeMap::new();
        plan.pages.iter().for_each(|&page| *uses.entry(page).or_default() += 1);
        for row in &plan.rows {
            let written = &table(plan, row)[row.start_position as usize / self.page_size..];
            if let Some(page) = written.iter().find(|page| uses[page] > 1) {
                return Err(format!(
                    "step {}: {} writes page {page}, which is mapped twice",
                    plan.step, row.id
                ));
            }
        }
        Ok(())
    }

    fn run(&mut self, plan: &StepPlan, oracle: &Oracle) -> Result<Vec<TokenId>, String> {
        let mut tokens = Vec::new();
        for row in &plan.rows {
            let expected = oracle.get(&row.id).ok_or_else(|| format!("{} was never sent", row.id))?;
            let token = self
                .run_row(plan, row, expected)
                .map_err(|what| format!("step {}, {}: {what}", plan.step, row.id))?;
            tokens.extend(token);
        }
        Ok(tokens)
    }

    fn run_row(
        &mut self,
        plan: &StepPlan,
        row: &PlanRow,
        expected: &Expected,
    ) -> Result<Option<TokenId>, String> {
        let pages = table(plan, row);
        let slot_of = |position: usize| {
            pages[position / self.page_size] as usize * self.page_size + position % self.page_size
        };
        let (start, count) = (row.start_position as usize, row.token_count as usize);
        let (mut attention, mut previous) = (Hasher64::default(), 0);
        for position in 0..start {
            let (got, page) = (self.slots[slot_of(position)], pages[position / self.page_size]);
            let Some(kv) = got.filter(|kv| kv.position as usize == position) else {
                return Err(format!(
                    "KV of position {position} is read from page {page}, which holds {got:?}"
                ));
            };
            attention = attend(attention, kv.value);
            previous = kv.value;
        }
        for position in start..start + count {
            let token = self.input(plan, row, position - start)?;
            if expected.tokens.get(position) != Some(&token) {
                return Err(format!(
                    "input at position {position} is {token}, alone it is {:?}",
                    expected.tokens.get(position)
                ));
            }
            let value = kv_of(previous, token);
            if expected.kv[position] != value {
                return Err(format!("KV before position {position} is another history's (pages {pages:?})"));
            }
            self.slots[slot_of(position)] = Some(Kv { position: position as u32, value });
            attention = attend(attention, value);
            previous = value;
        }
        if !row.samples {
            return Ok(None);
        }
        let index = (start + count).checked_sub(expected.prompt_len);
        if index != Some(row.output_index as usize) || *row.sampling != expected.sampling {
            return Err(format!("output index {} at position {}", row.output_index, start + count));
        }
        Ok(Some(sample(attention, row.output_index, &row.sampling)))
    }

    /// The `at`-th input token of a row.
    fn input(&self, plan: &StepPlan, row: &PlanRow, at: usize) -> Result<TokenId, String> {
        let RowInput::SampledBy { step, sample_index } = row.input else {
            return Ok(plan.token_ids[row.first_token as usize + at]);
        };
        let launched = self.launched.iter().find(|l| l.plan.step == step).and_then(|l| l.tokens.as_ref());
        let newest = self.newest.as_ref().filter(|(newest, _)| *newest == step).map(|(_, tokens)| tokens);
        let token = launched.or(newest).and_then(|tokens| tokens.get(sample_index as usize));
        token.copied().ok_or_else(|| format!("token {sample_index} of step {step} is not on the device"))
    }
}

fn table<'a>(plan: &'a StepPlan, row: &PlanRow) -> &'a [PageId] {
    &plan.pages[row.first_page as usize..][..row.page_count as usize]
}
